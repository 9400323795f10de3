package school

import "time"

// PostState is where something stands that is posted to a webhook: a
// fallback or an alert.
type PostState string

const (
	PostPending PostState = "PENDING" // waits for its first or another try
	PostSent    PostState = "SENT"    // the webhook took it
	PostFailed  PostState = "FAILED"  // refused, void, or not taken in its time
)

// Posted is what became of one try.
type Posted struct {
	State   PostState
	RetryIn time.Duration // with PENDING: from the moment it is written
	Code    string        // why it was not taken; empty with SENT
}

// Fallback is the message to one person whose device could not be reached (R35),
// claimed for one try.
type Fallback struct {
	Notice  int64
	Seq     int
	School  string
	Ref     string        // the application's own name for the recipient; may be empty
	Text    string        // the notice's
	Attempt int           // number of this try, from 1
	Age     time.Duration // since the failure became definite
	Void    Reason        // Cancelled or Expired: the notice is not to reach anybody any more
}

// ID names the fallback, the same in every try and from every replica: the key by
// which the webhook's receiver drops repeats.
func (f *Fallback) ID() string { return MessageID(f.Notice, f.Seq) + ".sms" }

// FallbackCounts are a notice's fallbacks by state.
type FallbackCounts struct {
	Pending, Sent, Failed int
}

// Alert is a message to operators (R42), claimed for one try. What it says, Body,
// is for whoever raised it to read.
type Alert struct {
	ID      int64
	Kind    string
	Body    []byte        // JSON
	At      time.Time     // when it was raised
	Since   time.Time     // when what it tells of began
	Seen    int64         // how often that was seen since the alert before it
	Attempt int           // number of this try, from 1
	Age     time.Duration // since At
}

// Condition is something that operators should know of.
type Condition struct {
	Key    string // the same from every replica that sees it
	Kind   string // of the alert
	Body   []byte // JSON, of the alert
	Count  int    // how often it was seen since the last call, at least 1
	Remind bool   // it is only said that it still holds: nothing where it does not

	Every time.Duration // it is told again after so long
	Lapse time.Duration // not seen for so long, it is a new one
}

// FailureCount counts recipients that have failed for good (PERMANENT_FAIL).
type FailureCount struct {
	School string
	Name   string // the school's; may be empty
	Code   string // the last code; the reason where there was none
	Reason Reason
	Count  int
}

// Failures are the recipients that failed for good in a stretch of the store's
// time, by school, code and reason, the most first. The next stretch begins where
// this one ends: each failure is in one of them.
type Failures struct {
	From, Until time.Time
	Counts      []FailureCount
}

// Recipients adds all of them up.
func (f *Failures) Recipients() int {
	n := 0
	for i := range f.Counts {
		n += f.Counts[i].Count
	}
	return n
}
