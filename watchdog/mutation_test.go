//go:build mutations

package watchdog_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

// TestAMutationTrustsALeaseForTooLong lets every answer be late: the lease counts
// from it, when it was taken as well as when it was extended.
func TestAMutationTrustsALeaseForTooLong(t *testing.T) {
	const late = 900 * time.Millisecond
	// ends is the server's end of the lease less the margin, seen from the end of
	// the trust: never negative where the trust is deserved.
	ends := func(t *testing.T) (taken, extended time.Duration) {
		bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
			spare := func(l *watchdog.Lease) time.Duration {
				lock, ok := m.Lock("A")
				require.True(t, ok)
				return (lock.TTL - watchdog.Margin(lease) - l.Left()).Round(time.Millisecond) // boot time is not the bubble's
			}
			m.Slow(0, late)
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				taken = spare(l)
				for calls := m.Calls(watchdogtest.Extend); m.Calls(watchdogtest.Extend) == calls; {
					busyFor(ctx, l, 5*time.Second)
				}
				busyFor(ctx, l, 5*time.Second)
				extended = spare(l)
				return nil
			}))
		})
		return taken, extended
	}
	taken, extended := ends(t)
	require.Zero(t, taken)
	require.Zero(t, extended)
	t.Setenv("SCHOOLBELL_MUTATE", "lease-end-after-call")
	taken, extended = ends(t)
	require.Equal(t, -late, taken)
	require.Equal(t, -late, extended)
}
