// Package api is the HTTP API as values: the JSON of requests and answers, the
// error codes, and a client. The server in package web writes these types, so
// what a Go program reads is what was meant.
//
// It imports nothing else of the project and holds no rule: which values are
// right is the server's to say, with an [Error] that names the field.
//
// Ids are strings, times RFC 3339, durations seconds with a fraction.
package api

import "time"

// NoticeRequest is a message of one school to many devices: the body of POST
// /v1/notices, or the first line of an NDJSON upload (without Recipients then).
type NoticeRequest struct {
	School      string            `json:"school"`
	Title       string            `json:"title"`
	Body        string            `json:"body,omitempty"`
	Data        map[string]string `json:"data,omitempty"`
	Image       string            `json:"image,omitempty"` // absolute http(s) address
	Link        string            `json:"link,omitempty"`  // absolute http(s) address, opened by a tap
	Recipients  []Recipient       `json:"recipients,omitempty"`
	Topic       string            `json:"topic,omitempty"`    // in place of Recipients: the school's devices that have it
	Priority    string            `json:"priority,omitempty"` // urgent, normal (default), low
	ScheduledAt *time.Time        `json:"scheduled_at,omitempty"`
	ExpiresAt   *time.Time        `json:"expires_at,omitempty"`
	Delivery    string            `json:"delivery,omitempty"` // at_least_once (default), at_most_once
	Fallback    *Fallback         `json:"fallback,omitempty"` // only where the server has a webhook for it
}

// Fallback is what follows where a recipient has definitely failed, once each:
// never where the message may have arrived, and not for one that was skipped, was
// cancelled or has expired.
type Fallback struct {
	SMS string `json:"sms"` // the text; at most 2,000 characters
}

// Recipient is one device.
type Recipient struct {
	Token   string            `json:"token"`
	Ref     string            `json:"ref,omitempty"`     // the application's own name for it
	Enabled *bool             `json:"enabled,omitempty"` // false: notifications are off
	Badge   *int              `json:"badge,omitempty"`
	Data    map[string]string `json:"data,omitempty"` // merged over the notice's
}

// Accepted answers a notice: it is committed.
type Accepted struct {
	ID     string `json:"id"`
	School string `json:"school"`
	Status string `json:"status"`
	Total  int    `json:"total"`
}

// Counts say what became of a notice's recipients. They are disjoint and add
// up to Total. Success means accepted by FCM or the relay; whether a device
// showed it is not known.
type Counts struct {
	Total         int     `json:"total"`
	Waiting       int     `json:"waiting"`
	InProgress    int     `json:"in_progress"`
	Success       int     `json:"success"`       // accepted at the first attempt
	Fail          int     `json:"fail"`          // the device was gone at the first attempt
	RetrySuccess  int     `json:"retry_success"` // accepted at a later one
	RetryFail     int     `json:"retry_fail"`    // gone at a later one
	RetryPending  int     `json:"retry_pending"`
	PermanentFail int     `json:"permanent_fail"`
	Skipped       Skipped `json:"skipped"`
}

// Skipped counts recipients that were never handed over, by reason.
type Skipped struct {
	Disabled   int `json:"disabled"`
	Cancelled  int `json:"cancelled"`
	Expired    int `json:"expired"`
	Duplicate  int `json:"duplicate"`
	NotAllowed int `json:"not_allowed"`
}

// Fallbacks count a notice's fallbacks by what became of them.
type Fallbacks struct {
	Pending int `json:"pending"`
	Sent    int `json:"sent"` // taken by the webhook
	Failed  int `json:"failed"`
}

