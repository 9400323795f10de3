package store_test

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

// TestInterleaving15ARequeueLooksUnderTheLock: what happened to a notice between
// the list of notices and the step that would put its recipients back.
func TestInterleaving15ARequeueLooksUnderTheLock(t *testing.T) {
	t.Parallel()
	type requeued interface {
		storetest.Store
		store.Requeuer
	}
	for engine, open := range map[string]func(*testing.T) (requeued, func(sql string)){
		"postgres": func(t *testing.T) (requeued, func(string)) {
			url := migrated(t)
			conn := connect(t, url)
			return open(t, url), func(sql string) { exec(t, conn, sql) }
		},
		"sqlite": func(t *testing.T) (requeued, func(string)) {
			path := filepath.Join(t.TempDir(), "school.db")
			db := openFile(t, path)
			other := beside(t, path)
			return db, func(sql string) { execOn(t, other, sql) }
		},
	} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			db, change := open(t)
			failed := func(schoolID string) int64 {
				n := notice(schoolID)
				n.ExpiresAt, n.Delivery = time.Now().Add(time.Hour), school.AtMostOnce
				r, err := db.Accept(t.Context(), n, 4, devices(4))
				require.NoError(t, err)
				term, err := db.OpenTerm(t.Context(), schoolID, "acq", "x")
				require.NoError(t, err)
				page, err := db.Page(t.Context(), term, 10)
				require.NoError(t, err)
				sendBatch(t, t.Context(), db, term, fmt.Sprint("batch-", r.ID), page.Work, func(int) school.Outcome { return school.Rejected })
				change(fmt.Sprintf(`UPDATE push_cluster_tokens SET reason = 'OUTCOME_UNKNOWN' WHERE cluster_id = %d AND seq <= 2`, r.ID))
				require.Equal(t, 4, progress(t, db, r.ID).Counts.PermanentFail)
				return r.ID
			}
			for i, c := range []struct {
				outcome, change string
				n               int
				code            school.Reason
			}{
				{"done", `UPDATE push_clusters SET traceparent = '' WHERE id = %d`, 2, ""}, // nothing happened
				{"done", `UPDATE push_clusters SET traceparent = '' WHERE id = %d`, 2, school.OutcomeUnknown},
				{"cancelled", `UPDATE push_clusters SET closing = 'CANCELLED' WHERE id = %d`, 0, ""},
				{"expired", `UPDATE push_clusters SET closing = 'EXPIRED' WHERE id = %d`, 0, ""},
				{"expired", `UPDATE push_clusters SET expires_at = created_at WHERE id = %d`, 0, ""},
				{"purged", `UPDATE push_clusters SET purged_at = ended_at WHERE id = %d`, 0, ""},
				{"deleted", `DELETE FROM schools WHERE id = (SELECT school_id FROM push_clusters WHERE id = %d)`, 0, ""},
				{"absent", `DELETE FROM push_clusters WHERE id = %d`, 0, ""},
			} {
				id := failed(fmt.Sprint("school-", i)) // one of them is deleted
				change(fmt.Sprintf(c.change, id))
				outcome, n, err := store.RequeueStep(t.Context(), db, school.RequeueOrder{FailureFilter: school.FailureFilter{Code: string(c.code)}}, id, 10)
				require.NoError(t, err)
				require.Equal(t, []any{c.outcome, c.n}, []any{outcome, n}, c.change)
			}
		})
	}
}
