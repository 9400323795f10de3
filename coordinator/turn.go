package coordinator

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"schoolbell/school"
	"schoolbell/sender"
)

// verdictKind says how a turn ended.
type verdictKind int

const (
	verdictIdle   verdictKind = iota // nothing to do now
	verdictRest                      // the cycle is full
	verdictBusy                      // another replica holds the school
	verdictDrain                     // a dead owner's call may still be in flight
	verdictYield                     // others wait for the slot
	verdictLater                     // the sender is closed, its rate is used up, or the pace asks to wait
	verdictLine                      // no room among the sender's messages in flight
	verdictLost                      // the lease or the term is another's
	verdictFailed                    // an error; backs off
)

// verdict is what the agenda learns from a turn. With look the school is looked
// at again after wait; without, when it is woken.
type verdict struct {
	kind verdictKind
	look bool
	wait time.Duration
	hold time.Duration // nothing can be sent before: wake-ups are held off so long
	tell bool          // tell the peers that the school has work nobody holds
}

// turn is one school's time on a slot. Its caches live and die with it (R8).
//
// Its methods take the lease's context, which ends when no new batch may start:
// the lease is gone or the replica stops. What must be carried through all the
// same (a call on the wire, its record, a settlement) runs detached from it,
// with a deadline of its own.
type turn struct {
	c      *Coordinator
	school string

	lease Lease
	term  school.Term
	rule  school.Rule
	lane  *lane
	floor school.Ledger // the ledger as this term has written it

	ticket sender.Ticket // of the batch in hand, where its sender has a rate
	ticked time.Time     // when it was given

	filled bool // the last reservation reached the limit

	page      school.Page
	announced bool
	next      int  // first item of page not yet worked on
	used      bool // something of page was worked on or fell out of it
	staled    int  // pages in a row that were stale
	contents  map[int64]*sender.Content
	fresh     map[int64]bool // notices of the page of which nothing was sent yet
	nextDue   time.Duration  // from looked on, until the earliest later work; 0: none known
	looked    time.Time
	tell      bool // a batch could not be sent from here: the peers may do better
}

// restSlack is how much longer than the deployment's rest one may look before
// it is not believed by a look alone: the arbiter's clock may have gone back, or
// the school's own rest is longer. The ledger and the reservation tell which.
const restSlack = time.Minute

// run takes the school if it may be worked on, and works until there is nothing
// left, the cycle is full, the lease ends, the replica stops or others wait.
func (t *turn) run(ctx context.Context) (verdict, error) {
	peek, err := t.peek(ctx)
	if err != nil {
		return verdict{kind: verdictFailed}, err
	}
	switch {
	case peek.Resting > 0 && !peek.Orphaned && peek.Resting <= t.c.cfg.Rest+restSlack:
		if peek.Held {
			// Whoever filled the cycle is about to record it, or is dead: then its
			// batch is to be taken over when its lease has run out.
			return resting(min(peek.Resting, t.busy(peek.LeaseLeft).wait)), nil
		}
		return resting(peek.Resting), nil
	case peek.Held:
		return t.busy(peek.LeaseLeft), nil
	}
	if err := t.c.storeLives(ctx); err != nil {
		return verdict{kind: verdictFailed}, err
	}
	// Hints come more often than work: a look spares a lock and a term, and its
	// fence, for work that is done already.
	in, err := t.workIn(ctx)
	switch {
	case err != nil:
		return verdict{kind: verdictFailed}, err
	case in == school.Never:
		return verdict{kind: verdictIdle}, nil
	case in > 0:
		return verdict{kind: verdictIdle, look: true, wait: in + t.gather()}, nil
	}
	var v verdict
	err = t.c.holder.Hold(ctx, t.school, t.c.etc.of(t.school), func(ctx context.Context, l Lease) error {
		t.point(Acquired)
		var err error
		t.lease = l
		v, err = t.held(ctx)
		t.point(Ended)
		return err
	})
	t.point(Released)
	var busy *BusyError
	switch {
	case errors.As(err, &busy):
		return t.busy(busy.Remaining), nil
	case err != nil && v.kind == verdictIdle:
		v = verdict{kind: verdictFailed}
	}
	return v, err
}

