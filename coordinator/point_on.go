//go:build failpoints

package coordinator

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

var pointHits atomic.Int64

// point kills the process with SIGKILL when the environment asks for it:
// FAILPOINT=name or name:filled or name:ordinary, with FAILPOINT_AT=n for the
// n-th time (1). "filled" is the batch that reaches the limit.
func point(name string, filled bool) {
	want, kind, _ := strings.Cut(os.Getenv("FAILPOINT"), ":")
	if want != name || kind == "filled" && !filled || kind == "ordinary" && filled {
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
