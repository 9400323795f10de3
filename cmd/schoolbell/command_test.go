package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/node"
	"schoolbell/coordinator/node/settings"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { localtest.Main(m) }

// stage is surroundings that a test can look into.
type stage struct {
	surroundings
	out, err bytes.Buffer
	files    map[string]string
}

func newStage() *stage {
	s := &stage{files: map[string]string{}}
	s.surroundings = surroundings{
		stdin: strings.NewReader(""), stdout: &s.out, stderr: &s.err,
		readFile: func(name string) ([]byte, error) {
			if text, ok := s.files[name]; ok {
				return []byte(text), nil
			}
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		},
		open: func(name string) (io.ReadCloser, error) {
			if text, ok := s.files[name]; ok {
				return io.NopCloser(strings.NewReader(text)), nil
			}
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		},
		instanceID: "host-1a2b",
		build:      build{Version: "v1.2.3", Commit: "abc", Go: "go1.26"},
		pollEvery:  time.Millisecond,
	}
	return s
}

func (s *stage) run(args ...string) int {
	s.out.Reset()
	s.err.Reset()
	return run(context.Background(), args, s.surroundings)
}

// failed asserts the code and the whole error line.
func (s *stage) failed(t *testing.T, code int, line string, args ...string) {
	t.Helper()
	require.Equal(t, code, s.run(args...), s.err.String())
	require.Equal(t, "schoolbell: "+line+"\n", s.err.String())
	require.Empty(t, s.out.String())
}

// every walks all commands that a user can see.
func every(c *cobra.Command, visit func(*cobra.Command)) {
	visit(c)
	for _, child := range c.Commands() {
		if child.IsAvailableCommand() {
			every(child, visit)
		}
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	started := false
	every(newRoot(newStage().surroundings, &started), func(c *cobra.Command) {
		require.NotEmpty(t, c.Short, c.CommandPath())
		require.NotEmpty(t, c.Example, "%s has no example", c.CommandPath())
		s := newStage()
		require.Equal(t, exitDone, s.run(append(strings.Fields(c.CommandPath())[1:], "--help")...))
		require.Empty(t, s.err.String())
		fmt.Fprintf(&all, "$ %s --help\n%s\n", c.CommandPath(), s.out.String())
	})
	const golden = "testdata/help.txt"
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(all.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), all.String(), "run with -update if the change is meant")
}

func TestWrongUsage(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args, want string
	}{
		{"frobnicate", `unknown command "frobnicate" for "schoolbell" (see schoolbell --help)`},
		{"serve --frob", "unknown flag: --frob (see schoolbell serve --help)"},
		{"serve now", `unknown command "now" for "schoolbell serve" (see schoolbell serve --help)`},
		{"version --output yaml", `--output "yaml" is not text or json (see schoolbell version --help)`},
		{"notice", "notice needs a command: send, show, list, cancel, retry (see schoolbell notice --help)"},
		{"notice sned", `notice has no command "sned"; it has send, show, list, cancel, retry (see schoolbell notice --help)`},
		{"notice show", "give the notice's id, one argument; there are 0 (see schoolbell notice show --help)"},
		{"notice list --limit 1001", "--limit 1001 is not 1 to 1000 (see schoolbell notice list --help)"},
		{"notice cancel", "give the notice's id, one argument; there are 0 (see schoolbell notice cancel --help)"},
		{"notice send --school A --title x --tokens-file f --priority high", `--priority "high" is not urgent, normal or low (see schoolbell notice send --help)`},
		{"notice retry", "give the notice's id, one argument; there are 0 (see schoolbell notice retry --help)"},
		{"failure", "failure needs a command: list, requeue (see schoolbell failure --help)"},
		{"failure requeue --yes", "name what to requeue: --school, --notice, --code, or several of them (see schoolbell failure requeue --help)"},
		{"failure list --limit 0", "--limit 0 is not 1 to 1000 (see schoolbell failure list --help)"},
		{"school", "school needs a command: list, show, put, pause, resume (see schoolbell school --help)"},
		{"school pause", "give the school's id, one argument; there are 0 (see schoolbell school pause --help)"},
		{"school put A --rest 5", `--rest "5" has no unit; write 5s (see schoolbell school put --help)`},
		{"school list --limit 0", "--limit 0 is not 1 to 1000 (see schoolbell school list --help)"},
		{"notice send --title x --tokens-file f", "--school is missing (see schoolbell notice send --help)"},
		{"notice send --school A --tokens-file f", "--title is missing (see schoolbell notice send --help)"},
		{"notice send --school A --title x", "--tokens-file or --topic is missing (see schoolbell notice send --help)"},
		{"notice send --school A --title x --tokens-file f --delivery once", `--delivery "once" is not at_least_once or at_most_once (see schoolbell notice send --help)`},
		{"notice send --school A --title x --tokens-file f --data k", "--data needs key=value (see schoolbell notice send --help)"},
		{"notice send --school A --title x --tokens-file f --data k=1 --data k=2", `--data names "k" twice (see schoolbell notice send --help)`},
		{"notice send --school A --title x --tokens-file f --expires-at tomorrow", `--expires-at "tomorrow" is not a time such as 2030-03-04T08:00:00+09:00 (see schoolbell notice send --help)`},
		{"notice list --server 127.0.0.1:8080", `--server "127.0.0.1:8080" has no scheme; write http://127.0.0.1:8080 (see schoolbell notice list --help)`},
		{"notice show 7 --server localhost:8080", `--server "localhost:8080" has no scheme; write http://localhost:8080 (see schoolbell notice show --help)`},
		{"notice send --school A --title x --tokens-file f --server ftp://h", `--server "ftp://h" is not an address such as http://127.0.0.1:8080 (see schoolbell notice send --help)`},
		{"notice list --limit many", `--limit "many" is not a whole number (see schoolbell notice list --help)`},
		{"demo --kill-every 3", `--kill-every "3" has no unit; write 3s (see schoolbell demo --help)`},
		{"demo --rest long", `--rest "long" is not a duration such as 3s or 1m30s (see schoolbell demo --help)`},
		{"demo --replicas x", `--replicas "x" is not a whole number (see schoolbell demo --help)`},
		{"serve --print-config=x", `--print-config "x" is not true or false (see schoolbell serve --help)`},
		{"migrate up", "database_url is empty; give --database-url or SCHOOLBELL_DATABASE_URL, e.g. postgres://user:password@host:5432/schoolbell (see schoolbell migrate up --help)"},
		{"migrate down --database-url postgres://h/d", "migrate down needs --to with the last version to keep; 0 drops everything (see schoolbell migrate down --help)"},
	} {
		t.Run(tc.args, func(t *testing.T) {
			t.Parallel()
			newStage().failed(t, exitUsage, tc.want, strings.Fields(tc.args)...)
		})
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	s := newStage()
	require.Equal(t, exitDone, s.run("version"))
	require.Equal(t, "schoolbell v1.2.3\ncommit abc\ngo1.26\n", s.out.String())
	require.Equal(t, exitDone, s.run("--version"))
	require.Equal(t, "schoolbell v1.2.3\ncommit abc\ngo1.26\n", s.out.String())
	for _, args := range [][]string{{"version", "--output", "json"}, {"--version", "--output", "json"}} {
		require.Equal(t, exitDone, s.run(args...))
		require.JSONEq(t, `{"version":"v1.2.3","commit":"abc","go":"go1.26"}`, s.out.String())
	}
	require.Equal(t, exitDone, s.run())
	require.Contains(t, s.out.String(), "Available Commands:")
}

