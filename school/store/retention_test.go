package store_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// TestPurgePlansStayByKey purges among rows that nobody counted, with plans made
// on empty tables and with fresh ones, and over what was removed already.
func TestPurgePlansStayByKey(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	for _, table := range []string{"push_cluster_tokens", "push_clusters", "push_batches", "push_batch_ranges", "push_fallbacks"} {
		exec(t, admin, `ALTER TABLE `+table+` SET (autovacuum_enabled = false)`)
	}
	options := strings.ReplaceAll("-c session_preload_libraries=auto_explain -c auto_explain.log_min_duration=0 -c auto_explain.log_nested_statements=on"+
		" -c auto_explain.log_analyze=on -c auto_explain.log_timing=off -c auto_explain.log_format=json -c auto_explain.log_level=notice", " ", "%20")
	var seen plans
	db, err := store.Open(t.Context(), store.Config{URL: url + "&options=" + strings.ReplaceAll(options, "=", "%3D"), MaxConns: 3}.OnNotice(seen.notice))
	require.NoError(t, err)
	t.Cleanup(db.Close)
	const after = 24 * time.Hour
	for round, analyzed := range []bool{false, false, true} {
		// Ended notices of every size, one of them old, and what others go on with.
		exec(t, admin, `INSERT INTO push_clusters (id, school_id, title, body, total_count, success_count, frontier, job_status, due_at, ended_at)
			SELECT $1 * 1000000 + g, 'A', 'T', 'B', n, n, n, 'COMPLETED', now(), now() - CASE WHEN g % 100 = 1 THEN interval '2 days' ELSE interval '1 hour' END
			FROM (SELECT g, CASE WHEN g = 1 THEN 30000 ELSE 20 END AS n FROM generate_series(1, 1000) g) x`, round)
		exec(t, admin, `INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, job_status, attempts)
			SELECT c.id, s, 'A', 't', 'SUCCESS', 1 FROM push_clusters c, generate_series(1, c.total_count) s WHERE c.id / 1000000 = $1`, round)
		exec(t, admin, `INSERT INTO push_batches (id, school_id, sender, fence, cycle, size, filled, owner, claimed_at, send_deadline, settled_at)
			SELECT 'b' || $1 || lpad(g::text, 6, '0'), 'A', 'log', 1, 1, 20, false, 'x', now(), now(), now() - CASE WHEN g <= 100 THEN interval '2 days' ELSE interval '1 hour' END
			FROM generate_series(1, 5000) g`, fmt.Sprint(round))
		exec(t, admin, `INSERT INTO push_batch_ranges SELECT id, 1, 0, 1, 'first' FROM push_batches WHERE id LIKE 'b' || $1 || '%'`, fmt.Sprint(round))
		if analyzed {
			exec(t, admin, `ANALYZE`)
		}
		seen.take(t)
		p, err := db.Purge(t.Context(), after)
		require.NoError(t, err)
		require.Equal(t, []int{10, 30_180}, []int{p.Notices, p.Recipients}, "round %d", round)
		// A step reads what it removes, and of open notices and batches at most a
		// thousand, whatever lies before and behind.
		requireByKey(t, seen.take(t), 5000, fmt.Sprint("purge, round ", round))
	}
	require.Equal(t, [][]string{{"0", "4900"}}, query(t, admin, `SELECT count(*) FILTER (WHERE id <= 'b0000100'), count(*) FILTER (WHERE id < 'b1') FROM push_batches`))
	require.Equal(t, [][]string{{"0"}}, query(t, admin, `SELECT count(*) FROM push_batch_ranges r WHERE NOT EXISTS (SELECT FROM push_batches b WHERE b.id = r.batch_id)`))
}

// TestOnePurgeAtATime: two replicas that purge at once remove everything once.
func TestOnePurgeAtATime(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	conn := connect(t, url)
	var stores []*store.DB
	var registries []*prometheus.Registry
	for range 2 {
		reg := prometheus.NewRegistry()
		db, err := store.Open(t.Context(), store.Config{URL: url, Registerer: reg})
		require.NoError(t, err)
		t.Cleanup(db.Close)
		stores, registries = append(stores, db), append(registries, reg)
	}
	const notices, each = 40, 300
	for i := range notices {
		accept(t, stores[0], fmt.Sprint("S", i), each)
	}
	exec(t, conn, `UPDATE push_cluster_tokens SET job_status = 'SUCCESS', attempts = 1`)
	exec(t, conn, `UPDATE push_clusters SET job_status = 'COMPLETED', ended_at = now() - interval '2 days', frontier = total_count, success_count = total_count`)
	step, err := conn.Begin(t.Context()) // another replica's step
	require.NoError(t, err)
	_, err = step.Exec(t.Context(), `SELECT * FROM schoolbell_purge(86400000000000, 1)`)
	require.NoError(t, err)
	p, err := stores[0].Purge(t.Context(), time.Hour)
	require.NoError(t, err)
	require.Equal(t, school.Purged{}, p, "one at a time")
	require.NoError(t, step.Rollback(t.Context()))

	var wg sync.WaitGroup
	done := make([]school.Purged, 2)
	for i, db := range stores {
		wg.Go(func() {
			// Who comes to a step of the other's ends at once.
			p, err := db.Purge(t.Context(), time.Hour)
			if err != nil {
				t.Error(err)
			}
			done[i] = p
		})
	}
	wg.Wait()
	p, err = stores[0].Purge(t.Context(), time.Hour)
	require.NoError(t, err)
	require.Equal(t, school.Purged{Notices: notices, Recipients: notices * each}, p.Plus(done[0]).Plus(done[1]))
	counted := 0.0
	for _, reg := range registries {
		families, err := reg.Gather()
		require.NoError(t, err)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				if f.GetName() == "schoolbell_retention_removed_total" && m.GetLabel()[0].GetValue() == "push_cluster_tokens" {
					counted += m.GetCounter().GetValue()
				}
			}
		}
	}
	require.EqualValues(t, notices*each, counted)
}
