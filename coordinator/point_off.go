//go:build !failpoints

package coordinator

// point marks a gap between two steps of a turn.
func point(Point, bool) {}

// gate is what the sender asks before a message leaves.
func (t *turn) gate(int) func() error { return t.lease.Check }
