package coordinator

import (
	"context"
	"fmt"
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
// in (credentials, project, URL); it is then probed with one message after 5 s,
// 10 s … up to 5 min, and opens with the first answer that lets it in.
type lane struct {
	name   string
	sender sender.Sender
	room   *sender.Room // nil: no bound of its own

	mu       sync.Mutex
	silent   int           // batches in a row without an answer
	doubt    time.Time     // until then others go first
	round    int           // grows each time the lane closes
	closed   time.Time     // not before this
	pause    time.Duration // the pause that ended or ends at closed
	stopped  bool          // by the receiver; closed is when the next probe may go
	probing  bool          // a probe is under way
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
}

func newLane(l Lane) (*lane, error) {
	if l.Name == "" || l.Sender == nil {
		return nil, fmt.Errorf("lane %q: needs a name and a sender", l.Name)
	}
	return &lane{name: l.Name, sender: l.Sender, room: l.Room, tickets: map[string]func(){}, awaiting: map[string]bool{}}, nil
}

// permit is leave to send one batch.
type permit struct {
	most  int // at most this many messages; 0: no bound
	probe bool
	round int // of the lane when it was given
}

// permit asks whether a batch may go now. Otherwise wait is how long to look
// elsewhere. A probe is handed out once at a time and must be given back by
// observe or forgo.
func (l *lane) permit(now time.Time) (p permit, wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Before(l.closed) {
		return permit{}, l.closed.Sub(now), false
	}
	if !l.stopped {
		return permit{round: l.round}, 0, true
	}
	if l.probing {
		return permit{}, probeFirst, false
	}
	l.probing = true
	return permit{most: 1, probe: true, round: l.round}, 0, true
}

// open reports whether permit would let a batch go, without taking a probe.
func (l *lane) open(now time.Time) (wait time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case now.Before(l.closed):
		return l.closed.Sub(now), false
	case l.stopped && l.probing:
		return probeFirst, false
	}
	return 0, true
}

// doubted reports whether the last batch got no answer, lately: then the
// replicas that may have a way to the receiver go first. It ends by itself, since
// a replica that others are always faster than would never find its way again.
func (l *lane) doubted(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now.Before(l.doubt)
}

// forgo gives a permit back of which nothing was sent.
func (l *lane) forgo(p permit) {
	if !p.probe {
		return
	}
	l.mu.Lock()
	l.probing = false
	l.mu.Unlock()
}

// change is what one batch did to the lane.
type change int

const (
	laneSame change = iota
	laneStopped
	laneResumed
)

// observe feeds the results of one batch.
func (l *lane) observe(p permit, results []sender.Result, now time.Time) change {
	answered, refused := false, false
	var retryAfter time.Duration
	for _, r := range results {
		switch r.Class {
		case sender.Misconfigured:
			refused = true
			retryAfter = max(retryAfter, r.RetryAfter)
		case sender.NotSent, sender.Unknown:
		default:
			answered = true
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent.add(now, len(results))
	if p.probe {
		l.probing = false
	}
	switch {
	case refused:
		was := l.stopped
		if !was {
			l.pause = 0
		}
		if !was || p.probe {
			l.close(now, probeFirst, probeMost, retryAfter)
		}
		l.stopped, l.silent = true, 0
		if !was {
			return laneStopped
		}
	case answered:
		was := l.stopped
		l.stopped, l.silent, l.pause, l.closed, l.doubt = false, 0, 0, time.Time{}, time.Time{}
		if was {
			return laneResumed
		}
	default:
		l.doubt = now.Add(doubtFor)
		switch {
		case l.stopped && p.probe:
			// Nobody answered the probe: the receiver is away on top.
			l.close(now, probeFirst, probeMost, 0)
		case l.stopped || p.round != l.round:
			// It was on the wire when the lane closed, and says nothing new.
		default:
			if l.silent++; l.silent >= breakerAfter {
				l.close(now, breakerFirst, breakerMost, 0)
			}
		}
	}
	return laneSame
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
	Broken   bool          // no answers: closed by the breaker
	ResumeIn time.Duration // until the next try, where Stopped or Broken
	InFlight int           // messages; 0 where the lane has no room of its own
	Rate     float64       // messages handed over a second, lately, by this replica
}

func (l *lane) state(now time.Time) LaneState {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LaneState{Name: l.name, Stopped: l.stopped, Rate: l.sent.perSecond(now)}
	if now.Before(l.closed) {
		s.Broken, s.ResumeIn = !l.stopped, l.closed.Sub(now)
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
