package demo

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/coordinator"
	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node"
	"schoolbell/school"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

func TestMain(m *testing.M) {
	node.LogRedis(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// small is a production of a few seconds: three cycles a school. It is busy enough
// alone, so the tests come one after the other.
func small() Config {
	return Config{
		Schools: 4, Recipients: 480, Replicas: 3, Limit: 40, Rest: 700 * time.Millisecond, Listen: "127.0.0.1:0",
		Latency: simulator.Latency{Base: 20 * time.Millisecond, Spread: 10 * time.Millisecond},
	}
}

func judged(t *testing.T, cfg Config) verdict.Verdict {
	t.Helper()
	v, err := Run(t.Context(), cfg)
	require.NoError(t, err)
	return v
}

func TestEveryPromiseIsKept(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	cfg := small()
	var last Progress
	cfg.Watch = func(p Progress) { last = p }
	v := judged(t, cfg)
	require.Empty(t, v.Violations)
	require.True(t, v.OK)
	require.Equal(t, []int{480, 480, 0, 0, 0}, []int{v.Accepted, v.Arrived, v.Lost, v.Repeated, v.Rule.Violations})
	require.Equal(t, 40, v.Rule.WorstCount)
	require.Equal(t, 8, v.Rule.Cycles, "two rests between three cycles of four schools")
	require.GreaterOrEqual(t, *v.Rule.ShortestRestMS, int64(700))
	require.Equal(t, 3, v.Replicas)
	require.Equal(t, 480, last.Planned)
	require.Equal(t, 3, last.Replicas)
	left, err := os.ReadDir(os.TempDir())
	require.NoError(t, err)
	require.Empty(t, left, "temporary files are removed")
}

// TestInterleaving22Kills kills a replica each second: what is repeated is at most what was in
// its hands, and everything else is kept.
func TestInterleaving22Kills(t *testing.T) {
	cfg := small()
	cfg.KillEvery, cfg.Latency.Base = time.Second, 100*time.Millisecond
	v := judged(t, cfg)
	require.Empty(t, v.Violations)
	kills := 0
	for _, f := range v.Faults {
		if f.Kind == verdict.Stall { // the machine is busy
			continue
		}
		kills++
		require.Equal(t, verdict.Kill, f.Kind)
		require.Contains(t, f.Target, "replica-")
	}
	require.Positive(t, kills)
	require.LessOrEqual(t, v.Repeated, v.RepeatBound)
	require.Equal(t, 480, v.Arrived)
}

// generous is an arbiter that grants beyond the rule.
type generous struct{ coordinator.Budget }

func (g generous) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	r.Rule.Limit *= 2
	return g.Budget.Reserve(ctx, r)
}

func (g generous) Reconcile(ctx context.Context, id string, l school.Ledger, r school.Rule) error {
	r.Limit *= 2
	return g.Budget.Reconcile(ctx, id, l, r)
}

// hasty is an arbiter that lets nobody rest long enough.
type hasty struct{ coordinator.Budget }

func (h hasty) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	r.Rule.Rest = time.Millisecond
	return h.Budget.Reserve(ctx, r)
}

func (h hasty) Reconcile(ctx context.Context, id string, l school.Ledger, r school.Rule) error {
	r.Rest = time.Millisecond
	return h.Budget.Reconcile(ctx, id, l, r)
}

// TestABrokenRuleIsSeen breaks the rule in the arbiter, which every replica
// believes: only the receiver can know, and the verdict says so.
func TestABrokenRuleIsSeen(t *testing.T) {
	for name, tc := range map[string]struct {
		budget func(coordinator.Budget) coordinator.Budget
		rest   time.Duration
		seen   func(verdict.Verdict) bool
	}{
		"too many": {func(b coordinator.Budget) coordinator.Budget { return generous{b} }, 700 * time.Millisecond,
			func(v verdict.Verdict) bool { return v.Rule.WorstCount == 80 }},
		"too soon": {func(b coordinator.Budget) coordinator.Budget { return hasty{b} }, 10 * time.Second,
			func(v verdict.Verdict) bool { return *v.Rule.ShortestRestMS < 10_000 }},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := small()
			cfg.Budget, cfg.Recipients, cfg.Rest = tc.budget, 320, tc.rest
			v := judged(t, cfg)
			require.False(t, v.OK)
			require.Positive(t, v.Rule.Violations)
			require.True(t, tc.seen(v), "%+v", v.Rule)
			require.NotEmpty(t, v.Violations)
			require.Zero(t, v.Lost)
		})
	}
}

