package ratetest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCases(t *testing.T) {
	t.Parallel()
	RunCases(t, func(testing.TB) Subject { return NewPure() })
}

func TestTheModelIsItself(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		require.NoError(t, Compare(Seeded(seed), NewPure(), 2000))
	}
}

func TestTheJudgeSeesTooMuch(t *testing.T) {
	t.Parallel()
	require.Empty(t, Judge([]Gone{{0, "A", 2000}, {1000, "B", 1000}}, 60_000, 200))
	require.Len(t, Judge([]Gone{{0, "A", 2000}, {1000, "B", 1100}}, 60_000, 200), 1)
}
