package store

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	sweepRecent  = time.Hour      // an ended notice is still looked at
	failedRecent = 24 * time.Hour // an ended notice's failures are still counted
)

// Sweep does what DB.Sweep does.
func (db *SQLite) Sweep(ctx context.Context) (stranded int, err error) {
	var list []sweepCandidate
	var after int64
	err = db.read(ctx, db.reads, "sweep", func(tx *sqliteTx) error {
		if _, err := tx.one(`SELECT position FROM job_positions WHERE job = 'sweep'`, nil, &after); err != nil {
			return err
		}
		return tx.each(`SELECT id, total_count FROM (
				SELECT id, total_count FROM push_clusters INDEXED BY push_clusters_open WHERE ended_at IS NULL AND id > ?1
				UNION ALL
				SELECT id, total_count FROM push_clusters INDEXED BY push_clusters_ended WHERE ended_at IS NOT NULL AND ended_at > ?2 AND purged_at IS NULL AND id > ?1)
			ORDER BY id LIMIT 10000`, []any{after, tx.now - sweepRecent.Microseconds()}, func(scan func(...any) error) error {
			var c sweepCandidate
			err := scan(&c.ID, &c.Total)
			list = append(list, c)
			return err
		})
	})
	if err != nil {
		return 0, err
	}
	stranded, next, err := sweepOver(list, db.cfg.sweepRows, func(id int64) (int, error) { return db.sweepNotice(ctx, id) })
	if next == after {
		return stranded, err
	}
	return stranded, errors.Join(err, db.change(ctx, "sweep", func(tx *sqliteTx) error {
		_, err := tx.exec(`INSERT INTO job_positions VALUES ('sweep', ?1, ?2)
			ON CONFLICT (job) DO UPDATE SET position = excluded.position, moved_at = excluded.moved_at`, next, tx.now)
		return err
	}))
}

// sqliteSweepSQL compares a notice's counters with its recipients in one
// snapshot: wrong where they differ, or where nothing remains and it has not ended.
const sqliteSweepSQL = `SELECT k.stranded,
	(k.total, k.waiting, k.in_progress, k.retry_pending, k.success, k.fail, k.retry_success, k.retry_fail, k.permanent_fail,
		k.disabled, k.cancelled, k.expired, k.duplicate, k.not_allowed)
	IS NOT
	(c.total_count, c.waiting_count, c.in_progress_count, c.retry_pending_count, c.success_count, c.fail_count,
		c.retry_success_count, c.retry_fail_count, c.permanent_fail_count, c.skipped_disabled_count, c.skipped_cancelled_count,
		c.skipped_expired_count, c.skipped_duplicate_count, c.skipped_not_allowed_count),
	c.ended_at IS NULL AND k.waiting + k.in_progress + k.retry_pending = 0 AND (c.closing IS NULL OR c.closing_seq = c.total_count)
FROM push_clusters AS c JOIN push_cluster_counts AS k ON k.cluster_id = c.id
WHERE c.id = ?1 AND k.cluster_id = ?1`

func (db *SQLite) sweepNotice(ctx context.Context, id int64) (stranded int, err error) {
	op := fmt.Sprintf("sweep notice %d", id)
	var wrong, finished bool
	err = db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
		_, err := tx.one(sqliteSweepSQL, []any{id}, &stranded, &wrong, &finished)
		return err
	})
	if err != nil || (stranded == 0 && !wrong && !finished) {
		return 0, err
	}
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		stranded, err = tx.repair(id)
		return err
	})
	if err != nil {
		return 0, err
	}
	putRight(ctx, db.log, db.metrics, id, wrong, finished, stranded)
	return stranded, nil
}

