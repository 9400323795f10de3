package redisrate

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/scripts"
	"schoolbell/sender"
	"schoolbell/sender/redisrate/ratetest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// timeLine is the one place in which a script reads the clock. Tests that need
// virtual time put a list in its place; that is the only difference to what
// runs in production.
const timeLine = "redis.call('TIME')"

// edit changes a script's text before it is run: a mutation.
type edit struct{ script, old, new string }

type server struct {
	client redis.UniversalClient
	serial atomic.Int64
}

func startServer(tb testing.TB) *server {
	r := localtest.RedisWith(tb, local.RedisConfig{Memory: true})
	c := redis.NewClient(&redis.Options{Addr: r.Addr()})
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return &server{client: c}
}

// startMemory is the Redis that runs inside the process where there is no other.
func startMemory(tb testing.TB) *server {
	m := miniredis.NewMiniRedis()
	require.NoError(tb, m.Start())
	c := redis.NewClient(&redis.Options{Addr: m.Addr()})
	tb.Cleanup(func() {
		require.NoError(tb, c.Close())
		m.Close()
	})
	return &server{client: c}
}

// live is one sender in Redis, under a clock that the test sets.
type live struct {
	tb    testing.TB
	c     redis.UniversalClient
	r     *Rates
	name  string
	clock string
}

func (s *server) subject(tb testing.TB, edits ...edit) *live {
	keys, err := scripts.NewKeys("test")
	require.NoError(tb, err)
	r, err := New(s.client, keys, map[string]sender.Limit{})
	require.NoError(tb, err)
	name := fmt.Sprintf("s%d", s.serial.Add(1))
	l := &live{tb: tb, c: s.client, r: r, name: name, clock: "clock:{sender:" + name + "}"}
	for _, at := range []struct {
		script scripts.Script
		in     **redis.Script
	}{{scripts.Take(), &r.take}, {scripts.Report(), &r.report}, {scripts.Look(), &r.look}} {
		require.Equal(tb, 1, strings.Count(at.script.Source, timeLine))
		src := strings.Replace(at.script.Source, timeLine, "redis.call('LRANGE', '"+l.clock+"', 0, 1)", 1)
		for _, e := range edits {
			if e.script == at.script.Name || e.script == "rate" {
				require.Equal(tb, 1, strings.Count(src, e.old), "%s holds what is to be mutated once: %s", at.script.Name, e.old)
				src = strings.Replace(src, e.old, e.new, 1)
			}
		}
		*at.in = redis.NewScript(src)
	}
	l.At(ratetest.Epoch)
	return l
}

func (l *live) At(ms int64) {
	p := l.c.Pipeline()
	p.Del(context.Background(), l.clock)
	p.RPush(context.Background(), l.clock, ms/1000, ms%1000*1000)
	_, err := p.Exec(context.Background())
	require.NoError(l.tb, err)
}

func (l *live) Limit(limit sender.Limit) { l.r.limits = map[string]sender.Limit{l.name: limit} }

func (l *live) Take(t sender.Take) sender.Ticket {
	t.Sender = l.name
	k, err := l.r.Take(context.Background(), t)
	require.NoError(l.tb, err)
	return k
}

func (l *live) Report(r sender.Report) sender.Reported {
	r.Sender = l.name
	out, err := l.r.Report(context.Background(), r)
	require.NoError(l.tb, err)
	return out
}

func (l *live) Look(k sender.Look) sender.RateState {
	k.Sender = l.name
	s, err := l.r.Look(context.Background(), k)
	require.NoError(l.tb, err)
	return s
}

func (l *live) Forget() {
	require.NoError(l.tb, l.c.Del(context.Background(), l.r.keys.Rate(l.name)).Err())
}

func TestCases(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	ratetest.RunCases(t, func(tb testing.TB) ratetest.Subject { return srv.subject(tb) })
}

type drawn struct{ t *rapid.T }

func (d drawn) Intn(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "n") }

func TestLuaIsTheModel(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	rapid.Check(t, func(rt *rapid.T) {
		if err := ratetest.Compare(drawn{rt}, srv.subject(t), 60); err != nil {
			rt.Fatal(err)
		}
	})
	for range 3 { // long, and each time another
		seed := rand.Uint64()
		require.NoError(t, ratetest.Compare(ratetest.Seeded(seed), srv.subject(t), 1500), "seed %d", seed)
	}
}

