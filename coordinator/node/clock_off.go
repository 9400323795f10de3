//go:build !failpoints

package node

import "time"

// wallClock is what the parts of a replica are given as the wall clock.
func wallClock() func() time.Time { return time.Now }