// resting looks again after wait, and not before: nothing can be sent.
func resting(wait time.Duration) verdict {
	return verdict{kind: verdictRest, look: true, wait: wait, hold: wait}
}

// busy looks again when the other's lease has run out unless it was extended:
// a moment later for each, so that not all come at once.
func (t *turn) busy(left time.Duration) verdict {
	return verdict{kind: verdictBusy, look: true, wait: left + time.Duration(rand.Int64N(int64(50*time.Millisecond)))}
}

func (t *turn) peek(ctx context.Context) (school.Peek, error) {
	ctx, cancel := context.WithTimeout(ctx, arbiterTimeout)
	defer cancel()
	peek, err := t.c.budget.Peek(ctx, t.school)
	t.point(Peeked)
	if err != nil {
		return peek, fmt.Errorf("peek at school %s: %w", t.school, err)
	}
	return peek, nil
}

func (t *turn) workIn(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	in, err := t.c.queue.WorkIn(ctx, t.school)
	t.point(Looked)
	if err != nil {
		return 0, fmt.Errorf("look for work of school %s: %w", t.school, err)
	}
	t.c.storeAnswered()
	return in, nil
}

// held is the turn under the lock.
func (t *turn) held(ctx context.Context) (verdict, error) {
	if v, done, err := t.open(ctx); done || err != nil {
		return v, err
	}
	if v, done, err := t.drain(ctx); done || err != nil {
		return v, err
	}
	if err := t.reconcile(ctx); err != nil {
		return verdict{kind: verdictFailed}, err
	}
	if t.floor.Resting > 0 {
		return resting(t.floor.Resting), nil
	}
	began := time.Now()
	t.contents = map[int64]*sender.Content{}
	for sent := 0; ; {
		if ctx.Err() != nil {
			return t.ended(ctx)
		}
		if t.c.othersWait() && (sent >= yieldBatches || time.Since(began) >= yieldAfter) {
			return verdict{kind: verdictYield, look: true, tell: true}, nil
		}
		if t.next >= len(t.page.Work) || t.short() {
			if v, done, err := t.turnPage(ctx); done || err != nil {
				return v, err
			}
		}
		if !t.anySendable() {
			switch err := t.skip(ctx); {
			case errors.Is(err, school.ErrPaused):
				return verdict{kind: verdictIdle}, nil
			case err != nil:
				return t.storeVerdict(err), err
			}
			continue
		}
		if err := t.askFirst(ctx); err != nil {
			return t.storeVerdict(err), err
		}
		if !t.anySendable() || t.short() {
			continue
		}
		v, done, err := t.batch(ctx)
		if done || err != nil {
			return v, err
		}
		sent++
	}
}

// open opens the term: from here on no claim of an older owner commits.
func (t *turn) open(ctx context.Context) (v verdict, done bool, err error) {
	call, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	term, err := t.c.queue.OpenTerm(call, t.school, t.lease.Acquisition(), t.c.cfg.Instance)
	t.point(Opened)
	if errors.Is(err, school.ErrNotFound) {
		return verdict{kind: verdictIdle}, true, nil // a hint of a school that is not there
	}
	if err != nil {
		return verdict{kind: verdictFailed}, false, fmt.Errorf("open term of school %s: %w", t.school, err)
	}
	t.c.storeAnswered()
	t.term, t.floor, t.rule = term, term.Ledger, t.c.rule(term.Settings)
	name := term.Settings.Sender
	if name == "" {
		name = t.c.cfg.DefaultSender
	}
	if t.lane = t.c.lanes[name]; t.lane == nil {
		return verdict{kind: verdictFailed}, false, fmt.Errorf("school %s: sender %q is not configured on this replica", t.school, name)
	}
	for _, l := range t.c.lanes { // the agenda may have believed in another sender
		if l != t.lane {
			t.c.lookAt(l.name, l.stepBack(t.school))
		}
	}
	call, cancel = context.WithTimeout(ctx, arbiterTimeout)
	defer cancel()
	err = t.lease.Bind(call, term.Fence)
	t.point(Bound)
	if err != nil {
		return t.leaseVerdict(), false, fmt.Errorf("bind fence %d of school %s: %w", term.Fence, t.school, err)
	}
	t.lease.Progress()
	return verdict{}, false, nil
}

