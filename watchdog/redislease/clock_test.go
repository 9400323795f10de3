package redislease_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/watchdog"
)

// TestADeadOwnersLockEndsAlthoughTheClockWentBack: a TTL is a moment by the
// server's clock. When that goes back an hour, the lock of an owner that died would
// hold its school for an hour.
func TestADeadOwnersLockEndsAlthoughTheClockWentBack(t *testing.T) {
	t.Parallel()
	const lease = 300 * time.Millisecond
	clock, err := local.NewFakeClock(filepath.Join(t.TempDir(), "clock"))
	require.NoError(t, err)
	env, err := clock.Env()
	require.NoError(t, err)
	s := &server{t: t, keys: testKeys(t), redis: localtest.RedisWith(t, local.RedisConfig{Memory: true, Env: env})}
	s.begin(s.redis.Addr())
	request := func(name, owner string) watchdog.Request {
		return watchdog.Request{Name: name, Owner: owner, Acquisition: owner + "-1", Lease: lease, ETC: lease, Patience: 10 * time.Second}
	}
	// The first request after a step is refused: what is known of the server's
	// clock is not true any more. Its answer tells.
	acquire := func(name, owner string) error {
		err := s.Acquire(t.Context(), request(name, owner))
		if errors.Is(err, watchdog.ErrStale) {
			err = s.Acquire(t.Context(), request(name, owner))
		}
		return err
	}
	ttl := func(name string) time.Duration {
		left, err := s.direct.PTTL(t.Context(), s.keys.Lock(name)).Result()
		require.NoError(t, err)
		return left
	}
	require.NoError(t, clock.Set(time.Hour))
	require.NoError(t, acquire("A", "dead"))
	require.NoError(t, acquire("B", "alive"))
	require.NoError(t, s.Extend(t.Context(), "B", "alive-1", 2*lease, 1), "it may have a longer lease meanwhile")
	require.NoError(t, clock.Set(0))
	require.Greater(t, ttl("A"), 50*time.Minute)

	var busy *watchdog.BusyError
	require.ErrorAs(t, acquire("A", "next"), &busy)
	require.LessOrEqual(t, ttl("A"), lease, "no longer than an owner that lives can believe in")
	require.NoError(t, s.Extend(t.Context(), "B", "alive-1", lease, 2))
	require.LessOrEqual(t, ttl("B"), 2*lease)
	require.Greater(t, ttl("B"), lease, "and no shorter than one that it was given")
	require.Eventually(t, func() bool { return acquire("A", "next") == nil }, 10*time.Second, 20*time.Millisecond)
}
