package redisquota

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/school"
	"schoolbell/school/quota/quotatest"
	"schoolbell/scripts"
)

var rule = school.Rule{Limit: 5000, Rest: 180 * time.Second, Version: 1}

func reservation(batch string, want int) school.Reservation {
	return school.Reservation{Acquisition: "acq-1", Fence: 7, Batch: batch, Want: want,
		Longest: 19 * time.Second, Margin: time.Second, Rule: rule}
}

// begun is a subject whose quota exists and whose lock (acq-1, 7) holds.
func begun(t *testing.T, s *server) *live {
	l := s.subject(t)
	l.Own("acq-1", 7)
	require.NoError(t, l.Reconcile(school.Ledger{}, rule))
	return l
}

func TestReserveAsksForTheLock(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	ctx := t.Context()
	for _, c := range []struct {
		name   string
		change func(l *live, lock string, r *school.Reservation)
		want   school.GrantKind
	}{
		{"held", func(*live, string, *school.Reservation) {}, school.Granted},
		{"no lock", func(l *live, lock string, _ *school.Reservation) { l.c.Del(ctx, lock) }, school.NotOwner},
		{"another's lock", func(l *live, lock string, _ *school.Reservation) { l.c.HSet(ctx, lock, "acq", "acq-2") }, school.NotOwner},
		{"a newer fence", func(l *live, lock string, _ *school.Reservation) { l.c.HSet(ctx, lock, "fence", 8) }, school.NotOwner},
		{"no fence bound", func(l *live, lock string, _ *school.Reservation) { l.c.HSet(ctx, lock, "fence", 0) }, school.NotOwner},
		{"lease ends within the batch", func(l *live, lock string, _ *school.Reservation) { l.c.PExpire(ctx, lock, 19*time.Second) }, school.LeaseShort},
		{"a lock without an end", func(l *live, lock string, _ *school.Reservation) { l.c.Persist(ctx, lock) }, school.LeaseShort},
		{"no quota", func(l *live, _ string, _ *school.Reservation) { l.Load(nil) }, school.NeedRebuild},
		{"no data epoch", func(l *live, _ string, _ *school.Reservation) { l.c.HDel(ctx, l.keys.Quota(l.id), "inc") }, school.NeedRebuild},
		{"a field lost", func(l *live, _ string, _ *school.Reservation) { l.c.HDel(ctx, l.keys.Quota(l.id), "settled") }, school.NeedRebuild},
		{"a field that is no number", func(l *live, _ string, _ *school.Reservation) {
			l.c.HSet(ctx, l.keys.Quota(l.id), "attempted", "many")
		}, school.NeedRebuild},
		{"less than the ledger", func(_ *live, _ string, r *school.Reservation) { r.Floor.Attempted = 1 }, school.NeedRebuild},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := begun(t, srv)
			r := reservation("b1", 200)
			c.change(l, l.keys.Lock(l.id), &r)
			before := l.hash()
			g, err := l.Reserve(r)
			require.NoError(t, err)
			require.Equal(t, c.want, g.Kind)
			if c.want != school.Granted {
				require.Equal(t, before, l.hash(), "a refusal writes nothing")
				require.NotEqual(t, "b1", l.c.HGet(ctx, l.keys.Lock(l.id), "batch").Val())
			} else {
				require.Equal(t, "b1", l.c.HGet(ctx, l.keys.Lock(l.id), "batch").Val())
			}
		})
	}
}

func TestRepeatedReserveIsAnsweredEvenOnAShortLease(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	first, err := l.Reserve(reservation("b1", 200))
	require.NoError(t, err)
	l.c.PExpire(t.Context(), l.keys.Lock(l.id), 5*time.Second)
	again, err := l.Reserve(reservation("b1", 200))
	require.NoError(t, err)
	require.Equal(t, first, again)
}

func TestReserveDoesNotTouchTheLease(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	ctx := t.Context()
	require.NoError(t, l.c.PExpire(ctx, l.keys.Lock(l.id), time.Hour).Err())
	before := l.c.PExpireTime(ctx, l.keys.Lock(l.id)).Val()
	_, err := l.Reserve(reservation("b1", 200))
	require.NoError(t, err)
	require.Equal(t, before, l.c.PExpireTime(ctx, l.keys.Lock(l.id)).Val())
}

