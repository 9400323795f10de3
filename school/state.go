package school

import (
	"fmt"
	"time"
)

// State is where a recipient of a notice stands (R20).
type State string

const (
	Pending       State = "PENDING"        // waits for its first attempt
	InProgress    State = "IN_PROGRESS"    // an open batch covers it; never written to its row
	Success       State = "SUCCESS"        // accepted by FCM or the relay; whether a device showed it is not known
	Fail          State = "FAIL"           // the device is gone: normal
	RetryPending  State = "RETRY_PENDING"  // waits for another attempt
	PermanentFail State = "PERMANENT_FAIL" // something is wrong: a person should look
	Skipped       State = "SKIPPED"        // never handed over, for a Reason
)

// Final reports whether s is left only by a requeue.
func (s State) Final() bool {
	switch s {
	case Success, Fail, PermanentFail, Skipped:
		return true
	}
	return false
}

// Reason says why a recipient was skipped or failed for good.
type Reason string

const (
	Disabled         Reason = "DISABLED"          // notifications off, by the request or the device registry
	Cancelled        Reason = "CANCELLED"         // its notice was cancelled
	Expired          Reason = "EXPIRED"           // its notice's expires_at passed
	Duplicate        Reason = "DUPLICATE"         // the same device stands earlier in the notice
	NotAllowed       Reason = "NOT_ALLOWED"       // the sender is limited to listed devices
	OutcomeUnknown   Reason = "OUTCOME_UNKNOWN"   // may have been delivered: not sent again at-most-once or after too many orphanings; with RETRY_PENDING: of the last attempt
	RetriesExhausted Reason = "RETRIES_EXHAUSTED" // the last permitted attempt failed
	RejectedReason   Reason = "REJECTED"          // the receiver refused the message or its credentials for the platform
	MismatchReason   Reason = "SENDER_MISMATCH"   // the token belongs to another sender
)

// Delivery says what to do when it is not known whether a message arrived (R25).
type Delivery string

const (
	AtLeastOnce Delivery = "at_least_once" // send again
	AtMostOnce  Delivery = "at_most_once"  // PERMANENT_FAIL, OUTCOME_UNKNOWN
)

// Outcome is what became of one message in one send. It is the domain's own
// word: the scheduler maps the senders' classes to it.
type Outcome int

const (
	Accepted       Outcome = iota + 1 // taken by the receiver
	Gone                              // the device no longer exists
	Rejected                          // refused for good; the device is kept
	Mismatch                          // the token belongs to another sender
	Throttled                         // definitely not taken: too fast
	Unavailable                       // definitely not taken: try later
	Unknown                           // may or may not have been taken
	Misconfigured                     // the sender is not let in: nobody's retry is used
	NotSent                           // never left this process: nobody's retry is used
	OrphanedUnsure                    // its owner died with the batch open: may or may not have been taken
)

var outcomeNames = [...]string{"", "accepted", "gone", "rejected", "mismatch", "throttled", "unavailable", "unknown", "misconfigured", "not_sent", "orphaned"}

func (o Outcome) String() string {
	if o < Accepted || int(o) >= len(outcomeNames) {
		return fmt.Sprintf("outcome(%d)", int(o))
	}
	return outcomeNames[o]
}

// MaxOrphanings bounds how often a recipient may be orphaned by crashes before
// its outcome is called unknown for good (R33).
const MaxOrphanings = 10

// MaxRetryAfter bounds how long a receiver's Retry-After is believed (R33).
const MaxRetryAfter = time.Hour

// MaxRetryWait bounds what the schedule's doubling comes to, before jitter, so
// that a policy with many retries neither overflows nor waits for years.
const MaxRetryWait = 24 * time.Hour

// RetryPolicy is the schedule of R33: wait Base × 2^retries, at most Max
// retries after the first attempt.
type RetryPolicy struct {
	Max  int           // 0 means no retry at all
	Base time.Duration // wait before the first retry, more than 0
}

// Standing is what Next needs to know of a recipient.
type Standing struct {
	State      State
	Attempts   int // hand-overs so far, this one not counted
	Retries    int // retries used so far
	Orphanings int
}

// Event is what happened to a recipient that an open batch covers.
type Event struct {
	Outcome    Outcome
	Code       string        // the receiver's code, kept for people
	RetryAfter time.Duration // 0: the receiver named none
	Closing    Reason        // Cancelled or Expired when its notice takes no more attempts
	Delivery   Delivery
	Jitter     float64 // 0 ≤ Jitter < 1, from the caller's random source
}

// Change is what Next decided. It is written as it stands.
type Change struct {
	State      State
	Attempts   int
	Retries    int
	Orphanings int
	RetryIn    time.Duration // with RETRY_PENDING: from the moment it is recorded; 0 is at once
	Code       string
	Reason     Reason
	Retire     bool // the device is gone: retire it
}

