package watchdog_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
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

// TestTwoOfOneNameAreSaid: two that live under one instance id are said by both,
// once; what one that died left is not.
func TestTwoOfOneNameAreSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := watchdogtest.NewMemory()
		lines := func(b *bytes.Buffer) int { return strings.Count(b.String(), "instance_id_taken") }
		run := func(address string) (said *bytes.Buffer, stop func()) {
			said = &bytes.Buffer{}
			r, err := watchdog.NewRoster(watchdog.RosterConfig{}, watchdog.Member{Instance: "one", Address: address}, m,
				func(context.Context) watchdog.Load { return watchdog.Load{} }, slog.New(slog.NewTextHandler(said, nil)))
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- r.Run(ctx) }()
			return said, func() {
				cancel()
				require.NoError(t, <-done)
			}
		}
		_, err := m.Beat(t.Context(), watchdog.Member{Instance: "one", Address: "died:8080"}, 15*time.Second)
		require.NoError(t, err)
		time.Sleep(time.Second)
		first, stopFirst := run("10.0.0.1:8080")
		defer stopFirst()
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, lines(first), "its predecessor writes nothing any more")
		second, stopSecond := run("10.0.0.2:8080")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, 1, lines(first), first)
		require.Equal(t, 1, lines(second), second)
		require.Contains(t, first.String(), "level=WARN")
		require.Contains(t, first.String(), "other_address=10.0.0.2:8080")
		require.Contains(t, second.String(), "other_address=10.0.0.1:8080")
		stopSecond()
	})
}
