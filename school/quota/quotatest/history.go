package quotatest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"schoolbell/school"
)

// Source decides what happens: a seed, a property test or a fuzzer.
type Source interface {
	// Intn is 0 or more and less than n.
	Intn(n int) int
}

// Plan says what a history may contain. Owners always come one after the other;
// that is the lock's and the fence's part.
type Plan struct {
	Terms    int
	Lossless bool // Redis loses nothing and its clock does not jump; owners die all the same
	Settings bool // the school's limit and rest change; the clock of Redis only goes back
	NoFloors bool // the owners forget to bring the ledger: a history that must go wrong
}

// History is what a receiver saw of one school, and how much it was worth.
type History struct {
	Sent  []Sent
	Limit int   // highest that was ever set
	Rest  int64 // shortest that was ever set, ms

	Attempts, Cycles, Deaths, Losses, Jumps int
}

// Wrong judges the history from what was sent alone.
func (h *History) Wrong() []string { return Judge(h.Sent, h.Limit, h.Rest) }

const (
	historyLongest = 100 * time.Millisecond
	historyRecord  = 20 * time.Millisecond // time to record on top: the ledger's deadlines are later by it
)

// story is a history in the making.
type story struct {
	History
	Plan
	src    Source
	s      Subject
	now    int64 // ms from 0, as the receiver and the database see it
	offset int64 // how far the clock of Redis is from that
	rule   school.Rule
	ledger Ledger
	fence  int64
	serial int

	saved   any
	orphans []school.Settlement
	drained int64 // until then a call of a dead owner may be running
	settled []school.Settlement
	asked   []school.Reservation
}

// Happen drives s through a random history. An error is a breach that shows
// without judging what was sent: an answer that makes no sense, or no progress.
func Happen(src Source, s Subject, p Plan) (*History, error) {
	t := &story{Plan: p, src: src, s: s, now: 10_000,
		rule: school.Rule{Limit: 50, Rest: 200 * time.Millisecond, Version: 1}}
	t.Limit, t.Rest = t.rule.Limit, t.rule.Rest.Milliseconds()
	t.ledger = Ledger{rule: t.rule}
	for range p.Terms {
		if err := t.term(); err != nil {
			return &t.History, fmt.Errorf("at %d: %w", t.now, err)
		}
	}
	return &t.History, nil
}

func (t *story) odds(n int) bool { return t.src.Intn(n) == 0 }

func (t *story) clock() { t.s.At(Epoch + t.now + t.offset) }

func (t *story) floor() school.Ledger {
	if t.NoFloors {
		return school.Ledger{}
	}
	return t.ledger.At(t.now)
}

// trouble is what Redis may do at any moment.
func (t *story) trouble() {
	if t.Lossless {
		return
	}
	switch t.src.Intn(40) {
	case 0:
		t.s.Load(nil)
		t.Losses++
	case 1:
		if t.saved != nil {
			t.s.Load(t.saved)
			t.Losses++
		}
	case 2, 3:
		t.saved = t.s.Save()
	case 4:
		// A rest that only Redis knows of (its reservation was never claimed, or
		// the limit was lowered) is as good as the clock of Redis: nothing else
		// could tell that it was skipped.
		if t.Settings {
			return
		}
		t.clock()
		if p, err := t.s.Peek(); err == nil && p.Resting > 0 && !(t.ledger.filled && t.ledger.cycle == p.Cycle) {
			return
		}
		t.offset += int64(t.src.Intn(3000))
		t.Jumps++
	case 5:
		t.offset -= int64(t.src.Intn(3000))
		t.Jumps++
	}
}

func (t *story) term() error {
	if t.odds(4) {
		t.now += int64(t.src.Intn(600))
	}
	t.now = max(t.now+int64(t.src.Intn(20)), t.drained)
	if t.Settings && t.odds(6) {
		t.rule = school.Rule{Version: t.rule.Version + 1,
			Limit: []int{20, 50, 80}[t.src.Intn(3)], Rest: []time.Duration{100, 200, 300}[t.src.Intn(3)] * time.Millisecond}
		t.Limit, t.Rest = max(t.Limit, t.rule.Limit), min(t.Rest, t.rule.Rest.Milliseconds())
	}
	t.trouble()
	t.fence++
	t.clock()
	t.s.Own(t.acquisition(), t.fence)
	if t.odds(2) { // a takeover settles what it took, unless it dies itself
		for _, x := range t.orphans {
			if err := t.settle(x); err != nil {
				return err
			}
		}
	}
	t.orphans = nil
	if err := t.s.Reconcile(t.floor(), t.rule); err != nil {
		return err
	}
	for range 1 + t.src.Intn(6) {
		if on, err := t.batch(); err != nil || !on {
			return err
		}
		t.now += int64(t.src.Intn(10))
	}
	return nil
}

