package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/settings"
	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/sender/simulator"
)

const testTimeout = 60 * time.Second

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// events keeps what a replica logs, in order.
type events struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (e *events) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.text.Write(p)
}

func (e *events) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(e, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// names are the events so far, each once, in the order of their first time.
func (e *events) names(t *testing.T) []string {
	t.Helper()
	var all []string
	seen := map[string]bool{}
	for _, line := range e.lines(t) {
		if name, _ := line["event"].(string); !seen[name] {
			seen[name] = true
			all = append(all, name)
		}
	}
	return all
}

func (e *events) lines(t *testing.T) []map[string]any {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []map[string]any
	for line := range bytes.Lines(e.text.Bytes()) {
		var l map[string]any
		require.NoError(t, json.Unmarshal(line, &l))
		all = append(all, l)
	}
	return all
}

// servers are a database with the schema, a Redis, and a receiver.
type servers struct {
	database string
	redis    *local.Redis
	receiver *simulator.Engine
	relay    string
}

func startServers(t *testing.T) servers {
	t.Helper()
	s := servers{
		database: localtest.PreparedDatabase(t, "schoolbell", func(ctx context.Context, url string) error {
			_, err := store.Migrate(ctx, url)
			return err
		}),
		redis: localtest.Redis(t),
	}
	var err error
	s.receiver, err = simulator.New(simulator.Config{Keep: true, Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 20 * time.Millisecond}}})
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := simulator.NewServer(s.receiver, nil)
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(l) }()
	t.Cleanup(func() {
		require.NoError(t, s.receiver.Close())
		require.NoError(t, server.Close())
		<-served
	})
	s.relay = "http://" + l.Addr().String() + "/relay"
	return s
}

// settings of a replica on the servers, with short times.
func (s servers) settings(instance string) settings.Settings {
	c := settings.Default()
	c.InstanceID, c.HTTP.Listen = instance, "127.0.0.1:0"
	c.DatabaseURL, c.Redis.URL = settings.Secret(s.database), settings.Secret(s.redis.URL())
	c.Quota.Limit, c.Quota.Rest = 500, time.Second
	c.Dispatch.ClaimTimeout, c.Dispatch.FirstTick, c.Dispatch.Tick = 2*time.Second, time.Second, time.Second
	c.Lock.ETC, c.Lock.ETCMax = 6*time.Second, 6*time.Second
	c.Retry.Base = time.Second
	c.StopDelay, c.StopTimeout = 0, 20*time.Second
	relay := settings.NewSender(settings.KindRelay)
	relay.URL = settings.Secret(s.relay)
	relay.CallTimeout, relay.ReadTimeout, relay.ConnectTimeout = 3*time.Second, 3*time.Second, 3*time.Second
	c.Senders = map[string]settings.Sender{settings.KindRelay: relay}
	c.DefaultSender = settings.KindRelay
	return c
}

// running is a replica that runs.
type running struct {
	*Node
	client *api.Client
	stop   context.CancelFunc
	ended  chan error
}

func run(t *testing.T, s settings.Settings, d Deps) *running {
	t.Helper()
	require.NoError(t, s.Validate())
	if d.Log == nil {
		d.Log = discard()
	}
	n, err := New(t.Context(), s, d)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	r := &running{Node: n, client: client(n.Addr()), stop: stop, ended: make(chan error, 1)}
	go func() { r.ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		select {
		case <-r.ended:
		case <-time.After(testTimeout):
			t.Error("a replica did not stop")
		}
	})
	return r
}

func client(addr string) *api.Client {
	return &api.Client{BaseURL: "http://" + addr, HTTP: &http.Client{Timeout: testTimeout, Transport: &http.Transport{DisableKeepAlives: true}}}
}

// end stops the replica and returns what Run said.
func (r *running) end(t *testing.T) error {
	t.Helper()
	r.stop()
	return r.wait(t)
}

func (r *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.ended:
		r.ended <- err // for the cleanup
		return err
	case <-time.After(testTimeout):
		t.Fatal("a replica did not stop")
		return nil
	}
}

