package store_test

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// statements collects what a store runs.
type statements struct {
	list []string
	args map[string][]any
}

func (s *statements) of(db *store.SQLite, work func()) {
	s.list, s.args = nil, map[string][]any{}
	db.OnStatement(func(query string, args []any) {
		if _, known := s.args[query]; !known {
			s.list = append(s.list, query)
		}
		s.args[query] = slices.Clone(args)
	})
	work()
	db.OnStatement(nil)
}

// byKey are the ways in which a statement of the scheduler may reach a table, as
// EXPLAIN QUERY PLAN tells them. Indexes that are gone through from end to end
// hold only what is open.
var byKey = map[string]*regexp.Regexp{
	"push_cluster_tokens": regexp.MustCompile(`^SEARCH .*(PRIMARY KEY \(cluster_id=\? AND seq|INDEX push_cluster_tokens_retry)`),
	"push_clusters": regexp.MustCompile(`^SEARCH .*(INTEGER PRIMARY KEY \(rowid=\?\)|INDEX push_clusters_(idempotency|expiring|retained) \()|` +
		`^S.* INDEX push_clusters_(open|closing)`),
	"push_batches":      regexp.MustCompile(`^SEARCH .*PRIMARY KEY \(id[=>]\?\)|^S.* INDEX push_batches_unsettled`),
	"push_fallbacks":    regexp.MustCompile(`^SEARCH .*PRIMARY KEY \(cluster_id=\? AND seq`),
	"push_batch_ranges": regexp.MustCompile(`^SEARCH .*PRIMARY KEY \(batch_id=\?`),
	"school_terms":      regexp.MustCompile(`^SEARCH .*PRIMARY KEY \(school_id=\?\)`),
	"schools":           regexp.MustCompile(`^SEARCH .*PRIMARY KEY \(id=\?\)`),
	"devices":           regexp.MustCompile(`^SEARCH .*(PRIMARY KEY \(school_id=\? AND token_sha=\?\)|INDEX devices_off \()`),
}

var (
	tableIn = regexp.MustCompile(`\b(push_\w+|school_terms|schools|devices)\b(?:\s+AS\s+(\w+))?`)
	stepOf  = regexp.MustCompile(`^(?:SCAN|SEARCH) (\w+)`)
)

// notByKey says which steps of a plan reach a table in another way.
func notByKey(query string, plan []string) (wrong []string) {
	tables := map[string]string{}
	for _, m := range tableIn.FindAllStringSubmatch(query, -1) {
		tables[m[1]] = m[1]
		if m[2] != "" {
			tables[m[2]] = m[1]
		}
	}
	for _, line := range plan {
		m := stepOf.FindStringSubmatch(line)
		if m == nil || tables[m[1]] == "" {
			continue // of what the statement itself made
		}
		if !byKey[tables[m[1]]].MatchString(line) {
			wrong = append(wrong, line)
		}
	}
	return wrong
}

func TestNotByKeyTellsAScan(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		query string
		plan  string
		wrong bool
	}{
		{`SELECT * FROM push_cluster_tokens AS t WHERE school_id = ?`, `SCAN t`, true},
		{`SELECT * FROM push_cluster_tokens WHERE school_id = ?`, `SCAN push_cluster_tokens`, true},
		{`SELECT * FROM push_cluster_tokens AS t`, `SCAN t USING INDEX push_cluster_tokens_retry`, true},
		{`SELECT * FROM push_cluster_tokens AS t`, `SEARCH t USING PRIMARY KEY (cluster_id=?)`, true},
		{`SELECT * FROM push_cluster_tokens AS t`, `SEARCH t USING PRIMARY KEY (cluster_id=? AND seq>? AND seq<?)`, false},
		{`UPDATE push_clusters AS c`, `SEARCH c USING INDEX push_clusters_school (school_id=?)`, true},
		{`SELECT 1 FROM devices`, `SEARCH devices USING PRIMARY KEY (school_id=?)`, true},
		{`SELECT x.key FROM json_each(?1) AS x`, `SCAN x VIRTUAL TABLE INDEX 1:`, false},
	} {
		require.Equal(t, c.wrong, len(notByKey(c.query, []string{c.plan})) > 0, "%s: %s", c.query, c.plan)
	}
}

