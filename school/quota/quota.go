// Package quota is the sending rule as arithmetic: at most Limit attempts of a
// school, then Rest without any, across the whole cluster (R1 to R6).
//
// A [State] is what is known of one school. Each operation is a pure function
// of (state, now, arguments) to (state, answer): no clock, no I/O, nothing is
// shared with the state it came from. Package redisquota runs the same
// operations in Lua; a differential test holds the two together, so everything
// here is integers that a Lua double holds exactly: milliseconds since the
// epoch, milliseconds, counts.
//
// It does not know locks, fences or leases; whoever reserves must own the
// school, and the Lua checks that in the same step.
//
// Invariants:
//   - A cycle ends only by a rest that was set for it and has passed.
//   - Between two cycles lies a silence of at least Rest: a rest is never set
//     to end earlier than Rest after the latest moment at which an attempt of
//     the cycle can have ended.
//   - What the ledger has confirmed is never given back or shortened, except by
//     [State.Rebuild].
//   - Each operation done twice in a row equals the operation done once.
//
// DESIGN.md says why each part is needed.
package quota

import (
	"fmt"
	"regexp"
	"slices"
	"time"

	"schoolbell/school"
)

const (
	// KeepSettled is how many settled reservations are remembered, so that a
	// repeated settle or reserve is known as one. Older ones are answered as
	// unknown, which changes nothing either.
	KeepSettled = 128

	// Skew is how much further than it was set to lie a rest may seem to lie, in
	// ms, before the clock counts as having gone back: the clocks of a Redis
	// primary and the replica that takes over from it are no better than that.
	Skew = 1000

	// maxLimit and maxSpan bound what is accepted, far above anything of use and
	// far below where a Lua double stops being exact.
	maxLimit = 1_000_000_000
	maxSpan  = 366 * 24 * time.Hour
)

var batchID = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)

// State is the quota of one school. The zero value is a school of which
// nothing is known: everything is refused until Reconcile or Rebuild.
type State struct {
	Known bool
	Since int64 // when this state was made from the ledger, ms since the epoch: the data's epoch

	Cycle     int64
	Attempted int   // reserved in this cycle, less what was given back
	Limit     int   // in force in this cycle
	Rest      int64 // ms, in force: once Next is set, the one that Next was set with

	Setting Setting // the newest setting seen; what of it does not act at once acts from the next cycle

	// Next is when the next cycle may begin, ms since the epoch; 0 while no rest
	// is set for this cycle. It stays when the moment has passed, since only
	// that says that the cycle is over.
	Next int64
	Span int64 // how far ahead of its time Next was set, ms

	LastEnd int64 // when the last attempt known to have ended did so; 0: not known

	FloorAttempted int   // attempts that the ledger has confirmed: a refund stops here
	FloorNext      int64 // a rest that the ledger has confirmed: nothing makes Next earlier; 0: none

	Open    []Open    // reservations not settled, in order of their making
	Settled []Settled // the last KeepSettled settled ones, in order of their settling
}

// Setting is a school's limit and rest as some caller knew them.
type Setting struct {
	Version int64
	Limit   int
	Rest    int64 // ms
}

// Open is a reservation that nobody has settled. It keeps its answer, so that
// the same batch asked again gets the same.
type Open struct {
	Batch     string
	Size      int
	Cycle     int64
	Deadline  int64 // when its call has ended at the latest, ms since the epoch
	Longest   int64 // the longest that it may take, ms
	Attempted int   // of its cycle, itself included
	Filled    bool
	Rested    int64 // it opened the cycle, so long after the last one's end, ms; -1: it did not
}

// Settled is what remains of a settled reservation.
type Settled struct {
	Batch     string
	Attempted int
}

// Outcome says what a settlement did.
type Outcome int

const (
	Settles   Outcome = iota + 1 // the reservation is settled by it
	Duplicate                    // it was settled before, or closed after its deadline; nothing changed
	Late                         // it is of an older cycle; it is settled and the count stays
	Unknown                      // there is no such reservation; nothing changed
)

// Merge says what the ledger changed.
type Merge int

const (
	Kept    Merge = iota + 1 // nothing was missing
	Created                  // nothing was known before
	Raised                   // less was known than the ledger says
	Reset                    // the rest lay further ahead than it can and was set anew
)

// Peek is a look at the quota; the lock's part stays empty.
func (s State) Peek(now int64) school.Peek {
	if !s.Known {
		return school.Peek{}
	}
	return school.Peek{
		Known:     true,
		Attempted: s.Attempted,
		Limit:     s.Limit,
		Cycle:     s.Cycle,
		Resting:   duration(max(0, s.Next-now)),
		Orphaned:  slices.ContainsFunc(s.Open, func(o Open) bool { return o.Deadline <= now }),
	}
}

// jumped reports whether the rest lies further ahead than it was ever set to.
func (s *State) jumped(now int64) bool { return s.Next-now > s.Span+Skew }

// closeOverdue settles, as attempted in full, every reservation whose call must
// have ended. It first pulls into the past what cannot lie in the future: if
// the clock went back, a reservation of the past still ends within its longest
// duration from now.
func (s *State) closeOverdue(now int64) {
	s.LastEnd = min(s.LastEnd, now)
	closed := false
	open := make([]Open, 0, len(s.Open)+1)
	for _, o := range s.Open {
		o.Deadline = min(o.Deadline, now+o.Longest)
		if o.Deadline > now {
			open = append(open, o)
			continue
		}
		s.bury(o.Batch, o.Size)
		if o.Cycle == s.Cycle {
			s.LastEnd = max(s.LastEnd, o.Deadline)
			closed = true
		}
	}
	s.Open = open
	if closed {
		s.exact(now)
	}
}

