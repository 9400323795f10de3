package scripts

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScriptsAreWhole(t *testing.T) {
	t.Parallel()
	all, err := All()
	require.NoError(t, err)
	require.Len(t, all, 12)
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			require.NotContains(t, s.Source, "-- include", "every include was put in")
			require.Equal(t, 1, strings.Count(s.Source, "redis.call('TIME')"), "the clock is read once")
			require.NotContains(t, s.Source, "os.", "no other clock")
			for _, part := range []string{"-- KEYS[1]", "-- Returns", "-- Atomic because", "repeat"} {
				require.Contains(t, s.Source, part)
			}
			require.Len(t, s.SHA, 40)
		})
	}
}

func TestQuotaScriptsBuildNoKeys(t *testing.T) {
	t.Parallel()
	for _, s := range []Script{Reserve(), Settle(), Reconcile(), Rebuild(), Peek()} {
		require.NotContains(t, s.Source, ".. ':", s.Name)
		require.NotContains(t, s.Source, "'schoolbell", s.Name)
	}
}

func TestPeekWritesNothing(t *testing.T) {
	t.Parallel()
	for _, write := range []string{"HSET", "DEL", "PEXPIRE", "HDEL", "'SET'"} {
		require.NotContains(t, Peek().Source, write)
	}
}

func TestOnlyReserveTouchesTheLockAndOnlyItsBatch(t *testing.T) {
	t.Parallel()
	for _, s := range []Script{Settle(), Reconcile(), Rebuild(), Peek()} {
		require.NotContains(t, s.Source, "'HSET', lock", s.Name)
	}
	require.Equal(t, 1, strings.Count(Reserve().Source, "'HSET', lock"))
	require.Contains(t, Reserve().Source, "redis.call('HSET', lock, 'batch', batch)")
}

// TestInterleaving22NoPrefixMovesTheHashTag: what stands between the first pair of
// braces decides the slot, so that a school's keys would part.
func TestInterleaving22NoPrefixMovesTheHashTag(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"", "{a}", "a{", "a}b", "{", "two words", "line\n"} {
		_, err := NewKeys(prefix)
		require.ErrorContains(t, err, "without braces", prefix)
	}
	keys, err := NewKeys("some.prefix:of-ours")
	require.NoError(t, err)
	for _, key := range []string{keys.Lock("A"), keys.Quota("A"), keys.Rate("A")} {
		require.Equal(t, 1, strings.Count(key, "{"))
		require.Regexp(t, `\{(sender:)?A\}`, key)
	}
}
