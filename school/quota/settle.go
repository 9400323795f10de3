package quota

import (
	"fmt"
	"slices"

	"schoolbell/school"
)

// Settle says what became of a reservation. What was not attempted is given
// back, as long as the reservation's cycle runs and its deadline has not
// passed, and never below what the ledger has confirmed. The settlement that
// leaves a full cycle without a call in flight makes its rest exact: from now
// on (R4). An error means bad arguments, more attempts than granted among them,
// and no change.
func (s State) Settle(now int64, x school.Settlement) (State, Outcome, error) {
	if err := CheckSettlement(x); err != nil {
		return s, 0, fmt.Errorf("settle: %w", err)
	}
	if !s.Known {
		return s, Unknown, nil
	}
	before := s
	s.closeOverdue(now)

	if slices.ContainsFunc(s.Settled, func(d Settled) bool { return d.Batch == x.Batch }) {
		return s, Duplicate, nil
	}
	i := slices.IndexFunc(s.Open, func(o Open) bool { return o.Batch == x.Batch && o.Cycle == x.Cycle })
	if i < 0 {
		return s, Unknown, nil
	}
	o := s.Open[i]
	if x.Attempted > o.Size {
		return before, 0, fmt.Errorf("settle: attempted %d of %d granted", x.Attempted, o.Size)
	}
	s.Open = slices.Delete(s.Open, i, i+1)
	s.bury(o.Batch, x.Attempted)
	if o.Cycle != s.Cycle {
		return s, Late, nil
	}

	if x.Attempted > 0 {
		s.LastEnd = max(s.LastEnd, now)
	}
	left := max(s.Attempted-(o.Size-x.Attempted), min(s.Attempted, s.FloorAttempted))
	gaveBack := left < s.Attempted
	s.Attempted = left
	if gaveBack && s.Attempted < s.Limit && s.FloorNext == 0 {
		// Not full after all. Only giving something back may take a rest away.
		s.Next, s.Span = 0, 0
		s.apply()
		return s, Settles, nil
	}
	s.exact(now)
	return s, Settles, nil
}