// bury remembers a settled reservation and forgets the oldest one beyond
// KeepSettled.
func (s *State) bury(batch string, attempted int) {
	kept := s.Settled[max(0, len(s.Settled)-KeepSettled+1):]
	s.Settled = append(slices.Clone(kept), Settled{Batch: batch, Attempted: attempted})
}

// exact makes a provisional rest exact once no call of the cycle can still be
// running: it counts from the end of the last one, but not below what the
// ledger has confirmed.
func (s *State) exact(now int64) {
	if s.Next == 0 || s.LastEnd == 0 || s.latest() > 0 || s.jumped(now) {
		return // where the clock went back, only the ledger can say
	}
	s.rest(now, max(s.LastEnd+s.Rest, s.FloorNext))
}

// latest is the latest moment at which an open reservation of this cycle can
// still end; 0 if there is none.
func (s *State) latest() int64 {
	var d int64
	for _, o := range s.Open {
		if o.Cycle == s.Cycle {
			d = max(d, o.Deadline)
		}
	}
	return d
}

func (s *State) rest(now, next int64) {
	s.Next = next
	s.Span = max(0, next-now)
}

// adopt takes note of a setting that is not older than the newest one seen. A
// lower limit acts at once, a higher one from the next cycle; the rest is the
// newest known when a rest is set, and then stays as it was set.
func (s *State) adopt(n Setting) {
	if n.Version >= s.Setting.Version {
		s.Setting = n
	}
	s.apply()
}

func (s *State) apply() {
	s.Limit = min(s.Limit, s.Setting.Limit)
	if s.Next == 0 {
		s.Rest = s.Setting.Rest
	}
}

func (s *State) rule() school.Rule {
	return school.Rule{Limit: s.Limit, Rest: duration(s.Rest), Version: s.Setting.Version}
}

func setting(r school.Rule) Setting {
	return Setting{Version: r.Version, Limit: r.Limit, Rest: Millis(r.Rest)}
}

// Millis is d in whole milliseconds, rounded up: a rest or a deadline may be a
// little late, never early.
func Millis(d time.Duration) int64 {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	return ms
}

func duration(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func checkRule(r school.Rule) error {
	if r.Limit < 1 || r.Limit > maxLimit {
		return fmt.Errorf("limit %d: must be 1 to %d", r.Limit, maxLimit)
	}
	if r.Rest <= 0 || r.Rest > maxSpan {
		return fmt.Errorf("rest %v: must be above 0 and at most %v", r.Rest, maxSpan)
	}
	if r.Version < 0 {
		return fmt.Errorf("settings version %d: must not be negative", r.Version)
	}
	return nil
}

// checkLedger accepts a ledger without a rule: one that was never written.
func checkLedger(l school.Ledger) error {
	if l.Cycle < 0 || l.Attempted < 0 || l.Attempted > maxLimit {
		return fmt.Errorf("ledger: cycle %d and attempted %d must be 0 or more", l.Cycle, l.Attempted)
	}
	if l.Resting < 0 || l.Resting > maxSpan {
		return fmt.Errorf("ledger: resting %v: must be 0 to %v", l.Resting, maxSpan)
	}
	if l.Rule == (school.Rule{}) {
		return nil
	}
	if err := checkRule(l.Rule); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	return nil
}

// CheckReservation says what is wrong with r's numbers and batch id, before
// anything is asked.
func CheckReservation(r school.Reservation) error {
	switch {
	case !batchID.MatchString(r.Batch):
		return fmt.Errorf("batch id: must be 1 to 128 letters, digits, dots, colons, underscores or dashes")
	case r.Want < 1 || r.Want > maxLimit:
		return fmt.Errorf("want %d: must be 1 to %d", r.Want, maxLimit)
	case r.Longest <= 0 || r.Longest > maxSpan:
		return fmt.Errorf("longest duration %v: must be above 0 and at most %v", r.Longest, maxSpan)
	case r.Margin < 0 || r.Margin > maxSpan:
		return fmt.Errorf("margin %v: must be 0 to %v", r.Margin, maxSpan)
	}
	if err := checkRule(r.Rule); err != nil {
		return err
	}
	return checkLedger(r.Floor)
}

// CheckSettlement says what is wrong with x's numbers and batch id. That it
// attempted no more than was granted only the operation can tell.
func CheckSettlement(x school.Settlement) error {
	if !batchID.MatchString(x.Batch) {
		return fmt.Errorf("batch id: must be 1 to 128 letters, digits, dots, colons, underscores or dashes")
	}
	if x.Attempted < 0 || x.Cycle < 0 {
		return fmt.Errorf("attempted %d and cycle %d must be 0 or more", x.Attempted, x.Cycle)
	}
	return nil
}

// CheckMerge says what is wrong with a ledger and a rule.
func CheckMerge(l school.Ledger, r school.Rule) error {
	if err := checkLedger(l); err != nil {
		return err
	}
	return checkRule(r)
}
