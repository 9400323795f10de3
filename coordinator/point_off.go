//go:build !failpoints

package coordinator

// point marks the gap between two steps of a turn. Built with the tag
// failpoints, the process can be made to die there.
func point(string, bool) {}
