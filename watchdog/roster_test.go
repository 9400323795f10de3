package watchdog_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

func newRoster(t *testing.T, instance string, held int, r watchdog.Registry) *watchdog.Roster {
	t.Helper()
	roster, err := watchdog.NewRoster(watchdog.RosterConfig{}, watchdog.Member{Instance: instance, Version: "v1", Address: ":8080"},
		r, func(context.Context) watchdog.Load {
			return watchdog.Load{SchoolsHeld: held, Rate: 12.5, Unable: held < 0}
		}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return roster
}

func TestRosterListsWhoLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := watchdogtest.NewMemory()
		one, two := newRoster(t, "one", 3, m), newRoster(t, "two", 0, m)
		require.Equal(t, []string{"one"}, one.Live(), "before Run only itself")

		start := time.Now()
		run := func(r *watchdog.Roster) (stop func()) {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			return func() {
				cancel()
				require.NoError(t, <-done)
			}
		}
		stopOne, stopTwo := run(one), run(two)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"one", "two"}, one.Live())

		members, err := two.Members(t.Context())
		require.NoError(t, err)
		require.Len(t, members, 2)
		require.Equal(t, "one", members[0].Instance)
		require.Equal(t, 3, members[0].SchoolsHeld)
		require.InDelta(t, 12.5, members[0].Rate, 0)
		require.Equal(t, start, members[0].Since)
		require.True(t, members[0].Heartbeat.After(start))

		m.Forget() // the next heartbeats bring everybody back, with their first time
		time.Sleep(10 * time.Second)
		synctest.Wait()
		members, err = one.Members(t.Context())
		require.NoError(t, err)
		require.Len(t, members, 2)
		require.Equal(t, start, members[1].Since)

		m.Cut()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"one", "two"}, one.Live(), "what was known stays while nobody answers")
		m.Restore()
		time.Sleep(10 * time.Second)

		stopTwo()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"one"}, one.Live(), "who leaves is off the list at once")
		stopOne()
		members, err = one.Members(t.Context())
		require.NoError(t, err)
		require.Empty(t, members)
	})
}

func TestRosterTellsWhetherAnotherCouldWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := watchdogtest.NewMemory()
		one := newRoster(t, "one", 0, m)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- one.Run(ctx) }()
		beat := func(instance string, unable bool) {
			_, err := m.Beat(t.Context(), watchdog.Member{Instance: instance, Unable: unable}, 15*time.Second)
			require.NoError(t, err)
			time.Sleep(6 * time.Second)
			synctest.Wait()
		}
		time.Sleep(6 * time.Second)
		require.False(t, one.OthersAble(), "it does not count itself")
		beat("two", true)
		require.False(t, one.OthersAble())
		beat("three", false)
		require.True(t, one.OthersAble())
		beat("three", true)
		require.False(t, one.OthersAble())
		beat("three", false)
		require.True(t, one.OthersAble())
		time.Sleep(20 * time.Second)
		synctest.Wait()
		require.False(t, one.OthersAble(), "who died is no help")

		// And whether another is answered, by sender.
		require.True(t, one.OthersUnanswered("fcm"), "there is no other")
		say := func(instance string, unanswered ...string) {
			_, err := m.Beat(t.Context(), watchdog.Member{Instance: instance, Unanswered: unanswered}, 15*time.Second)
			require.NoError(t, err)
			time.Sleep(6 * time.Second)
			synctest.Wait()
		}
		say("two")
		require.False(t, one.OthersUnanswered("fcm"))
		say("two", "relay", "fcm")
		require.True(t, one.OthersUnanswered("fcm"))
		require.False(t, one.OthersUnanswered("log"))
		say("three", "relay")
		require.False(t, one.OthersUnanswered("fcm"))
		require.True(t, one.OthersUnanswered("relay"))
		cancel()
		require.NoError(t, <-done)
	})
}

func TestKilledReplicaLeavesTheListWithItsHeartbeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := watchdogtest.NewMemory()
		_, err := m.Beat(t.Context(), watchdog.Member{Instance: "killed"}, 15*time.Second)
		require.NoError(t, err)
		one := newRoster(t, "one", 0, m)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- one.Run(ctx) }()
		time.Sleep(14 * time.Second)
		require.Equal(t, []string{"killed", "one"}, one.Live())
		time.Sleep(7 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"one"}, one.Live())
		cancel()
		require.NoError(t, <-done)
	})
}

func TestRosterSettingsAreChecked(t *testing.T) {
	m, log, held := watchdogtest.NewMemory(), slog.New(slog.DiscardHandler), func(context.Context) watchdog.Load { return watchdog.Load{} }
	_, err := watchdog.NewRoster(watchdog.RosterConfig{Beat: 5 * time.Second, TTL: 6 * time.Second}, watchdog.Member{Instance: "one"}, m, held, log)
	require.ErrorContains(t, err, "at least twice the beat")
	_, err = watchdog.NewRoster(watchdog.RosterConfig{}, watchdog.Member{}, m, held, log)
	require.ErrorContains(t, err, "instance")
}
