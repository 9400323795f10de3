//go:build mutations

package store

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
)

// edit breaks a function of the schema on purpose: old becomes new in its text.
type edit struct{ function, old, new string }

const (
	fenced   = "t.school_id = p_school AND t.fence = p_fence AND t.acquisition = p_acquisition AND NOT t.paused\n            RETURNING"
	unfenced = "t.school_id = p_school AND NOT t.paused\n            RETURNING"
)

// mutations are the parts of those of package scripts that are SQL. An owner that
// trusts its lease for too long would be stopped by the fence.
var mutations = map[string][]edit{
	"no-provisional-rest": {{"schoolbell_claim",
		"WHEN p_filled THEN clock_timestamp() + (p_longest_us + p_rest * 1000) * interval '1 microsecond'", "WHEN p_filled THEN NULL"}},
	"claim-unfenced":       {{"schoolbell_claim", fenced, unfenced}},
	"lease-end-after-call": {{"schoolbell_claim", fenced, unfenced}},
}

// mutate breaks the schema as SCHOOLBELL_MUTATE asks. It stays broken: this is
// for databases that a test throws away.
func (db *DB) mutate(ctx context.Context) error {
	edits := mutations[os.Getenv("SCHOOLBELL_MUTATE")]
	if len(edits) == 0 {
		return nil
	}
	return pgx.BeginFunc(ctx, db.dispatch, func(tx pgx.Tx) error {
		// One replica at a time; the others find it done.
		if _, err := tx.Exec(ctx, `LOCK TABLE `+schemaTable+` IN SHARE ROW EXCLUSIVE MODE`); err != nil {
			return fmt.Errorf("store: mutate: %w", err)
		}
		for _, e := range edits {
			var text string
			if err := tx.QueryRow(ctx, `SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = $1`, e.function).Scan(&text); err != nil {
				return fmt.Errorf("store: mutate %s: %w", e.function, err)
			}
			switch strings.Count(text, e.old) {
			case 1:
				if _, err := tx.Exec(ctx, strings.Replace(text, e.old, e.new, 1)); err != nil {
					return fmt.Errorf("store: mutate %s: %w", e.function, err)
				}
			case 0:
				if !strings.Contains(text, e.new) {
					return fmt.Errorf("store: mutate %s: it has neither %q nor %q", e.function, e.old, e.new)
				}
			}
		}
		return nil
	})
}