// TestInterrupted ends a run in the middle: the replicas stop gracefully, and
// what was kept so far is judged.
func TestInterrupted(t *testing.T) {
	cfg := small()
	cfg.Rest = time.Hour
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	cfg.Watch = func(p Progress) {
		if p.Schools[api.Resting] == 4 && p.Accepted == 480 {
			stop()
		}
	}
	v, err := Run(ctx, cfg)
	require.NoError(t, err)
	require.Empty(t, v.Violations)
	require.True(t, v.OK)
	require.Equal(t, []int{480, 160, 320}, []int{v.Accepted, v.Arrived, v.Waiting})

	// Before anything began it ends as well.
	v, err = Run(ctx, cfg)
	require.NoError(t, err)
	require.Zero(t, v.Accepted)
}

// TestARunThatTakesTooLongIsEnded says so, and judges what was kept.
func TestARunThatTakesTooLongIsEnded(t *testing.T) {
	cfg := small()
	cfg.Rest, cfg.GiveUpAfter = time.Hour, 3*time.Second
	v, err := Run(t.Context(), cfg)
	var overdue *OverdueError
	require.ErrorAs(t, err, &overdue)
	require.ErrorContains(t, err, "ended after 3s")
	require.Empty(t, v.Violations)
	require.Positive(t, v.Waiting)
	require.Equal(t, v.Accepted, v.Arrived+v.Waiting)
}

// TestAVisitor hands in a notice while the demonstration runs: it is sent, and
// judged with the rest.
func TestAVisitor(t *testing.T) {
	cfg := small()
	var once sync.Once
	var visit error
	cfg.Watch = func(p Progress) {
		once.Do(func() {
			c := &api.Client{BaseURL: "http://" + p.Address, HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
			_, visit = c.Send(t.Context(), api.NoticeRequest{School: "visitor", Title: "Hello", Recipients: []api.Recipient{{Token: "mine"}}}, "")
		})
	}
	v := judged(t, cfg)
	require.NoError(t, visit)
	require.Empty(t, v.Violations)
	require.Equal(t, 481, v.Accepted)
	require.Equal(t, 481, v.Arrived)
	require.Equal(t, 5, v.Schools)
}

// TestDuration goes on handing in notices until the time is over.
func TestDuration(t *testing.T) {
	cfg := small()
	cfg.Recipients, cfg.Duration = 40, 4*time.Second
	v := judged(t, cfg)
	require.Empty(t, v.Violations)
	require.Greater(t, v.Arrived, 160, "more than a cycle of each school")
	require.Equal(t, v.Accepted, v.Arrived)
	require.Greater(t, v.Seconds, 3.5)
}

// TestAddressTaken falls back to a free port and says so.
func TestAddressTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, taken.Close()) }()
	_, port, err := net.SplitHostPort(taken.Addr().String())
	require.NoError(t, err)
	cfg := small()
	cfg.Recipients, cfg.Listen = 8, ":"+port
	var last Progress
	cfg.Watch = func(p Progress) { last = p }
	require.True(t, judged(t, cfg).OK)
	require.True(t, last.Moved)
	require.NotEqual(t, taken.Addr().String(), last.Address)
	host, _, err := net.SplitHostPort(last.Address)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1", host, "an address without a host is this machine")
}

func TestWhatCannotBeRun(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*Config){
		"no school": func(c *Config) { c.Schools = 0 }, "fewer recipients than schools": func(c *Config) { c.Recipients = 3 },
		"no replica": func(c *Config) { c.Replicas = 0 }, "no limit": func(c *Config) { c.Limit = 0 }, "no rest": func(c *Config) { c.Rest = 0 },
		"kills without end": func(c *Config) { c.KillEvery = time.Millisecond }, "negative duration": func(c *Config) { c.Duration = -1 }, "given up at once": func(c *Config) { c.GiveUpAfter = -1 },
		"no address": func(c *Config) { c.Listen = "x" }, "an address for everybody": func(c *Config) { c.Listen = "0.0.0.0:0" },
	} {
		cfg := small()
		spoil(&cfg)
		_, err := Run(t.Context(), cfg)
		_, ok := errors.AsType[*ConfigError](err)
		require.True(t, ok, "%s: %v", name, err)
	}
}
