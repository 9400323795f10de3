package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
)

// served is a real `schoolbell serve`.
type served struct {
	*local.Program
	client *api.Client
	lines  []map[string]any // of its log until it was up
}

// serve starts the program in dir and waits until it is up.
func serve(ctx context.Context, t *testing.T, program, dir string, env ...string) *served {
	t.Helper()
	log, logged := io.Pipe()
	s := &served{}
	up := make(chan string, 1)
	read := make(chan struct{})
	go func() { // ends with the pipe
		defer close(read)
		started := false
		for lines := bufio.NewScanner(log); lines.Scan(); {
			var line map[string]any
			if json.Unmarshal(lines.Bytes(), &line) != nil || started {
				continue
			}
			s.lines = append(s.lines, line)
			if started = line["event"] == "replica_started"; started {
				up <- line["address"].(string)
			}
		}
	}()
	s.Program = localtest.Program(t, local.ProgramConfig{Path: program, Args: []string{"serve"}, Env: env, Dir: dir, Stderr: logged})
	t.Cleanup(func() {
		require.NoError(t, logged.Close())
		<-read
	})
	select {
	case address := <-up:
		s.client = &api.Client{BaseURL: "http://" + address, HTTP: &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}}
	case <-s.Exited():
		t.Fatal("the replica ended")
	case <-ctx.Done():
		t.Fatal("the replica did not start")
	}
	return s
}

// TestEmbedded is what a person has who starts the program with nothing: it
// sends, and a kill costs neither counts nor the rest.
func TestEmbedded(t *testing.T) {
	t.Parallel()
	program := localtest.Build(t, "schoolbell/cmd/schoolbell")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	dir := t.TempDir()
	env := []string{"SCHOOLBELL_HTTP_LISTEN=127.0.0.1:0", "SCHOOLBELL_QUOTA_LIMIT=50", "SCHOOLBELL_QUOTA_REST=10m", "SCHOOLBELL_STOP_DELAY=0s"}
	one := serve(ctx, t, program, dir, env...)

	var told []map[string]any
	for _, line := range one.lines {
		if line["event"] == "embedded" {
			told = append(told, line)
		}
	}
	require.Len(t, told, 1, "one line says so")
	file, err := filepath.EvalSymlinks(dir)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(file, "schoolbell.db"), told[0]["file"])
	require.Equal(t, "none", told[0]["http_auth"])
	require.Equal(t, strings.TrimPrefix(one.client.BaseURL, "http://"), told[0]["address"])

	req := api.NoticeRequest{School: "A", Title: "T"}
	for i := range 80 {
		req.Recipients = append(req.Recipients, api.Recipient{Token: fmt.Sprintf("token-%d", i)})
	}
	accepted, err := one.client.Send(ctx, req, "key")
	require.NoError(t, err)
	rests := func(s *served) (api.School, api.Notice) {
		t.Helper()
		for {
			sc, err := s.client.School(ctx, "A")
			require.NoError(t, err)
			n, err := s.client.Notice(ctx, accepted.ID)
			require.NoError(t, err)
			// Until the turn has ended the rest is the provisional one, which is longer.
			if sc.State == api.Resting && sc.Lock == nil && n.Success == 50 && n.InProgress == 0 {
				return sc, n
			}
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
				t.Fatalf("no rest after 50 of 80: %+v %+v", sc, n)
			}
		}
	}
	before, _ := rests(one)
	require.Equal(t, 50, before.Attempted)

	// A second one on the same file is refused in words.
	var refusal strings.Builder
	second := localtest.Program(t, local.ProgramConfig{Path: program, Args: []string{"serve"}, Env: env, Dir: dir, Stderr: &refusal})
	code, err := second.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, exitFailed, code)
	last := refusal.String()[strings.LastIndex(strings.TrimSpace(refusal.String()), "\n")+1:]
	require.Contains(t, last, "in use")
	require.Contains(t, last, fmt.Sprintf("process %d", one.PID()))
	require.Contains(t, last, "stop it first")

	require.NoError(t, one.Signal(syscall.SIGKILL))
	_, _ = one.Wait(ctx)
	two := serve(ctx, t, program, dir, env...)
	after, n := rests(two)
	require.Equal(t, before.Cycle, after.Cycle)
	require.Equal(t, 50, after.Attempted)
	require.Equal(t, 30, after.Waiting)
	require.Equal(t, 30, n.Waiting)
	require.InDelta(t, time.Until(*before.NextEligibleAt).Seconds(), after.RestingSeconds, 2, "the rest goes on, it does not begin anew")
	again, err := two.client.Send(ctx, req, "key")
	require.NoError(t, err)
	require.Equal(t, accepted.ID, again.ID, "a key is known for as long as its notice")

	require.NoError(t, two.Signal(syscall.SIGTERM))
	code, err = two.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, exitDone, code)
}

// TestDemoForReal runs the demonstration as a person does, with kills.
func TestDemoForReal(t *testing.T) {
	t.Parallel()
	program := localtest.Build(t, "schoolbell/cmd/schoolbell")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	temp := t.TempDir()
	var out, log strings.Builder
	p := localtest.Program(t, local.ProgramConfig{
		Path:   program,
		Args:   []string{"demo", "--schools", "4", "--recipients", "1600", "--limit", "100", "--rest", "1s", "--kill-every", "2s", "--http", "127.0.0.1:0", "--output", "json"},
		Env:    []string{"TMPDIR=" + temp},
		Stdout: &out, Stderr: &log,
	})
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, exitDone, code, log.String()+out.String())
	require.Contains(t, log.String(), "the first replica answers on http://127.0.0.1:")
	dec := json.NewDecoder(strings.NewReader(out.String()))
	var v map[string]any
	require.NoError(t, dec.Decode(&v))
	require.ErrorIs(t, dec.Decode(new(any)), io.EOF, "exactly one object")
	require.Equal(t, true, v["ok"])
	require.EqualValues(t, 1600, v["arrived"])
	require.NotEmpty(t, v["faults"])
	left, err := filepath.Glob(filepath.Join(temp, "*"))
	require.NoError(t, err)
	require.Empty(t, left, "temporary files are removed")
}

// TestDemoInterrupted: Ctrl-C ends it with the verdict so far.
func TestDemoInterrupted(t *testing.T) {
	t.Parallel()
	program := localtest.Build(t, "schoolbell/cmd/schoolbell")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var out strings.Builder
	log, logged := io.Pipe()
	p := localtest.Program(t, local.ProgramConfig{
		Path: program, Args: []string{"demo", "--schools", "2", "--recipients", "600", "--limit", "100", "--rest", "1h", "--http", "127.0.0.1:0"},
		Env: []string{"TMPDIR=" + t.TempDir()}, Stdout: &out, Stderr: logged,
	})
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(log); lines.Scan(); {
			if strings.Contains(lines.Text(), "2 resting") {
				_ = p.Signal(syscall.SIGINT) // it may have ended
			}
		}
	}()
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.NoError(t, logged.Close())
	<-read
	require.Equal(t, exitDone, code, out.String())
	require.Contains(t, out.String(), "not sent yet")
	require.Contains(t, out.String(), "Every promise was kept.")
}
