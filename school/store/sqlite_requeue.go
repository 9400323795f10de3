package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// Requeue does what DB.Requeue does.
func (db *SQLite) Requeue(ctx context.Context, o school.RequeueOrder) (school.Requeued, error) {
	return requeue(ctx, db, db.readModels, o)
}

func (db *SQLite) clock(ctx context.Context, op string) (now time.Time, err error) {
	return now, db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
		now = time.UnixMicro(tx.now)
		return nil
	})
}

const requeueSQL = `UPDATE push_cluster_tokens NOT INDEXED SET
		job_status = 'RETRY_PENDING', retry_after = ?4, retry_count = 0, orphan_count = 0, requeued = requeued + 1,
		error_code = NULL, reason = NULL
	WHERE cluster_id = ?1 AND seq > ?2 AND seq <= ?3 AND job_status = 'PERMANENT_FAIL'
		AND (processed_at IS NULL OR processed_at <= ?5)
		AND (?6 = '' OR error_code = ?6 OR reason = ?6)
		AND (?7 <> 'at_most_once' OR reason IS NOT 'OUTCOME_UNKNOWN' OR ?6 = 'OUTCOME_UNKNOWN')`

func (db *SQLite) requeueOneStep(ctx context.Context, op string, o *school.RequeueOrder, notice int64, from, upto int) (outcome string, n int, err error) {
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		row, found, err := tx.notice(notice)
		if err != nil {
			return err
		}
		var (
			delivery string
			known    bool
		)
		if _, err := tx.one(`SELECT c.delivery, EXISTS (SELECT 1 FROM schools AS s WHERE s.id = c.school_id) FROM push_clusters AS c WHERE c.id = ?1`,
			[]any{notice}, &delivery, &known); err != nil {
			return err
		}
		switch {
		case !found:
			outcome = requeueAbsent
		case row.purged:
			outcome = requeuePurged
		case row.closing == school.Cancelled:
			outcome = requeueCancelled
		case row.closing != "" || row.expires != nil && *row.expires <= tx.now:
			outcome = requeueExpired
		case !known:
			outcome = requeueDeleted
		default:
			outcome = requeueDone
		}
		if outcome != requeueDone {
			return nil
		}
		if n, err = tx.exec(requeueSQL, notice, from, upto, tx.now, o.From.Before.UnixMicro(), o.Code, delivery); err != nil || n == 0 {
			return err
		}
		if _, err := tx.exec(`UPDATE push_clusters SET ended_at = NULL, job_status = 'IN_PROGRESS' WHERE id = ?1 AND ended_at IS NOT NULL`, notice); err != nil {
			return err
		}
		var ledger counterMoves
		ledger.add(notice, counterPermanentFail, counterRetryPending, n)
		return tx.move(&ledger)
	})
	return outcome, n, err
}
