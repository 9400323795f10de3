//go:build mutations

package node

import (
	"context"
	"os"

	"schoolbell/coordinator"
	"schoolbell/school"
)

// mutated takes the ledger's floors from the scheduler where SCHOOLBELL_MUTATE
// asks for it. settle-twice needs that as well: what was given back twice the
// ledger would take back before the next grant. As long as Redis loses nothing
// the floors alone are not missed.
func mutated(q coordinator.Queue, b coordinator.Budget) (coordinator.Queue, coordinator.Budget) {
	switch os.Getenv("SCHOOLBELL_MUTATE") {
	case "no-ledger-floors", "settle-twice":
		return floorless{q}, groundless{b}
	}
	return q, b
}

// sunk is a ledger that knows the cycle, without which no claim would be taken,
// and neither a count nor a rest.
func sunk(l school.Ledger) school.Ledger { return school.Ledger{Cycle: l.Cycle, Rule: l.Rule} }

// floorless opens terms that do not tell what is left of a rest.
type floorless struct{ coordinator.Queue }

func (q floorless) OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error) {
	t, err := q.Queue.OpenTerm(ctx, schoolID, acquisition, owner)
	t.Ledger = sunk(t.Ledger)
	return t, err
}

// groundless is the arbiter without the ledger to correct it.
type groundless struct{ coordinator.Budget }

func (b groundless) Reconcile(ctx context.Context, schoolID string, l school.Ledger, r school.Rule) error {
	return b.Budget.Reconcile(ctx, schoolID, sunk(l), r)
}

func (b groundless) Rebuild(ctx context.Context, schoolID, acquisition string, fence int64, l school.Ledger, r school.Rule) error {
	return b.Budget.Rebuild(ctx, schoolID, acquisition, fence, sunk(l), r)
}

func (b groundless) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	r.Floor = sunk(r.Floor)
	return b.Budget.Reserve(ctx, r)
}
