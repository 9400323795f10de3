//go:build !linux

package watchdog

import "time"

// bootTime is not known here; the wall clock alone shows a sleep.
func bootTime() time.Duration { return 0 }
