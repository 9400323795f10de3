package watchdog_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/watchdog"
)

func TestMargin(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ lease, margin time.Duration }{
		{60 * time.Second, 1200 * time.Millisecond},
		{90 * time.Second, 1500 * time.Millisecond},
		{5 * time.Second, 650 * time.Millisecond},
		{1500 * time.Millisecond, 265 * time.Millisecond},
	} {
		require.Equal(t, c.margin, watchdog.Margin(c.lease), "lease %s", c.lease)
	}
}

func TestLeastETCIsTheLeast(t *testing.T) {
	t.Parallel()
	fits := func(etc, longest time.Duration) bool {
		return etc >= longest+watchdog.Margin(watchdog.LeaseFor(etc))
	}
	rapid.Check(t, func(t *rapid.T) {
		longest := time.Duration(rapid.Int64Range(1, int64(5*time.Minute)).Draw(t, "longest"))
		etc := watchdog.LeastETC(longest)
		require.True(t, fits(etc, longest), "%s does not hold %s", etc, longest)
		require.False(t, fits(etc-2*time.Millisecond, longest), "%s is not the least for %s", etc, longest)
	})
}

func TestCallTimeoutLeavesRoomForSeveralCalls(t *testing.T) {
	t.Parallel()
	require.Equal(t, time.Second, watchdog.CallTimeout(40*time.Second))
	require.Equal(t, 500*time.Millisecond, watchdog.CallTimeout(5*time.Second))
	require.Equal(t, 250*time.Millisecond, watchdog.CallTimeout(time.Second))
	rapid.Check(t, func(t *rapid.T) {
		etc := time.Duration(rapid.Int64Range(int64(200*time.Millisecond), int64(time.Minute)).Draw(t, "etc"))
		lease := watchdog.LeaseFor(etc)
		room := lease - watchdog.Margin(lease) - watchdog.TickFor(etc) // from the first tick to the local end
		require.Less(t, watchdog.CallTimeout(etc), room)
	})
}

func TestTrustEndsByTheClockThatLeavesLeast(t *testing.T) {
	t.Parallel()
	const lease = 60 * time.Second // margin 1.2 s, of which 500 ms are allowed to the wall clock
	start := watchdog.Clocks{Mono: time.Now(), Wall: time.Now(), Boot: time.Hour}
	after := func(mono, wall, boot time.Duration) watchdog.Clocks {
		return watchdog.Clocks{Mono: start.Mono.Add(mono), Wall: start.Wall.Add(wall), Boot: start.Boot + boot}
	}
	for _, c := range []struct {
		name             string
		mono, wall, boot time.Duration
		left             time.Duration
	}{
		{"together", 10 * time.Second, 10 * time.Second, 10 * time.Second, 48800 * time.Millisecond},
		{"monotonic stood still while the machine slept", 0, 40 * time.Second, 40 * time.Second, 18800 * time.Millisecond},
		{"only the wall clock knows of the sleep", 0, 40 * time.Second, 0, 19300 * time.Millisecond},
		{"wall clock set back", 50 * time.Second, -time.Hour, 50 * time.Second, 8800 * time.Millisecond},
		{"wall clock slewed a little ahead", 10 * time.Second, 10400 * time.Millisecond, 10 * time.Second, 48800 * time.Millisecond},
		{"wall clock set far ahead", time.Second, time.Hour, time.Second, 0},
		{"over", 59 * time.Second, 59 * time.Second, 59 * time.Second, 0},
	} {
		require.Equal(t, c.left, watchdog.WindowRemaining(lease, start, after(c.mono, c.wall, c.boot)), c.name)
	}

	noBoot := after(40*time.Second, 0, 0) // a system without a boot-time clock: the other two decide
	noBoot.Boot = 0
	require.Equal(t, 18800*time.Millisecond, watchdog.WindowRemaining(lease, start, noBoot))
}
