//go:build !mutations

package watchdog

import "time"

// trusted is from when on an answered call counts, and what was left then. Built
// with the tag mutations it can be wrong on purpose; see mutation_on.go.
func trusted(before, _ instant, left time.Duration) (instant, time.Duration) { return before, left }