func TestServe(t *testing.T) {
	t.Parallel()
	s := newStage()
	s.files["schoolbell.yaml"] = "quota: {limit: 50, rest: 1s}\nhttp: {admin_key: k}\nlog: {level: debug}\n"
	s.environ = []string{"SCHOOLBELL_DATABASE_URL=postgres://u:pa55@h/d", "SCHOOLBELL_REDIS_URL=redis://h", "SCHOOLBELL_QUOTA_REST=2s"}
	var got settings.Settings
	s.replica.serve = func(_ context.Context, st settings.Settings, log *slog.Logger, b build) error {
		got = st
		log.Debug("up", "event", "started", "url", st.DatabaseURL)
		require.Equal(t, "v1.2.3", b.Version)
		return nil
	}
	require.Equal(t, exitDone, s.run("serve", "--quota-limit", "60", "--http-listen=127.0.0.1:0"), s.err.String())
	require.Equal(t, 60, got.Quota.Limit)
	require.Equal(t, 2*time.Second, got.Quota.Rest)
	require.Equal(t, "host-1a2b", got.InstanceID)
	require.Equal(t, "127.0.0.1:0", got.HTTP.Listen)
	var line map[string]any // not a terminal: json
	require.NoError(t, json.Unmarshal(s.err.Bytes(), &line), s.err.String())
	require.Equal(t, "(hidden)", line["url"])

	s.terminal = true
	require.Equal(t, exitDone, s.run("serve"))
	require.Contains(t, s.err.String(), "level=DEBUG msg=up event=started url=(hidden)\n")

	require.Equal(t, exitDone, s.run("serve", "--print-config"))
	require.Contains(t, s.out.String(), "limit: 50 # schoolbell.yaml:1\n")
	require.Contains(t, s.out.String(), "rest: 2s # SCHOOLBELL_QUOTA_REST\n")
	require.NotContains(t, s.out.String(), "pa55")

	require.Equal(t, exitDone, s.run("serve", "--print-config", "--output", "json"))
	require.NotContains(t, s.out.String(), "pa55")
	var printed struct {
		Settings struct{ Quota struct{ Limit int } }
		From     map[string]string
	}
	require.NoError(t, json.Unmarshal(s.out.Bytes(), &printed), s.out.String())
	require.Equal(t, 50, printed.Settings.Quota.Limit)
	require.Equal(t, "schoolbell.yaml:1", printed.From["quota.limit"])
}

