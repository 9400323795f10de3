// Package quotatest says what an implementation of the sending rule must do,
// apart from any implementation: the cases with their only right answers, the
// rule in sentences, and random histories with kills, losses and clock jumps
// judged from nothing but what was sent when. The pure rule and the Lua both
// pass it.
//
// It drives an implementation in virtual time as a school's owners would, with
// a ledger that stands for the database.
package quotatest

import (
	"time"

	"schoolbell/school"
)

// Subject is one school's quota in some implementation, under a clock that the
// test sets.
type Subject interface {
	// At sets the clock, in ms since the epoch.
	At(ms int64)
	// Own makes (acquisition, fence) the holder of the lock.
	Own(acquisition string, fence int64)

	Reserve(school.Reservation) (school.Grant, error)
	Settle(school.Settlement) error
	Reconcile(school.Ledger, school.Rule) error
	Rebuild(acquisition string, fence int64, l school.Ledger, r school.Rule) error
	Peek() (school.Peek, error)

	// Save copies the data of the quota; Load puts a copy back, as after a
	// failover to a replica that was behind. Load(nil) loses everything.
	Save() any
	Load(any)
}

// Epoch is the moment that stands for 0 in cases and histories.
const Epoch = 1_800_000_000_000

// Ledger stands for the database: what was claimed, on a clock of its own that
// never jumps.
type Ledger struct {
	cycle     int64
	attempted int
	filled    bool
	restUntil int64 // ms of the database's clock
	rule      school.Rule
}

// At is the ledger as a transaction at that time reads it.
func (l *Ledger) At(now int64) school.Ledger {
	out := school.Ledger{Cycle: l.cycle, Attempted: l.attempted, Filled: l.filled, Rule: l.rule}
	if l.filled {
		out.Resting = time.Duration(max(0, l.restUntil-now)) * time.Millisecond
	}
	return out
}

// Claim advances the ledger by n of the granted attempts; a claim that fills
// the cycle sets the rest from the latest end of its call.
func (l *Ledger) Claim(now int64, g school.Grant, n int, longest time.Duration) {
	if n == 0 || g.Cycle < l.cycle {
		return
	}
	if g.Cycle > l.cycle {
		l.cycle, l.attempted, l.filled, l.restUntil = g.Cycle, 0, false, 0
	}
	l.attempted = max(l.attempted, g.Attempted-(g.Size-n))
	l.rule = g.Rule
	if g.Filled && n == g.Size {
		l.filled = true
		l.restUntil = now + (longest + g.Rule.Rest).Milliseconds()
	}
}

// Record makes the rest exact when the batch that filled the cycle is recorded.
func (l *Ledger) Record(now int64, g school.Grant) {
	if l.filled && g.Filled && g.Cycle == l.cycle {
		l.restUntil = now + g.Rule.Rest.Milliseconds()
	}
}
