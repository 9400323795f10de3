package quota

import (
	"fmt"
	"slices"

	"schoolbell/school"
)

// Reserve grants up to r.Want attempts, or says why not. The answer is never
// NotOwner or LeaseShort: those are about the lock. NeedRebuild leaves the
// state as it is. An error means bad arguments, and no change.
//
// A grant counts from now on, whatever becomes of the call (R2). One that fills
// the cycle sets the rest at once, from the latest moment at which its call can
// end, so that a crash before Settle still rests (R4).
func (s State) Reserve(now int64, r school.Reservation) (State, school.Grant, error) {
	if err := CheckReservation(r); err != nil {
		return s, school.Grant{}, fmt.Errorf("reserve: %w", err)
	}
	if !s.Known {
		return s, school.Grant{Kind: school.NeedRebuild}, nil
	}
	before := s
	s.closeOverdue(now)

	if slices.ContainsFunc(s.Settled, func(d Settled) bool { return d.Batch == r.Batch }) {
		return s, school.Grant{Kind: school.BatchSettled}, nil
	}
	if i := slices.IndexFunc(s.Open, func(o Open) bool { return o.Batch == r.Batch }); i >= 0 {
		return s, s.granted(s.Open[i]), nil
	}

	switch {
	case s.behind(r.Floor):
		return before, school.Grant{Kind: school.NeedRebuild}, nil
	case s.jumped(now):
		return before, school.Grant{Kind: school.NeedRebuild, ClockJumped: true}, nil
	case s.unconfirmed(r.Floor):
		return before, school.Grant{Kind: school.NeedRebuild}, nil
	}
	s.adopt(setting(r.Rule))
	if r.Floor.Cycle == s.Cycle {
		s.raiseRest(now, r.Floor)
	}

	rested := int64(-1)
	switch {
	case s.Next > now:
		return s, s.resting(now), nil
	case s.Next > 0:
		rested = s.open(now)
	case s.Attempted >= s.Limit:
		// Full without a rest: the limit was lowered, or the ledger knew of more.
		// The cycle must not end by this, so the rest is set now, from the end
		// of the last attempt as far as that is known.
		end := max(s.LastEnd, s.latest())
		if end == 0 {
			end = now
		}
		s.rest(now, end+s.Rest)
		if s.unconfirmed(r.Floor) {
			s.confirm(now, r.Floor)
		}
		return s, s.resting(now), nil
	}

	size := min(r.Want, s.Limit-s.Attempted)
	longest := Millis(r.Longest)
	s.Attempted += size
	o := Open{
		Batch:     r.Batch,
		Size:      size,
		Cycle:     s.Cycle,
		Deadline:  now + longest,
		Longest:   longest,
		Attempted: s.Attempted,
		Filled:    s.Attempted >= s.Limit,
		Rested:    rested,
	}
	s.Open = append(s.Open, o)
	if o.Filled {
		s.rest(now, s.latest()+s.Rest)
	}
	return s, s.granted(o), nil
}

// behind reports whether less is known here than in the ledger, so that
// something was lost.
func (s *State) behind(f school.Ledger) bool {
	return s.Cycle < f.Cycle ||
		s.Cycle == f.Cycle && (s.Attempted < f.Attempted || filled(f) && s.Next == 0)
}

// unconfirmed reports whether a rest is set that the ledger knows nothing of,
// although its own count would not be full. Either the reservation that filled
// the cycle was never claimed, or Redis went back to a moment before a refund
// took the rest away, and attempts were made since: then this rest is an old
// one that must not end the cycle. It counts as confirmed once it has begun
// anew under the eyes of a ledger, until a ledger knows of more attempts.
func (s *State) unconfirmed(l school.Ledger) bool {
	return s.Next > 0 && s.Cycle == l.Cycle && !filled(l) && l.Attempted < s.Limit &&
		(s.FloorNext == 0 || s.FloorAttempted < l.Attempted)
}

// confirm begins an unconfirmed rest anew.
func (s *State) confirm(now int64, l school.Ledger) {
	s.rest(now, max(s.Next, now+s.Rest))
	s.FloorNext = s.Next
	s.FloorAttempted = max(s.FloorAttempted, l.Attempted)
}

// open begins the next cycle and returns how long the school rested.
func (s *State) open(now int64) int64 {
	end := s.LastEnd
	if end == 0 {
		end = s.Next - s.Rest
	}
	s.Cycle++
	s.Attempted = 0
	s.Limit = s.Setting.Limit
	s.Rest = s.Setting.Rest
	s.Next, s.Span = 0, 0
	s.FloorAttempted, s.FloorNext = 0, 0
	return max(0, now-end)
}

func (s *State) granted(o Open) school.Grant {
	return school.Grant{
		Kind:      school.Granted,
		Size:      o.Size,
		Cycle:     o.Cycle,
		Attempted: o.Attempted,
		Filled:    o.Filled,
		Opened:    o.Rested >= 0,
		RestedFor: duration(max(0, o.Rested)),
		Rule:      s.rule(),
	}
}

func (s *State) resting(now int64) school.Grant {
	return school.Grant{
		Kind:      school.Resting,
		Cycle:     s.Cycle,
		Attempted: s.Attempted,
		Wait:      duration(max(0, s.Next-now)),
		Rule:      s.rule(),
	}
}
