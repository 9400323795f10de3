package quota_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/school/quota/quotatest"
)

func fresh(testing.TB) quotatest.Subject { return &quotatest.Pure{} }

func TestSentences(t *testing.T) {
	t.Parallel()
	quotatest.RunSentences(t, fresh)
}

func TestCases(t *testing.T) {
	t.Parallel()
	quotatest.RunCases(t, "testdata/rule.json", fresh)
}

type seeded struct{ *rand.Rand }

func (s seeded) Intn(n int) int { return s.IntN(n) }

func TestHistories(t *testing.T) {
	t.Parallel()
	for name, plan := range map[string]quotatest.Plan{
		"owners die":                        {Terms: 60, Lossless: true},
		"owners die and bring no ledger":    {Terms: 60, Lossless: true, NoFloors: true},
		"data is lost as well":              {Terms: 60},
		"settings change, owners die":       {Terms: 60, Lossless: true, Settings: true},
		"settings change, and data is lost": {Terms: 60, Settings: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var total quotatest.History
			for seed := range uint64(300) {
				h, err := quotatest.Happen(seeded{rand.New(rand.NewPCG(seed, 1))}, fresh(t), plan)
				require.NoError(t, err, "seed %d", seed)
				require.Empty(t, h.Wrong(), "seed %d", seed)
				total.Attempts += h.Attempts
				total.Cycles += h.Cycles
				total.Deaths += h.Deaths
				total.Losses += h.Losses
				total.Jumps += h.Jumps
			}
			t.Logf("%d attempts, %d cycles, %d deaths, %d losses, %d jumps",
				total.Attempts, total.Cycles, total.Deaths, total.Losses, total.Jumps)
			require.Greater(t, total.Cycles, 2000, "histories too tame to judge")
		})
	}
}
