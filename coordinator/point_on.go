//go:build failpoints

package coordinator

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

var pointHits, pointWaits atomic.Int64

// point kills the process with SIGKILL when the environment asks for it:
// FAILPOINT=name or name:filled or name:ordinary, with FAILPOINT_AT=n for the
// n-th time (1). "filled" is the batch that reaches the limit. With
// FAILPOINT_WAIT=name:duration it stands still before, the first time it comes
// there, so that what a slow process meets can be arranged.
func point(p Point, filled bool) {
	if name, for_, ok := strings.Cut(os.Getenv("FAILPOINT_WAIT"), ":"); ok && name == string(p) && pointWaits.Add(1) == 1 {
		if d, err := time.ParseDuration(for_); err == nil {
			time.Sleep(d)
		}
	}
	want, kind, _ := strings.Cut(os.Getenv("FAILPOINT"), ":")
	if want != string(p) || kind == "filled" && !filled || kind == "ordinary" && filled {
		return
	}
	at, err := strconv.ParseInt(os.Getenv("FAILPOINT_AT"), 10, 64)
	if err != nil {
		at = 1
	}
	if pointHits.Add(1) == at {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// Pass is a point of another package's.
func Pass(p Point) { point(p, false) }

// gate is what the sender asks twice for each of a batch's n messages, when its
// turn comes and when it leaves. HalfSent is where three quarters have been asked
// for, so that some have left whatever the order; while the process stands there,
// no other does.
func (t *turn) gate(n int) func() error {
	var mu sync.Mutex
	asked := 0
	return func() error {
		mu.Lock()
		if asked++; asked == n+n/2+1 {
			t.point(HalfSent)
		}
		mu.Unlock()
		return t.lease.Check()
	}
}
