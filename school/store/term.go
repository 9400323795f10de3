package store

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// batchJSON is an open batch as the functions in the database tell it.
type batchJSON struct {
	ID          string `json:"id"`
	Fence       int64  `json:"fence"`
	Cycle       int64  `json:"cycle"`
	Size        int    `json:"size"`
	RemainingUS int64  `json:"remaining_us"`
}

func openBatches(text []byte) ([]school.OpenBatch, error) {
	if len(text) == 0 {
		return nil, nil
	}
	var list []batchJSON
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("open batches: %w", err)
	}
	batches := make([]school.OpenBatch, len(list))
	for i, b := range list {
		batches[i] = school.OpenBatch{ID: b.ID, Fence: b.Fence, Cycle: b.Cycle, Size: b.Size, Remaining: micros(b.RemainingUS)}
	}
	return batches, nil
}

// OpenTerm raises the school's fence by one and makes (acquisition, owner) its
// holder. From its return on no claim of an older fence commits, and each that
// did is among the unsettled (R13). The rest in its ledger is what is left of
// it by the database's clock, rounded up.
//
// school.ErrNotFound for an unknown school, school.ErrUnavailable where nothing
// was changed, school.ErrCommitUnknown where the fence may have grown: a term
// opened anew is then simply the next one.
func (db *DB) OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error) {
	op := "open term of school " + schoolID
	t := school.Term{School: schoolID, Acquisition: acquisition, Owner: owner}
	var (
		resting, rest int64
		schoolLimit   *int
		schoolRest    *int64
		batches       []byte
	)
	err := change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT fence, cycle, attempted, filled, resting_us, rule_limit, rule_rest, rule_version,
				name, sender, school_limit, school_rest, settings_version, paused, created_at, batches
				FROM schoolbell_open_term($1, $2, $3)`, schoolID, acquisition, owner).
			Scan(&t.Fence, &t.Ledger.Cycle, &t.Ledger.Attempted, &t.Ledger.Filled, &resting,
				&t.Ledger.Rule.Limit, &rest, &t.Ledger.Rule.Version,
				&t.Settings.Name, &t.Settings.Sender, &schoolLimit, &schoolRest, &t.Settings.SettingsVersion,
				&t.Settings.Paused, &t.Settings.CreatedAt, &batches)
	})
	if err != nil {
		return school.Term{}, err
	}
	t.Ledger.Resting, t.Ledger.Rule.Rest = micros(resting), restFromMillis(rest)
	t.Settings.ID, t.Settings.Limit, t.Settings.Rest = schoolID, schoolLimit, restOrNil(schoolRest)
	if t.Unsettled, err = openBatches(batches); err != nil {
		return school.Term{}, fmt.Errorf("%s: %w", op, err)
	}
	return t, nil
}

func restOrNil(ms *int64) *time.Duration {
	if ms == nil {
		return nil
	}
	d := restFromMillis(*ms)
	return &d
}
