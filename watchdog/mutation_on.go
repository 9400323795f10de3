//go:build mutations

package watchdog

import (
	"os"
	"time"
)

// trusted lets a lease count from after the call, where SCHOOLBELL_MUTATE asks
// for it, and so also from an answer that came when the lease had ended.
func trusted(before, after instant, left time.Duration) (instant, time.Duration) {
	if os.Getenv("SCHOOLBELL_MUTATE") != "lease-end-after-call" {
		return before, left
	}
	return after, max(left, 1)
}
