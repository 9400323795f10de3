package storm

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/cmd/chaos/plan"
	"schoolbell/sender/simulator"
)

func TestTheScheduleHandsInEverything(t *testing.T) {
	t.Parallel()
	cfg := Config{Seed: 3, Schools: 7, Recipients: 10_003, For: 2 * time.Minute}
	hands := schedule(cfg)
	require.Equal(t, hands, schedule(cfg), "the same seed hands in the same")
	total, late := 0, 0
	schools := map[string]int{}
	var last time.Duration
	for _, h := range hands {
		require.Positive(t, h.n)
		require.GreaterOrEqual(t, h.at, last)
		require.Less(t, h.at, cfg.For)
		total += h.n
		schools[h.school] += h.n
		last = h.at
		if h.at > cfg.For/2 {
			late += h.n
		}
	}
	require.Equal(t, cfg.Recipients, total)
	require.Len(t, schools, cfg.Schools)
	require.Greater(t, late, cfg.Recipients/5, "there is more to come until the end")
	for name, n := range schools {
		require.InDelta(t, cfg.Recipients/cfg.Schools, n, 1, name)
	}
	cfg.Seed = 4
	require.NotEqual(t, hands, schedule(cfg))
}

func TestAPlanLeavesOutWhatTheRunCannotDo(t *testing.T) {
	t.Parallel()
	clocks, err := plan.Parse("clock")
	require.NoError(t, err)
	cfg := Config{Seed: 1, Schools: 5, Replicas: 3, For: 10 * time.Minute, Kinds: clocks}
	ways := func() map[plan.Way]bool {
		seen := map[plan.Way]bool{}
		for _, f := range cfg.Plan() {
			seen[f.Way] = true
		}
		return seen
	}
	require.Equal(t, map[plan.Way]bool{plan.RedisForth: true, plan.RedisBack: true}, ways())
	cfg.Clocks = true
	require.Len(t, ways(), 4)
}

func TestTheTimeToSettleGrowsWithTheWork(t *testing.T) {
	t.Parallel()
	cfg := Config{Schools: 2, Recipients: 2000, Limit: 100, Rest: time.Second}
	few := cfg.settle()
	cfg.Recipients *= 10
	require.Greater(t, cfg.settle(), few+90*time.Second)
	cfg.Settle = time.Second
	require.Equal(t, time.Second, cfg.settle())
}

func TestTakenOverCountsFromTheKillToTheNextOwner(t *testing.T) {
	t.Parallel()
	killed := time.Unix(1000, 0)
	at := func(school string, after time.Duration, fence int64) simulator.Arrival {
		return simulator.Arrival{School: school, T: killed.Add(after).UnixNano(), Fence: fence}
	}
	got := takenOver([]simulator.Arrival{
		at("A", 7*time.Second, 5), at("A", -time.Second, 4), at("A", time.Millisecond, 4), at("A", 6*time.Second, 5),
		at("B", time.Second, 9), at("C", -time.Second, 1), at("C", time.Second, 1),
	}, []string{"A", "C"}, killed)
	require.Equal(t, map[string]time.Duration{"A": 6 * time.Second}, got)
	require.Equal(t, "none", distribution(nil))
	require.Equal(t, "p0 1s, p10 1s, p50 1s, p90 2s, p99 2s, p100 2s", distribution([]time.Duration{time.Second, 2 * time.Second}))
}
