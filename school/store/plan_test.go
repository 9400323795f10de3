package store_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

// planNode is what auto_explain tells of one step of a plan that ran.
type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Rows     float64    `json:"Actual Rows"`
	Loops    float64    `json:"Actual Loops"`
	Removed  float64    `json:"Rows Removed by Filter"`
	Rechecks float64    `json:"Rows Removed by Index Recheck"`
	Plans    []planNode `json:"Plans"`
}

func (n *planNode) walk(visit func(*planNode)) {
	visit(n)
	for i := range n.Plans {
		n.Plans[i].walk(visit)
	}
}

// plans collects the plans of everything that a store executes, statements
// inside functions included.
type plans struct {
	mu      sync.Mutex
	list    []explained
	invalid []string
}

type explained struct {
	Query string   `json:"Query Text"`
	Plan  planNode `json:"Plan"`
}

func (p *plans) notice(n *pgconn.Notice) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, text, ok := strings.Cut(n.Message, "plan:")
	if !ok {
		return
	}
	var e explained
	if err := json.Unmarshal([]byte(text), &e); err != nil {
		p.invalid = append(p.invalid, err.Error())
		return
	}
	p.list = append(p.list, e)
}

// take returns what was collected since the last take.
func (p *plans) take(t *testing.T) []explained {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Empty(t, p.invalid)
	list := p.list
	p.list = nil
	return list
}

// requireByKey fails where a statement read a table of the outbox without an
// index, or many more rows of it than it has to do with.
func requireByKey(t *testing.T, list []explained, rows float64, about string) {
	t.Helper()
	require.NotEmpty(t, list, about)
	for _, e := range list {
		e.Plan.walk(func(n *planNode) {
			if n.Relation == "" || n.Type == "ModifyTable" || n.Type == "Insert" || n.Type == "Update" {
				return
			}
			read := (n.Rows + n.Removed + n.Rechecks) * max(n.Loops, 1)
			if n.Type == "Seq Scan" || read > rows {
				t.Errorf("%s: %s of %s (%s) read %.0f rows in\n%s", about, n.Type, n.Relation, n.Index, read, e.Query)
			}
		})
	}
}

// TestPlansStayByKey runs the turn's statements on tables without statistics,
// with plans that were made while they were empty, and with fresh ones: none
// may depend on how much is done already or lies ahead.
func TestPlansStayByKey(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	for _, table := range []string{"push_cluster_tokens", "push_clusters", "push_batches", "push_batch_ranges", "school_terms", "schools", "devices"} {
		exec(t, admin, `ALTER TABLE `+table+` SET (autovacuum_enabled = false)`)
	}
	options := strings.ReplaceAll("-c session_preload_libraries=auto_explain -c auto_explain.log_min_duration=0 -c auto_explain.log_nested_statements=on"+
		" -c auto_explain.log_analyze=on -c auto_explain.log_timing=off -c auto_explain.log_format=json -c auto_explain.log_level=notice", " ", "%20")
	url += "&options=" + strings.ReplaceAll(options, "=", "%3D")

	var seen plans
	openSeen := func() *store.DB {
		db, err := store.Open(t.Context(), store.Config{URL: url, MaxConns: 3, ReadTimeout: time.Minute}.OnNotice(seen.notice))
		require.NoError(t, err)
		t.Cleanup(db.Close)
		return db
	}
	old := openSeen() // its one dispatching session plans everything on empty tables
	small := accept(t, old, "small", 10)
	turnOf(t, old, "small", 10, 10)
	require.Equal(t, school.NoticeCompleted, progress(t, old, small).Status)
	seen.take(t)

	const big = 100_000
	for i := range 300 {
		accept(t, old, fmt.Sprint("other-", i), 20)
	}
	accept(t, old, "big", big)
	// Half of it is done, and some of it failed: what a plan might walk over.
	exec(t, admin, `UPDATE push_cluster_tokens SET job_status = 'SUCCESS', attempts = 1 WHERE school_id = 'big' AND seq <= 50000 AND seq % 100 <> 0`)
	exec(t, admin, `UPDATE push_cluster_tokens SET job_status = 'RETRY_PENDING', attempts = 1, retry_after = now() + interval '1 hour' WHERE school_id = 'big' AND seq <= 50000 AND seq % 100 = 0`)
	exec(t, admin, `UPDATE push_clusters SET frontier = 50000, success_count = 49500, retry_pending_count = 500, job_status = 'IN_PROGRESS' WHERE school_id = 'big'`)
	exec(t, admin, `UPDATE push_cluster_tokens SET retry_after = now() - interval '1 minute' WHERE school_id = 'big' AND seq <= 10000 AND retry_after IS NOT NULL`)
	for _, c := range []struct {
		about    string
		analyzed bool
		db       *store.DB
	}{
		{"plans made on empty tables", false, old},
		{"fresh plans without statistics", false, openSeen()},
		{"fresh plans with statistics", true, openSeen()},
	} {
		if c.analyzed {
			exec(t, admin, `ANALYZE`)
		}
		seen.take(t)
		due, err := c.db.Due(t.Context(), time.Minute)
		require.NoError(t, err)
		require.Len(t, due, 301)
		requireByKey(t, seen.take(t), 1000, c.about+", due")
		for range 3 {
			turnOf(t, c.db, "big", 1000, 200)
			requireByKey(t, seen.take(t), 2200, c.about+", a turn")
		}
	}
}

