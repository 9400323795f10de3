package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender"
	"schoolbell/sender/relay"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output collects what the command prints; it is read while it is written.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// start runs the command until the returned stop, which gives its error.
func start(t *testing.T, args ...string) (stderr *output, addr string, stop func() error) {
	t.Helper()
	addrFile := filepath.Join(t.TempDir(), "addr")
	ctx, cancel := context.WithCancel(t.Context())
	stderr = new(output)
	cmd := command()
	cmd.SetArgs(append([]string{"--listen", "127.0.0.1:0", "--addr-file", addrFile}, args...))
	cmd.SetErr(stderr)
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(addrFile)
		addr = strings.TrimSpace(string(b))
		return err == nil
	}, 10*time.Second, 5*time.Millisecond)
	return stderr, addr, func() error { cancel(); return <-ended }
}

func TestItReceivesAndLogsUntilItIsStopped(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "arrivals.ndjson")
	stderr, addr, stop := start(t, "--log", log, "--latency", "1ms±1ms")
	r, err := relay.New(relay.Config{Name: "r", URL: "http://" + addr + "/relay"}, nil)
	require.NoError(t, err)
	defer r.Close()
	c := &sender.Content{Title: "t", Body: "b"}
	got := r.Send(t.Context(), sender.Batch{ID: "b1", School: "A", Fence: 1, Messages: []sender.Message{
		{ID: "n.1", Token: "device", Content: c, Attempt: 1},
		{ID: "n.2", Token: "unregistered-2", Content: c, Attempt: 1},
	}})
	require.Equal(t, []sender.Result{{ID: "n.1", Class: sender.Accepted}, {ID: "n.2", Class: sender.Gone, Code: "UNREGISTERED"}}, got)

	// A caller that is kept hanging does not hold up the stop.
	var wg sync.WaitGroup
	wg.Go(func() {
		r.Send(context.Background(), sender.Batch{ID: "b2", School: "A", Fence: 1, Messages: []sender.Message{{ID: "n.3", Token: "hang-3", Content: c, Attempt: 1}}})
	})
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(log)
		return err == nil && bytes.Count(b, []byte("\n")) == 5
	}, 10*time.Second, 5*time.Millisecond)
	begin := time.Now()
	require.NoError(t, stop())
	require.Less(t, time.Since(begin), stopTimeout)
	wg.Wait()

	b, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Equal(t, 6, bytes.Count(b, []byte("\n")), "all of it is written: %s", b)
	require.Contains(t, string(b), `"answer":"hang"`)
	require.Equal(t, fmt.Sprintf("listening on http://%s\n", addr), stderr.String())
}

func TestWrongUsageIsToldApart(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() }) // after the parallel cases, which a defer is not
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"unknown flag":    {[]string{"--nonsense"}, 2, "nonsense"},
		"latency":         {[]string{"--latency", "soon"}, 2, "80ms±40ms"},
		"outcomes":        {[]string{"--outcomes", "UNREGISTERED"}, 2, "UNREGISTERED=0.02"},
		"unknown outcome": {[]string{"--outcomes", "NONE=1"}, 2, "UNREGISTERED"},
		"reset":           {[]string{"--reset", "2"}, 2, "probability"},
		"address in use":  {[]string{"--listen", taken.Addr().String()}, 1, taken.Addr().String()},
		"log":             {[]string{"--log", filepath.Join(t.TempDir(), "no", "such", "dir")}, 1, "arrival log"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := command()
			cmd.SetArgs(append([]string{"--listen", "127.0.0.1:0"}, c.args...))
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // it would serve until then
			defer cancel()
			err := cmd.ExecuteContext(ctx)
			require.Error(t, err)
			require.Equal(t, c.code, exitCode(err), err)
			require.ErrorContains(t, err, c.says)
		})
	}
	require.Equal(t, 1, exitCode(errors.New("other")))
}

func TestTakenPortsAreNamedWithTheFix(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })
	at := taken.Addr().String()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--listen", at}, "another program listens on " + at + "; give another --listen or stop that program"},
		{[]string{"--listen", "127.0.0.1:0", "--tls-listen", at}, "another program listens on " + at + "; give another --tls-listen or stop that program"},
	} {
		cmd := command()
		cmd.SetArgs(tc.args)
		cmd.SetErr(new(output))
		require.EqualError(t, cmd.ExecuteContext(t.Context()), tc.want)
	}
}
