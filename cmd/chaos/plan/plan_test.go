package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const lease = 6 * time.Second

func parsed(t require.TestingT, list string) []Choice {
	choices, err := Parse(list)
	require.NoError(t, err)
	return choices
}

func all(t require.TestingT) []Choice {
	kinds, err := Parse("all")
	require.NoError(t, err)
	return kinds
}

func TestTheSameSeedPlansTheSame(t *testing.T) {
	t.Parallel()
	cfg := Config{Seed: 7, For: 2 * time.Minute, Kinds: all(t), Replicas: 3, Schools: 20, Lease: lease}
	first := New(cfg)
	require.Equal(t, first, New(cfg))
	cfg.Seed = 8
	require.NotEqual(t, first, New(cfg))
}

// TestAPlanIsKept pins one plan, so that a seed that once found something means
// the same next year.
func TestAPlanIsKept(t *testing.T) {
	t.Parallel()
	var got []string
	for _, f := range New(Config{Seed: 1, For: 20 * time.Second, Kinds: parsed(t, "kill,redis-flush,db-restart"), Replicas: 3, Schools: 5, Lease: lease}) {
		got = append(got, f.String())
	}
	require.Equal(t, pinned, got, "%q", got)
}

func TestEveryPlanKeepsItsRules(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kinds := rapid.SliceOfNDistinct(rapid.SampledFrom(all(t)), 1, -1, func(c Choice) Kind { return c.Kind }).Draw(t, "kinds")
		cfg := Config{
			Seed: rapid.Int64().Draw(t, "seed"), For: time.Duration(rapid.IntRange(5, 300).Draw(t, "for")) * time.Second,
			Kinds: kinds, Replicas: rapid.IntRange(1, 6).Draw(t, "replicas"), Schools: 20, Lease: lease,
			Without: rapid.SliceOf(rapid.SampledFrom([]Way{ReplicaForth, ReplicaBack})).Draw(t, "without"),
		}
		faults := New(cfg)
		require.NotEmpty(t, faults)
		var last time.Duration
		count := map[Kind]int{}
		for i, f := range faults {
			e, ok := entry(f.Kind)
			require.True(t, ok)
			require.True(t, Has(kinds, f.Kind))
			require.Contains(t, e.Ways, f.Way)
			require.NotContains(t, cfg.Without, f.Way)
			require.GreaterOrEqual(t, f.At, cfg.For/13)
			require.Less(t, f.At, cfg.For)
			require.GreaterOrEqual(t, f.At, last)
			require.Less(t, f.Rank, max(1, cfg.Replicas-1))
			require.Less(t, f.School, cfg.Schools)
			last = f.At
			count[f.Kind]++
			suffering := 0
			for _, other := range faults[:i] {
				o, _ := entry(other.Kind)
				if other.At+other.Hold <= f.At {
					continue
				}
				if e.touches(f.Way) != aReplica {
					require.NotEqual(t, e.touches(f.Way), o.touches(other.Way), "%s and %s", other, f)
				} else if o.touches(other.Way) == aReplica {
					suffering++
				}
			}
			require.Less(t, suffering+1, max(2, cfg.Replicas), "one replica is left alone: %s", f)
		}
	})
}

func TestEveryKindAndWayComes(t *testing.T) {
	t.Parallel()
	came := map[string]bool{}
	for seed := range int64(5) {
		faults := New(Config{Seed: seed, For: 3 * time.Minute, Kinds: all(t), Replicas: 3, Schools: 20, Lease: lease})
		kinds := map[Kind]bool{}
		for _, f := range faults {
			kinds[f.Kind] = true
			came[fmt.Sprint(f.Kind, f.Way)] = true
		}
		require.Len(t, kinds, len(Catalogue()), "seed %d", seed)
	}
	for _, e := range Catalogue() {
		for _, w := range e.Ways {
			require.True(t, came[fmt.Sprint(e.Kind, w)], "%s %s", e.Kind, w)
		}
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	kinds, err := Parse("kill, redis-flush,kill")
	require.NoError(t, err)
	require.Equal(t, []Choice{{Kill, []Way{Dies}}, {RedisFlush, []Way{FlushAll, FlushScript, DropLock, DropQuota}}}, kinds)
	require.Equal(t, []Choice{{Clock, []Way{RedisBack, RedisForth}}}, parsed(t, "clock/redis-1h,clock/redis+1h,clock/redis-1h"))
	_, err = Parse("clock/sideways")
	require.ErrorContains(t, err, "clock happens as redis+1h")
	for _, f := range New(Config{Seed: 1, For: time.Minute, Kinds: parsed(t, "partition-db/late"), Replicas: 3, Lease: lease}) {
		require.Equal(t, Late, f.Way)
	}
	require.Len(t, all(t), len(Catalogue()))
	kinds, err = Parse("none")
	require.NoError(t, err)
	require.Empty(t, New(Config{Seed: 1, For: time.Minute, Kinds: kinds, Replicas: 3}))
	_, err = Parse("kill,earthquake")
	require.ErrorContains(t, err, `"earthquake" is none of kill, pause`)
}
