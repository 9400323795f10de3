package demo

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"time"

	_ "github.com/glebarez/go-sqlite" // the judge has eyes of its own and does not ask the store

	"schoolbell/sender/simulator/verdict"
)

// eyes look into the file that the replicas write, past the store: read only.
type eyes struct{ db *sql.DB }

func openEyes(file string) (eyes, error) {
	dsn := url.URL{Scheme: "file", Path: file, RawQuery: url.Values{"_pragma": {"query_only(ON)", "busy_timeout(2000)"}}.Encode()}
	db, err := sql.Open("sqlite", dsn.String())
	if err != nil {
		return eyes{}, fmt.Errorf("open the file to judge by: %w", err)
	}
	db.SetMaxOpenConns(1)
	return eyes{db}, nil
}

func (e eyes) close() error { return e.db.Close() }

// busy reports whether a replica has a batch in its hands.
func (e eyes) busy(ctx context.Context, instance string) bool {
	var n int
	err := e.db.QueryRowContext(ctx, `SELECT count(*) FROM push_batches WHERE settled_at IS NULL AND owner = ?`, instance).Scan(&n)
	return err == nil && n > 0
}

// judge says what was kept, from the receiver's log, from what the applications
// were told, and from the file that the replicas left. It is asked when no
// replica runs any more.
func (r *run) judge(ctx context.Context, unfinished bool) (v verdict.Verdict, err error) {
	j, err := verdict.New(verdict.Config{
		Rule: verdict.Rule{Limit: r.cfg.Limit, Rest: r.cfg.Rest}, Start: r.began, Replicas: r.cfg.Replicas, Unfinished: unfinished,
	})
	if err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	known := map[string]bool{}
	for _, p := range r.posted {
		known[p.id] = true
		if err := j.AcceptNotice(verdict.Notice{ID: p.id, School: p.school, Total: p.total, At: p.at}); err != nil {
			return v, fmt.Errorf("demo: %w", err)
		}
	}
	if err := r.tellOthers(ctx, j, known, unfinished); err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	for _, f := range append(r.stalls, r.cluster.faults...) {
		j.Fault(f)
	}
	for _, tell := range []func(context.Context, *sql.DB, *verdict.Judge) error{tellStates, tellCounts, tellBatches} {
		if err := tell(ctx, r.eyes.db, j); err != nil {
			return v, fmt.Errorf("demo: %w", err)
		}
	}
	for _, a := range r.receiver.Arrivals() {
		j.Arrival(a)
	}
	return j.Verdict(), nil
}

// tellOthers tells of notices that are not known from an answer. Somebody who
// tries the API while the demonstration runs is welcome: what he handed in has to
// be kept as well, once it has ended. One of the demonstration's own is a stranger
// that must not be there, unless the run was ended before its answer came.
func (r *run) tellOthers(ctx context.Context, j *verdict.Judge, known map[string]bool, unfinished bool) error {
	return each(ctx, r.eyes.db, "notices", `SELECT CAST(id AS TEXT), school_id, total_count, created_at, title, ended_at IS NOT NULL FROM push_clusters`, func(rows *sql.Rows) error {
		var n verdict.Notice
		var created int64
		var title string
		var ended bool
		if err := rows.Scan(&n.ID, &n.School, &n.Total, &created, &title, &ended); err != nil {
			return err
		}
		n.At = time.UnixMicro(created)
		own := title == noticeTitle
		if known[n.ID] || own && !unfinished {
			return nil
		}
		n.Maybe = own || !ended
		return j.AcceptNotice(n)
	})
}

func tellStates(ctx context.Context, db *sql.DB, j *verdict.Judge) error {
	return each(ctx, db, "states", `SELECT CAST(cluster_id AS TEXT), seq, job_status FROM push_cluster_token_states`, func(rows *sql.Rows) error {
		var notice, name string
		var seq int
		if err := rows.Scan(&notice, &seq, &name); err != nil {
			return err
		}
		state, err := verdict.ParseState(name)
		if err == nil {
			j.FinalState(fmt.Sprintf("%s.%d", notice, seq), state)
		}
		return err
	})
}

func tellCounts(ctx context.Context, db *sql.DB, j *verdict.Judge) error {
	return each(ctx, db, "counts", `
SELECT CAST(id AS TEXT), total_count, in_progress_count, retry_pending_count, success_count, fail_count, retry_success_count, retry_fail_count, permanent_fail_count,
	skipped_disabled_count + skipped_cancelled_count + skipped_expired_count + skipped_duplicate_count + skipped_not_allowed_count
FROM push_clusters`, func(rows *sql.Rows) error {
		var c verdict.NoticeCounts
		if err := rows.Scan(&c.Notice, &c.Total, &c.InProgress, &c.RetryPending, &c.Success, &c.Fail, &c.RetrySuccess, &c.RetryFail, &c.PermanentFail, &c.SkippedAtAll); err != nil {
			return err
		}
		c.Waiting = c.Total - c.InProgress - c.RetryPending - c.Success - c.Fail - c.RetrySuccess - c.RetryFail - c.PermanentFail - c.SkippedAtAll
		j.NoticeCounts(c)
		return nil
	})
}

func tellBatches(ctx context.Context, db *sql.DB, j *verdict.Judge) error {
	return each(ctx, db, "batches", `SELECT id, school_id, owner, fence, size, claimed_at, send_deadline, settled_at FROM push_batches`, func(rows *sql.Rows) error {
		var b verdict.Batch
		var claimed, deadline int64 // microseconds, as every time in the file
		var settled *int64
		if err := rows.Scan(&b.ID, &b.School, &b.Owner, &b.Fence, &b.Size, &claimed, &deadline, &settled); err != nil {
			return err
		}
		b.ClaimedAt, b.SendDeadline = time.UnixMicro(claimed), time.UnixMicro(deadline)
		if settled != nil {
			b.SettledAt = time.UnixMicro(*settled)
		}
		return j.Batch(b)
	})
}

// each reads all rows of a query.
func each(ctx context.Context, db *sql.DB, what, query string, row func(*sql.Rows) error) error {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return fmt.Errorf("read %s to judge: %w", what, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows); err != nil {
			return fmt.Errorf("read %s to judge: %w", what, err)
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read %s to judge: %w", what, err)
	}
	return nil
}
