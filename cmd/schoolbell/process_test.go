package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
)

// TestProgram goes once through what a person does first, with the real program
// on a real PostgreSQL and Redis.
func TestProgram(t *testing.T) {
	t.Parallel()
	program := localtest.Build(t, "schoolbell/cmd/schoolbell")
	env := []string{
		"SCHOOLBELL_DATABASE_URL=" + localtest.Database(t), "SCHOOLBELL_REDIS_URL=" + localtest.Redis(t).URL(), "SCHOOLBELL_ADMIN_KEY=k",
		"SCHOOLBELL_HTTP_LISTEN=127.0.0.1:0", "SCHOOLBELL_STOP_DELAY=0s",
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	command := func(env []string, args ...string) (code int, stdout, stderr string) {
		var out, err strings.Builder
		p := localtest.Program(t, local.ProgramConfig{Path: program, Args: args, Env: env, Dir: t.TempDir(), Stdout: &out, Stderr: &err})
		code, waitErr := p.Wait(ctx)
		require.NoError(t, waitErr)
		return code, out.String(), err.String()
	}

	code, _, stderr := command(env, "serve")
	require.Equal(t, exitFailed, code, stderr)
	require.Contains(t, stderr, "schoolbell migrate up", "what to do stands in the error")

	code, stdout, stderr := command(env[:1], "migrate", "up")
	require.Equal(t, exitDone, code, stderr)
	require.Contains(t, stdout, "applied 1 ")
	code, stdout, _ = command(env[:1], "migrate", "status", "--output", "json")
	require.Equal(t, exitDone, code)
	var known schema
	require.NoError(t, json.Unmarshal([]byte(stdout), &known))
	require.NotEmpty(t, known.Steps)
	for _, step := range known.Steps {
		require.NotNil(t, step.AppliedAt, step.Name)
	}
	code, stdout, _ = command(env[:1], "migrate", "up")
	require.Equal(t, exitDone, code)
	require.Equal(t, "the schema is up to date\n", stdout)
	code, stdout, _ = command(append(env[:1:1], "TZ=Asia/Seoul"), "migrate", "status")
	require.Equal(t, exitDone, code)
	require.Contains(t, stdout, " KST\n", "people read times in the zone of their machine")
	code, _, stderr = command(env[:1], "migrate", "down", "--to", "99")
	require.Equal(t, exitUsage, code)
	require.Regexp(t, `^schoolbell: migrate down: the schema is at version \d+, so it cannot be taken back to 99; give 0 to \d+\n$`, stderr)
	code, _, stderr = command(nil, "migrate", "up", "--database-url", strings.Replace(strings.TrimPrefix(env[0], "SCHOOLBELL_DATABASE_URL="), "?", "_not?", 1))
	require.Equal(t, exitNotFound, code)
	require.Regexp(t, `^schoolbell: database_url \(--database-url\): migrate up: the server at [\d.:]+ has no database "(\w+)"; make it \(createdb \w+\) or name another\n$`, stderr)

	evicting := localtest.RedisWith(t, local.RedisConfig{Args: []string{"--maxmemory-policy", "allkeys-lru"}})
	code, _, stderr = command(append(slices.Clone(env), "SCHOOLBELL_REDIS_URL="+evicting.URL()), "serve")
	require.Equal(t, exitFailed, code, stderr)
	require.Contains(t, stderr, "CONFIG SET maxmemory-policy noeviction", "what to do stands in the error")

	log, logged := io.Pipe()
	address := make(chan string, 1)
	read := make(chan struct{})
	go func() { // ends with the pipe, below
		defer close(read)
		for lines := bufio.NewScanner(log); lines.Scan(); {
			var event struct{ Event, Address string }
			if json.Unmarshal(lines.Bytes(), &event) == nil && event.Event == "replica_started" {
				address <- event.Address
			}
		}
	}()
	replica := localtest.Program(t, local.ProgramConfig{Path: program, Args: []string{"serve"}, Env: env, Dir: t.TempDir(), Stderr: logged})
	var server []string
	select {
	case a := <-address:
		server = []string{"SCHOOLBELL_SERVER=http://" + a, "SCHOOLBELL_KEY=k"}
	case <-replica.Exited():
		t.Fatal("the replica ended")
	case <-ctx.Done():
		t.Fatal("the replica did not start")
	}

	client := newStage()
	client.environ = server
	var tokens strings.Builder
	for i := range 450 { // three batches
		fmt.Fprintf(&tokens, "token-%d\n", i)
	}
	client.files["tokens"] = tokens.String()
	code = client.run("notice", "send", "--school", "A", "--title", "T", "--tokens-file", "tokens", "--wait", "--output", "json")
	require.Equal(t, exitDone, code, client.err.String())
	var n api.Notice
	require.NoError(t, json.Unmarshal(client.out.Bytes(), &n))
	require.Equal(t, 450, n.Success, client.out.String())
	require.Equal(t, exitDone, client.run("notice", "list", "--school", "A"), client.err.String())
	require.Contains(t, client.out.String(), n.ID)
	require.Equal(t, exitNotFound, client.run("notice", "show", "1"), client.err.String())
	require.Equal(t, exitRefused, client.run("notice", "show", n.ID, "--key", "wrong"), client.err.String())
	require.Equal(t, exitUsage, client.run("notice", "send", "--school", "A/B", "--title", "T", "--tokens-file", "tokens"), client.err.String())
	require.Contains(t, client.err.String(), "--school: must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")

	require.NoError(t, replica.Signal(syscall.SIGTERM))
	code, err := replica.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, exitDone, code)
	require.NoError(t, logged.Close())
	<-read
	require.Equal(t, exitUnreachable, client.run("notice", "show", n.ID), client.err.String())
}

func TestMigrateWithoutADatabase(t *testing.T) {
	t.Parallel()
	s := newStage()
	s.replica = replica()
	code := s.run("migrate", "up", "--database-url", "postgres://bell:pa55@127.0.0.1:1/bell?connect_timeout=2")
	require.Equal(t, exitUnreachable, code, s.err.String())
	require.NotContains(t, s.err.String(), "pa55")
	require.Equal(t, 1, strings.Count(s.err.String(), "\n"))
	require.Equal(t, "schoolbell: database_url (--database-url): migrate up: no database server answers (dial tcp 127.0.0.1:1: connect: connection refused); is PostgreSQL running there, and is the address right?\n", s.err.String())
}
