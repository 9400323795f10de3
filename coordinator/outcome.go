package coordinator

import (
	"fmt"

	"schoolbell/school"
	"schoolbell/sender"
)

// outcomeOf is the one switch from a sender's class to the domain's outcome.
// Senders classify, school.Next decides (R32, R33).
func outcomeOf(r sender.Result) (school.Outcome, error) {
	switch r.Class {
	case sender.Accepted:
		return school.Accepted, nil
	case sender.Gone:
		return school.Gone, nil
	case sender.Rejected:
		return school.Rejected, nil
	case sender.Mismatch:
		return school.Mismatch, nil
	case sender.Throttled:
		return school.Throttled, nil
	case sender.Unavailable:
		if r.OutcomeUnknown {
			return school.Unknown, nil
		}
		return school.Unavailable, nil
	case sender.Misconfigured:
		return school.Misconfigured, nil
	case sender.NotSent:
		return school.NotSent, nil
	case sender.Unknown:
		return school.Unknown, nil
	}
	return 0, fmt.Errorf("class %s of a sender has no outcome", r.Class)
}
