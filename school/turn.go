package school

import "time"

// Term is one ownership of a school, opened in the store by whoever holds the
// lock. Its fence is higher than every fence before it (R13).
type Term struct {
	School      string
	Acquisition string // the lock acquisition it was opened under
	Owner       string // instance id
	Fence       int64
	Ledger      Ledger
	Settings    School // as they stood when the term was opened
	Unsettled   []OpenBatch
}

// OpenBatch is a claim of an older fence that nobody has settled yet.
type OpenBatch struct {
	ID        string
	Fence     int64
	Cycle     int64
	Size      int
	Remaining time.Duration // until its send deadline by the store's clock; 0 or less: its call cannot be in flight any more
}

// WorkKind tells first attempts from later ones.
type WorkKind string

const (
	First WorkKind = "first" // beyond the notice's frontier
	Again WorkKind = "retry" // due again, claimed by key
)

// Work is one recipient as a page shows it.
type Work struct {
	Notice   *Notice // shared by the recipients of one notice
	Seq      int
	Kind     WorkKind
	Token    string
	Badge    *int
	Data     map[string]string // its own, not merged
	Standing Standing
	Requeued int
	Skip     Reason // not to be sent: the claim writes it SKIPPED with this reason
	// Uncertain: the last hand-over may have arrived. Where the receiver can be
	// asked, it is, before the message is sent again.
	Uncertain bool
	Settled   bool // beyond the frontier but final already (a duplicate); it only moves the frontier
}

// Sendable reports whether w is to be handed over.
func (w *Work) Sendable() bool { return w.Skip == "" && !w.Settled }

// Page is what a school has to do now, composed anew: urgent notices, due
// retries, then by age. First attempts of one notice are consecutive from its
// frontier.
type Page struct {
	Work    []Work
	More    bool          // the page is full: there may be more
	NextDue time.Duration // until the earliest later work (a retry's or a scheduled notice's time); 0: none known
}

// Claim takes recipients out of the queue, in one short transaction, before any
// of them is sent (R24).
type Claim struct {
	Batch   string // id made by the caller before the reservation
	Sender  string
	Work    []Work        // in page order, skips included
	Grant   Grant         // what the arbiter answered
	Longest time.Duration // B: from now until the send has ended for certain
	Record  time.Duration // G: time to record on top; send deadline = the store's now + Longest + Record
	Rule    Rule

	// UrgentFirst: stale where first attempts of an urgent notice wait that this
	// claim leaves behind for anything else, since they came after its page.
	UrgentFirst bool
}

// Size is how many of the claim's recipients are to be handed over.
func (c *Claim) Size() int {
	n := 0
	for i := range c.Work {
		if c.Work[i].Sendable() {
			n++
		}
	}
	return n
}

// Recorded is the outcome of one recipient of a batch.
type Recorded struct {
	Notice int64
	Seq    int
	Change Change
	// Fallback: the notice has a fallback and the failure is definite, so that its
	// fallback is made with the record, once in the recipient's life.
	Fallback bool
}

// BatchRecord settles a batch with the outcome of each of its recipients.
type BatchRecord struct {
	Batch   string
	School  string
	Owner   string
	Fence   int64
	Cycle   int64
	Filled  bool          // the batch filled its cycle: its rest runs from this record on (R4)
	Rest    time.Duration // with Filled
	Brake   bool          // so many are gone that none is retired before a person has looked
	Results []Recorded
}

// Orphans is what a takeover did.
type Orphans struct {
	Batches    []OpenBatch   // settled by it: their attempts count as made
	Recipients int           // put back, or ended where at most once was asked
	Wait       time.Duration // more than 0: unsettled batches remain whose call may still be in flight
}

// Due says that a school has work.
type Due struct {
	School string
	Sender string        // empty: the deployment's default
	In     time.Duration // 0: now; otherwise until its earliest work
	Since  time.Duration // with In 0: for how long the oldest work has been due
}

// Never is the time until work that a school does not have.
const Never time.Duration = -1
