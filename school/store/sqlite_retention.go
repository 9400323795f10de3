package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// Purge does what DB.Purge does. Changes come one after the other here, so its
// steps are what everybody else waits for, and short for that reason.
func (db *SQLite) Purge(ctx context.Context, after time.Duration) (school.Purged, error) {
	return purge(ctx, db, after, db.log, db.metrics)
}

func (db *SQLite) purgeStep(ctx context.Context, after time.Duration, rows int) (p school.Purged, more bool, err error) {
	if err := checkAfter(after); err != nil {
		return p, false, err
	}
	err = db.change(ctx, "purge", func(tx *sqliteTx) error {
		before := tx.now - after.Microseconds()
		batches, err := tx.oldBatches(before, rows)
		if err != nil {
			return err
		}
		for _, id := range batches {
			n, err := tx.exec(`DELETE FROM push_batch_ranges WHERE batch_id = ?1`, id)
			if err != nil {
				return err
			}
			p.Ranges += n
			if _, err := tx.exec(`DELETE FROM push_batches WHERE id = ?1`, id); err != nil {
				return err
			}
			p.Batches++
		}
		notices, err := tx.oldNotices(before, rows)
		if err != nil {
			return err
		}
		left := rows
		for _, n := range notices {
			upto := min(n.total, n.purged+left)
			var emptied any
			if upto == n.total {
				emptied = tx.now
				p.Notices++
			}
			if _, err := tx.exec(`UPDATE push_clusters SET purged_at = coalesce(purged_at, ?2), purged_seq = ?3, emptied_at = ?4 WHERE id = ?1`,
				n.id, tx.now, upto, emptied); err != nil {
				return err
			}
			removed, err := tx.exec(`DELETE FROM push_cluster_tokens WHERE cluster_id = ?1 AND seq > ?2 AND seq <= ?3`, n.id, n.purged, upto)
			if err != nil {
				return err
			}
			p.Recipients += removed
			if removed, err = tx.exec(`DELETE FROM push_fallbacks WHERE cluster_id = ?1 AND seq > ?2 AND seq <= ?3`, n.id, n.purged, upto); err != nil {
				return err
			}
			p.Fallbacks += removed
			if left -= upto - n.purged; left == 0 {
				break
			}
		}
		more = len(batches) > 0 || len(notices) > 0
		return nil
	})
	if err != nil {
		return school.Purged{}, false, err
	}
	return p, more, nil
}

// oldBatches are some that were settled by then, as many as sent at most so many
// recipients. A batch's id begins with its time, so the oldest are the first.
func (tx *sqliteTx) oldBatches(before int64, rows int) (ids []string, err error) {
	err = tx.each(`SELECT id, size, coalesce(settled_at <= ?1, 0) FROM push_batches WHERE id > '' ORDER BY id LIMIT 1000`, []any{before}, func(scan func(...any) error) error {
		var (
			id   string
			size int
			old  bool
		)
		if err := scan(&id, &size, &old); err != nil {
			return err
		}
		if old && rows > 0 {
			ids = append(ids, id)
			rows -= size + 1
		}
		return nil
	})
	return ids, err
}

// oldNotice is one whose recipients, above purged, are to be removed.
type oldNotice struct {
	id            int64
	total, purged int
}

func (tx *sqliteTx) oldNotices(before int64, rows int) (list []oldNotice, err error) {
	err = tx.each(`SELECT id, total_count, purged_seq FROM push_clusters INDEXED BY push_clusters_retained
		WHERE ended_at IS NOT NULL AND emptied_at IS NULL AND ended_at <= ?1 ORDER BY ended_at, id LIMIT 500`, []any{before}, func(scan func(...any) error) error {
		var n oldNotice
		if err := scan(&n.id, &n.total, &n.purged); err != nil {
			return err
		}
		if rows > 0 {
			list = append(list, n)
			rows -= n.total - n.purged
		}
		return nil
	})
	return list, err
}
