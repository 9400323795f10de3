package redislease_test

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/watchdog/redislease"
)

func TestInterleaving20SlotIsTakenOnceInTheCluster(t *testing.T) {
	t.Parallel()
	slotIsTakenOnce(t, startServer(t))
}

func slotIsTakenOnce(t *testing.T, s *server) {
	const slot = "2026-11-30T09:05:00+09:00"
	var taken atomic.Int64
	var racing sync.WaitGroup
	for i := range 8 {
		slots := redislease.NewSlots(s.client, s.keys, "replica-"+strconv.Itoa(i))
		racing.Go(func() {
			for range 5 { // also not twice by the same one
				ok, err := slots.TakeAt(t.Context(), "sweep", slot, time.Hour)
				if err != nil {
					t.Errorf("take: %v", err)
				}
				if ok {
					taken.Add(1)
				}
			}
		})
	}
	racing.Wait()
	require.EqualValues(t, 1, taken.Load())
	require.Regexp(t, `^replica-\d$`, s.direct.Get(t.Context(), "schoolbell:job:sweep:"+slot).Val())

	slots := redislease.NewSlots(s.client, s.keys, "one")
	for _, other := range []struct{ name, slot string }{{"sweep", "2026-11-30T09:10:00+09:00"}, {"retention", slot}} {
		ok, err := slots.TakeAt(t.Context(), other.name, other.slot, time.Hour)
		require.NoError(t, err)
		require.True(t, ok, other)
	}
	_, err := slots.TakeAt(t.Context(), "sweep", slot, 0)
	require.Error(t, err)
}

func TestInterleaving20SlotIsTheServersTimeRoundedToThePeriod(t *testing.T) {
	t.Parallel()
	slotIsTheServersTime(t, startServer(t))
}

func slotIsTheServersTime(t *testing.T, s *server) {
	one, two := redislease.NewSlots(s.client, s.keys, "one"), redislease.NewSlots(s.client, s.keys, "two")
	taken, slot, err := one.Take(t.Context(), "digest", 24*time.Hour)
	require.NoError(t, err)
	require.True(t, taken)
	at, err := time.Parse(time.RFC3339, slot)
	require.NoError(t, err)
	require.Zero(t, at.UnixMilli()%(24*time.Hour).Milliseconds())
	require.WithinRange(t, time.Now(), at, at.Add(24*time.Hour+time.Minute))
	require.InDelta(t, 48*time.Hour, s.direct.PTTL(t.Context(), s.keys.Job("digest", slot)).Val(), float64(time.Minute))

	taken, again, err := two.Take(t.Context(), "digest", 24*time.Hour)
	require.NoError(t, err)
	require.Equal(t, slot, again)
	require.False(t, taken)

	// The next slot is free again.
	seen := map[string]bool{}
	eventually(t, 5*time.Second, "three slots of a short period", func() bool {
		ok, slot, err := one.Take(t.Context(), "often", 50*time.Millisecond)
		require.NoError(t, err)
		require.Equal(t, !seen[slot], ok)
		seen[slot] = true
		return len(seen) == 3
	})
	_, _, err = one.Take(t.Context(), "never", 0)
	require.Error(t, err)
}

func TestSlotTakenByACallWithoutAnAnswerIsOurs(t *testing.T) {
	t.Parallel()
	slotTakenWithoutAnAnswer(t, startServer(t))
}

func slotTakenWithoutAnAnswer(t *testing.T, s *server) {
	slots := redislease.NewSlots(s.client, s.keys, "one")
	s.loseRepliesTo("schoolbell:job:sweep")
	taken, err := slots.TakeAt(t.Context(), "sweep", "s1", time.Hour)
	require.NoError(t, err)
	require.True(t, taken, "the job would have run nowhere")
	require.Equal(t, 1, s.swallowed())

	taken, err = slots.TakeAt(t.Context(), "sweep", "s1", time.Hour)
	require.NoError(t, err)
	require.False(t, taken)

	other := redislease.NewSlots(s.client, s.keys, "two")
	s.loseRepliesTo("schoolbell:job:sweep")
	taken, err = other.TakeAt(t.Context(), "sweep", "s1", time.Hour)
	require.NoError(t, err)
	require.False(t, taken, "another's slot is not ours because an answer got lost")

	s.each((*local.Proxy).Refuse)
	s.closeConns()
	_, err = slots.TakeAt(t.Context(), "sweep", "s2", time.Hour)
	require.Error(t, err, "unknown is not taken")
}