// Definite reports whether the recipient has failed for good by the receiver's
// own word: the device is gone, the message was refused, or the last permitted
// attempt was definitely not taken. It is what a fallback follows (R35). Where the
// last outcome is unknown the message may have arrived; one that was cancelled,
// has expired or was switched off was not to arrive any more.
func (c Change) Definite() bool {
	switch c.State {
	case Fail:
		return true
	case PermanentFail:
		return c.Reason == RejectedReason || c.Reason == MismatchReason || c.Reason == RetriesExhausted
	}
	return false
}

// Next is the one place where the outcome of a send moves a recipient and where
// retries are counted (R20, R33). It refuses a recipient that is not waiting
// for an attempt and an outcome it does not know; nothing is moved then.
func Next(s Standing, e Event, p RetryPolicy) (Change, error) {
	if s.State != Pending && s.State != RetryPending {
		return Change{}, fmt.Errorf("recipient in state %s: an outcome moves only PENDING and RETRY_PENDING", s.State)
	}
	c := Change{Attempts: s.Attempts + 1, Retries: s.Retries, Orphanings: s.Orphanings, Code: e.Code}
	switch e.Outcome {
	case Accepted:
		c.State, c.Code = Success, ""
		return c, nil
	case Gone:
		c.State, c.Retire = Fail, true
		return c, nil
	case Rejected:
		c.State, c.Reason = PermanentFail, RejectedReason
		return c, nil
	case Mismatch:
		c.State, c.Reason = PermanentFail, MismatchReason
		return c, nil
	case Throttled, Unavailable:
		return retry(c, e, p), nil
	case Unknown:
		if e.Delivery == AtMostOnce {
			return unknown(c), nil
		}
		return retry(c, e, p), nil
	case OrphanedUnsure:
		c.Orphanings++
		if e.Delivery == AtMostOnce || c.Orphanings >= MaxOrphanings {
			return unknown(c), nil
		}
		return again(c, e, 0), nil
	case Misconfigured, NotSent:
		return again(c, e, lengthen(max(p.Base/12, min(e.RetryAfter, MaxRetryAfter)), e.Jitter)), nil
	}
	return Change{}, fmt.Errorf("recipient in state %s: unknown outcome %d", s.State, int(e.Outcome))
}

// retry uses one retry, or ends where none is left.
func retry(c Change, e Event, p RetryPolicy) Change {
	if c.Retries >= p.Max {
		c.State, c.Reason = PermanentFail, RetriesExhausted
		if e.Outcome == Unknown {
			c.Reason = OutcomeUnknown
		}
		return c
	}
	doublings := c.Retries
	if e.Outcome == Throttled {
		doublings++
	}
	wait := MaxRetryWait
	if p.Base < MaxRetryWait>>doublings { // compared this way round, nothing overflows
		wait = p.Base << doublings
	}
	wait = max(wait, min(e.RetryAfter, MaxRetryAfter))
	c.Retries++
	return again(c, e, lengthen(wait, e.Jitter))
}

// again puts the recipient back unless its notice takes no more attempts: it
// was handed over, so it cannot be SKIPPED any more (R20).
func again(c Change, e Event, wait time.Duration) Change {
	if e.Closing != "" {
		c.State, c.Reason = PermanentFail, e.Closing
		return c
	}
	c.State, c.RetryIn = RetryPending, wait
	if e.Outcome == Unknown || e.Outcome == OrphanedUnsure {
		c.Reason = OutcomeUnknown // so that the receiver can be asked first
	}
	return c
}

func unknown(c Change) Change {
	c.State, c.Reason = PermanentFail, OutcomeUnknown
	return c
}

// lengthen adds at most 20 %, so that what failed together does not come back
// together and nothing ever comes back early (R33).
func lengthen(d time.Duration, jitter float64) time.Duration {
	return d + time.Duration(float64(d)*0.2*jitter)
}

// Confirm is the receiver's word that it took a message whose outcome was
// unknown, given before the message is sent again. Asking is no attempt.
func Confirm(s Standing) (Change, error) {
	if s.State != RetryPending || s.Attempts < 1 {
		return Change{}, fmt.Errorf("recipient in state %s after %d attempts: only RETRY_PENDING can be confirmed", s.State, s.Attempts)
	}
	return Change{State: Success, Attempts: s.Attempts, Retries: s.Retries, Orphanings: s.Orphanings}, nil
}

// Requeue is an operator's wish to try a recipient again after it failed for
// good (R28). Its retries start anew; its attempts are kept, since they
// happened.
func Requeue(s Standing) (Change, error) {
	if s.State != PermanentFail {
		return Change{}, fmt.Errorf("recipient in state %s: only PERMANENT_FAIL can be requeued", s.State)
	}
	return Change{State: RetryPending, Attempts: s.Attempts}, nil
}
