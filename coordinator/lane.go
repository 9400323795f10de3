package coordinator

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"schoolbell/sender"
)

// lane is the way to one receiver as this replica sees it: whether it may be
// used now, and how many messages are in flight on it.
//
// Two things close a lane. The breaker: two batches in a row without one answer
// close it for 1, 2, 4 … 60 s. It is local on purpose: a replica that lost its own
// way to a receiver must not win every lock by failing fastest, and the others must
// not believe it. The stop: the receiver does not let this sender in (credentials,
// project, URL), for 5 s, 10 s … up to 5 min. That is true for all replicas, so it
// is Rates that decides, and the lane holds a copy for who need not ask; a local
// lane, whose sender nobody else has to know of, decides by itself. What is tried
// behind a batch without an answer, and behind either pause, is a probe: one message
// of one school at a time, since each attempt costs its school one of its cycle. The
// first answer opens a lane that silence closed for all; a stop only the probe's.
type lane struct {
	name   string
	sender sender.Sender
	room   *sender.Room            // nil: no bound of its own
	local  bool                    // Rates has nothing to say
	only   func(token string) bool // nil: every device
	dry    bool                    // nothing is delivered

	mu       sync.Mutex
	silent   int              // batches in a row without an answer
	code     string           // why the last of them had none, or was refused
	doubt    time.Time        // until then others go first
	round    int              // grows each time the lane closes
	closed   time.Time        // not before this
	pause    time.Duration    // the pause that ended or ends at closed
	stopped  bool             // by the receiver; closed is when the next probe may go
	since    time.Time        // stopped: since when
	told     time.Time        // when the stop was last heard of
	prober   string           // school whose turn has the place of the probe; empty: it is free
	behind   map[string]bool  // schools that found the place taken
	shared   sender.RateState // what Rates knew lately
	queued   time.Time        // until then schools stand in the sender's line
	sent     rate
	tickets  map[string]func()
	awaiting map[string]bool
}

const (
	breakerAfter = 2
	breakerFirst = time.Second
	breakerMost  = time.Minute
	probeFirst   = 5 * time.Second
	probeMost    = 5 * time.Minute
	doubtFor     = time.Minute
)

// A Lane names a sender and what this replica may have in flight on it.
type Lane struct {
	Name   string
	Sender sender.Sender
	Room   *sender.Room // nil: bounded by slots and batch only
	Local  bool         // it has no rate, and no receiver to be refused by: Rates is not asked

	// Only says which devices the sender is limited to; nil: it is not. All
	// others are skipped when the page is read, so they cost no attempt (R44).
	Only func(token string) bool

	// Dry: the receiver checks messages and delivers none. No fallback follows a
	// failure then, since nobody was to be reached (R44).
	Dry bool
}

func newLane(l Lane) (*lane, error) {
	if l.Name == "" || l.Sender == nil {
		return nil, fmt.Errorf("lane %q: needs a name and a sender", l.Name)
	}
	return &lane{
		name: l.Name, sender: l.Sender, room: l.Room, local: l.Local, only: l.Only, dry: l.Dry,
		behind: map[string]bool{}, tickets: map[string]func(){}, awaiting: map[string]bool{},
	}, nil
}

// permit is leave to send one batch.
type permit struct {
	most  int // at most this many messages; 0: no bound
	probe bool
	round int // of the lane when it was given
}

// permit asks whether a batch of the school may go now. Otherwise wait is how
// long to look elsewhere. A probe is given to one school at a time, which has
// its place until observe, or until its turn ends (see stepBack).
func (l *lane) permit(schoolID string, now time.Time) (p permit, wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if wait, ok := l.letIn(schoolID, now); !ok {
		return permit{}, wait, false
	}
	if l.sure() {
		return permit{round: l.round}, 0, true
	}
	return permit{most: 1, probe: true, round: l.round}, 0, true
}

// open reports whether permit would let a batch of the school go. Where that
// would be a probe it keeps its place, so that no other takes a lock for nothing.
func (l *lane) open(schoolID string, now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.letIn(schoolID, now)
}

// sure reports whether the last that was heard of the receiver is an answer. The
// caller holds mu.
func (l *lane) sure() bool { return !l.stopped && l.silent == 0 }

// letIn says whether the school may go on to a batch, and notes who finds the
// place of the probe taken: it is told when the probe has ended. The caller
// holds mu.
func (l *lane) letIn(schoolID string, now time.Time) (wait time.Duration, ok bool) {
	switch {
	case now.Before(l.closed):
		return l.closed.Sub(now), false
	case l.sure():
		return 0, true
	case l.prober != "" && l.prober != schoolID:
		l.behind[schoolID] = true
		return probeFirst, false
	}
	l.prober = schoolID
	return 0, true
}

// stepBack gives the place of the probe back where the school has it, and
// returns who waits for it: they are to be looked at now.
func (l *lane) stepBack(schoolID string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.prober != schoolID {
		return nil
	}
	l.prober = ""
	return l.waiters()
}

