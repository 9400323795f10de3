//go:build failpoints

package node

import (
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"
)

// clockFile is the environment variable that names a file with how far the wall
// clock is off: whole seconds as a Go duration, such as "-3600s". It is read
// again while the replica runs; without the variable the clock is right.
const clockFile = "CLOCK_OFFSET_FILE"

// clockEvery is how often the file is read at most.
const clockEvery = 10 * time.Millisecond

// wallClock is the wall clock as a replica sees it whose machine's clock is set:
// all at once, while the monotonic clock goes on as if nothing had happened.
func wallClock() func() time.Time {
	path := os.Getenv(clockFile)
	if path == "" {
		return time.Now
	}
	var due, offset atomic.Int64
	began := time.Now()
	return func() time.Time {
		now := time.Now()
		at := due.Load()
		if since := int64(now.Sub(began)); since >= at && due.CompareAndSwap(at, since+int64(clockEvery)) {
			// What cannot be read, or is being written, changes nothing.
			if text, err := os.ReadFile(path); err == nil {
				if d, err := time.ParseDuration(strings.TrimSpace(string(text))); err == nil {
					offset.Store(int64(d / time.Second))
				}
			}
		}
		return stepped(now, offset.Load())
	}
}

// stepped moves the wall reading of t and leaves the monotonic one. Add would
// move both, which no step of a clock does; so this goes to where package time
// keeps the seconds of a time that has both readings: above 30 bits of
// nanoseconds. TestStepsLikeASystemClock sees to it that this stays so.
func stepped(t time.Time, seconds int64) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) += uint64(seconds) << 30
	return t
}
