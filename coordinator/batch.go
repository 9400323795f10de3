package coordinator

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"schoolbell/school"
	"schoolbell/sender"
)

// batch sends the next batch of the page: permit, room and rate, lease check,
// reserve, lease check, claim, send, record, settle, in this order. done ends the
// turn.
func (t *turn) batch(ctx context.Context) (v verdict, done bool, err error) {
	p, wait, ok := t.lane.permit(t.school, time.Now())
	if !ok {
		return verdict{kind: verdictLater, look: true, wait: wait}, true, nil
	}
	want := t.sendable(t.c.cfg.Batch)
	if p.most > 0 {
		want = min(want, p.most)
	}
	leave, ok := t.lane.enter(t.school, want)
	if !ok {
		return verdict{kind: verdictLine}, true, nil
	}
	defer leave()
	id, err := uuid.NewV7()
	if err != nil {
		return verdict{kind: verdictFailed}, true, fmt.Errorf("make a batch id: %w", err)
	}
	want, v, done, err = t.take(ctx, &p, id.String(), want)
	if done || err != nil {
		return v, true, err
	}

	// B, from before the reservation: W until the claim has committed, C for the call.
	longest := t.longest()
	err = t.lease.Ensure(ctx, longest)
	t.point(Ensured)
	if err != nil {
		return t.leaseVerdict(), true, fmt.Errorf("lease of school %s before a batch: %w", t.school, err)
	}
	t0 := time.Now()
	// From here on the batch is carried through even when the replica stops.
	reserve, cancel := context.WithDeadline(context.WithoutCancel(ctx), t0.Add(t.c.cfg.ClaimTimeout))
	defer cancel()
	grant, v, done, err := t.reserve(reserve, id.String(), want, longest)
	if done || err != nil {
		return v, true, err
	}
	if grant.Opened && grant.RestedFor > 0 {
		t.c.metrics.cycles.Inc()
		t.c.metrics.resumeLag.Observe(max(0, grant.RestedFor-grant.Rule.Rest).Seconds())
		t.c.log.Info("rest is over", "event", "cooldown_completed", "school", t.school, "cycle", grant.Cycle, "waited_ms", grant.RestedFor.Milliseconds())
	}
	err = t.lease.Check()
	t.point(Checked)
	if err != nil {
		return t.leaseVerdict(), true, errors.Join(fmt.Errorf("lease of school %s after the reservation: %w", t.school, err),
			t.settle(ctx, id.String(), grant.Cycle, 0))
	}

	claim := school.Claim{
		Batch: id.String(), Sender: t.lane.name, Work: t.cut(grant.Size), Grant: grant,
		Longest: longest - time.Since(t0), Record: t.c.cfg.RecordGrace, Rule: grant.Rule,
		// Once: a page that was just read anew is claimed whatever came meanwhile, or
		// a stream of urgent notices could keep a school from sending at all.
		UrgentFirst: t.staled == 0,
	}
	v, done, again, err := t.claim(ctx, reserve, claim)
	if done || err != nil {
		return v, true, err
	}
	if again {
		return verdict{}, false, nil
	}
	t.c.metrics.countSkips(claim.Work)
	err = t.lease.Check()
	t.point(Cleared)
	if err != nil {
		return t.leaseVerdict(), true, errors.Join(fmt.Errorf("lease of school %s before the send: %w", t.school, err), t.withdraw(ctx, claim))
	}
	// After the look at the lease, which lasts where it has it confirmed.
	if late := time.Since(t0) - t.c.cfg.ClaimTimeout; late > 0 {
		return verdict{kind: verdictFailed}, true, errors.Join(
			fmt.Errorf("batch %s of school %s: claiming took %s longer than %s", claim.Batch, t.school, late, t.c.cfg.ClaimTimeout), t.withdraw(ctx, claim))
	}
	t.logStarted(claim)

	results := t.send(ctx, claim, t0.Add(longest))
	t.lease.Progress()
	leave()
	t.observe(ctx, p, results)
	taken, err := t.record(ctx, claim, results)
	if err != nil {
		return verdict{kind: verdictFailed}, true, err
	}
	if taken {
		return t.leaseVerdict(), true, fmt.Errorf("batch %s of school %s: %w", claim.Batch, t.school, school.ErrTakenOver)
	}
	t.c.etc.took(t.school, time.Since(t0))
	t.lease.Progress()
	settleErr := t.settle(ctx, claim.Batch, grant.Cycle, claim.Size())
	if grant.Filled {
		// A settlement that failed leaves the provisional rest, which is longer.
		t.c.log.Info("cycle is full: the school rests", "event", "cooldown_started", "school", t.school, "cycle", grant.Cycle, "rest_ms", grant.Rule.Rest.Milliseconds())
		return t.rested(grant.Rule.Rest), true, settleErr
	}
	if settleErr != nil {
		return verdict{kind: verdictFailed}, true, settleErr
	}
	if t.c.cfg.Pace > 0 {
		wait := t.c.cfg.Pace + time.Duration(rand.Int64N(int64(t.c.cfg.Pace)/5+1))
		return verdict{kind: verdictLater, look: true, wait: wait, hold: wait}, true, nil
	}
	return verdict{}, false, nil
}

