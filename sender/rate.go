package sender

import "time"

// A Limit is what a sender keeps to across the cluster (R9).
type Limit struct {
	PerMinute int           // messages; 0: no limit, but what a receiver asks for by throttling
	Batch     int           // messages that are taken at once, at most
	Ramp      time.Duration // from out of use to the whole rate; 0: at once
}

// A Take asks for a batch of a sender's rate. Where it is refused the school has a
// place in the line, which is its own whichever replica comes for it.
type Take struct {
	Sender, School string
	// ID is made by the caller for this batch: asked for again, it has the same answer.
	ID string
	// Want is how many messages; 1 to the limit's batch.
	Want int
	// Longest is how long the batch may take: so long a probe keeps others from probing.
	Longest time.Duration
	// Believed is the code with which the caller believes the sender to be stopped,
	// empty where it does not: what is known of it in the cluster may have been lost.
	Believed string
}

// TakeKind is what became of a Take.
type TakeKind int

// What may become of it.
const (
	Taken       TakeKind = iota + 1
	TakeLater            // the rate is used up: come again after Wait
	TakeStopped          // the receiver does not let this sender in: come again after Wait
)

// A Ticket is the answer to a Take.
type Ticket struct {
	Kind  TakeKind
	ID    string // of the Take
	Size  int    // Taken: messages that may be handed over, 1 to what was wanted
	Probe bool   // Taken: the sender is stopped, and this one message finds out whether it still is
	Epoch int64  // Taken: between which stops it was given

	Wait   time.Duration // above 0 where nothing was taken
	Joined bool          // TakeLater: the school has stood in the line since this Take

	Code    string        // TakeStopped: with which the receiver refused it
	Stopped time.Duration // TakeStopped: since when
}

// A Look asks what the cluster knows of a sender.
type Look struct {
	Sender   string
	School   string // whose place in the line is asked for; may be empty
	Believed string // as in a Take
}

// Heard is what a batch says of the receiver.
type Heard int

// What may be heard, by rank: what a batch says is the highest of its results.
const (
	HeardNothing   Heard = iota // no message was tried
	HeardSilence                // nobody answered
	HeardAnswer                 // to one message at least
	HeardThrottled              // an answer that asks for less
	HeardRefusal                // it does not let this sender in
)

// A Report says what a batch found out.
type Report struct {
	Sender, School string
	Ticket         string // its ID
	Epoch          int64  // the ticket's
	Heard          Heard
	Code           string        // the receiver's, where it refused or asked for less
	RetryAfter     time.Duration // that it asked for
	Age            time.Duration // since the ticket was given
}

// ReportChange is what a Report changed in the cluster.
type ReportChange int

// What may change. Each change is told to one report.
const (
	ChangeNone    ReportChange = iota
	ChangeStopped              // the sender stops for all its schools
	ChangeResumed              // it goes on for all
	ChangeProbing              // it stays stopped until the next probe
)

// Reported is the answer to a Report.
type Reported struct {
	Change    ReportChange
	ProbeIn   time.Duration // ChangeStopped, ChangeProbing: until the next probe
	Stopped   time.Duration // ChangeResumed: how long it was
	Lowered   bool          // the report lowered the rate
	PerMinute int           // the rate now; 0: no limit
}

// RateState is what the cluster knows of a sender.
type RateState struct {
	PerMinute int // messages that may go out a minute now; 0: no limit
	Used      int // that went out, lately, a minute
	Waiting   int // schools in the line

	Placed  bool          // the school asked for stands in it
	PlaceIn time.Duration // and its place comes after this; 0: it has come

	Stopped  bool
	Since    time.Duration // Stopped: how long it has been
	Code     string        // Stopped: the receiver's, or ours
	ProbeIn  time.Duration // Stopped: until the next probe; 0: with the next message
	Probing  bool          // Stopped: a probe is on its way
	Lowered  bool          // the receiver asked for less
	LowerFor time.Duration // Lowered: until the rate begins to grow again; 0: it grows
	LowerBy  string        // Lowered: the receiver's code
}
