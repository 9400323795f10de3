package store

import (
	"context"

	"schoolbell/school"
)

// Cancel does what DB.Cancel does.
func (db *SQLite) Cancel(ctx context.Context, notice int64) error { return cancel(ctx, db, notice) }

// Expire does what DB.Expire does.
func (db *SQLite) Expire(ctx context.Context, limit int) (int, error) { return expire(ctx, db, limit) }

func (db *SQLite) expired(ctx context.Context, op string, limit int) ([]int64, error) {
	return db.noticeIDs(ctx, op, `SELECT id FROM push_clusters INDEXED BY push_clusters_expiring
		WHERE ended_at IS NULL AND closing IS NULL AND expires_at IS NOT NULL AND expires_at <= ?1 ORDER BY expires_at LIMIT ?2`, limit)
}

func (db *SQLite) unfinished(ctx context.Context, op string, limit int) ([]int64, error) {
	return db.noticeIDs(ctx, op, `SELECT id FROM push_clusters INDEXED BY push_clusters_closing
		WHERE ended_at IS NULL AND closing IS NOT NULL AND closing_seq < total_count AND ?1 > 0 ORDER BY id LIMIT ?2`, limit)
}

// noticeIDs runs a query of the time and a limit.
func (db *SQLite) noticeIDs(ctx context.Context, op, query string, limit int) (ids []int64, err error) {
	err = db.read(ctx, db.dispatch, op, func(tx *sqliteTx) error {
		return tx.each(query, []any{tx.now, limit}, func(scan func(...any) error) error {
			var id int64
			err := scan(&id)
			ids = append(ids, id)
			return err
		})
	})
	return ids, err
}

// noticeRow is a notice as a transaction found it.
type noticeRow struct {
	total, waiting, frontier, closingSeq int
	closing                              school.Reason
	expires                              *int64
	ended, purged                        bool
}

func (tx *sqliteTx) notice(id int64) (n noticeRow, found bool, err error) {
	found, err = tx.one(`SELECT total_count, waiting_count, frontier, closing_seq, coalesce(closing, ''), expires_at, ended_at IS NOT NULL, purged_at IS NOT NULL
		FROM push_clusters WHERE id = ?1`, []any{id},
		&n.total, &n.waiting, &n.frontier, &n.closingSeq, &n.closing, &n.expires, &n.ended, &n.purged)
	return n, found, err
}

// closeNotice closes a notice: from here on it takes no attempt. All that waits
// for a first attempt leaves the counters at once as skipped, whatever its size;
// the rows follow in steps, and until then a waiting recipient of a closing notice
// is SKIPPED by definition. What an open batch covers gets that batch's outcome.
func (db *SQLite) closeNotice(ctx context.Context, op string, notice int64, why school.Reason) (answer string, err error) {
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		n, found, err := tx.notice(notice)
		switch {
		case err != nil:
			return err
		case !found:
			answer = "absent"
			return nil
		case n.closing == why:
			answer = "closed"
			return nil
		case n.ended || n.closing != "",
			why == school.Expired && (n.expires == nil || *n.expires > tx.now):
			answer = "ended"
			return nil
		}
		answer = "closing"
		if _, err := tx.exec(`UPDATE push_clusters SET closing = ?2 WHERE id = ?1`, notice, why); err != nil {
			return err
		}
		var ledger counterMoves
		ledger.add(notice, counterWaiting, string(why), n.waiting)
		return tx.move(&ledger)
	})
	return answer, err
}

// closeOneStep writes the closing to the next recipients, in order of seq: those
// that were never handed over are SKIPPED, those that wait for a retry fail for
// good with their last code kept, those of an open batch are left to it. There is
// nobody to wait for: changes come one after the other.
func (db *SQLite) closeOneStep(ctx context.Context, op string, notice int64, _ bool) (more *bool, err error) {
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		n, found, err := tx.notice(notice)
		if err != nil || !found || n.ended || n.closing == "" || n.closingSeq >= n.total {
			return err
		}
		upto := min(n.total, n.closingSeq+closeStep)
		const where = `cluster_id = ?1 AND seq > ?2 AND seq <= ?3 AND job_status IN ('PENDING', 'RETRY_PENDING') AND (retry_after IS NOT NULL OR seq > ?4)`
		var failed int
		if _, err := tx.one(`SELECT count(*) FROM push_cluster_tokens WHERE `+where+` AND attempts > 0`,
			[]any{notice, n.closingSeq, upto, n.frontier}, &failed); err != nil {
			return err
		}
		if _, err := tx.exec(`UPDATE push_cluster_tokens NOT INDEXED SET job_status = CASE WHEN attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
			reason = ?5, retry_after = NULL, processed_at = ?6 WHERE `+where, notice, n.closingSeq, upto, n.frontier, n.closing, tx.now); err != nil {
			return err
		}
		if _, err := tx.exec(`UPDATE push_clusters SET closing_seq = ?2, frontier = max(frontier, ?2) WHERE id = ?1`, notice, upto); err != nil {
			return err
		}
		left := upto < n.total
		more = &left
		var ledger counterMoves
		ledger.add(notice, counterRetryPending, counterPermanentFail, failed)
		return tx.move(&ledger)
	})
	if err != nil {
		return nil, err
	}
	return more, nil
}
