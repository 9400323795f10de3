package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// sqliteDueSQL asks three partial indexes, each of which holds only what is open:
// notices, retries, unsettled batches. The retries of a school may be many, so the
// index is leapt through from school to school, one probe each. INDEXED BY, here and
// elsewhere, keeps the planner from choosing otherwise where somebody ran ANALYZE.
const sqliteDueSQL = `
WITH RECURSIVE retry (school_id) AS (
	SELECT min(school_id) FROM push_cluster_tokens INDEXED BY push_cluster_tokens_retry WHERE retry_after IS NOT NULL
	UNION ALL
	SELECT (SELECT min(k.school_id) FROM push_cluster_tokens AS k INDEXED BY push_cluster_tokens_retry WHERE k.retry_after IS NOT NULL AND k.school_id > r.school_id)
		FROM retry AS r WHERE r.school_id IS NOT NULL
), work (school_id, at, drain) AS (
	SELECT c.school_id, min(c.due_at), 0 FROM push_clusters AS c INDEXED BY push_clusters_open
		WHERE c.ended_at IS NULL AND c.closing IS NULL AND c.frontier < c.total_count
			AND c.due_at <= ?2 AND (c.expires_at IS NULL OR c.expires_at > ?1)
		GROUP BY c.school_id
	UNION ALL
	SELECT f.school_id, f.at, 0 FROM (
		SELECT r.school_id, (SELECT min(k.retry_after) FROM push_cluster_tokens AS k INDEXED BY push_cluster_tokens_retry
			WHERE k.retry_after IS NOT NULL AND k.school_id = r.school_id) AS at
		FROM retry AS r WHERE r.school_id IS NOT NULL) AS f WHERE f.at <= ?2
	UNION ALL
	SELECT b.school_id, min(b.send_deadline), 1 FROM push_batches AS b INDEXED BY push_batches_unsettled
		WHERE b.settled_at IS NULL AND b.send_deadline <= ?1
		GROUP BY b.school_id
)
SELECT e.school_id, s.sender, CASE WHEN t.paused = 1 THEN e.orphaned ELSE e.at END AS due
FROM (SELECT w.school_id, min(w.at) AS at, min(w.at) FILTER (WHERE w.drain = 1) AS orphaned FROM work AS w GROUP BY w.school_id) AS e
	JOIN schools AS s ON s.id = e.school_id JOIN school_terms AS t ON t.school_id = e.school_id
WHERE due IS NOT NULL
ORDER BY due, e.school_id`

// Due does what DB.Due does.
func (db *SQLite) Due(ctx context.Context, horizon time.Duration) (due []school.Due, err error) {
	err = db.read(ctx, db.dispatch, "due schools", func(tx *sqliteTx) error {
		return tx.each(sqliteDueSQL, []any{tx.now, tx.now + horizon.Microseconds()}, func(scan func(...any) error) error {
			var (
				d  school.Due
				at int64
			)
			err := scan(&d.School, &d.Sender, &at)
			if at > tx.now {
				d.In = micros(at - tx.now)
			} else {
				d.Since = micros(tx.now - at)
			}
			due = append(due, d)
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	return due, nil
}

// sqliteWorkInSQL probes the same indexes for one school: ?3, it is paused.
const sqliteWorkInSQL = `SELECT min(at) FROM (
	SELECT (SELECT c.due_at FROM push_clusters AS c INDEXED BY push_clusters_open
		WHERE c.school_id = ?1 AND c.ended_at IS NULL AND c.priority = p.column1 AND c.closing IS NULL
			AND c.frontier < c.total_count AND (c.expires_at IS NULL OR c.expires_at > ?2)
		ORDER BY c.due_at LIMIT 1) AS at FROM (VALUES (0), (1), (2)) AS p WHERE NOT ?3
	UNION ALL
	SELECT min(retry_after) FROM push_cluster_tokens INDEXED BY push_cluster_tokens_retry WHERE school_id = ?1 AND retry_after IS NOT NULL AND NOT ?3
	UNION ALL
	SELECT min(send_deadline) FROM push_batches INDEXED BY push_batches_unsettled WHERE school_id = ?1 AND settled_at IS NULL)`

// WorkIn does what DB.WorkIn does.
func (db *SQLite) WorkIn(ctx context.Context, schoolID string) (in time.Duration, err error) {
	in = school.Never
	err = db.read(ctx, db.dispatch, "work of school "+schoolID, func(tx *sqliteTx) error {
		var paused bool
		found, err := tx.one(`SELECT t.paused FROM school_terms AS t JOIN schools AS s ON s.id = t.school_id WHERE t.school_id = ?1`, []any{schoolID}, &paused)
		if err != nil || !found {
			return err
		}
		var at *int64
		if _, err := tx.one(sqliteWorkInSQL, []any{schoolID, tx.now, paused}, &at); err != nil {
			return err
		}
		if at != nil {
			in = tx.until(at)
		}
		return nil
	})
	return in, err
}