// turnOf reads a page of a school and claims and records one batch of it, one
// in twenty failing for now.
func turnOf(tb testing.TB, db storetest.Store, schoolID string, pageSize, batch int) {
	tb.Helper()
	ctx := tb.Context()
	term, err := db.OpenTerm(ctx, schoolID, "acq", "x")
	require.NoError(tb, err)
	_, err = db.Takeover(ctx, term, school.RetryPolicy{})
	require.NoError(tb, err)
	page, err := db.Page(ctx, term, pageSize)
	require.NoError(tb, err)
	require.GreaterOrEqual(tb, len(page.Work), batch)
	sendBatch(tb, ctx, db, term, fmt.Sprint("batch-", schoolID, "-", term.Fence), page.Work[:batch], func(i int) school.Outcome {
		if batch > 20 && i%20 == 0 {
			return school.Unavailable
		}
		return school.Accepted
	})
}

// sendBatch claims and records work.
func sendBatch(tb testing.TB, ctx context.Context, db storetest.Store, term school.Term, id string, work []school.Work, outcome func(i int) school.Outcome) {
	tb.Helper()
	c := claimOf(id, work)
	require.NoError(tb, db.Claim(ctx, term, c))
	require.NoError(tb, db.Record(ctx, recordOf(tb, term, c, outcome)))
}

func claimOf(id string, work []school.Work) school.Claim {
	c := school.Claim{
		Batch: id, Sender: "log", Work: work, Longest: 10 * time.Second, Record: 2 * time.Second,
		Rule: school.Rule{Limit: 5000, Rest: 180 * time.Second, Version: 1}, UrgentFirst: true,
	}
	c.Grant = school.Grant{Kind: school.Granted, Size: c.Size(), Cycle: 1, Attempted: len(work)}
	return c
}

func recordOf(tb testing.TB, term school.Term, c school.Claim, outcome func(i int) school.Outcome) school.BatchRecord {
	tb.Helper()
	r := school.BatchRecord{Batch: c.Batch, School: term.School, Owner: term.Owner, Fence: term.Fence, Cycle: 1, Rest: c.Rule.Rest}
	for i := range c.Work {
		k := &c.Work[i]
		if !k.Sendable() {
			continue
		}
		change, err := school.Next(k.Standing, school.Event{Outcome: outcome(i)}, school.RetryPolicy{Max: 3, Base: time.Minute})
		require.NoError(tb, err)
		r.Results = append(r.Results, school.Recorded{Notice: k.Notice.ID, Seq: k.Seq, Change: change})
	}
	return r
}

func accepted(int) school.Outcome { return school.Accepted }

func notice(schoolID string) *school.Notice {
	return &school.Notice{School: schoolID, Content: school.Content{Title: "Title", Body: "Body"}, Priority: school.Normal, Delivery: school.AtLeastOnce}
}

func accept(tb testing.TB, db storetest.Store, schoolID string, n int) int64 {
	tb.Helper()
	r, err := db.Accept(tb.Context(), notice(schoolID), n, devices(n))
	require.NoError(tb, err)
	return r.ID
}

// devices yields n tokens as long as FCM's.
func devices(n int) func(yield func(school.NewRecipient, error) bool) {
	return func(yield func(school.NewRecipient, error) bool) {
		tail := strings.Repeat("fcm-registration-token/", 7)
		for i := range n {
			if !yield(school.NewRecipient{Token: fmt.Sprintf("%07d", i+1) + tail[:153]}, nil) {
				return
			}
		}
	}
}

func progress(tb testing.TB, db storetest.Store, id int64) school.Progress {
	tb.Helper()
	p, err := db.Notice(tb.Context(), id)
	require.NoError(tb, err)
	return p
}