func TestTheRedisInTheProcessIsTheModel(t *testing.T) {
	t.Parallel()
	srv := startMemory(t)
	for seed := range uint64(4) {
		require.NoError(t, ratetest.Compare(ratetest.Seeded(seed), srv.subject(t), 250), "seed %d", seed)
	}
}

// TestBrokenRulesAreCaught takes one part away at a time: without it the Lua is not
// the model any more, which the cases hold to what was promised.
func TestBrokenRulesAreCaught(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	for name, e := range map[string]edit{
		"a place never ends":           {"rate", "local function lapsed(p) return s.minted", "local function lapsed(p) return -s.minted"},
		"it holds what it likes":       {"rate", "math.max(s.sold, s.minted - rate(now) * HOLDS)", "s.sold"},
		"it begins full":               {"rate", "got.clock_ms, got.epoch, got.level = now, now, 1000", "got.clock_ms, got.epoch, got.level, got.sold = now, now, 1000, -9e12"},
		"no ramp":                      {"rate", "r = cold() + math.floor((limit - cold()) * s.warm_ms / ramp)", "r = limit"},
		"the clock may not go back":    {"rate", "  s.clock_ms = math.min(s.clock_ms, now)\n", ""},
		"a probe waits for ever":       {"rate", "  s.probe_ms = math.min(s.probe_ms, now + s.probe_in_ms)\n", ""},
		"a lowered rate stays so":      {"rate", "return math.min(1000, s.level + math.floor(past * 1000 / RECOVER))", "return s.level"},
		"the last comes first":         {"take", "s.line = s.line .. school .. ',' .. str(want) .. ',' .. str(ends) .. ' '", "s.line = school .. ',' .. str(want) .. ',' .. str(ends) .. ' ' .. s.line"},
		"a repeat takes again":         {"take", "if s.stopped_ms == 0 or s.probe_id == id then", "if false then"},
		"a stopped sender's repeat":    {"take", "if s.stopped_ms == 0 or s.probe_id == id then", "if true then"},
		"everybody probes":             {"take", "wait <= 0 and s.prober_until_ms > now and s.prober ~= school", "false"},
		"a probe is a batch":           {"take", "return granted(1, 1)", "return granted(want, 1)"},
		"a probe costs nothing":        {"take", "s.sold = from + UNIT\n", ""},
		"a lost stop is forgotten":     {"rate", "if not fresh or code == '' then return end", "if true then return end"},
		"a place is for anything":      {"take", "local size = math.min(want, p.n)", "local size = want"},
		"every refusal stops":          {"report", "s.stopped_ms == 0 and (epoch == s.epoch or fresh)", "s.stopped_ms == 0"},
		"every refusal lengthens":      {"report", "elseif probe then\n    stop_for(math.min(s.pause_ms * 2, PROBE_MOST))\n    s.stopped_code", "elseif true then\n    stop_for(math.min(s.pause_ms * 2, PROBE_MOST))\n    s.stopped_code"},
		"any answer resumes":           {"report", "local probe = s.stopped_ms > 0 and s.probe_id == id", "local probe = s.stopped_ms > 0 and (s.probe_id == id or heard == 'answered')"},
		"a probe's silence is nothing": {"report", "if probe then -- nobody", "if false then -- nobody"},
		"what was on the way counts":   {"report", "level(now) < 1000 and now - age <= s.lowered_ms", "false"},
		"a lowering twice":             {"report", "if s.lowered_by == id then", "if false then"},
		"the receiver's wish":          {"report", "s.probe_in_ms = math.max(pause, wish)", "s.probe_in_ms = pause"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(40) {
				if err := ratetest.Compare(ratetest.Seeded(seed), srv.subject(t, e), 300); err != nil {
					return
				}
			}
			t.Fatal("nobody notices")
		})
	}
}