func TestInterleaving04RebuildAsksForTheLock(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	before := l.hash()
	full := school.Ledger{Attempted: 5000, Filled: true, Resting: time.Minute, Rule: rule}
	require.ErrorIs(t, l.Rebuild("acq-2", 7, full, rule), school.ErrFenced)
	require.ErrorIs(t, l.Rebuild("acq-1", 8, full, rule), school.ErrFenced)
	require.Equal(t, before, l.hash())
	require.NoError(t, l.Rebuild("acq-1", 7, full, rule))
	require.NotEqual(t, before, l.hash())
}

func TestScriptsRefuseBadArguments(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	ctx := t.Context()
	lock, q := l.keys.Lock(l.id), l.keys.Quota(l.id)
	_, err := l.Reserve(reservation("open", 200))
	require.NoError(t, err)
	before := l.hash()

	good := map[*redis.Script][]any{
		l.b.reserve:   {"acq-1", 7, "b1", 200, 19000, 1000, 5000, 180000, 1, 0, 0, 0, 0},
		l.b.settle:    {"open", 0, 200},
		l.b.reconcile: {0, 0, 0, 0, 5000, 180000, 1, 5000, 180000, 1},
		l.b.rebuild:   {"acq-1", 7, 0, 0, 0, 0, 5000, 180000, 1, 5000, 180000, 1},
	}
	for s, args := range good {
		keys := []string{lock, q}
		if s == l.b.settle || s == l.b.reconcile {
			keys = []string{q}
		}
		for i, v := range args {
			bad := []any{"", "-1", "1.5", "x", "99999999999999999999", "1e3", "0x10", "nan"}
			if v != 7 { // a fence may be greater than a Lua number is exact
				bad = append(bad, "9007199254740993")
			}
			if _, text := v.(string); text {
				bad = []any{""}
				if v == "b1" || v == "open" {
					bad = []any{"", "a b", "a,b", "\n", strings.Repeat("x", 129)}
				}
			}
			for _, w := range bad {
				mutated := append([]any(nil), args...)
				mutated[i] = w
				err := s.Run(ctx, l.c, keys, mutated...).Err()
				require.ErrorContains(t, err, "quota: ", "argument %d as %q", i+1, w)
			}
		}
		require.ErrorContains(t, s.Run(ctx, l.c, keys, args[:len(args)-1]...).Err(), "quota: ")
	}
	require.ErrorContains(t, l.b.settle.Run(ctx, l.c, []string{q}, "open", 0, 201).Err(), "more than was granted")
	require.Equal(t, before, l.hash(), "a refusal writes nothing")
}

func TestBadRequestsNeverReachRedis(t *testing.T) {
	t.Parallel()
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer func() { require.NoError(t, c.Close()) }()
	keys, err := scripts.NewKeys("test")
	require.NoError(t, err)
	b, err := New(c, keys, nil)
	require.NoError(t, err)
	ctx := t.Context()

	for name, change := range map[string]func(*school.Reservation){
		"school":  func(r *school.Reservation) { r.School = "{A}" },
		"batch":   func(r *school.Reservation) { r.Batch = "a b" },
		"want":    func(r *school.Reservation) { r.Want = 0 },
		"longest": func(r *school.Reservation) { r.Longest = 0 },
		"margin":  func(r *school.Reservation) { r.Margin = -1 },
		"limit":   func(r *school.Reservation) { r.Rule.Limit = 0 },
		"rest":    func(r *school.Reservation) { r.Rule.Rest = 0 },
		"version": func(r *school.Reservation) { r.Rule.Version = -1 },
		"floor":   func(r *school.Reservation) { r.Floor.Attempted = -1 },
		"resting": func(r *school.Reservation) { r.Floor.Resting = -1 },
	} {
		r := reservation("b1", 200)
		r.School = "A"
		change(&r)
		_, err := b.Reserve(ctx, r)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, school.ErrUnavailable, name)
	}
	require.NotErrorIs(t, b.Forget(ctx, "a:b"), school.ErrUnavailable)

	r := reservation("b1", 200)
	r.School = "A"
	_, err = b.Reserve(ctx, r)
	require.ErrorIs(t, err, school.ErrUnavailable)
	require.ErrorIs(t, b.Settle(ctx, school.Settlement{School: "A", Batch: "b1"}), school.ErrUnavailable)
	require.ErrorIs(t, b.Reconcile(ctx, "A", school.Ledger{}, rule), school.ErrUnavailable)
	require.ErrorIs(t, b.Rebuild(ctx, "A", "acq-1", 7, school.Ledger{}, rule), school.ErrUnavailable)
	require.ErrorIs(t, b.Forget(ctx, "A"), school.ErrUnavailable)
	_, err = b.Peek(ctx, "A")
	require.ErrorIs(t, err, school.ErrUnavailable)
}

