package coordinator

// A Point is a gap between two steps of a turn, named after the step before it.
// A program built with the tag failpoints can be made to die there; in any other
// a point is nothing. The step may have failed: a point says that its call has
// returned.
//
// Every call that leaves the process has a point behind it, which a test keeps
// by reading this package.
type Point string

// The points, in the order of a turn.
const (
	Peeked     Point = "peeked"     // the arbiter was looked at
	Pinged     Point = "pinged"     // the store answered that it lives
	Sighted    Point = "sighted"    // the school's place in its sender's line was looked up
	Looked     Point = "looked"     // the store was asked for work
	Acquired   Point = "acquired"   // the lock is held
	Opened     Point = "opened"     // the term is open: the fence has risen
	Bound      Point = "bound"      // the lock carries the fence
	TakenOver  Point = "taken-over" // what dead owners left is put back
	Drained    Point = "drained"    // and each of its reservations settled
	Reconciled Point = "reconciled" // the arbiter knows what the ledger knows
	Paged      Point = "paged"      // a page of recipients was read
	Skipped    Point = "skipped"    // frontiers moved over what is not to be sent
	Asked      Point = "asked"      // the receiver was asked about unknown outcomes
	Confirmed  Point = "confirmed"  // and its yes is written
	Metered    Point = "metered"    // the batch has its sender's rate, or a place in the line
	Ensured    Point = "ensured"    // the lease outlasts the batch
	Reserved   Point = "reserved"   // the attempts are counted
	Lengthened Point = "lengthened" // the lease was too short by the arbiter's word
	Rebuilt    Point = "rebuilt"    // a rest was set anew after the clock went back
	Checked    Point = "checked"    // the lease is still good
	Claimed    Point = "claimed"    // the batch is in the ledger
	Cleared    Point = "cleared"    // the lease was looked at for the last time before the send
	HalfSent   Point = "half-sent"  // some messages have left and some have not
	Sent       Point = "sent"       // the call has returned
	Reported   Point = "reported"   // what it found out about the receiver is known to all
	Recorded   Point = "recorded"   // its outcomes are written
	Settled    Point = "settled"    // and the rest, where there is one, is exact
	Reopened   Point = "reopened"   // a term was opened anew within the turn
	Rebound    Point = "rebound"    // and the lock carries its fence
	Withdrawn  Point = "withdrawn"  // a claim was taken back
	GivenBack  Point = "given-back" // attempts that nobody made were given back
	Ended      Point = "ended"      // the lock is about to be released
	Released   Point = "released"   // the lock is free
	Extended   Point = "extended"   // the watchdog extended the lease
)

// Points lists them.
func Points() []Point {
	return []Point{
		Sighted, Peeked, Pinged, Looked, Acquired, Opened, Bound, TakenOver, Drained, Reconciled, Paged, Skipped, Asked,
		Confirmed, Metered, Ensured, Reserved, Lengthened, Rebuilt, Checked, Claimed, Cleared, HalfSent, Sent, Reported, Recorded,
		Settled, Reopened, Rebound, Withdrawn, GivenBack, Ended, Released, Extended,
	}
}

// point is a point with what is known of the batch in hand.
func (t *turn) point(p Point) { point(p, t.filled) }