// rested ends the turn with the rest. Where nothing is left to send, nobody
// waits for it (R6).
func (t *turn) rested(rest time.Duration) verdict {
	if t.next >= len(t.page.Work) && !t.page.More && t.nextDue <= 0 {
		return verdict{kind: verdictRest}
	}
	v := resting(rest)
	if t.next >= len(t.page.Work) && !t.page.More {
		v.wait = max(rest, t.nextDue-time.Since(t.looked)) // but new work waits for the rest only
	}
	return v
}

// sendable counts the recipients to be sent in the rest of the page, up to most.
func (t *turn) sendable(most int) int {
	n := 0
	for i := t.next; i < len(t.page.Work) && n < most; i++ {
		if t.page.Work[i].Sendable() {
			n++
		}
	}
	return n
}

// cut takes the next n sendable recipients of the page with the skipped ones
// among and behind them, so that a notice's last batch reaches its end.
func (t *turn) cut(n int) []school.Work {
	end := t.next
	for ; end < len(t.page.Work); end++ {
		if t.page.Work[end].Sendable() {
			if n == 0 {
				break
			}
			n--
		}
	}
	return t.page.Work[t.next:end:end]
}

// reserve asks the arbiter for attempts. It cures what can be cured once: a
// lease that is too short by an extension, lost data by a rebuild.
func (t *turn) reserve(ctx context.Context, batch string, want int, longest time.Duration) (g school.Grant, v verdict, done bool, err error) {
	for try := 0; ; try++ {
		g, err = t.c.budget.Reserve(ctx, school.Reservation{
			School: t.school, Acquisition: t.lease.Acquisition(), Fence: t.term.Fence, Batch: batch,
			Want: want, Longest: longest, Floor: t.floor, Rule: t.rule,
		})
		t.filled = g.Filled
		t.point(Reserved)
		if err != nil {
			// It may have been granted: then it stays open until its deadline and
			// counts as used, which costs attempts of the cycle and nothing else.
			return g, verdict{kind: verdictFailed}, true, fmt.Errorf("reserve %d attempts of school %s: %w", want, t.school, err)
		}
		switch g.Kind {
		case school.Granted:
			return g, verdict{}, false, nil
		case school.Resting:
			return g, resting(g.Wait), true, nil
		case school.NotOwner:
			return g, t.leaseVerdict(), true, fmt.Errorf("reserve for school %s: the lock is not this term's", t.school)
		}
		if try >= 2 {
			return g, verdict{kind: verdictFailed}, true, fmt.Errorf("reserve for school %s: answer %d after %d tries", t.school, g.Kind, try+1)
		}
		switch {
		case g.Kind == school.LeaseShort:
			// The arbiter knows of less than the local end: it may have lost an
			// extension. Asking the local end again would change nothing.
			err = t.lease.Extend(ctx, longest)
			t.point(Lengthened)
		case g.Kind == school.NeedRebuild && g.ClockJumped:
			if err = t.freshFloor(ctx); err == nil {
				err = t.c.budget.Rebuild(ctx, t.school, t.lease.Acquisition(), t.term.Fence, t.floor, t.rule)
				t.point(Rebuilt)
			}
		case g.Kind == school.NeedRebuild:
			t.c.log.Warn("the arbiter lost a school's quota: rebuilt from the ledger", "event", "quota_rebuilt", "school", t.school, "cycle", t.floor.Cycle)
			err = t.reconcile(ctx)
		default:
			err = fmt.Errorf("answer %d is none that can be cured", g.Kind)
		}
		if err != nil {
			return g, verdict{kind: verdictFailed}, true, fmt.Errorf("reserve for school %s: %w", t.school, err)
		}
	}
}

