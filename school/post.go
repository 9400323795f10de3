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
