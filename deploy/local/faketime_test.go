package local

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRedisGoesByAFakeClock(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	clock, err := NewFakeClock(filepath.Join(t.TempDir(), "clock"))
	require.NoError(t, err)
	env, err := clock.Env()
	require.NoError(t, err)
	r, err := StartRedis(ctx, RedisConfig{Env: env})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	off := func() time.Duration {
		answer, err := r.Do(ctx, "TIME")
		require.NoError(t, err)
		seconds, _, _ := strings.Cut(answer, "\n")
		n, err := strconv.ParseInt(strings.TrimSpace(seconds), 10, 64)
		require.NoError(t, err)
		return time.Until(time.Unix(n, 0)).Round(time.Minute)
	}
	require.Zero(t, off())
	_, err = r.Do(ctx, "SET key value PX 60000")
	require.NoError(t, err)
	require.NoError(t, clock.Set(-time.Hour))
	require.Equal(t, -time.Hour, off())
	require.NoError(t, clock.Set(time.Hour))
	require.Equal(t, time.Hour, off())
	left, err := r.Do(ctx, "EXISTS key")
	require.NoError(t, err)
	require.Equal(t, ":0", left, "what should have lived a minute is gone")
	require.NoError(t, r.Restart(ctx, true))
	require.Equal(t, time.Hour, off(), "a restarted one goes by it too")
}