// waiters takes those who wait for the probe's end. The caller holds mu.
func (l *lane) waiters() []string {
	all := slices.Sorted(maps.Keys(l.behind))
	clear(l.behind)
	return all
}

// doubted reports whether the last batch got no answer, lately: then the
// replicas that may have a way to the receiver go first. It ends by itself, since
// a replica that others are always faster than would never find its way again.
func (l *lane) doubted(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now.Before(l.doubt)
}

// change is what one batch did to the lane.
type change int

const (
	laneSame change = iota
	laneStopped
	laneResumed
	laneSilent  // the breaker closed it, for the first time since an answer
	laneAnswers // behind that an answer came
)

// observe feeds what a batch of n messages of the school found out, and returns who
// waited for it: they are to be looked at now.
func (l *lane) observe(schoolID string, p permit, h heard, n int, now time.Time) (c change, waiters []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent.add(now, n)
	broken := l.broken()
	switch h.of {
	case sender.HeardRefusal:
		was := l.stopped
		if !was {
			l.pause, l.since = 0, now
		}
		if !was || p.probe {
			l.close(now, probeFirst, probeMost, h.retryAfter)
		}
		l.stopped, l.told, l.silent, l.code = true, now, 0, h.code
		if !was {
			c = laneStopped
		}
	case sender.HeardAnswer, sender.HeardThrottled:
		if l.stopped && !p.probe {
			break // it went out before, and says nothing of now
		}
		switch {
		case l.stopped:
			c = laneResumed
		case broken:
			c = laneAnswers
		}
		l.stopped, l.silent, l.code, l.pause, l.closed, l.doubt = false, 0, "", 0, time.Time{}, time.Time{}
		waiters = l.waiters() // whoever has the place of the probe does not need it any more
	case sender.HeardSilence:
		l.doubt = now.Add(doubtFor)
		switch {
		case l.stopped && p.probe:
			// Nobody answered the probe: the receiver is away on top.
			l.close(now, probeFirst, probeMost, 0)
		case l.stopped || p.round != l.round:
			// It was on the wire when the lane closed, and says nothing new.
		default:
			l.code = h.code
			if l.silent++; l.silent >= breakerAfter {
				l.close(now, breakerFirst, breakerMost, 0)
				if !broken {
					c = laneSilent
				}
			}
		}
	case sender.HeardNothing:
	}
	if p.probe && l.prober == schoolID {
		l.prober = ""
		waiters = append(waiters, l.waiters()...)
	}
	return c, waiters
}

// broken reports whether the breaker has closed the lane, and nobody has
// answered since. The caller holds mu.
func (l *lane) broken() bool { return l.silent >= breakerAfter }

// stop takes over that the sender is stopped, since so long, and may be probed in
// wait.
func (l *lane) stop(code string, wait, since time.Duration, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped {
		l.round++
		l.pause = 0
	}
	l.stopped, l.told, l.silent, l.code = true, now, 0, code
	l.since, l.closed = now.Add(-since), now.Add(wait)
}

// resume takes over that the sender is not stopped any more, and returns who waits
// for that.
func (l *lane) resume() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.goOn()
}

// goOn ends a stop. The caller holds mu.
func (l *lane) goOn() []string {
	if !l.stopped {
		return nil
	}
	l.stopped, l.code, l.pause, l.closed = false, "", 0, time.Time{}
	return l.waiters()
}

// taken makes the permit what the ticket says of it: a probe of a stop that this
// replica had not heard of, or none of one that is over. It returns who waits for
// the latter.
func (l *lane) taken(schoolID string, p *permit, k sender.Ticket, now time.Time) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !k.Probe {
		return l.goOn()
	}
	if !l.stopped {
		l.round++
		l.stopped, l.told, l.silent, l.since, l.closed, l.pause = true, now, 0, now, now, 0
	}
	l.prober = schoolID
	*p = permit{most: 1, probe: true, round: l.round}
	return nil
}

// adopt takes over what Rates knew when it was asked, and returns who waits for it.
func (l *lane) adopt(s sender.RateState, asked, now time.Time) []string {
	if s.Stopped {
		l.stop(s.Code, s.ProbeIn, s.Since, now)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shared = s; s.Waiting > 0 {
		l.queued = now.Add(2 * sendersWatch)
	}
	if s.Stopped || l.told.After(asked) {
		return nil
	}
	return l.goOn()
}

// refusedWith is the code with which the receiver refuses the sender; empty where
// it does not, as far as is known here.
func (l *lane) refusedWith() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stopped {
		return ""
	}
	return l.code
}

// crowd notes that schools stand in the sender's line.
func (l *lane) crowd(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queued = now.Add(2 * sendersWatch)
}

func (l *lane) crowded(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now.Before(l.queued)
}

// heard is what a batch's results say of the receiver.
type heard struct {
	of         sender.Heard
	code       string        // of the first that says so
	retryAfter time.Duration // the longest that is asked for by those
}

