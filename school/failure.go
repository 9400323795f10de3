package school

import "time"

// FailureFilter selects recipients that failed for good (R28).
type FailureFilter struct {
	School string // empty: all
	Notice int64  // 0: all
	Code   string // an error code, or a Reason; empty: all
}

// Failure is a group of one notice's recipients that failed for good alike.
type Failure struct {
	School     string
	Notice     int64
	Title      string
	Code       string // empty: none
	Reason     Reason
	Recipients int
	LastAt     time.Time // when the last of them failed
}

// FailureKey is a place in the list of failures: newest notices first, by code and
// reason within one.
type FailureKey struct {
	Notice int64 // 0: the beginning
	Whole  bool  // behind all of the notice's groups
	Code   string
	Reason Reason
}

// FailureList is a page of that list. A page may hold less than was asked for, even
// nothing, although more follows: only so many recipients are looked at at once.
type FailureList struct {
	Items []Failure
	Next  FailureKey // with More
	More  bool
}

// RequeueOrder asks for recipients that failed for good to be tried again. An
// outcome that is not known of a notice that is to be sent at most once is left,
// unless Code is OUTCOME_UNKNOWN: who names it knows that it may arrive twice.
type RequeueOrder struct {
	FailureFilter
	DryRun bool         // only count
	From   RequeuePlace // where the call before stopped; zero: from the beginning
	Limit  int          // recipients, about; at least 1
}

// RequeuePlace is how far a requeue has got. It goes on with what had failed before
// it began: what fails again meanwhile is not taken up again.
type RequeuePlace struct {
	Notice int64
	Seq    int
	Before time.Time // by the store's clock
}

// Requeued is what a requeue did.
type Requeued struct {
	Recipients int // put back; with DryRun: that would be
	Left       RequeueLeft
	Schools    []string // that have work now
	Next       RequeuePlace
	More       bool // the order is not done: go on from Next
}

// RequeueLeft counts what matched and was left, by why.
type RequeueLeft struct {
	Cancelled      int // their notice was cancelled
	Expired        int // their notice has expired
	Purged         int // the recipients of their notice were removed
	SchoolDeleted  int // there is no such school any more
	OutcomeUnknown int // may have arrived, and their notice asks for at most once
}

// Sum adds all reasons.
func (l RequeueLeft) Sum() int {
	return l.Cancelled + l.Expired + l.Purged + l.SchoolDeleted + l.OutcomeUnknown
}