func TestServeRefusals(t *testing.T) {
	t.Parallel()
	s := newStage() // its replica has no serve: reaching it would panic
	s.failed(t, exitUsage, "settings: --quota-limit: quota.limit: \"many\" is not a whole number; give 1 to 1000000", "serve", "--quota-limit", "many")
	s.failed(t, exitUsage, "settings: cannot read x.yaml: file does not exist; name an existing file with --config or leave --config out", "serve", "--config", "x.yaml")
	require.Equal(t, exitUsage, s.run("serve", "--redis-url", "redis://h"))
	require.Contains(t, s.err.String(), "schoolbell: settings: database_url: is empty, but redis.url is set (--redis-url); set both")
	require.Equal(t, 1, strings.Count(s.err.String(), "\n"))
}

// TestServeWithoutSettings is what a person tries first: it runs embedded, for
// this machine alone.
func TestServeWithoutSettings(t *testing.T) {
	t.Parallel()
	s := newStage()
	var got settings.Settings
	s.replica.serve = func(_ context.Context, st settings.Settings, _ *slog.Logger, _ build) error {
		got = st
		return nil
	}
	require.Equal(t, exitDone, s.run("serve"), s.err.String())
	require.True(t, got.Embedded())
	require.Equal(t, "127.0.0.1:8080", got.HTTP.Listen)
	require.Equal(t, settings.AuthNone, got.HTTP.Auth)
	require.Equal(t, []string{settings.KindLog}, got.SenderNames())
}

func TestExitCodeOfAReplica(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		err  error
		want int
	}{
		{"stopped", nil, exitDone},
		{"store away", fmt.Errorf("open store: %w", school.ErrUnavailable), exitUnreachable},
		{"refused connection", fmt.Errorf("redis: %w", &net.OpError{Op: "dial", Err: errors.New("connection refused")}), exitUnreachable},
		{"own port taken", fmt.Errorf("http.listen: %w", &net.OpError{Op: "listen", Err: errors.New("address already in use")}), exitFailed},
		{"signal while connecting", fmt.Errorf("redis: %w", &net.OpError{Op: "dial", Err: context.Canceled}), exitFailed},
		{"login refused", fmt.Errorf("database_url: %w", node.ErrLogin), exitRefused},
		{"no database", fmt.Errorf("database_url: %w", node.ErrNoDatabase), exitNotFound},
		{"anything else", errors.New("two\nlines"), exitFailed},
	} {
		s := newStage()
		s.environ = []string{"SCHOOLBELL_DATABASE_URL=postgres://h/d", "SCHOOLBELL_REDIS_URL=redis://h", "SCHOOLBELL_ADMIN_KEY=k"}
		s.replica.serve = func(context.Context, settings.Settings, *slog.Logger, build) error { return tc.err }
		require.Equal(t, tc.want, s.run("serve"), tc.name)
		require.LessOrEqual(t, strings.Count(s.err.String(), "\n"), 1, tc.name)
	}
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	steps := []migration{{Version: 1, Name: "outbox", AppliedAt: &at}, {Version: 2, Name: "ledger"}}
	s := newStage()
	s.replica.migrateUp = func(_ context.Context, st settings.Settings) ([]migration, error) {
		require.Equal(t, "postgres://h/d", string(st.DatabaseURL))
		return steps[:1], nil
	}
	s.replica.migrateStatus = func(context.Context, settings.Settings) ([]migration, error) { return steps, nil }
	s.replica.migrateDown = func(_ context.Context, _ settings.Settings, to int64) ([]migration, error) {
		switch to {
		case 1:
			return nil, nil
		case 99:
			return nil, &node.VersionError{Wanted: 99, Current: 1}
		}
		return nil, fmt.Errorf("version %d: %w", to, school.ErrUnavailable)
	}

	require.Equal(t, exitDone, s.run("migrate", "up", "--database-url", "postgres://h/d"), s.err.String())
	require.Equal(t, "applied 1 outbox\n", s.out.String())

	s.environ = []string{"SCHOOLBELL_DATABASE_URL=postgres://h/d"}
	require.Equal(t, exitDone, s.run("migrate", "status"))
	require.Equal(t, "VERSION  NAME    APPLIED\n1        outbox  "+clock(&at)+"\n2        ledger  no\n", s.out.String())
	require.Equal(t, exitDone, s.run("migrate", "status", "--output", "json"))
	require.JSONEq(t, `{"steps":[{"version":1,"name":"outbox","applied_at":"2026-03-04T05:06:07Z"},{"version":2,"name":"ledger","applied_at":null}]}`, s.out.String())
	require.Equal(t, exitDone, s.run("migrate", "down", "--to", "1"))
	require.Equal(t, "the schema is at version 1 already\n", s.out.String())
	s.failed(t, exitUsage, "the schema is at version 1, so it cannot be taken back to 99; give 0 to 1", "migrate", "down", "--to", "99")
	s.failed(t, exitUnreachable, "version 0: unavailable", "migrate", "down", "--to", "0")
}

func TestHostNamesFitAnInstanceID(t *testing.T) {
	t.Parallel()
	require.Equal(t, "bell-1.school_a", cleanHost("bell-1.school_a"))
	require.Equal(t, "my-host--", cleanHost("my host/é"))
	require.Len(t, cleanHost(strings.Repeat("x", 300)), 100)
}