// freshFloor reads the ledger again by opening a new term: what is left of a
// rest must be counted from now.
func (t *turn) freshFloor(ctx context.Context) error {
	term, err := t.c.queue.OpenTerm(ctx, t.school, t.lease.Acquisition(), t.c.cfg.Instance)
	t.point(Reopened)
	if err != nil {
		return fmt.Errorf("open term of school %s anew: %w", t.school, err)
	}
	t.term, t.floor = term, term.Ledger
	err = t.lease.Bind(ctx, term.Fence)
	t.point(Rebound)
	return err
}

// claim commits the batch. again: the page was stale and is to be read anew.
func (t *turn) claim(ctx, within context.Context, c school.Claim) (v verdict, done, again bool, err error) {
	err = t.c.queue.Claim(within, t.term, c)
	t.point(Claimed)
	if err == nil {
		t.c.storeAnswered()
		t.next, t.used = t.next+len(c.Work), true
		t.staled = 0
		t.floor = school.Ledger{
			Cycle: c.Grant.Cycle, Attempted: max(c.Grant.Attempted, t.sameCycle(c.Grant.Cycle)),
			Filled: c.Grant.Filled, Rule: c.Rule,
		}
		t.lease.Progress()
		return verdict{}, false, false, nil
	}
	if !notClaimed(err) {
		return verdict{kind: verdictFailed}, true, false, errors.Join(
			fmt.Errorf("claim batch %s of school %s: %w", c.Batch, t.school, err), t.resolve(ctx, c))
	}
	// Nothing was claimed, so nothing was handed over: the attempts go back.
	settled := t.settle(ctx, c.Batch, c.Grant.Cycle, 0)
	switch {
	case errors.Is(err, school.ErrStalePage) && settled == nil && ctx.Err() == nil:
		if err := t.stale(); err != nil {
			return verdict{kind: verdictFailed}, true, false, err
		}
		return verdict{}, false, true, nil
	case errors.Is(err, school.ErrPaused):
		return verdict{kind: verdictIdle}, true, false, settled
	case errors.Is(err, school.ErrRuleChanged) && settled == nil:
		// The limit, the rest or the sender may be another: a new term tells.
		return verdict{kind: verdictYield, look: true, tell: true}, true, false, nil
	}
	return t.storeVerdict(err), true, false, errors.Join(fmt.Errorf("claim batch %s of school %s: %w", c.Batch, t.school, err), settled)
}

// notClaimed reports whether a claim failed in a way that says that nothing of
// it was written. What the store does not say so clearly may have committed.
func notClaimed(err error) bool {
	for _, known := range []error{school.ErrFenced, school.ErrPaused, school.ErrStalePage, school.ErrRuleChanged, school.ErrUnavailable} {
		if errors.Is(err, known) {
			return !errors.Is(err, school.ErrCommitUnknown)
		}
	}
	return false
}

// sameCycle is what the floor has attempted in cycle; 0 in another.
func (t *turn) sameCycle(cycle int64) int {
	if t.floor.Cycle == cycle {
		return t.floor.Attempted
	}
	return 0
}

// resolve finds out about a claim whose answer was lost. A new term waits for
// the older claim's fate, and then nothing of it can commit any more; if it did
// commit, it is withdrawn, since nothing of it was sent. While the store is
// away the batch stays as it is, and the next owner takes it over.
func (t *turn) resolve(ctx context.Context, c school.Claim) error {
	call, cancel := detached(ctx, storeTimeout)
	defer cancel()
	before := t.term.Fence
	err := t.freshFloor(call)
	if t.term.Fence == before {
		return err
	}
	return errors.Join(err, t.withdraw(ctx, c)) // also where the lock could not be told of the new fence
}

