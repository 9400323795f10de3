package school

import (
	"errors"
	"time"
)

// ErrReservationUnknown answers a Settlement whose reservation the arbiter does
// not have: it lost data, or the reservation is of long ago. Nothing changed;
// the ledger, which has the attempts already, is what counts.
var ErrReservationUnknown = errors.New("reservation unknown to the arbiter")

// Rule is the sending rule as it applies to one school: at most Limit attempts,
// then Rest without any (R1). Version grows with each change of the school's
// settings and decides which of two rules is the newer one.
type Rule struct {
	Limit   int           // attempts per cycle, at least 1
	Rest    time.Duration // silence after the cycle is full, at least 1 ms
	Version int64
}

// Ledger is what PostgreSQL knows of a school's quota. It is written with every
// claim, so it is never behind what was really sent; Redis is rebuilt from it.
// The rest is a duration, since absolute times never cross between stores.
type Ledger struct {
	Cycle     int64         // grows by one with each cycle
	Attempted int           // attempts claimed in that cycle
	Resting   time.Duration // what is left of the rest; 0 when none is set or it has passed
	Filled    bool          // the cycle has a rest set for it, passed or not
	Rule      Rule          // the rule in force when the ledger was last written
}

// Reservation asks for attempts before they are claimed and sent.
type Reservation struct {
	School      string
	Acquisition string        // the lock acquisition it happens under
	Fence       int64         // the term's fencing number
	Batch       string        // caller-made id: the same batch asked twice gets the same answer
	Want        int           // at least 1
	Longest     time.Duration // B: the longest that the batch can take, from before this call to the end of its send
	Margin      time.Duration // the lease must outlast Longest by this much
	Floor       Ledger        // what the ledger holds now, withdrawn claims taken off; Redis showing less has lost data
	Rule        Rule
}

// GrantKind says how a reservation was answered.
type GrantKind int

const (
	Granted      GrantKind = iota + 1 // Size attempts are the caller's
	Resting                           // none before Wait has passed
	NotOwner                          // the lock is another's or gone, or carries another fence
	LeaseShort                        // the lease does not outlast the batch: extend first
	NeedRebuild                       // Redis lost this school's data: reconcile first
	BatchSettled                      // this batch id was settled already
)

// Grant answers a Reservation.
type Grant struct {
	Kind      GrantKind
	Size      int           // attempts granted, 1 … Want; 0 unless Granted
	Cycle     int64         // the cycle they belong to
	Attempted int           // attempts of that cycle, these included
	Filled    bool          // these attempts reach the limit: a provisional rest is set
	Wait      time.Duration // with Resting: how long
	Opened    bool          // this grant opened a new cycle
	RestedFor time.Duration // with Opened after a rest: from the end of the call that filled the last cycle to now
	Rule      Rule          // with Granted and Resting: limit and rest in force in this cycle, which a raise joins only with the next one

	// ClockJumped says with NeedRebuild that the rest lies further ahead than it
	// can: the clock went back. Reconcile only ever raises and would not help;
	// Rebuild does, and is right for either kind of NeedRebuild.
	ClockJumped bool
}

// Settlement tells what became of a reservation. Attempted counts every message
// handed to the sending call, whatever became of it (R2); the difference to the
// grant is given back only if the grant's cycle still runs.
type Settlement struct {
	School    string
	Batch     string
	Cycle     int64
	Attempted int
}

// Peek is a look at a school's lock and quota without touching them.
type Peek struct {
	Known     bool // a quota exists
	Attempted int
	Limit     int
	Cycle     int64
	Resting   time.Duration // 0: may send
	Held      bool
	Owner     string
	Fence     int64
	LeaseLeft time.Duration

	// Orphaned: a reservation is open whose deadline has passed. Its owner died,
	// and its recipients wait for a successor even while the school rests.
	Orphaned bool
}