// TestClusterAndLoss: the key stands on one slot, and a Redis that forgot its
// scripts and its data goes on.
func TestClusterAndLoss(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cluster, err := local.StartCluster(ctx, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	keys, err := scripts.NewKeys("test")
	require.NoError(t, err)
	limit := sender.Limit{PerMinute: 6_000_000, Batch: 200}
	r, err := New(c, keys, map[string]sender.Limit{"a": limit, "b": limit, "c": limit})
	require.NoError(t, err)
	for round := range 2 {
		for _, name := range []string{"a", "b", "c"} {
			take := sender.Take{Sender: name, School: "A", ID: fmt.Sprint(name, round), Want: 200, Longest: time.Second}
			require.Eventually(t, func() bool {
				k, err := r.Take(ctx, take)
				require.NoError(t, err)
				return k.Kind == sender.Taken
			}, 20*time.Second, time.Millisecond)
		}
		require.NoError(t, c.ForEachMaster(ctx, func(ctx context.Context, m *redis.Client) error {
			if err := m.ScriptFlush(ctx).Err(); err != nil {
				return err
			}
			return m.FlushAll(ctx).Err()
		}))
	}
}

// TestPeopleReadIt: the hash says in words what a person would ask (R40).
func TestPeopleReadIt(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	l := srv.subject(t)
	l.Limit(sender.Limit{PerMinute: 6000, Batch: 200})
	l.Take(sender.Take{School: "A", ID: "1", Want: 100, Longest: time.Second})
	l.Take(sender.Take{School: "B", ID: "2", Want: 100, Longest: time.Second})
	l.At(ratetest.Epoch + 1000)
	k := l.Take(sender.Take{School: "A", ID: "3", Want: 100, Longest: time.Second})
	l.Report(sender.Report{Ticket: k.ID, Epoch: k.Epoch, Heard: sender.HeardThrottled, Code: "QUOTA_EXCEEDED"})
	l.Report(sender.Report{Ticket: k.ID, Epoch: k.Epoch, Heard: sender.HeardRefusal, Code: "UNAUTHENTICATED"})
	got, err := l.c.HGetAll(context.Background(), l.r.keys.Rate(l.name)).Result()
	require.NoError(t, err)
	for field, want := range map[string]string{
		"state": "stopped", "stopped_code": "UNAUTHENTICATED", "stopped_at": "2027-01-15T08:00:01Z", "next_probe_at": "2027-01-15T08:00:06Z",
		"limit_per_minute": "6000", "now_per_minute": "3000", "used_per_minute": "600", "waiting": "1", "tokens": "0",
		"lowered_code": "QUOTA_EXCEEDED", "lowered_until": "2027-01-15T08:01:01Z",
	} {
		require.Equal(t, want, got[field], field)
	}
	require.True(t, strings.HasPrefix(got["line"], "B,100,"), got["line"])
}

func TestWhatCannotBe(t *testing.T) {
	t.Parallel()
	keys, err := scripts.NewKeys("test")
	require.NoError(t, err)
	for _, l := range []sender.Limit{{PerMinute: -1, Batch: 1}, {PerMinute: 100_000_001, Batch: 1}, {Batch: 0}, {Batch: 1, Ramp: -1}} {
		_, err := New(nil, keys, map[string]sender.Limit{"x": l})
		require.ErrorContains(t, err, "rate of sender x")
	}
	srv := startServer(t)
	l := srv.subject(t)
	l.Limit(sender.Limit{PerMinute: 60, Batch: 200})
	ctx := context.Background()
	for _, bad := range []sender.Take{
		{Sender: l.name, School: "A", ID: "a b", Want: 1}, {Sender: l.name, School: "A,1,2", ID: "x", Want: 1},
		{Sender: l.name, School: "A", ID: "x", Want: 0}, {Sender: l.name, School: "A", ID: "x", Want: 201},
		{Sender: "other", School: "A", ID: "x", Want: 1}, {Sender: l.name, School: "A", ID: "x", Want: 1, Believed: "no code"},
	} {
		_, err := l.r.Take(ctx, bad)
		require.Error(t, err, "%+v", bad)
	}
	exists, err := l.c.Exists(ctx, l.r.keys.Rate(l.name)).Result()
	require.NoError(t, err)
	require.Zero(t, exists, "nothing was written")
}

// BenchmarkTake is what each batch pays: with nobody in the line, and with many.
func BenchmarkTake(b *testing.B) {
	srv := startServer(b)
	for _, waiting := range []int{0, 1000} {
		b.Run(fmt.Sprint(waiting, " waiting"), func(b *testing.B) {
			l := srv.subject(b)
			l.Limit(sender.Limit{PerMinute: 60, Batch: 200})
			for i := range waiting {
				l.Take(sender.Take{School: fmt.Sprint("school-", i), ID: fmt.Sprint("w", i), Want: 200, Longest: time.Second})
			}
			if waiting == 0 {
				l.Limit(sender.Limit{Batch: 200})
			}
			for i := 0; b.Loop(); i++ {
				l.Take(sender.Take{School: fmt.Sprint("school-", i%max(1, waiting)), ID: fmt.Sprint("b", i), Want: 200, Longest: time.Second})
			}
		})
	}
}