// Notice is a notice with what became of it so far.
type Notice struct {
	ID     string `json:"id"`
	School string `json:"school"`
	Status string `json:"status"` // PENDING, IN_PROGRESS, COMPLETED, CANCELLED
	Counts

	Title       string            `json:"title"`
	Body        string            `json:"body,omitempty"` // absent in lists
	Data        map[string]string `json:"data,omitempty"` // absent in lists
	Image       string            `json:"image,omitempty"`
	Link        string            `json:"link,omitempty"`
	Topic       string            `json:"topic,omitempty"` // whose devices it is for; empty: they were listed
	Priority    string            `json:"priority"`
	Delivery    string            `json:"delivery"`
	CreatedAt   time.Time         `json:"created_at"`
	ScheduledAt *time.Time        `json:"scheduled_at,omitempty"`
	ExpiresAt   *time.Time        `json:"expires_at,omitempty"`
	Closing     string            `json:"closing,omitempty"` // CANCELLED or EXPIRED: no more attempts; its calls in flight may not have ended yet
	FirstSendAt *time.Time        `json:"first_send_at,omitempty"`
	LastSendAt  *time.Time        `json:"last_send_at,omitempty"`
	EndedAt     *time.Time        `json:"ended_at,omitempty"`
	Fallback    *Fallbacks        `json:"fallback,omitempty"`  // where it has one; absent in lists
	PurgedAt    *time.Time        `json:"purged_at,omitempty"` // since then its recipients are being removed; its counts stay
	// ExpectedEndAt is when the school's sending rule lets the last recipient
	// go, if all that waits at the school now goes before it. Absent where
	// nothing waits, the school is paused, or in lists.
	ExpectedEndAt *time.Time `json:"expected_end_at,omitempty"`
}

// RecipientStatus is one recipient of a notice as people look at it.
type RecipientStatus struct {
	Seq       int        `json:"seq"`
	Ref       string     `json:"ref"`
	MessageID string     `json:"message_id"`
	Token     string     `json:"token"` // shortened
	State     string     `json:"state"` // PENDING, IN_PROGRESS, SUCCESS, FAIL, RETRY_PENDING, PERMANENT_FAIL, SKIPPED
	Attempts  int        `json:"attempts"`
	ErrorCode string     `json:"error_code"`
	Reason    string     `json:"reason"`
	NextTryAt *time.Time `json:"next_try_at"`
	Fallback  string     `json:"fallback,omitempty"` // PENDING, SENT, FAILED; absent where none was made
}

// Failure is a group of one notice's recipients that failed permanently alike.
type Failure struct {
	School       string     `json:"school"`
	Notice       string     `json:"notice"`
	Title        string     `json:"title"`
	ErrorCode    string     `json:"error_code"` // the receiver's; may be empty
	Reason       string     `json:"reason"`     // REJECTED, RETRIES_EXHAUSTED, OUTCOME_UNKNOWN …
	Recipients   int        `json:"recipients"`
	LastFailedAt *time.Time `json:"last_failed_at,omitempty"`
}

// RequeueRequest is the body of POST /v1/failures/requeue: which recipients that
// failed permanently are to be tried again. One of School, Notice and Code at
// least; together they narrow each other.
type RequeueRequest struct {
	School string `json:"school,omitempty"`
	Notice string `json:"notice,omitempty"`
	Code   string `json:"code,omitempty"`    // an error code or a reason; OUTCOME_UNKNOWN also takes what may have arrived of at_most_once notices
	DryRun bool   `json:"dry_run,omitempty"` // only count
	Cursor string `json:"cursor,omitempty"`  // Next of the answer before
}

// Requeued answers a requeue.
type Requeued struct {
	Requeued int         `json:"requeued"` // with DryRun: that would be
	DryRun   bool        `json:"dry_run"`
	Left     RequeueLeft `json:"left"`
	Next     string      `json:"next"` // cursor to go on from; empty: done
}

// RequeueLeft counts failures that matched and were left, by why.
type RequeueLeft struct {
	Cancelled      int `json:"cancelled"`
	Expired        int `json:"expired"`
	Purged         int `json:"purged"`
	SchoolDeleted  int `json:"school_deleted"`
	OutcomeUnknown int `json:"outcome_unknown"` // may have arrived, and their notice asks for at most once
}