func notice(school string, n int) api.NoticeRequest {
	r := api.NoticeRequest{School: school, Title: "t", Body: "b"}
	for i := range n {
		r.Recipients = append(r.Recipients, api.Recipient{Token: fmt.Sprintf("device-%s-%d", school, i)})
	}
	return r
}

// eventually polls a condition.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(testTimeout); !cond(); {
		if time.Now().After(deadline) {
			t.Fatal("did not happen: " + what)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("did not happen: " + what)
		}
	}
}

// nothingOpen checks that no connection to the servers is left.
func (s servers) nothingOpen(t *testing.T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	eventually(t, "the database's sessions are closed", func() bool {
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`).Scan(&n))
		return n == 0
	})
	c := redis.NewClient(&redis.Options{Addr: s.redis.Addr()})
	defer func() { require.NoError(t, c.Close()) }()
	eventually(t, "Redis's connections are closed", func() bool {
		list, err := c.ClientList(t.Context()).Result()
		require.NoError(t, err)
		return bytes.Count([]byte(list), []byte("\n")) == 1 // this one
	})
}

// TestNewFailsCleanly lets the start fail at each of its steps: the error says
// at which, holds no password, and what was opened is closed again.
func TestNewFailsCleanly(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, taken.Close()) })
	empty := localtest.Database(t)
	for _, tc := range []struct {
		name  string
		spoil func(*settings.Settings)
		want  string
		is    error
	}{
		{"port taken", func(s *settings.Settings) { s.HTTP.Listen = taken.Addr().String() }, "http.listen: another program listens on " + taken.Addr().String() + "; give another address (--http-listen, SCHOOLBELL_HTTP_LISTEN) or stop that program", syscall.EADDRINUSE},
		{"prefix", func(s *settings.Settings) { s.Redis.Prefix = "{a}" }, "redis prefix", nil},
		{"half embedded", func(s *settings.Settings) { s.Redis.URL = "" }, "go together", nil},
		{"redis address", func(s *settings.Settings) { s.Redis.URL = "redis://:pa55@127.0.0.1:1/0?frob=1" }, "redis.url", nil},
		{"database away", func(s *settings.Settings) { s.DatabaseURL = "postgres://u:pa55@127.0.0.1:1/d" }, "database_url: no database server answers (dial tcp 127.0.0.1:1: connect: connection refused); is PostgreSQL running there", school.ErrUnavailable},
		{"no database", func(s *settings.Settings) {
			s.DatabaseURL = settings.Secret(strings.Replace(string(s.DatabaseURL), "?", "_not?", 1))
		}, "_not\"; make it (createdb ", ErrNoDatabase},
		{"no credentials", func(s *settings.Settings) {
			s.Senders = map[string]settings.Sender{"main": {Kind: settings.KindFCM, CredentialsFile: "none.json", InFlight: 1}}
		}, "senders.main.credentials_file: there is no file none.json; give the path of a service account's key (JSON), which the Firebase console makes", fs.ErrNotExist},
		{"no list of devices", func(s *settings.Settings) {
			relay := s.Senders[settings.KindRelay]
			relay.OnlyTokensFile = "none.txt"
			s.Senders = map[string]settings.Sender{settings.KindRelay: relay}
		}, "senders.relay.only_tokens_file: there is no file none.txt; write one, a token a line (an empty one sends to nobody)", fs.ErrNotExist},
		{"no schema", func(s *settings.Settings) { s.DatabaseURL = settings.Secret(empty) }, "schoolbell migrate up", store.ErrSchemaOld},
		{"sender", func(s *settings.Settings) {
			relay := s.Senders[settings.KindRelay]
			relay.URL = "ftp://x"
			s.Senders = map[string]settings.Sender{settings.KindRelay: relay}
		}, "relay relay: url", nil},
		{"no such kind", func(s *settings.Settings) {
			s.Senders = map[string]settings.Sender{"x": {Kind: "pigeon", InFlight: 1}}
		}, "sender x", nil},
		{"default sender", func(s *settings.Settings) { s.DefaultSender = "nobody" }, `"nobody"`, nil},
		{"schedule", func(s *settings.Settings) { s.Sweep.Cron = "now" }, "sweep.cron", nil},
		{"rule", func(s *settings.Settings) { s.Quota.Headroom = s.Quota.Limit }, "headroom", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := srv.settings("replica")
			free, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			require.NoError(t, free.Close())
			s.HTTP.Listen = free.Addr().String()
			tc.spoil(&s)
			n, err := New(t.Context(), s, Deps{Log: discard()})
			require.Nil(t, n)
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), "pa55")
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			if s.HTTP.Listen == free.Addr().String() {
				again, err := net.Listen("tcp", s.HTTP.Listen)
				require.NoError(t, err, "the port was given back")
				require.NoError(t, again.Close())
			}
			srv.nothingOpen(t)
		})
	}
	_, err = New(t.Context(), srv.settings("replica"), Deps{})
	require.ErrorContains(t, err, "no logger")
}

// TestStop goes through a graceful stop (R15): not ready but accepting first;
// then no new batch, what is in flight is recorded, and nothing is left behind
// in Redis, in the database or here.
func TestStop(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	s := srv.settings("one")
	s.StopDelay = time.Second
	var log events
	one := run(t, s, Deps{Log: log.logger()})
	ready, err := one.client.Ready(t.Context())
	require.NoError(t, err)
	require.True(t, ready.Ready)
	_, err = one.client.Send(t.Context(), notice("A", 400), "")
	require.NoError(t, err)
	eventually(t, "something arrives", func() bool { return srv.receiver.Counts().Arrivals > 0 })

	one.stop()
	eventually(t, "not ready", func() bool {
		ready, err := one.client.Ready(t.Context())
		require.NoError(t, err, "it still answers")
		return !ready.Ready && ready.Draining
	})
	late, err := one.client.Send(t.Context(), notice("B", 10), "")
	require.NoError(t, err, "and it still accepts")
	require.NoError(t, one.wait(t))

	_, err = one.client.Ready(t.Context())
	require.Error(t, err, "the address is given up")
	srv.nothingOpen(t)
	c := redis.NewClient(&redis.Options{Addr: srv.redis.Addr()})
	defer func() { require.NoError(t, c.Close()) }()
	keys, err := c.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	for _, k := range keys {
		require.NotContains(t, k, ":lock", "locks are released")
		require.NotContains(t, k, ":replica:", "it has left the roster")
	}
	require.Zero(t, srv.receiver.Counts().InFlight)
	names := log.names(t)
	require.Contains(t, names, "replica_started")
	require.Equal(t, "replica_stopped", names[len(names)-1])
	stopping := false
	for _, line := range log.lines(t) {
		switch line["event"] {
		case "replica_stopping":
			stopping = true
		case "batch_recorded":
			require.Zero(t, line["retry"], "what was in flight has its answer")
		case "turn_failed", "record_failed":
			require.False(t, stopping, "%v", line)
		}
	}

	// The next replica goes on with what the last one accepted.
	two := run(t, srv.settings("two"), Deps{})
	eventually(t, "everything is sent", func() bool {
		n, err := two.client.Notice(t.Context(), late.ID)
		require.NoError(t, err)
		return n.Success == 10 && srv.receiver.Counts().Distinct == 410
	})
	require.NoError(t, two.end(t))
	require.Zero(t, srv.receiver.Counts().Repeated)
}

// TestRunEndsWithAPart: a part that cannot be done without takes the replica
// with it, and the error says which.
func TestRunEndsWithAPart(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	one := run(t, srv.settings("one"), Deps{})
	eventually(t, "ready", func() bool { r, err := one.client.Ready(t.Context()); return err == nil && r.Ready })
	require.NoError(t, one.listener.Close())
	require.ErrorIs(t, one.wait(t), net.ErrClosed)
	srv.nothingOpen(t)
}
