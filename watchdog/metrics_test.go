package watchdog_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

func TestLockFoundLostAtReleaseIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, reg := watchdogtest.NewMemory(), prometheus.NewPedanticRegistry()
		k, err := watchdog.New(watchdog.Config{}, "one", m, slog.New(slog.DiscardHandler), reg)
		require.NoError(t, err)
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error {
			m.Forget()
			return nil
		}))
		require.NoError(t, testutil.GatherAndCompare(reg, bytes.NewBufferString(`
# HELP schoolbell_lease_lost_total Leases that ended before their work, by cause: lost, expired, no_progress, max_hold.
# TYPE schoolbell_lease_lost_total counter
schoolbell_lease_lost_total{cause="expired"} 0
schoolbell_lease_lost_total{cause="lost"} 1
schoolbell_lease_lost_total{cause="max_hold"} 0
schoolbell_lease_lost_total{cause="no_progress"} 0
`), "schoolbell_lease_lost_total"))
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, reg := watchdogtest.NewMemory(), prometheus.NewPedanticRegistry()
		k, err := watchdog.New(watchdog.Config{}, "one", m, slog.New(slog.DiscardHandler), reg)
		require.NoError(t, err)
		m.LoseReply(watchdogtest.Extend, 1)
		err = k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			require.Error(t, k.Hold(ctx, "A", etc, nil))
			m.LoseReply(watchdogtest.Acquire, 1)
			require.Error(t, k.Hold(ctx, "B", etc, nil))
			busyFor(ctx, l, time.Minute)
			require.NoError(t, testutil.GatherAndCompare(reg, bytes.NewBufferString(`
# HELP schoolbell_locks_held Locks that this replica holds.
# TYPE schoolbell_locks_held gauge
schoolbell_locks_held 1
`), "schoolbell_locks_held"))
			m.Forget()
			busyFor(ctx, l, time.Minute)
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseLost)
		require.NoError(t, testutil.GatherAndCompare(reg, bytes.NewBufferString(`
# HELP schoolbell_lock_acquire_total Attempts to take a lock, by result: ok, busy, stale, error.
# TYPE schoolbell_lock_acquire_total counter
schoolbell_lock_acquire_total{result="busy"} 1
schoolbell_lock_acquire_total{result="error"} 1
schoolbell_lock_acquire_total{result="ok"} 1
schoolbell_lock_acquire_total{result="stale"} 0
# HELP schoolbell_locks_held Locks that this replica holds.
# TYPE schoolbell_locks_held gauge
schoolbell_locks_held 0
`), "schoolbell_lock_acquire_total", "schoolbell_locks_held"))
		samples, err := testutil.GatherAndCount(reg, "schoolbell_lease_extend_total", "schoolbell_lease_remaining_seconds")
		require.NoError(t, err)
		require.Equal(t, 5, samples)

		_, err = watchdog.New(watchdog.Config{}, "two", m, slog.New(slog.DiscardHandler), reg)
		require.ErrorContains(t, err, "register metrics")
	})
}
