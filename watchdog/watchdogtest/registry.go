package watchdogtest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
)

// TestRegistry runs the suite of a watchdog.Registry. ttl is the members' time to
// live, long enough that a few calls on this machine take much less; forget drops
// everything the registry knows.
func TestRegistry(t *testing.T, ttl time.Duration, run func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func()))) {
	list := func(t *testing.T, r watchdog.Registry) map[string]watchdog.Member {
		t.Helper()
		members, err := r.Members(t.Context())
		require.NoError(t, err)
		all := map[string]watchdog.Member{}
		for _, m := range members {
			all[m.Instance] = m
		}
		require.Len(t, all, len(members), "a member is listed twice")
		return all
	}

	t.Run("members", func(t *testing.T) {
		run(t, func(t *testing.T, r watchdog.Registry, forget func()) {
			require.Empty(t, list(t, r))
			one := watchdog.Member{Instance: "one", Version: "v1.2.3", Address: "10.0.0.7:8080", SchoolsHeld: 3, Rate: 12.5}
			joined, err := r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			require.WithinDuration(t, time.Now(), joined, time.Minute)
			_, err = r.Beat(t.Context(), watchdog.Member{Instance: "two"}, time.Hour)
			require.NoError(t, err)

			all := list(t, r)
			require.Len(t, all, 2)
			got := all["one"]
			require.True(t, got.Since.Equal(joined))
			require.True(t, got.Heartbeat.Equal(joined))
			got.Since, got.Heartbeat = time.Time{}, time.Time{}
			require.Equal(t, one, got)

			one.Since, one.SchoolsHeld = joined, 4
			again, err := r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			got = list(t, r)["one"]
			require.True(t, got.Since.Equal(joined), "a heartbeat changed since when it lives")
			require.True(t, got.Heartbeat.Equal(again))
			require.Equal(t, 4, got.SchoolsHeld)

			one.Unable = true
			_, err = r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			require.True(t, list(t, r)["one"].Unable)
			require.False(t, list(t, r)["two"].Unable)

			require.Empty(t, list(t, r)["one"].Unanswered)
			one.Unanswered = []string{"fcm", "relay.2"}
			_, err = r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			require.Equal(t, one.Unanswered, list(t, r)["one"].Unanswered)
			one.Unanswered = nil
			_, err = r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			require.Empty(t, list(t, r)["one"].Unanswered)

			require.NoError(t, r.Leave(t.Context(), "two"))
			require.NoError(t, r.Leave(t.Context(), "two"))
			require.NoError(t, r.Leave(t.Context(), "never was"))
			require.Len(t, list(t, r), 1)

			forget()
			require.Empty(t, list(t, r))
			_, err = r.Beat(t.Context(), one, time.Hour)
			require.NoError(t, err)
			require.True(t, list(t, r)["one"].Since.Equal(joined))
		})
	})
	t.Run("no heartbeat, no member", func(t *testing.T) {
		run(t, func(t *testing.T, r watchdog.Registry, _ func()) {
			_, err := r.Beat(t.Context(), watchdog.Member{Instance: "killed"}, ttl)
			require.NoError(t, err)
			_, err = r.Beat(t.Context(), watchdog.Member{Instance: "living"}, time.Hour)
			require.NoError(t, err)
			for deadline := time.Now().Add(10 * ttl); len(list(t, r)) > 1; time.Sleep(ttl / 10) {
				require.True(t, time.Now().Before(deadline), "a member outlived its time to live")
			}
			require.Contains(t, list(t, r), "living")
		})
	})
}
