package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if kind := os.Getenv(ownerEnv); kind != "" {
		own(kind)
	}
	goleak.VerifyTestMain(m)
}

// bounded is a test's context with a deadline, so that nothing hangs.
func bounded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually polls until the condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// gone reports that a process does not run any more; a zombie does not.
func gone(pid int) bool {
	st, err := readStat(pid)
	return err != nil || st.state == 'Z'
}

func noFolder(dir string) bool {
	_, err := os.Lstat(dir)
	return os.IsNotExist(err)
}

func TestFreePortLiesBelowOutgoingConnections(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	require.NoError(t, err)
	var first, last int
	_, err = fmt.Sscan(string(b), &first, &last)
	require.NoError(t, err)
	for range 50 {
		port, err := FreePort()
		require.NoError(t, err)
		require.GreaterOrEqual(t, port, lowestPort)
		require.Less(t, port, first)
	}
	port, err := freePort(busOffset)
	require.NoError(t, err)
	require.Less(t, port+busOffset, first)
}

func TestStartIsRepeatedWhileThePortIsTaken(t *testing.T) {
	t.Parallel()
	other := errors.New("another reason")
	for name, tc := range map[string]struct {
		answers []error // of one start after the other; the last one repeats
		starts  int
		want    error
	}{
		"at once":        {[]error{nil}, 1, nil},
		"in the end":     {[]error{errAddressInUse, errAddressInUse, nil}, 3, nil},
		"never":          {[]error{errAddressInUse}, portAttempts, errAddressInUse},
		"another reason": {[]error{errAddressInUse, other}, 2, other},
	} {
		t.Run(name, func(t *testing.T) {
			var starts int
			ports := map[int]bool{}
			err := onFreePort(func(port int) error {
				ports[port] = true
				starts++
				return tc.answers[min(starts, len(tc.answers))-1]
			})
			require.Equal(t, tc.want, err)
			require.Equal(t, tc.starts, starts)
			require.Greater(t, len(ports), starts/2, "not the same port again")
		})
	}
}

func TestLaunchOfMissingProgramFails(t *testing.T) {
	t.Parallel()
	dir, g, err := guardedFolder(t.TempDir(), "missing")
	require.NoError(t, err)
	_, err = launch(command{path: "/nowhere/program"}, g)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, g.release())
	require.True(t, noFolder(dir))
}

func TestMissingServersNameTheirPackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := StartRedis(bounded(t), RedisConfig{})
	require.ErrorContains(t, err, "Debian package redis-server")
}

func TestReadStatTakesAnyProgramName(t *testing.T) {
	t.Parallel()
	st, err := readStat(os.Getpid())
	require.NoError(t, err)
	require.Equal(t, os.Getppid(), st.parent)
	require.NotZero(t, st.born)
	_, err = os.Stat("/proc/" + strconv.Itoa(os.Getpid()))
	require.NoError(t, err)
}

// The parent-death signal goes by threads: a process must not die with the
// thread of whoever asked for its start.
func TestProcessOutlivesTheThreadOfItsCaller(t *testing.T) {
	t.Parallel()
	var r *Redis
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread ends here
		r, err = StartRedis(bounded(t), RedisConfig{Memory: true})
	}()
	<-done
	require.NoError(t, err)
	defer r.Close()
	require.Never(t, func() bool { return r.PID() == 0 }, 300*time.Millisecond, 20*time.Millisecond)
	require.Equal(t, "+PONG", asked(t, r.Addr(), "PING"))
}
