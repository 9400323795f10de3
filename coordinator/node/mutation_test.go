//go:build mutations

package node

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
)

// hearer is a ledger that is full, and an arbiter that writes down which floors
// it is told.
type hearer struct {
	coordinator.Queue
	coordinator.Budget
	heard []school.Ledger
}

func (h *hearer) OpenTerm(context.Context, string, string, string) (school.Term, error) {
	return school.Term{Fence: 7, Ledger: full}, nil
}

func (h *hearer) Reconcile(_ context.Context, _ string, l school.Ledger, _ school.Rule) error {
	h.heard = append(h.heard, l)
	return nil
}

func (h *hearer) Rebuild(_ context.Context, _, _ string, _ int64, l school.Ledger, _ school.Rule) error {
	h.heard = append(h.heard, l)
	return nil
}

func (h *hearer) Reserve(_ context.Context, r school.Reservation) (school.Grant, error) {
	h.heard = append(h.heard, r.Floor)
	return school.Grant{}, nil
}

var full = school.Ledger{Cycle: 3, Attempted: 50, Filled: true, Resting: time.Second, Rule: school.Rule{Limit: 50, Rest: time.Second, Version: 1}}

func TestMutationsTakeTheFloorsAway(t *testing.T) {
	floors := func() []school.Ledger {
		h := &hearer{}
		q, b := mutated(h, h)
		term, err := q.OpenTerm(t.Context(), "A", "acq", "one")
		require.NoError(t, err)
		require.Equal(t, int64(7), term.Fence)
		require.NoError(t, b.Reconcile(t.Context(), "A", full, full.Rule))
		require.NoError(t, b.Rebuild(t.Context(), "A", "acq", 7, full, full.Rule))
		_, err = b.Reserve(t.Context(), school.Reservation{Floor: full})
		require.NoError(t, err)
		return append(h.heard, term.Ledger)
	}
	require.Equal(t, []school.Ledger{full, full, full, full}, floors())
	for _, name := range []string{"no-ledger-floors", "settle-twice"} {
		t.Setenv("SCHOOLBELL_MUTATE", name)
		none := school.Ledger{Cycle: 3, Rule: full.Rule}
		require.Equal(t, []school.Ledger{none, none, none, none}, floors())
	}
}
