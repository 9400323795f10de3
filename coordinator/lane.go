package coordinator

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"schoolbell/sender"
)

// lane is the way to one receiver as this replica sees it: whether it may be
// used now, and how many messages are in flight on it. It is local on purpose:
// a replica that lost its own way to a receiver must not win every lock by
// failing fastest, and the others must not believe it.
//
// Two things close a lane. The breaker: two batches in a row without one answer
// close it for 1, 2, 4 … 60 s. The stop: the receiver does not let this sender
// in (credentials, project, URL), for 5 s, 10 s … up to 5 min. What is tried
// behind a batch without an answer, and behind either pause, is a probe: one
// message of one school at a time, since each attempt costs its school one of
// its cycle. The first answer that lets the sender in opens the lane for all.
type lane struct {
	name   string
	sender sender.Sender
	room   *sender.Room            // nil: no bound of its own
	only   func(token string) bool // nil: every device

	mu       sync.Mutex
	silent   int             // batches in a row without an answer
	code     string          // why the last of them had none
	doubt    time.Time       // until then others go first
	round    int             // grows each time the lane closes
	closed   time.Time       // not before this
	pause    time.Duration   // the pause that ended or ends at closed
	stopped  bool            // by the receiver; closed is when the next probe may go
	prober   string          // school whose turn has the place of the probe; empty: it is free
	behind   map[string]bool // schools that found the place taken
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

	// Only says which devices the sender is limited to; nil: it is not. All
	// others are skipped when the page is read, so they cost no attempt (R44).
	Only func(token string) bool
}

func newLane(l Lane) (*lane, error) {
	if l.Name == "" || l.Sender == nil {
		return nil, fmt.Errorf("lane %q: needs a name and a sender", l.Name)
	}
	return &lane{
		name: l.Name, sender: l.Sender, room: l.Room, only: l.Only,
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

// observe feeds the results of one batch of the school, and returns who waited
// for them: they are to be looked at now.
func (l *lane) observe(schoolID string, p permit, results []sender.Result, now time.Time) (c change, waiters []string) {
	heard, retryAfter, code := hear(results)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent.add(now, len(results))
	broken := l.broken()
	switch heard {
	case refusal:
		was := l.stopped
		if !was {
			l.pause = 0
		}
		if !was || p.probe {
			l.close(now, probeFirst, probeMost, retryAfter)
		}
		l.stopped, l.silent, l.code = true, 0, code
		if !was {
			c = laneStopped
		}
	case anAnswer:
		switch {
		case l.stopped:
			c = laneResumed
		case broken:
			c = laneAnswers
		}
		l.stopped, l.silent, l.code, l.pause, l.closed, l.doubt = false, 0, "", 0, time.Time{}, time.Time{}
		waiters = l.waiters() // whoever has the place of the probe does not need it any more
	case silence:
		l.doubt = now.Add(doubtFor)
		switch {
		case l.stopped && p.probe:
			// Nobody answered the probe: the receiver is away on top.
			l.close(now, probeFirst, probeMost, 0)
		case l.stopped || p.round != l.round:
			// It was on the wire when the lane closed, and says nothing new.
		default:
			l.code = code
			if l.silent++; l.silent >= breakerAfter {
				l.close(now, breakerFirst, breakerMost, 0)
				if !broken {
					c = laneSilent
				}
			}
		}
	case nothing:
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

// heard is what a batch's results say of the receiver.
type heard int

const (
	nothing  heard = iota // no message was tried
	silence               // nobody answered
	anAnswer              // to one message at least
	refusal               // it does not let this sender in
)

// hear takes one answer among many for an answer, and a refusal for what counts.
// Where there is none, code is the first reason; of a refusal its own.
func hear(results []sender.Result) (h heard, retryAfter time.Duration, code string) {
	for i := range results {
		r := &results[i]
		of := anAnswer
		switch {
		case r.Class == sender.Misconfigured:
			of, retryAfter = refusal, max(retryAfter, r.RetryAfter)
			if h != refusal {
				code = r.Code
			}
		case r.Class == sender.NotSent && r.Code == sender.CodeGateClosed:
			continue // that is about the lease
		case r.Class == sender.NotSent, r.Class == sender.Unknown:
			of = silence
			if code == "" && h != refusal {
				code = r.Code
			}
		}
		h = max(h, of)
	}
	return h, retryAfter, code
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
	Name     string
	Stopped  bool          // the receiver does not let this sender in
	Broken   bool          // closed by the breaker, and no answer since
	Code     string        // where Stopped or Broken: a result's code, such as UNAUTHENTICATED or CONNECT_FAILED
	ResumeIn time.Duration // until the next try, where Stopped or Broken; 0: with the next message
	InFlight int           // messages; 0 where the lane has no room of its own
	Rate     float64       // messages handed over a second, lately, by this replica
}

func (l *lane) state(now time.Time) LaneState {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LaneState{Name: l.name, Stopped: l.stopped, Rate: l.sent.perSecond(now), ResumeIn: max(0, l.closed.Sub(now))}
	s.Broken = !l.stopped && l.broken()
	if s.Stopped || s.Broken {
		s.Code = l.code
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
