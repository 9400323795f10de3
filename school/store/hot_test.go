package store_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// TestInterleaving07UpdatesStayHeapOnly watches what keeps the outbox fast for good: the
// update that each recipient sees, and those of a notice under way, touch no
// index. An index that names a state or a counter ends that.
func TestInterleaving07UpdatesStayHeapOnly(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db := open(t, url)
	conn := connect(t, url)
	accept(t, db, "A", 20_000)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	for i := 0; ; i++ {
		page, err := db.Page(t.Context(), term, 1000)
		require.NoError(t, err)
		if len(page.Work) == 0 {
			break
		}
		for j := 0; j < len(page.Work); j += 200 {
			sendBatch(t, t.Context(), db, term, fmt.Sprint("batch-", i, "-", j), page.Work[j:j+200], func(i int) school.Outcome {
				if i%50 == 0 {
					return school.Gone
				}
				return school.Accepted
			})
		}
	}
	updates := func(table string) (all, hot int) {
		r := query(t, conn, `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = $1`, table)
		all, err := strconv.Atoi(r[0][0])
		require.NoError(t, err)
		hot, err = strconv.Atoi(r[0][1])
		require.NoError(t, err)
		return all, hot
	}
	for table, want := range map[string]int{"push_cluster_tokens": 20_000, "push_clusters": 200, "school_terms": 101} {
		// A session reports what it did when it has been idle for a moment.
		require.Eventually(t, func() bool {
			exec(t, conn, `SELECT pg_stat_clear_snapshot()`)
			all, _ := updates(table)
			return all >= want
		}, 20*time.Second, 50*time.Millisecond, table)
		all, hot := updates(table)
		t.Logf("%s: %d of %d updates were heap-only", table, hot, all)
		require.GreaterOrEqual(t, float64(hot), 0.97*float64(all), "%s: %d of %d", table, hot, all)
	}
}
