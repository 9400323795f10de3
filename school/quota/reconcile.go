package quota

import (
	"fmt"

	"schoolbell/school"
)

// Reconcile raises the state to what the ledger says: the greater cycle, in the
// same cycle the greater count and the later rest. It lowers nothing, so that
// any number of ledgers in any order, each any number of times, come to the
// same. A rest of which the ledger does not know, where it should, begins anew,
// once. An error means bad arguments, and no change.
func (s State) Reconcile(now int64, l school.Ledger, r school.Rule) (State, Merge, error) {
	if err := CheckMerge(l, r); err != nil {
		return s, 0, fmt.Errorf("reconcile: %w", err)
	}
	s, m := s.merge(now, l, r)
	return s, m, nil
}

// Rebuild is Reconcile for a state whose rest lies further ahead than it can,
// because the clock went back: the rest then is what the ledger has left of it,
// also where that is less. A rest that the ledger does not know of begins anew.
// An error means bad arguments, and no change.
func (s State) Rebuild(now int64, l school.Ledger, r school.Rule) (State, Merge, error) {
	if err := CheckMerge(l, r); err != nil {
		return s, 0, fmt.Errorf("rebuild: %w", err)
	}
	if !s.Known || s.Cycle < l.Cycle || !s.jumped(now) {
		s, m := s.merge(now, l, r)
		return s, m, nil
	}
	s.closeOverdue(now)
	if s.Cycle == l.Cycle && filled(l) {
		s.Next, s.FloorNext = 0, 0
	} else {
		// Every rest set in the past ends within its span from now.
		s.Next = min(s.Next, now+s.Span)
		s.FloorNext = min(s.FloorNext, s.Next)
	}
	s, _ = s.merge(now, l, r)
	return s, Reset, nil
}

func (s State) merge(now int64, l school.Ledger, r school.Rule) (State, Merge) {
	m := Kept
	inForce := l.Rule
	if inForce == (school.Rule{}) {
		inForce = r
	}
	again := false
	if s.Known {
		s.closeOverdue(now)
		again = s.unconfirmed(l) && !s.jumped(now)
	}
	switch {
	case !s.Known:
		m = Created
		s = State{Known: true, Since: now, Setting: setting(inForce)}
		s.take(l, inForce)
	case s.Cycle < l.Cycle:
		m = Raised
		s.take(l, inForce)
	case s.Cycle == l.Cycle:
		if s.Attempted < l.Attempted {
			m = Raised
			s.Attempted = l.Attempted
			s.LastEnd = 0 // attempts that were forgotten may have ended later
		}
		s.FloorAttempted = max(s.FloorAttempted, l.Attempted)
		if l.Rule != (school.Rule{}) {
			s.Limit = min(s.Limit, inForce.Limit)
		}
	}
	if again {
		m = Raised
		s.confirm(now, l)
	}
	if s.Cycle == l.Cycle {
		if filled(l) && s.Next == 0 {
			s.Rest = Millis(inForce.Rest)
			if m == Kept {
				m = Raised
			}
		}
		s.raiseRest(now, l)
	}
	if inForce.Version > s.Setting.Version {
		s.adopt(setting(inForce))
	}
	s.adopt(setting(r))
	return s, m
}

// take makes the ledger's cycle the current one.
func (s *State) take(l school.Ledger, inForce school.Rule) {
	s.Cycle = l.Cycle
	s.Attempted = l.Attempted
	s.Limit = inForce.Limit
	s.Rest = Millis(inForce.Rest)
	s.Next, s.Span = 0, 0
	s.LastEnd = 0
	s.FloorAttempted, s.FloorNext = l.Attempted, 0
}

// raiseRest takes over the rest of a ledger of this cycle. Without one of our
// own it is set even where it has passed, since only a rest ends a cycle; but
// not so that it would end before the rest of a call which may still be running.
func (s *State) raiseRest(now int64, l school.Ledger) {
	if !filled(l) {
		return
	}
	next := now + Millis(l.Resting)
	switch {
	case s.Next == 0:
		at := next
		if d := s.latest(); d > 0 {
			at = max(at, d+s.Rest)
		}
		s.rest(now, at)
	case l.Resting > 0 && next > s.Next:
		s.rest(now, next)
	}
	if l.Resting > 0 || s.FloorNext == 0 {
		s.FloorNext = max(s.FloorNext, next)
	}
}

func filled(l school.Ledger) bool { return l.Filled || l.Resting > 0 }