// withdraw takes a claim back of which nothing was sent: the ledger first, then
// the arbiter, so that the ledger is never behind.
func (t *turn) withdraw(ctx context.Context, c school.Claim) error {
	call, cancel := detached(ctx, storeTimeout)
	defer cancel()
	err := t.c.queue.Withdraw(call, t.term, c.Batch)
	t.point(Withdrawn)
	if err != nil {
		return fmt.Errorf("withdraw batch %s of school %s: %w", c.Batch, t.school, err)
	}
	return t.settle(ctx, c.Batch, c.Grant.Cycle, 0)
}

// errBatchEnded closes the gate of a batch whose time is over.
var errBatchEnded = errors.New("the batch's time is over")

// send hands the batch to the sender. The call has its own deadline and does not
// end with the lease: what is on the wire gets its answer. But it ends with its
// batch: a process that stood still must not send when the reservation and the
// claim count as ended.
func (t *turn) send(ctx context.Context, c school.Claim, until time.Time) []sender.Result {
	ctx, cancel := detached(ctx, min(t.lane.sender.Longest(), time.Until(until)))
	defer cancel()
	lease := t.gate(c.Size())
	gate := func() error {
		if err := lease(); err != nil {
			return err
		}
		if !time.Now().Before(until) { // ctx may not have noticed yet
			return errBatchEnded
		}
		return nil
	}
	b := sender.Batch{ID: c.Batch, School: t.school, Fence: t.term.Fence, Gate: gate}
	for i := range c.Work {
		w := &c.Work[i]
		if !w.Sendable() {
			continue
		}
		if b.TraceParent == "" {
			b.TraceParent = w.Notice.TraceParent
		}
		if t.fresh[w.Notice.ID] {
			delete(t.fresh, w.Notice.ID)
			t.c.metrics.firstSendLag.Observe((w.Notice.DueFor + time.Since(t.looked)).Seconds())
		}
		b.Messages = append(b.Messages, sender.Message{
			ID: school.MessageID(w.Notice.ID, w.Seq), Notice: strconv.FormatInt(w.Notice.ID, 10), Token: w.Token,
			Content: t.content(w.Notice).WithData(w.Data), Badge: w.Badge,
			Attempt: w.Standing.Attempts + 1, Requeued: w.Requeued,
		})
	}
	results := t.lane.sender.Send(ctx, b)
	t.point(Sent)
	return results
}

// content is the notice as a sender sees it, made once a turn.
func (t *turn) content(n *school.Notice) *sender.Content {
	if c := t.contents[n.ID]; c != nil {
		return c
	}
	c := &sender.Content{Title: n.Content.Title, Body: n.Content.Body, Image: n.Content.Image, Link: n.Content.Link, Data: n.Content.Data, ExpiresAt: n.ExpiresAt}
	if !n.ExpiresAt.IsZero() {
		c.ExpiresBy = t.looked.Add(n.ExpiresIn)
	}
	switch n.Priority {
	case school.Urgent:
		c.Priority = sender.Urgent
	case school.Low:
		c.Priority = sender.Low
	}
	t.contents[n.ID] = c
	return c
}

// record writes the outcomes, again and again until they are recorded, another
// owner took the batch over, or the stop gives up: only this process knows them.
func (t *turn) record(ctx context.Context, c school.Claim, results []sender.Result) (taken bool, err error) {
	r, err := t.outcomes(c, results)
	if err != nil {
		return false, err
	}
	began := time.Now()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		call, cancel := detached(ctx, storeTimeout)
		err := t.c.queue.Record(call, r)
		t.point(Recorded)
		cancel()
		switch {
		case err == nil:
			t.c.storeAnswered()
			t.c.metrics.record.Observe(time.Since(began).Seconds())
			t.logRecorded(r)
			t.emitBrake(r)
			for i := range r.Results { // a retry's wait counts from the record
				if ch := &r.Results[i].Change; ch.State == school.RetryPending {
					t.dueIn(ch.RetryIn)
				}
			}
			return false, nil
		case errors.Is(err, school.ErrTakenOver):
			return true, nil
		}
		// While the store is away for all, waiting for it is the work's state and
		// not a stuck owner. One that alone lost its way to it must not keep the
		// school from those that have theirs.
		if !t.c.members.OthersAble() {
			t.lease.Progress()
		}
		t.c.log.Warn("results could not be recorded and are tried again", "event", "record_failed", "school", t.school, "batch", c.Batch, "error", err)
		select {
		case <-time.After(wait + time.Duration(rand.Int64N(int64(wait)/4+1))):
		case <-t.c.gaveUp:
			t.c.givenUp.Add(1)
			return false, fmt.Errorf("record batch %s of school %s: %w %s after the stop: %w", c.Batch, t.school, errGivenUp, t.c.cfg.StopTimeout, err)
		}
	}
}

