//go:build mutations

package redisquota

import (
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/school/quota/quotatest"
)

// TestMutationsBreakTheRule lets owners die until a receiver has seen the rule
// broken by the scripts that SCHOOLBELL_MUTATE asks for.
func TestMutationsBreakTheRule(t *testing.T) {
	srv := startServer(t)
	for name, plan := range map[string]quotatest.Plan{
		"no-provisional-rest": {Terms: 60, Lossless: true},
		"settle-twice":        {Terms: 60, Lossless: true, NoFloors: true},
	} {
		t.Run(name, func(t *testing.T) {
			wrong := func() bool {
				for seed := range uint64(60) {
					h, err := quotatest.Happen(newSeeded(seed), srv.subject(t), plan)
					if err != nil || len(h.Wrong()) > 0 {
						t.Logf("seed %d: %v %v", seed, err, first(h.Wrong()))
						return true
					}
				}
				return false
			}
			require.False(t, wrong(), "the real rule holds")
			t.Setenv("SCHOOLBELL_MUTATE", name)
			require.True(t, wrong(), "nothing noticed")
		})
	}
}