// drain settles what dead owners left, once their calls cannot be in flight any
// more. Until then the slot goes back (R14, R25).
func (t *turn) drain(ctx context.Context) (v verdict, done bool, err error) {
	if len(t.term.Unsettled) > 0 {
		call, cancel := context.WithTimeout(ctx, storeTimeout)
		defer cancel()
		orphans, err := t.c.queue.Takeover(call, t.term, t.c.cfg.Retry)
		t.point(TakenOver)
		if err != nil {
			return t.storeVerdict(err), false, fmt.Errorf("take over batches of school %s: %w", t.school, err)
		}
		for _, b := range orphans.Batches {
			// A reservation of a batch that was taken over counts as made in full.
			if err := t.settle(ctx, b.ID, b.Cycle, b.Size); err != nil {
				return verdict{kind: verdictFailed}, false, err
			}
		}
		t.point(Drained)
		if n := len(orphans.Batches); n > 0 {
			t.c.metrics.orphaned.Add(float64(n))
			t.c.log.Warn("batches of a dead owner were taken over", "event", "orphans_recovered",
				"school", t.school, "fence", t.term.Fence, "batches", n, "recipients", orphans.Recipients)
		}
		if orphans.Wait > 0 {
			wait := orphans.Wait + time.Millisecond
			return verdict{kind: verdictDrain, look: true, wait: wait, hold: wait}, true, nil
		}
	}
	if t.term.Settings.Paused {
		return verdict{kind: verdictIdle}, true, nil
	}
	if wait, ok := t.lane.open(t.school, time.Now()); !ok {
		return verdict{kind: verdictLater, look: true, wait: wait}, true, nil
	}
	return verdict{}, false, nil
}

// reconcile raises what the arbiter knows to what the ledger knows, so that a
// Redis which lost data grants nothing twice.
func (t *turn) reconcile(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, arbiterTimeout)
	defer cancel()
	err := t.c.budget.Reconcile(call, t.school, t.floor, t.rule)
	t.point(Reconciled)
	if err != nil {
		return fmt.Errorf("reconcile quota of school %s: %w", t.school, err)
	}
	return nil
}

// turnPage reads what is to be done now. Where there is nothing, the turn ends.
func (t *turn) turnPage(ctx context.Context) (v verdict, done bool, err error) {
	call, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	page, err := t.c.queue.Page(call, t.term, t.c.cfg.Page)
	t.point(Paged)
	if err != nil {
		return t.storeVerdict(err), false, fmt.Errorf("read page of school %s: %w", t.school, err)
	}
	t.c.storeAnswered()
	t.lease.Progress()
	t.page, t.next, t.used, t.looked, t.nextDue = page, 0, false, time.Now(), page.NextDue
	t.fresh = map[int64]bool{}
	for i := range page.Work {
		if w := &page.Work[i]; w.Kind == school.First && w.Seq == 1 {
			t.fresh[w.Notice.ID] = true
		}
	}
	t.c.metrics.read.Add(float64(len(page.Work)))
	t.limit()
	if len(page.Work) == 0 {
		return t.idle(), true, nil
	}
	return verdict{}, false, nil
}

// limit takes out of the page whom the sender may not send to (R44). One that
// was handed over earlier cannot be SKIPPED any more; the store ends it with the
// same reason.
func (t *turn) limit() {
	if t.lane.only == nil {
		return
	}
	for i := range t.page.Work {
		if w := &t.page.Work[i]; w.Sendable() && !t.lane.only(w.Token) {
			w.Skip = school.NotAllowed
		}
	}
}

// gatherMost is how long due retries are gathered: their jitter spreads them,
// and one batch each would cost a lock, a claim and a request a message.
const gatherMost = 500 * time.Millisecond

