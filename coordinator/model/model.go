// Package model searches every state that a school's turn can reach, on two
// replicas, through every interleaving and with a bounded number of faults, for
// one that breaks a promise. It says how with the shortest way there.
//
// It runs no code of the coordinator. The arithmetic of the sending rule is the
// real one, package school/quota; the lock's scripts, the store's transactions
// and the steps of a turn are written down again, small, next to the names of
// what they mirror. DESIGN.md maps each to the code, says what was left out and
// why that loses nothing, and which time stands for which.
//
// It proves nothing about what it does not model: bytes, SQL, a clock that
// jumps, a store that loses commits. Those have tests on the real thing.
package model

import (
	"errors"
	"fmt"
)

// Bounds say how large a world is searched. Times are in ticks: the smallest
// that still tell apart what differs in reality.
type Bounds struct {
	Recipients int // at most 8
	Batch      int // most messages of one call
	Limit      int // attempts of a cycle
	Lowered    int // what the limit is lowered to, once; 0: never
	Rest       int
	Claim      int // W: from before the reservation until the claim has committed
	Call       int // C: the longest that one call takes
	Record     int // G: how much later than the call's end a batch may be taken over
	Lease      int // L: at least Claim + Call, or no batch fits
	Patience   int // how long a replica waits for the lock's answer

	Faults Faults
	Broken Broken

	// Only, where set, names the one promise that is looked at: which of them a
	// broken protocol breaks besides the first.
	Only string
}

// Faults bound how often each thing goes wrong, and all of them together.
type Faults struct {
	All       int
	Kill      int // a process dies and starts anew
	Pause     int // a process stands still where time matters, and goes on
	LostReply int // a call is executed or not, and its caller does not hear
	Late      int // a request arrives again, or only when its caller gave up
	Flush     int // Redis loses everything
	Failover  int // Redis goes back to before its last writes
	Unknown   int // the receiver took the messages and its answer was lost
}

// Broken takes parts of the protocol away: what the search must then find tells
// what they are for.
type Broken struct {
	NoProvisionalRest  bool // a reservation that fills the cycle sets no rest; its settlement does
	NoLedgerFloors     bool // the ledger is neither brought to a reservation nor reconciled
	LeaseEndAfterCall  bool // the local end counts from the answer of the lock and not from before the question
	SettleTwice        bool // a settlement that comes again gives back again
	ClaimUnfenced      bool // a claim commits under whatever fence
	RollOver           bool // a full cycle without a rest begins the next one
	NoDrain            bool // a new owner does not wait for the calls of the old one
	CallBeyondBatch    bool // the call has its whole time, also where the batch has less left
	ReleaseByAnybody   bool // a release frees the lock whoever has it
	RecordOverTakeover bool // a result counts although the batch was taken over
}

// check says what is wrong with b.
func (b Bounds) check() error {
	var wrong []error
	for _, n := range []struct {
		name          string
		value         int
		least, atMost int
	}{
		{"Recipients", b.Recipients, 1, 8}, {"Batch", b.Batch, 1, b.Limit}, {"Limit", b.Limit, 1, 8},
		{"Lowered", b.Lowered, 0, b.Limit}, {"Rest", b.Rest, 1, 20}, {"Claim", b.Claim, 0, 9}, {"Call", b.Call, 1, 9},
		{"Record", b.Record, 1, 9}, {"Lease", b.Lease, b.longest(), 30}, {"Patience", b.Patience, 0, 9},
	} {
		if n.value < n.least || n.value > n.atMost {
			wrong = append(wrong, fmt.Errorf("bounds: %s is %d, must be %d to %d", n.name, n.value, n.least, n.atMost))
		}
	}
	return errors.Join(wrong...)
}

// longest is B: the longest that a batch takes from before its reservation.
func (b Bounds) longest() int { return b.Claim + b.Call }