func TestAnswersThatMakeNoSenseAreErrors(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	for _, answer := range []string{
		"1", "'OK'", "{}", "{'GRANTED'}", "{1, 2}", "{'GRANTED', 'now'}", "{'FINE', 1}",
		"{'GRANTED', 1, 200}", "{'GRANTED', 1, 200, 0, 200, 0, -1, 5000, 180000, 'x', 0}",
		"{'GRANTED', 1, 201, 0, 201, 0, -1, 5000, 180000, 1, 0}", "{'GRANTED', 1, 0, 0, 0, 0, -1, 5000, 180000, 1, 0}",
		"{'RESTING', 1}", "{'NEED_REBUILD', 1}", "{'KNOWN', 1, 2}",
	} {
		s := redis.NewScript("return " + answer)
		l.b.reserve, l.b.settle, l.b.reconcile, l.b.rebuild, l.b.peek = s, s, s, s, s
		_, err := l.Reserve(reservation("b1", 200))
		require.Error(t, err, answer)
		require.NotErrorIs(t, err, school.ErrUnavailable)
		if answer == "'OK'" {
			continue
		}
		require.Error(t, l.Settle(school.Settlement{Batch: "b1"}), answer)
		require.Error(t, l.Reconcile(school.Ledger{}, rule), answer)
		require.Error(t, l.Rebuild("acq-1", 7, school.Ledger{}, rule), answer)
		_, err = l.Peek()
		require.Error(t, err, answer)
	}
}

func TestPeek(t *testing.T) {
	t.Parallel()
	l := startServer(t).subject(t)
	p, err := l.Peek()
	require.NoError(t, err)
	require.Equal(t, school.Peek{}, p)

	l.Own("acq-1", 1<<62) // a fence beyond what a Lua number holds
	require.NoError(t, l.Reconcile(school.Ledger{Cycle: 3, Attempted: 5000, Filled: true, Resting: time.Minute, Rule: rule}, rule))
	p, err = l.Peek()
	require.NoError(t, err)
	require.Positive(t, p.LeaseLeft)
	p.LeaseLeft = 0
	require.Equal(t, school.Peek{Known: true, Attempted: 5000, Limit: 5000, Cycle: 3, Resting: time.Minute,
		Held: true, Owner: "test", Fence: 1 << 62}, p)

	r := reservation("b1", 1)
	r.Fence = 1 << 62
	r.Rule = rule
	g, err := l.Reserve(r)
	require.NoError(t, err)
	require.Equal(t, school.Resting, g.Kind)
	r.Fence++
	g, err = l.Reserve(r)
	require.NoError(t, err)
	require.Equal(t, school.NotOwner, g.Kind, "two fences that a Lua number cannot tell apart")
}

// TestPeekSeesWhatADeadOwnerLeft: its recipients wait for a successor, also
// through a rest.
func TestPeekSeesWhatADeadOwnerLeft(t *testing.T) {
	t.Parallel()
	for name, size := range map[string]int{"an ordinary batch": 200, "the batch that fills the cycle": 5000} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := begun(t, startServer(t))
			r := reservation("b1", size)
			_, err := l.Reserve(r)
			require.NoError(t, err)
			p, err := l.Peek()
			require.NoError(t, err)
			require.False(t, p.Orphaned, "its call may still run")
			l.At(quotatest.Epoch + r.Longest.Milliseconds())
			p, err = l.Peek()
			require.NoError(t, err)
			require.True(t, p.Orphaned)
			require.NoError(t, l.Settle(school.Settlement{Batch: "b1", Cycle: p.Cycle, Attempted: size}))
			p, err = l.Peek()
			require.NoError(t, err)
			require.False(t, p.Orphaned, "taken over")
		})
	}
}

func TestHashIsReadable(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	_, err := l.Reserve(reservation("b1", 5000))
	require.NoError(t, err)
	h := l.hash()
	for name, want := range map[string]string{
		"attempted": "5000", "limit": "5000", "cycle": "0", "rest_ms": "180000",
		"nextEligibleMs": fmt.Sprint(int64(quotatest.Epoch + 199000)), "nextEligibleAt": "2027-01-15T08:03:19Z",
		"inc": fmt.Sprint(int64(quotatest.Epoch)),
	} {
		require.Equal(t, want, h[name], name)
	}
	require.NoError(t, l.Settle(school.Settlement{Batch: "b1", Attempted: 4000}))
	require.Empty(t, l.hash()["nextEligibleAt"])
	require.Equal(t, "0", l.hash()["nextEligibleMs"])
	require.Equal(t, time.Duration(-1), l.c.PTTL(t.Context(), l.keys.Quota(l.id)).Val(), "the quota does not end")
}