// idle ends the turn until the earliest later work, and a moment longer.
func (t *turn) idle() verdict {
	if t.nextDue <= 0 {
		return verdict{kind: verdictIdle}
	}
	return verdict{kind: verdictIdle, look: true, wait: max(0, t.nextDue-time.Since(t.looked)) + t.gather()}
}

func (t *turn) gather() time.Duration { return min(gatherMost, t.c.cfg.Retry.Base/20) }

// dueIn notes that the school has later work.
func (t *turn) dueIn(d time.Duration) {
	d += time.Since(t.looked)
	if t.nextDue <= 0 || d < t.nextDue {
		t.nextDue = max(d, 1)
	}
}

// short reports whether what is left of the page would make a batch smaller
// than the work that waits beyond the page allows (R3). A page that is as it was
// read would be no longer if it were read again.
func (t *turn) short() bool {
	return t.used && t.page.More && t.sendable(t.c.cfg.Batch) < t.c.cfg.Batch
}

// stale forgets the page because the store has moved on. That a page made anew
// is stale each time is no state of a school but an error.
func (t *turn) stale() error {
	t.page, t.next = school.Page{}, 0
	if t.staled++; t.staled > staleMost {
		return fmt.Errorf("school %s: %d pages in a row: %w", t.school, t.staled, school.ErrStalePage)
	}
	return nil
}

func (t *turn) anySendable() bool {
	for i := t.next; i < len(t.page.Work); i++ {
		if t.page.Work[i].Sendable() {
			return true
		}
	}
	return false
}

// skip moves over a rest of the page of which nothing is to be sent.
func (t *turn) skip(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	work := t.page.Work[t.next:]
	err := t.c.queue.Skip(call, t.term, work)
	t.point(Skipped)
	if errors.Is(err, school.ErrStalePage) {
		return t.stale()
	}
	if err != nil {
		return fmt.Errorf("skip recipients of school %s: %w", t.school, err)
	}
	t.next, t.staled = len(t.page.Work), 0
	t.c.metrics.countSkips(work)
	t.lease.Progress()
	return nil
}

// ended says why a turn whose context ended ended.
func (t *turn) ended(ctx context.Context) (verdict, error) {
	gate := t.lease.Check()
	t.point(Checked)
	switch {
	case errors.Is(context.Cause(ctx), ErrStopping):
		// The school has work that nobody holds now.
		return verdict{kind: verdictIdle, tell: true}, nil
	case gate == nil:
		// It was held for as long as one hold may: others first, then on with it.
		return verdict{kind: verdictYield, look: true, tell: true}, nil
	}
	return t.leaseVerdict(), fmt.Errorf("school %s: %w", t.school, context.Cause(ctx))
}

// leaseVerdict follows a lease that is gone: whoever has it now has the work;
// looking again soon is for the case that nobody does.
func (t *turn) leaseVerdict() verdict {
	return verdict{kind: verdictLost, look: true, wait: time.Second}
}

// storeVerdict follows an error of the store.
func (t *turn) storeVerdict(err error) verdict {
	if errors.Is(err, school.ErrFenced) {
		t.c.metrics.fenced.Inc()
		return t.leaseVerdict()
	}
	return verdict{kind: verdictFailed}
}

// settle tells the arbiter what became of a reservation. That it does not know
// it (it lost data) is no error: the ledger has it.
func (t *turn) settle(ctx context.Context, batch string, cycle int64, attempted int) error {
	call, cancel := detached(ctx, arbiterTimeout)
	defer cancel()
	behind := Settled
	if attempted == 0 {
		behind = GivenBack
	}
	err := t.c.budget.Settle(call, school.Settlement{School: t.school, Batch: batch, Cycle: cycle, Attempted: attempted})
	t.point(behind)
	if err != nil && !errors.Is(err, school.ErrReservationUnknown) {
		return fmt.Errorf("settle batch %s of school %s: %w", batch, t.school, err)
	}
	return nil
}

// detached is a context that outlives ctx by at most d.
func detached(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), d)
}