// outcomes maps each result to what becomes of its recipient.
func (t *turn) outcomes(c school.Claim, results []sender.Result) (school.BatchRecord, error) {
	r := school.BatchRecord{
		Batch: c.Batch, School: t.school, Owner: t.c.cfg.Instance, Fence: t.term.Fence,
		Cycle: c.Grant.Cycle, Filled: c.Grant.Filled, Rest: c.Grant.Rule.Rest,
		Results: make([]school.Recorded, 0, len(results)),
	}
	if n := c.Size(); n != len(results) {
		return r, fmt.Errorf("batch %s of school %s: sender %s gave %d results for %d messages", c.Batch, t.school, t.lane.name, len(results), n)
	}
	i, gone := 0, 0
	for w := range c.Work {
		w := &c.Work[w]
		if !w.Sendable() {
			continue
		}
		result := results[i]
		i++
		outcome, err := outcomeOf(result)
		if err != nil {
			outcome, result.Code = school.Unknown, sender.CodeResultMalformed
		}
		change, err := school.Next(w.Standing, school.Event{
			Outcome: outcome, Code: result.Code, RetryAfter: result.RetryAfter,
			Delivery: w.Notice.Delivery, Jitter: rand.Float64(),
		}, t.c.cfg.Retry)
		if err != nil {
			return r, fmt.Errorf("recipient %s of batch %s: %w", school.MessageID(w.Notice.ID, w.Seq), c.Batch, err)
		}
		if change.Retire {
			gone++
		}
		t.c.metrics.countResult(t.lane.name, outcome, change)
		r.Results = append(r.Results, school.Recorded{
			Notice: w.Notice.ID, Seq: w.Seq, Change: change, Fallback: w.Notice.Fallback != "" && change.Definite() && !t.lane.dry,
		})
	}
	r.Brake = t.c.cfg.Brake.Acts(gone, len(r.Results))
	return r, nil
}

func (t *turn) logStarted(c school.Claim) {
	first := ""
	trace := ""
	for i := range c.Work {
		if c.Work[i].Sendable() {
			first, trace = strconv.FormatInt(c.Work[i].Notice.ID, 10), traceID(c.Work[i].Notice.TraceParent)
			break
		}
	}
	if !t.announced {
		t.announced = true
		t.c.log.Info("sending", "event", "send_started", "school", t.school, "fence", t.term.Fence, "notice", first, "trace_id", trace)
	}
	t.c.log.Info("batch goes out", "event", "batch_started", "school", t.school,
		"attempted_in_cycle", c.Grant.Attempted-c.Grant.Size, "batch", c.Size(), "batch_id", c.Batch,
		"cycle", c.Grant.Cycle, "fence", t.term.Fence, "sender", c.Sender, "notice", first, "trace_id", trace)
}

func (t *turn) logRecorded(r school.BatchRecord) {
	var success, fail, retry, permanent int
	for i := range r.Results {
		switch r.Results[i].Change.State {
		case school.Success:
			success++
		case school.Fail:
			fail++
		case school.RetryPending:
			retry++
		case school.PermanentFail:
			permanent++
		}
	}
	t.c.log.Info("batch is recorded", "event", "batch_recorded", "school", t.school, "batch_id", r.Batch,
		"success", success, "fail", fail, "retry", retry, "permanent_fail", permanent, "fence", r.Fence)
}

// traceID takes the trace id out of a W3C traceparent; empty where there is none.
func traceID(traceParent string) string {
	parts := strings.Split(traceParent, "-")
	if len(parts) < 4 {
		return ""
	}
	return parts[1]
}
