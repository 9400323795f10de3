package redislease_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
)

func TestReplicaIsReadableWithRedisCLI(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	r := redislease.NewRegistry(s.client, s.keys)
	ctx := t.Context()
	now, err := r.Beat(ctx, watchdog.Member{Instance: "one", Version: "v1", Address: "10.0.0.7:8080", SchoolsHeld: 2, Rate: 12.5}, time.Minute)
	require.NoError(t, err)
	text := now.UTC().Format(time.RFC3339Nano)
	require.Equal(t, map[string]string{
		"since": text, "version": "v1", "address": "10.0.0.7:8080", "schools_held": "2", "rate_per_second": "12.5", "store": "ok", "unanswered": "", "heartbeat_at": text,
	}, s.direct.HGetAll(ctx, "schoolbell:replica:one").Val())
	require.InDelta(t, time.Minute, s.direct.PTTL(ctx, "schoolbell:replica:one").Val(), float64(5*time.Second))
	require.EqualValues(t, now.UnixMilli(), s.direct.ZScore(ctx, "schoolbell:replicas", "one").Val())

	// A replica that was killed: its hash is gone with its time to live, its entry
	// in the index goes with the next look.
	require.NoError(t, s.direct.Del(ctx, "schoolbell:replica:one").Err())
	members, err := r.Members(ctx)
	require.NoError(t, err)
	require.Empty(t, members)
	require.Zero(t, s.direct.ZCard(ctx, "schoolbell:replicas").Val())
}

func TestRosterInRedis(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	start := func(instance string) (*watchdog.Roster, func()) {
		r, err := watchdog.NewRoster(watchdog.RosterConfig{Beat: 50 * time.Millisecond, TTL: time.Second}, watchdog.Member{Instance: instance},
			redislease.NewRegistry(s.connect("redis://"+s.proxy.Addr()), s.keys), func(context.Context) watchdog.Load { return watchdog.Load{} }, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		return r, func() {
			cancel()
			require.NoError(t, <-done)
		}
	}
	one, stopOne := start("one")
	_, stopTwo := start("two")
	both := func() bool { return len(one.Live()) == 2 }
	eventually(t, 5*time.Second, "both live", both)
	s.Forget()
	eventually(t, 5*time.Second, "both live after a flush", both)
	stopTwo()
	eventually(t, 900*time.Millisecond+5*time.Second, "two has left", func() bool { return !both() })
	stopOne()
	require.Empty(t, s.direct.Keys(t.Context(), "*").Val())
}
