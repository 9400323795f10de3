package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
)

// sweepRows bounds how many recipients one sweep counts. What is beyond it comes
// in the next sweeps, whichever replica runs them.
const sweepRows = 500_000

// sweepListSQL lists what a sweep looks at: open notices and those that ended
// lately, by id beyond $1.
const sweepListSQL = `
SELECT n.id, n.total_count FROM (
	SELECT c.id, c.total_count FROM push_clusters c WHERE c.ended_at IS NULL AND c.id > $1
	UNION
	SELECT c.id, c.total_count FROM push_clusters c
		WHERE c.ended_at IS NOT NULL AND c.ended_at > statement_timestamp() - interval '1 hour' AND c.purged_at IS NULL AND c.id > $1
) n ORDER BY n.id LIMIT 10000`

// sweepCheckSQL compares a notice's counters with its recipients in one
// snapshot, so without any lock: wrong where they differ, or where nothing
// remains and it has not ended.
const sweepCheckSQL = `
SELECT k.stranded,
	(k.total, k.waiting, k.in_progress, k.retry_pending, k.success, k.fail, k.retry_success, k.retry_fail, k.permanent_fail,
		k.disabled, k.cancelled, k.expired, k.duplicate, k.not_allowed)
	IS DISTINCT FROM
	(c.total_count, c.waiting_count, c.in_progress_count, c.retry_pending_count, c.success_count, c.fail_count,
		c.retry_success_count, c.retry_fail_count, c.permanent_fail_count, c.skipped_disabled_count, c.skipped_cancelled_count,
		c.skipped_expired_count, c.skipped_duplicate_count, c.skipped_not_allowed_count) AS wrong,
	c.ended_at IS NULL AND k.waiting + k.in_progress + k.retry_pending = 0
		AND (c.closing IS NULL OR c.closing_seq = c.total_count) AS finished
FROM push_clusters c JOIN push_cluster_counts k ON k.cluster_id = c.id
WHERE c.id = $1`

// Sweep compares the counts of open and lately ended notices with their
// recipients, puts them right where they differ, ends notices of which nothing
// remains, and puts recipients back that nothing would ever touch again
// (stranded: the number of those, which must be 0). It looks at a bounded number
// of recipients a call and goes on from there in the next. A notice is locked
// only if something is wrong with it. school.ErrUnavailable.
func (db *DB) Sweep(ctx context.Context) (stranded int, err error) {
	const op = "sweep"
	var after int64
	err = db.reads.QueryRow(ctx, `SELECT coalesce((SELECT position FROM job_positions WHERE job = 'sweep'), 0)`).Scan(&after)
	if err != nil {
		return 0, readError(op, err)
	}
	rows, err := db.reads.Query(ctx, sweepListSQL, after)
	if err != nil {
		return 0, readError(op, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[sweepCandidate])
	if err != nil {
		return 0, readError(op, err)
	}
	stranded, next, err := sweepOver(list, db.cfg.sweepRows, func(id int64) (int, error) { return db.sweepNotice(ctx, id) })
	if next == after {
		return stranded, err
	}
	return stranded, errors.Join(err, change(ctx, db.ingest, op, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `INSERT INTO job_positions VALUES ('sweep', $1, clock_timestamp())
			ON CONFLICT (job) DO UPDATE SET position = excluded.position, moved_at = excluded.moved_at`, next)
		return err
	}))
}

type sweepCandidate struct {
	ID    int64
	Total int
}

// sweepOver looks at the notices of the list until it has counted enough
// recipients, and returns the notice after which the next sweep goes on; 0 where
// it came to the end. One that cannot be looked at is passed over: the sweeps
// after the next come to it again, and it must not hide what lies behind it.
func sweepOver(list []sweepCandidate, rows int, look func(id int64) (stranded int, err error)) (stranded int, next int64, err error) {
	counted := 0
	for _, n := range list {
		if counted > 0 && counted+n.Total > rows {
			return stranded, next, nil
		}
		counted, next = counted+n.Total, n.ID
		found, err := look(n.ID)
		stranded += found
		if err != nil {
			return stranded, next, err
		}
	}
	return stranded, 0, nil
}