// throttledShare is what part of a batch has to be throttled for the sender's sake: a
// device or a topic that gets too much is throttled alone.
const throttledShare = 10

// codeRefused stands for a refusal without a code.
const codeRefused = "MISCONFIGURED"

// hear takes one answer among many for an answer, and a refusal for what counts.
func hear(results []sender.Result) heard {
	var h heard
	throttled := heard{of: sender.HeardThrottled}
	count := 0
	for i := range results {
		r := &results[i]
		of := sender.HeardAnswer
		switch {
		case r.Class == sender.Misconfigured:
			of = sender.HeardRefusal
		case r.Class == sender.Throttled:
			count++
			throttled.code = cmp.Or(throttled.code, r.Code)
			throttled.retryAfter = max(throttled.retryAfter, r.RetryAfter)
		case r.Class == sender.NotSent && r.Code == sender.CodeGateClosed:
			continue // that is about the lease
		case r.Class == sender.NotSent, r.Class == sender.Unknown:
			of = sender.HeardSilence
		}
		if of > h.of {
			h = heard{of: of}
		}
		if of == h.of && of != sender.HeardAnswer {
			h.code = cmp.Or(h.code, r.Code)
			h.retryAfter = max(h.retryAfter, r.RetryAfter)
		}
	}
	switch {
	case h.of == sender.HeardAnswer && count*throttledShare >= len(results):
		return throttled
	case h.of == sender.HeardRefusal:
		h.code = cmp.Or(h.code, codeRefused)
	}
	return h
}

// close closes the lane for twice the pause before, from first to most, and at
// least for floor. Batches that are on the wire by then do not lengthen it.
func (l *lane) close(now time.Time, first, most, floor time.Duration) {
	l.pause = min(max(l.pause*2, first), most)
	l.closed = now.Add(max(l.pause, floor))
	l.round++
}

// LaneState is a lane as people look at it.
type LaneState struct {
	Name       string
	Stopped    bool          // the receiver does not let this sender in
	StoppedFor time.Duration // where Stopped
	Broken     bool          // closed by the breaker, and no answer since
	Code       string        // where Stopped or Broken: a result's code, such as UNAUTHENTICATED or CONNECT_FAILED
	ResumeIn   time.Duration // until the next try, where Stopped or Broken; 0: with the next message
	InFlight   int           // messages; 0 where the lane has no room of its own
	Rate       float64       // messages handed over a second, lately, by this replica

	// Shared is what the cluster knows of the sender, a second old or so; nothing
	// where it is local. Stopped above is newer.
	Shared sender.RateState
}

func (l *lane) state(now time.Time) LaneState {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LaneState{Name: l.name, Stopped: l.stopped, Rate: l.sent.perSecond(now), ResumeIn: max(0, l.closed.Sub(now)), Shared: l.shared}
	s.Broken = !l.stopped && l.broken()
	if s.Stopped || s.Broken {
		s.Code = l.code
	}
	if s.Stopped {
		s.StoppedFor = max(0, now.Sub(l.since))
	}
	if l.room != nil {
		s.InFlight = l.room.InUse()
	}
	return s
}

// enter takes room for n messages of the school, with a ticket got earlier or
// at once. Where there is none, ok is false and the school has to wait in line
// (see await) without a slot, a lease or a claim.
func (l *lane) enter(schoolID string, n int) (leave func(), ok bool) {
	if l.room == nil {
		return func() {}, true
	}
	l.mu.Lock()
	leave, ok = l.tickets[schoolID]
	delete(l.tickets, schoolID)
	l.mu.Unlock()
	if ok {
		return leave, true
	}
	return l.room.TryEnter(min(n, l.room.Size()))
}

// await stands in line for room for n messages and keeps it as the school's
// ticket. It reports whether the ticket was got; one school stands in line once.
func (l *lane) await(ctx context.Context, schoolID string, n int) bool {
	l.mu.Lock()
	if l.awaiting[schoolID] || l.tickets[schoolID] != nil {
		l.mu.Unlock()
		return false
	}
	l.awaiting[schoolID] = true
	l.mu.Unlock()
	leave, err := l.room.Enter(ctx, min(n, l.room.Size()))
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.awaiting, schoolID)
	if err != nil {
		return false
	}
	l.tickets[schoolID] = leave
	return true
}

// drop gives back a ticket that the school's turn did not use.
func (l *lane) drop(schoolID string) {
	l.mu.Lock()
	leave := l.tickets[schoolID]
	delete(l.tickets, schoolID)
	l.mu.Unlock()
	if leave != nil {
		leave()
	}
}

// dropAll gives back every ticket, at the stop.
func (l *lane) dropAll() {
	l.mu.Lock()
	tickets := l.tickets
	l.tickets = map[string]func(){}
	l.mu.Unlock()
	for _, leave := range tickets {
		leave()
	}
}