func TestForget(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	require.NoError(t, l.b.Forget(t.Context(), l.id))
	require.NoError(t, l.b.Forget(t.Context(), l.id))
	require.Empty(t, l.hash())
	p, err := l.Peek()
	require.NoError(t, err)
	require.True(t, p.Held, "a lock is its holder's")
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	l := startServer(t).subject(t)
	reg := prometheus.NewRegistry()
	m, err := newMetrics(reg)
	require.NoError(t, err)
	l.b.metrics = m
	l.Own("acq-1", 7)
	used := school.Ledger{Cycle: 1, Attempted: 300, Rule: rule}

	require.NoError(t, l.Reconcile(school.Ledger{}, rule))
	require.Zero(t, testutil.ToFloat64(m.rebuilds), "a new school has lost nothing")
	require.NoError(t, l.Reconcile(used, rule))
	require.Equal(t, 1.0, testutil.ToFloat64(m.rebuilds))
	require.NoError(t, l.Reconcile(used, rule))
	require.Equal(t, 1.0, testutil.ToFloat64(m.rebuilds))
	l.Load(nil)
	_, err = l.Reserve(reservation("b1", 1))
	require.NoError(t, err)
	require.NoError(t, l.Reconcile(used, rule))
	require.Equal(t, 2.0, testutil.ToFloat64(m.rebuilds))
	_, err = l.Reserve(reservation("b1", 1))
	require.NoError(t, err)
	require.NoError(t, l.Settle(school.Settlement{Batch: "b1", Cycle: 1, Attempted: 1}))
	require.ErrorIs(t, l.Settle(school.Settlement{Batch: "b2", Cycle: 1, Attempted: 1}), school.ErrReservationUnknown)
	require.Equal(t, 1.0, testutil.ToFloat64(m.reserve.WithLabelValues("granted")))
	require.Equal(t, 1.0, testutil.ToFloat64(m.reserve.WithLabelValues("need_rebuild")))
	require.Equal(t, 1.0, testutil.ToFloat64(m.settle.WithLabelValues("ok")))
	require.Equal(t, 1.0, testutil.ToFloat64(m.settle.WithLabelValues("unknown")))
	_, err = newMetrics(reg)
	require.Error(t, err)
}

func TestLostRepliesChangeNothing(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	proxy, err := local.StartProxy(srv.Addr())
	require.NoError(t, err)
	defer func() { require.NoError(t, proxy.Close()) }()
	client := redis.NewClient(&redis.Options{Addr: proxy.Addr(), ReadTimeout: 100 * time.Millisecond})
	defer func() { require.NoError(t, client.Close()) }()
	keys, err := scripts.NewKeys("test")
	require.NoError(t, err)
	b, err := New(client, keys, nil)
	require.NoError(t, err)
	l := &live{tb: t, c: srv.client, b: b, keys: keys, id: "A"}
	l.Own("acq-1", 7)
	require.NoError(t, l.Reconcile(school.Ledger{}, rule))
	// Every script is known to the server before replies get lost.
	_, err = l.Reserve(reservation("b0", 1))
	require.NoError(t, err)
	require.NoError(t, l.Settle(school.Settlement{Batch: "b0", Attempted: 1}))

	lose := func() { proxy.SwallowReply(local.RequestContains("evalsha"), 1) }
	lose()
	g, err := l.Reserve(reservation("b1", 200))
	require.NoError(t, err)
	require.Equal(t, 201, g.Attempted)
	lose()
	require.NoError(t, l.Settle(school.Settlement{Batch: "b1", Attempted: 120}))
	lose()
	require.NoError(t, l.Reconcile(school.Ledger{Attempted: 121, Rule: rule}, rule))
	require.Equal(t, 3, proxy.Swallowed())
	require.Equal(t, "121", l.hash()["attempted"])
}

func TestScriptFlushCostsNothing(t *testing.T) {
	t.Parallel()
	l := begun(t, startServer(t))
	for i := range 5 {
		require.NoError(t, l.c.ScriptFlush(context.Background()).Err())
		g, err := l.Reserve(reservation(fmt.Sprintf("b%d", i), 10))
		require.NoError(t, err)
		require.Equal(t, 10*(i+1), g.Attempted)
	}
}