// SchoolChange is the body of PUT /v1/schools/{id}; absent fields stay.
type SchoolChange struct {
	Name        *string  `json:"name,omitempty"`
	Sender      *string  `json:"sender,omitempty"` // empty: the deployment's default
	Limit       *int     `json:"limit,omitempty"`  // attempts per cycle
	RestSeconds *float64 `json:"rest_seconds,omitempty"`
}

// DevicesRequest registers up to 1,000 devices of a school: the body of PUT
// /v1/schools/{id}/devices. More go as NDJSON, a NewDevice a line.
type DevicesRequest struct {
	Devices []NewDevice `json:"devices"`
}

// NewDevice registers a device or changes it; absent fields stay. A device that
// is new is on, without a ref and without topics.
type NewDevice struct {
	Token   string    `json:"token"`
	Ref     *string   `json:"ref,omitempty"`
	Enabled *bool     `json:"enabled,omitempty"` // false: notifications are off, also for notices accepted before
	Topics  *[]string `json:"topics,omitempty"`  // the whole set
}

// Registered answers a registration.
type Registered struct {
	School  string `json:"school"`
	Devices int    `json:"devices"` // that were named
	Created int    `json:"created"` // of them, those that were new
	Revived int    `json:"revived"` // of them, those that were retired
}

// DeletedDevice answers the removal of a device.
type DeletedDevice struct {
	School  string `json:"school"`
	Deleted bool   `json:"deleted"`
}

// Device is a device of a school's registry.
type Device struct {
	Key          string     `json:"key"`   // SHA-256 of its token
	Token        string     `json:"token"` // shortened
	Ref          string     `json:"ref"`
	Enabled      bool       `json:"enabled"`
	Topics       []string   `json:"topics"`
	Flagged      bool       `json:"flagged"` // came back as unregistered while a brake is on
	RegisteredAt time.Time  `json:"registered_at"`
	RetiredAt    *time.Time `json:"retired_at"` // null: it is not
}

// Brake keeps the devices that a sender calls unregistered from being retired
// until somebody confirms that they are gone, or clears them.
type Brake struct {
	ID           string     `json:"id"`
	School       string     `json:"school"`
	Sender       string     `json:"sender"`
	Open         bool       `json:"open"`
	Batch        string     `json:"batch"` // that engaged it
	Instance     string     `json:"instance"`
	Unregistered int        `json:"unregistered"` // of that batch
	Size         int        `json:"size"`
	EngagedAt    time.Time  `json:"engaged_at"`
	Flagged      int        `json:"flagged"` // devices, now
	Retired      int        `json:"retired"` // by its confirmation
	ClosedAt     *time.Time `json:"closed_at"`
	ClosedAs     string     `json:"closed_as"` // confirmed, cleared
	ClosedBy     string     `json:"closed_by"`
}

// SchoolState is what a school is doing.
type SchoolState string

const (
	Paused          SchoolState = "paused"            // by an operator
	Resting         SchoolState = "resting"           // its cycle is full, the rest runs
	Sending         SchoolState = "sending"           // a replica holds its lock
	WaitingForSlot  SchoolState = "waiting_for_slot"  // has due work, no lock, no rest
	WaitingForRetry SchoolState = "waiting_for_retry" // all that is left waits for its retry's time
	Idle            SchoolState = "idle"
)

// SchoolStates returns every state.
func SchoolStates() []SchoolState {
	return []SchoolState{Paused, Resting, Sending, WaitingForSlot, WaitingForRetry, Idle}
}