// repair puts a notice right whose counters do not agree with its recipients, or
// that has recipients which nothing would ever touch again: at or below the
// frontier, without an open batch, without a time to be tried again. It returns
// how many were stranded.
func (tx *sqliteTx) repair(id int64) (stranded int, err error) {
	n, found, err := tx.notice(id)
	if err != nil || !found || n.purged {
		return 0, err
	}
	var retry any
	if n.closing == "" {
		retry = tx.now
	}
	stranded, err = tx.exec(`UPDATE push_cluster_tokens AS t SET
			job_status = CASE WHEN ?2 = '' THEN t.job_status WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
			reason = CASE WHEN ?2 = '' THEN t.reason ELSE ?2 END, retry_after = ?3
		WHERE t.cluster_id = ?1 AND t.seq <= ?4 AND t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL
			AND NOT EXISTS (
				SELECT 1 FROM push_batches AS b JOIN push_batch_ranges AS r ON r.batch_id = b.id
				WHERE b.school_id = t.school_id AND b.settled_at IS NULL
					AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq)`, id, n.closing, retry, n.frontier)
	if err != nil {
		return 0, err
	}
	if _, err := tx.exec(`UPDATE push_clusters AS c SET
			total_count = k.total, in_progress_count = k.in_progress, retry_pending_count = k.retry_pending,
			success_count = k.success, fail_count = k.fail, retry_success_count = k.retry_success, retry_fail_count = k.retry_fail,
			permanent_fail_count = k.permanent_fail,
			skipped_disabled_count = k.disabled, skipped_cancelled_count = k.cancelled, skipped_expired_count = k.expired,
			skipped_duplicate_count = k.duplicate, skipped_not_allowed_count = k.not_allowed,
			ended_at = CASE WHEN k.waiting + k.in_progress + k.retry_pending = 0 THEN c.ended_at END,
			job_status = CASE WHEN c.ended_at IS NOT NULL AND k.waiting + k.in_progress + k.retry_pending > 0 THEN 'IN_PROGRESS' ELSE c.job_status END
		FROM (SELECT * FROM push_cluster_counts WHERE cluster_id = ?1) AS k WHERE c.id = ?1`, id); err != nil {
		return 0, err
	}
	var ledger counterMoves
	ledger.add(id, counterWaiting, counterWaiting, 0) // ends it if nothing remains
	return stranded, tx.move(&ledger)
}

// RecipientCounts does what DB.RecipientCounts does.
func (db *SQLite) RecipientCounts(ctx context.Context) (c RecipientCounts, err error) {
	err = db.read(ctx, db.reads, "recipient counts", func(tx *sqliteTx) error {
		var (
			oldest, oldestRetry       *int64
			retryPending, ended, open int
		)
		if _, err := tx.one(`SELECT coalesce(sum(waiting_count) FILTER (WHERE due_at <= ?1), 0), coalesce(sum(waiting_count) FILTER (WHERE due_at > ?1), 0),
				coalesce(sum(in_progress_count), 0), coalesce(sum(retry_pending_count), 0), coalesce(sum(permanent_fail_count), 0),
				min(due_at) FILTER (WHERE due_at <= ?1 AND waiting_count > 0)
			FROM push_clusters INDEXED BY push_clusters_open WHERE ended_at IS NULL`, []any{tx.now},
			&c.Waiting, &c.Scheduled, &c.InProgress, &retryPending, &c.PermanentFail, &oldest); err != nil {
			return err
		}
		if _, err := tx.one(`SELECT count(*) FILTER (WHERE job_status = 'RETRY_PENDING'), min(retry_after)
			FROM push_cluster_tokens INDEXED BY push_cluster_tokens_retry WHERE retry_after IS NOT NULL AND retry_after <= ?1`, []any{tx.now}, &c.RetryDue, &oldestRetry); err != nil {
			return err
		}
		if _, err := tx.one(`SELECT coalesce(sum(permanent_fail_count), 0) FROM push_clusters INDEXED BY push_clusters_ended WHERE ended_at IS NOT NULL AND ended_at > ?1`,
			[]any{tx.now - failedRecent.Microseconds()}, &ended); err != nil {
			return err
		}
		if _, err := tx.one(`SELECT coalesce(sum(size), 0) FROM push_batches INDEXED BY push_batches_unsettled WHERE settled_at IS NULL`, nil, &open); err != nil {
			return err
		}
		c.RetryWaiting = max(0, retryPending-c.RetryDue)
		c.PermanentFail += ended
		c.OldestWaiting = max(tx.since(oldest), tx.since(oldestRetry)).Seconds()
		c.Stranded = max(0, c.InProgress-open)
		return nil
	})
	if err != nil {
		return RecipientCounts{}, err
	}
	return c, nil
}