// TestSQLitePlansStayByKey runs everything that the scheduler does on a notice of
// 100,000 among others, half of it done, and looks at how each statement reaches
// its rows, without statistics and with.
func TestSQLitePlansStayByKey(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	look := beside(t, path)
	const big = 100_000
	for i := range 100 {
		accept(t, db, fmt.Sprint("other-", i), 20)
	}
	id := accept(t, db, "big", big)
	execOn(t, look, `UPDATE push_cluster_tokens SET job_status = 'SUCCESS', attempts = 1 WHERE school_id = 'big' AND seq <= 50000 AND seq % 100 <> 0`)
	execOn(t, look, `UPDATE push_cluster_tokens SET job_status = 'RETRY_PENDING', attempts = 1, retry_after = ? + 3600000000 WHERE school_id = 'big' AND seq <= 50000 AND seq % 100 = 0`, time.Now().UnixMicro())
	execOn(t, look, `UPDATE push_clusters SET frontier = 50000, success_count = 49500, retry_pending_count = 500, job_status = 'IN_PROGRESS' WHERE school_id = 'big'`)
	execOn(t, look, `UPDATE push_cluster_tokens SET retry_after = 1 WHERE school_id = 'big' AND seq <= 30000 AND retry_after IS NOT NULL`)
	execOn(t, look, `INSERT INTO devices (school_id, token_sha, token, enabled, registered_at, updated_at)
		SELECT school_id, randomblob(32), token, seq % 1000 <> 0, 1, 1 FROM push_cluster_tokens WHERE school_id = 'big' AND seq > 80000`)
	execOn(t, look, `UPDATE push_cluster_tokens SET enabled = 0 WHERE school_id = 'big' AND seq > 50000 AND seq % 50 = 0`)

	var seen statements
	seen.of(db, func() {
		ctx := t.Context()
		n := notice("new")
		n.IdempotencyKey, n.RequestHash = "key", []byte{1}
		n.ExpiresAt = time.Now().Add(time.Hour)
		for range 2 {
			_, err := db.Accept(ctx, n, 10, devices(10))
			require.NoError(t, err)
		}
		_, err := db.Due(ctx, time.Minute)
		require.NoError(t, err)
		_, err = db.WorkIn(ctx, "big")
		require.NoError(t, err)
		term, err := db.OpenTerm(ctx, "big", "acq", "x")
		require.NoError(t, err)
		page, err := db.Page(ctx, term, 1000)
		require.NoError(t, err)
		require.Equal(t, []school.WorkKind{school.Again, school.First}, []school.WorkKind{page.Work[0].Kind, page.Work[999].Kind})
		sendBatch(t, ctx, db, term, "sent", page.Work[200:500], func(i int) school.Outcome {
			return []school.Outcome{school.Accepted, school.Gone, school.Unknown, school.Accepted}[i%4]
		})
		page, err = db.Page(ctx, term, 1000)
		require.NoError(t, err)
		require.NoError(t, db.Claim(ctx, term, claimOf("withdrawn", page.Work[:300])))
		require.NoError(t, db.Withdraw(ctx, term, "withdrawn"))
		page, err = db.Page(ctx, term, 1000)
		require.NoError(t, err)
		require.NoError(t, db.Claim(ctx, term, claimOf("orphaned", page.Work[:300])))
		execOn(t, look, `UPDATE push_batches SET send_deadline = 1 WHERE id = 'orphaned'`)
		term, err = db.OpenTerm(ctx, "big", "acq", "y")
		require.NoError(t, err)
		_, err = db.Takeover(ctx, term, school.RetryPolicy{Max: 3, Base: time.Minute})
		require.NoError(t, err)
		page, err = db.Page(ctx, term, 1000)
		require.NoError(t, err)
		change, err := school.Confirm(page.Work[200].Standing)
		require.NoError(t, err)
		require.NoError(t, db.Confirm(ctx, term, []school.Recorded{{Notice: id, Seq: page.Work[200].Seq, Change: change}}))
		require.NoError(t, db.Pause(ctx, "big"))
		require.NoError(t, db.Cancel(ctx, id))
		_, err = db.Expire(ctx, 10)
		require.NoError(t, err)
		execOn(t, look, `UPDATE push_batches SET settled_at = 1 WHERE id = 'sent'`)
		execOn(t, look, `UPDATE push_clusters SET ended_at = 1 WHERE school_id = 'other-1'`)
		p, err := db.Purge(ctx, time.Hour)
		require.NoError(t, err)
		require.Equal(t, school.Purged{Notices: 1, Recipients: 20, Batches: 1, Ranges: 1}, school.Purged{Notices: p.Notices, Recipients: p.Recipients, Batches: p.Batches, Ranges: min(p.Ranges, 1)})
	})
	require.Greater(t, len(seen.list), 40)
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			execOn(t, look, `ANALYZE`)
		}
		for _, query := range seen.list {
			if strings.Contains(query, "temp.") {
				continue // where a long notice was gathered is no table of the outbox
			}
			var plan []string
			for _, r := range rowsOf(t, look, `EXPLAIN QUERY PLAN `+query, seen.args[query]...) {
				plan = append(plan, r[3])
			}
			require.Empty(t, notByKey(query, plan), "analyzed: %t\n%s\n%s", analyzed, query, strings.Join(plan, "\n"))
		}
	}
}
