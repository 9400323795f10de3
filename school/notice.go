package school

import "time"

// Status is where a notice stands (R21).
type Status string

const (
	NoticePending    Status = "PENDING"     // nothing of it was handed over yet
	NoticeInProgress Status = "IN_PROGRESS" // under way
	NoticeCompleted  Status = "COMPLETED"   // every recipient has its outcome
	NoticeCancelled  Status = "CANCELLED"   // cancelled, and every recipient has its outcome
)

// Priority orders a school's notices.
type Priority string

const (
	Urgent Priority = "urgent"
	Normal Priority = "normal"
	Low    Priority = "low"
)

// Content is what a notice says, shared by all its recipients.
type Content struct {
	Title string
	Body  string
	Data  map[string]string
	Image string
	Link  string
}

// Notice is a message of one school to many devices.
type Notice struct {
	ID          int64
	School      string
	Content     Content
	Priority    Priority
	Delivery    Delivery
	ScheduledAt time.Time // zero: at once
	ExpiresAt   time.Time // zero: never
	Fallback    string    // text of the SMS that follows a definite failure (R35); empty: none follows
	TraceParent string    // W3C trace context of the request that made it; empty without one

	// Topic, where it is not empty, stands in place of recipients: the devices of
	// the school that have it and are not retired when the notice is accepted.
	Topic string

	// In a page, by the database's clock when the page was read. Durations, since
	// no clock but that one is to be compared with its times.
	DueFor    time.Duration // for how long it has been due
	ExpiresIn time.Duration // until ExpiresAt

	IdempotencyKey string // empty: none (R27)
	RequestHash    []byte // SHA-256 of the request; compared when the key comes again
}

// NewRecipient is one device as an application named it.
type NewRecipient struct {
	Token   string
	Ref     string            // the application's own name for it; may be empty
	Enabled *bool             // false: notifications are off; nil means not said
	Badge   *int              // nil: none
	Data    map[string]string // merged over the notice's (R18)
}

// Counts are disjoint and always add up to Total (R21). "First" and "later"
// go by the number of the recipient's hand-over.
type Counts struct {
	Total         int
	Waiting       int
	InProgress    int
	RetryPending  int
	Success       int // accepted at the first attempt
	Fail          int // gone at the first attempt
	RetrySuccess  int // accepted at a later one
	RetryFail     int // gone at a later one
	PermanentFail int
	Skipped       Skips
}

// Skips counts recipients that were never handed over, by reason.
type Skips struct {
	Disabled   int
	Cancelled  int
	Expired    int
	Duplicate  int
	NotAllowed int
}

// Sum adds all reasons.
func (s Skips) Sum() int { return s.Disabled + s.Cancelled + s.Expired + s.Duplicate + s.NotAllowed }

// Sum adds everything but Total. It equals Total for a sound notice.
func (c Counts) Sum() int {
	return c.Waiting + c.InProgress + c.RetryPending + c.Success + c.Fail + c.RetrySuccess + c.RetryFail + c.PermanentFail + c.Skipped.Sum()
}

// Progress is a notice with what became of it so far.
type Progress struct {
	Notice      Notice
	Status      Status
	Closing     Reason // Cancelled or Expired: it takes no more attempts; empty otherwise
	Counts      Counts
	Fallbacks   *FallbackCounts // nil: the notice has no fallback or was purged, or in a list
	CreatedAt   time.Time
	FirstSendAt time.Time // zero: not yet
	LastSendAt  time.Time
	EndedAt     time.Time
	PurgedAt    time.Time // since then its recipients are being removed (R29); zero: they are there
}

// Purged is what retention removed (R29).
type Purged struct {
	Notices    int // of which the last recipient was removed
	Recipients int
	Batches    int
	Ranges     int
	Fallbacks  int
}

// Plus adds what was removed besides.
func (p Purged) Plus(q Purged) Purged {
	return Purged{p.Notices + q.Notices, p.Recipients + q.Recipients, p.Batches + q.Batches, p.Ranges + q.Ranges, p.Fallbacks + q.Fallbacks}
}

// RecipientRow is one recipient as people look at it.
type RecipientRow struct {
	Seq       int
	Ref       string
	MessageID string
	Token     string // shortened: never whole
	State     State  // IN_PROGRESS worked out
	Attempts  int
	Code      string
	Reason    Reason
	NextTryAt time.Time // zero: none
	Fallback  PostState // empty: none was made
}

// Accepted is the answer to a notice: it is committed.
type Receipt struct {
	ID     int64
	School string
	Status Status
	Total  int
	Replay bool // an earlier request with the same idempotency key had been accepted
}

// School is an organisation's unit whose notices are sent under one rule.
type School struct {
	ID              string
	Name            string
	Sender          string         // empty: the deployment's default
	Limit           *int           // nil: the deployment's
	Rest            *time.Duration // nil: the deployment's
	SettingsVersion int64
	Paused          bool
	CreatedAt       time.Time
}

// SchoolChange changes a school; nil fields stay as they are.
type SchoolChange struct {
	Name   *string
	Sender *string
	Limit  *int
	Rest   *time.Duration
}

// Backlog is what the store knows of a school's work, for people.
type Backlog struct {
	School           School
	Ledger           Ledger
	Fence            int64
	Waiting          int           // PENDING and due, or beyond a due notice's frontier
	RetryWaiting     int           // RETRY_PENDING, not due yet
	RetryDue         int           // RETRY_PENDING and due
	Scheduled        int           // of notices whose time has not come
	InProgress       int           // covered by open batches
	OldestWaitingFor time.Duration // age of the oldest due work; 0 without any
}

// NoticeFilter selects notices for a list, newest first.
type NoticeFilter struct {
	School string // empty: all
	Status Status // empty: all
	Before int64  // only ids below it; 0: from the newest
	Limit  int    // 1 … 1000
}

// RecipientFilter selects recipients of one notice, in order of seq.
type RecipientFilter struct {
	State State  // empty: all
	Code  string // empty: all
	After int    // only seqs above it
	Limit int    // 1 … 1000
}