func (t *story) acquisition() string { return fmt.Sprintf("acq-%d", t.fence) }

// batch is one batch; false: the term is over.
func (t *story) batch() (on bool, err error) {
	t.trouble()
	t.serial++
	began := t.now
	r := school.Reservation{
		School: "A", Acquisition: t.acquisition(), Fence: t.fence, Batch: fmt.Sprintf("b%d", t.serial),
		Want: 1 + t.src.Intn(20), Longest: historyLongest, Rule: t.rule,
	}
	g, err := t.reserve(r)
	if err != nil {
		return false, err
	}
	if g.Kind == school.Resting {
		wait := g.Wait.Milliseconds()
		if most := int64(2000); wait > most {
			return false, fmt.Errorf("told to wait %d ms; no rest is that long", wait)
		}
		if t.odds(3) {
			wait = int64(t.src.Intn(int(wait) + 1))
		}
		t.now += wait
		return false, nil
	}
	if g.Opened {
		t.Cycles++
	}
	if t.odds(20) {
		t.Deaths++
		return false, nil // before the claim: nothing is sent, nobody tells
	}
	t.now += int64(t.src.Intn(5))
	n := g.Size
	if t.odds(6) {
		n = t.src.Intn(g.Size + 1)
	}
	t.trouble()
	t.ledger.Claim(t.now, g, n, historyLongest+historyRecord)
	x := school.Settlement{School: "A", Batch: r.Batch, Cycle: g.Cycle, Attempted: n}
	if n > 0 {
		took := 1 + int64(t.src.Intn(int(began+historyLongest.Milliseconds()-t.now)))
		t.Sent = append(t.Sent, Sent{Start: t.now, End: t.now + took, Size: n})
		t.Attempts += n
		if t.odds(12) {
			t.Deaths++
			t.orphans = append(t.orphans, x)
			t.drained = t.now + (historyLongest + historyRecord).Milliseconds()
			t.now += int64(t.src.Intn(int(took)))
			return false, nil
		}
		t.now += took
	}
	t.trouble()
	t.ledger.Record(t.now, g)
	if t.odds(20) {
		t.Deaths++
		return false, nil // recorded, but not settled
	}
	return true, t.settle(x)
}

// reserve asks until the answer is about the rule, bringing the ledger where
// something was lost, and now and then asks twice.
func (t *story) reserve(r school.Reservation) (school.Grant, error) {
	for range 4 {
		t.clock()
		r.Floor = t.floor()
		g, err := t.s.Reserve(r)
		if err != nil {
			return g, err
		}
		switch g.Kind {
		case school.Granted:
			if g.Size < 1 || g.Size > r.Want || g.Attempted > t.Limit {
				return g, fmt.Errorf("granted %d of %d, %d of the cycle", g.Size, r.Want, g.Attempted)
			}
			if t.odds(4) {
				again, err := t.s.Reserve(r)
				if err != nil || again != g {
					return g, fmt.Errorf("asked again: %+v, first %+v: %w", again, g, err)
				}
			}
			t.asked = append(t.asked, r)
			return g, nil
		case school.Resting:
			return g, nil
		case school.NeedRebuild:
			if g.ClockJumped || t.odds(2) {
				err = t.s.Rebuild(r.Acquisition, r.Fence, t.floor(), t.rule)
			} else {
				err = t.s.Reconcile(t.floor(), t.rule)
			}
			if err != nil {
				return g, err
			}
		default:
			return g, fmt.Errorf("answer %d", g.Kind)
		}
	}
	return school.Grant{}, errors.New("rebuilt over and over")
}

// settle settles, sometimes twice, sometimes with an older settlement after it,
// as a network brings them.
func (t *story) settle(x school.Settlement) error {
	t.settled = append(t.settled, x)
	todo := []school.Settlement{x}
	if t.odds(3) {
		todo = append(todo, x)
	}
	if t.odds(4) {
		todo = append(todo, t.settled[t.src.Intn(len(t.settled))])
	}
	if t.odds(8) {
		slices.Reverse(todo)
	}
	for _, x := range todo {
		t.clock()
		err := t.s.Settle(x)
		if errors.Is(err, school.ErrReservationUnknown) {
			err = t.s.Reconcile(t.floor(), t.rule)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