// School is a school with its quota, lock and backlog.
type School struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Sender string `json:"sender"` // empty: the deployment's default
	// SenderStopped: nothing is sent by the school's sender until its receiver lets it
	// in again; GET /v1/cluster says why.
	SenderStopped bool        `json:"sender_stopped,omitempty"`
	State         SchoolState `json:"state"`
	Limit         int         `json:"limit"` // its own or the deployment's
	RestSeconds   float64     `json:"rest_seconds"`

	Attempted      int        `json:"attempted"` // in this cycle
	Cycle          int64      `json:"cycle"`
	NextEligibleAt *time.Time `json:"next_eligible_at"` // null: may send
	RestingSeconds float64    `json:"resting_seconds"`
	Lock           *Lock      `json:"lock"` // null: nobody holds it

	Waiting              int     `json:"waiting"` // due for their first attempt
	InProgress           int     `json:"in_progress"`
	RetryDue             int     `json:"retry_due"`
	RetryWaiting         int     `json:"retry_waiting"`
	Scheduled            int     `json:"scheduled"` // of notices whose time has not come
	OldestWaitingSeconds float64 `json:"oldest_waiting_seconds"`

	// Degraded: Redis could not be asked; quota and rest are the database's,
	// who holds the lock is not known.
	Degraded  bool      `json:"degraded,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// Lock says who holds a school.
type Lock struct {
	Owner            string  `json:"owner"` // instance id
	Fence            int64   `json:"fence"`
	ExpiresInSeconds float64 `json:"expires_in_seconds"` // unless it is extended
}

// Cluster is the replicas and the senders.
type Cluster struct {
	Replicas []Replica `json:"replicas"`
	Senders  []Sender  `json:"senders"`
	// OpenBrakes is how many brakes are on: see /v1/brakes.
	OpenBrakes int `json:"open_brakes,omitempty"`
	// Degraded: Redis could not be asked; only the answering replica is listed.
	Degraded bool `json:"degraded,omitempty"`
}

// Replica is one living replica.
type Replica struct {
	Instance      string    `json:"instance"`
	Version       string    `json:"version"`
	Address       string    `json:"address,omitempty"`
	Since         time.Time `json:"since"`
	SchoolsHeld   int       `json:"schools_held"`
	RatePerSecond float64   `json:"rate_per_second"` // messages handed over lately
	Self          bool      `json:"self,omitempty"`  // the one that answered
}

// Sender is one configured sender as the answering replica sees it.
type Sender struct {
	Name          string  `json:"name"`
	Kind          string  `json:"kind"`            // fcm, relay, log
	State         string  `json:"state"`           // running, stopped
	Reason        string  `json:"reason"`          // why it is stopped or its rate lowered, or which replicas get no answer; empty otherwise
	RatePerMinute int     `json:"rate_per_minute"` // its cluster-wide limit; 0: none
	RatePerSecond float64 `json:"rate_per_second"` // messages handed over lately by the answering replica

	// Of the whole cluster, a second old or so.
	RateNowPerMinute  int  `json:"rate_now_per_minute"`  // what it may send now: less while it ramps up or is lowered; 0: no limit
	RateUsedPerMinute int  `json:"rate_used_per_minute"` // what it sent lately
	SchoolsWaiting    int  `json:"schools_waiting"`      // for the rate
	RateLowered       bool `json:"rate_lowered"`         // the receiver asked for less

	Stop *SenderStop `json:"stop,omitempty"` // where State is stopped

	DryRun     bool `json:"dry_run,omitempty"`     // messages are checked and none is delivered
	OnlyTokens *int `json:"only_tokens,omitempty"` // how many listed devices it sends to, all others are skipped; absent: to all
}

// SenderStop is what is known of a stop.
type SenderStop struct {
	Code             string  `json:"code"`               // with which the receiver refused it, or ours where nobody answers
	Seconds          float64 `json:"seconds"`            // how long it has been stopped; 0: not known
	NextProbeSeconds float64 `json:"next_probe_seconds"` // until one message is tried; 0: the next one is
}

// List is one page of a list. An empty Next ends it.
type List[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next"`
}

// RecipientList is a page of a notice's recipients.
type RecipientList struct {
	List[RecipientStatus]
	// PurgedAt is the notice's; where it is set the list is empty.
	PurgedAt *time.Time `json:"purged_at,omitempty"`
}

// Ready is the body of /readyz.
type Ready struct {
	Ready    bool              `json:"ready"`
	Draining bool              `json:"draining,omitempty"`
	Checks   map[string]string `json:"checks"`   // name of a part: "ok" or what is wrong
	Degraded []string          `json:"degraded"` // parts whose absence costs something, but not readiness
}

// Version is the body of /version.
type Version struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
}
