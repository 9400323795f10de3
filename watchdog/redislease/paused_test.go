package redislease_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/scripts"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
)

// ownerURL makes this test binary an owner that looks at its gate without end,
// so that a test can stop it as a process.
const ownerURL = "SCHOOLBELL_TEST_OWNER_REDIS"

// own holds the lock A, and writes "open" for every look at the gate that found
// it open, with the time before and after the look, until it is closed.
func own(url string, out io.Writer) error {
	o, err := redislease.ParseURL(url)
	if err != nil {
		return err
	}
	client := redislease.NewClient(o)
	defer client.Close()
	keys, err := scripts.NewKeys("schoolbell")
	if err != nil {
		return err
	}
	k, err := watchdog.New(watchdog.Config{}, fmt.Sprint("pid-", os.Getpid()), redislease.NewLocks(client, keys), slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return err
	}
	return k.Hold(context.Background(), "A", time.Second, func(_ context.Context, l *watchdog.Lease) error {
		fmt.Fprintln(out, "held")
		for {
			l.Progress()
			before := time.Now()
			if err := l.Check(); err != nil {
				fmt.Fprintln(out, "closed", err)
				return nil
			}
			fmt.Fprintln(out, "open", before.UnixNano(), time.Now().UnixNano())
			time.Sleep(time.Millisecond) // the send
		}
	})
}

func TestStoppedProcessFindsItsGateClosed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	owner := exec.Command(os.Args[0])
	owner.Env = append(os.Environ(), ownerURL+"=redis://"+s.redis.Addr())
	out, err := owner.StdoutPipe()
	require.NoError(t, err)
	owner.Stderr = os.Stderr
	owner.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, owner.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan())
	require.Equal(t, "held", lines.Text())

	require.NoError(t, owner.Process.Signal(syscall.SIGSTOP))
	stopped := time.Now()
	eventually(t, 10*time.Second, "the lease ends", func() bool { _, held := s.Lock("A"); return !held })
	next := watchdog.Request{Name: "A", Owner: "next", Acquisition: "b", Lease: time.Minute, ETC: etc, Patience: time.Second}
	require.NoError(t, s.Acquire(t.Context(), next))
	taken := time.Now()
	require.Less(t, taken.Sub(stopped), 3*time.Second)
	require.NoError(t, owner.Process.Signal(syscall.SIGCONT))

	// A look that began before the stop may say so after it: nothing can help
	// that. One that began later may not.
	closed := ""
	for lines.Scan() {
		line := lines.Text()
		if rest, ok := strings.CutPrefix(line, "open "); ok {
			var before, after int64
			_, err := fmt.Sscan(rest, &before, &after)
			require.NoError(t, err)
			require.Less(t, before, taken.UnixNano(), "the gate was open after another had taken the lock")
		} else if strings.HasPrefix(line, "closed ") {
			closed = line
		}
	}
	require.Contains(t, closed, "closed lease ")
	require.NoError(t, lines.Err())
	require.Error(t, owner.Wait(), "Hold says why the lease ended")
	held, ok := s.Lock("A")
	require.True(t, ok)
	require.Equal(t, "b", held.Acquisition, "the former owner freed its successor's lock")
}