func (db *DB) sweepNotice(ctx context.Context, id int64) (stranded int, err error) {
	op := fmt.Sprintf("sweep notice %d", id)
	var wrong, finished bool
	err = db.reads.QueryRow(ctx, sweepCheckSQL, id).Scan(&stranded, &wrong, &finished)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	if err != nil {
		return 0, readError(op, err)
	}
	if stranded == 0 && !wrong && !finished {
		return 0, nil
	}
	err = change(ctx, db.ingest, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT schoolbell_repair($1)`, id).Scan(&stranded)
	})
	if err != nil {
		return 0, err
	}
	putRight(ctx, db.log, db.metrics, id, wrong, finished, stranded)
	return stranded, nil
}

// putRight tells of something that must not happen.
func putRight(ctx context.Context, log *slog.Logger, m *metrics, notice int64, wrong, finished bool, stranded int) {
	if wrong {
		m.countsRepaired.Inc()
	}
	log.ErrorContext(ctx, "a notice was put right", "event", "notice_repaired",
		"notice", notice, "counts_wrong", wrong, "not_ended", finished, "stranded", stranded)
}

// RecipientCounts is the store's work in numbers, for metrics.
type RecipientCounts struct {
	Waiting       int     // not handed over yet, of due notices
	Scheduled     int     // of notices whose time has not come
	InProgress    int     // covered by open batches
	RetryWaiting  int     // RETRY_PENDING, not due yet
	RetryDue      int     // RETRY_PENDING and due
	PermanentFail int     // of open notices and of those that ended within a day
	OldestWaiting float64 // seconds since the oldest due work became due; 0 without any

	// Stranded compares counters with open batches, which is cheap enough for
	// every scrape; Sweep looks at the recipients themselves.
	Stranded int
}

const recipientCountsSQL = `
WITH open AS (
	SELECT coalesce(sum(c.waiting_count) FILTER (WHERE c.due_at <= statement_timestamp()), 0) AS waiting,
		coalesce(sum(c.waiting_count) FILTER (WHERE c.due_at > statement_timestamp()), 0) AS scheduled,
		coalesce(sum(c.in_progress_count), 0) AS in_progress,
		coalesce(sum(c.retry_pending_count), 0) AS retry_pending,
		coalesce(sum(c.permanent_fail_count), 0) AS permanent_fail,
		min(c.due_at) FILTER (WHERE c.due_at <= statement_timestamp() AND c.waiting_count > 0) AS oldest
	FROM push_clusters c WHERE c.ended_at IS NULL
), due AS (
	SELECT count(*) FILTER (WHERE t.job_status = 'RETRY_PENDING') AS n, min(t.retry_after) AS oldest
	FROM push_cluster_tokens t WHERE t.retry_after IS NOT NULL AND t.retry_after <= statement_timestamp()
)
SELECT o.waiting, o.scheduled, o.in_progress, greatest(0, o.retry_pending - d.n), d.n,
	o.permanent_fail + (SELECT coalesce(sum(c.permanent_fail_count), 0) FROM push_clusters c
		WHERE c.ended_at IS NOT NULL AND c.ended_at > statement_timestamp() - interval '1 day'),
	coalesce(extract(epoch FROM statement_timestamp() - least(o.oldest, d.oldest)), 0)::float8,
	greatest(0, o.in_progress - (SELECT coalesce(sum(b.size), 0) FROM push_batches b WHERE b.settled_at IS NULL))
FROM open o, due d`

// RecipientCounts counts the recipients of open notices by what they wait for,
// from counters and partial indexes, in one snapshot. school.ErrUnavailable.
func (db *DB) RecipientCounts(ctx context.Context) (RecipientCounts, error) {
	var c RecipientCounts
	err := db.reads.QueryRow(ctx, recipientCountsSQL).Scan(&c.Waiting, &c.Scheduled, &c.InProgress, &c.RetryWaiting,
		&c.RetryDue, &c.PermanentFail, &c.OldestWaiting, &c.Stranded)
	if err != nil {
		return RecipientCounts{}, readError("recipient counts", err)
	}
	return c, nil
}
