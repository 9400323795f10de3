package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// dueSQL asks three partial indexes, each of which holds only what is open:
// notices, retries, unsettled batches. The retries of a school may be many, so
// the index is leapt through from school to school, one probe each.
const dueSQL = `
WITH RECURSIVE retry(school_id, at) AS (
	(SELECT t.school_id, t.retry_after FROM push_cluster_tokens t WHERE t.retry_after IS NOT NULL
		ORDER BY t.school_id, t.retry_after LIMIT 1)
	UNION ALL
	SELECT n.school_id, n.retry_after FROM retry r CROSS JOIN LATERAL (
		SELECT t.school_id, t.retry_after FROM push_cluster_tokens t
		WHERE t.retry_after IS NOT NULL AND t.school_id > r.school_id
		ORDER BY t.school_id, t.retry_after LIMIT 1) n
), work AS (
	SELECT c.school_id, min(c.due_at) AS at, false AS drain FROM push_clusters c
		WHERE c.ended_at IS NULL AND c.closing IS NULL AND c.frontier < c.total_count
			AND c.due_at <= statement_timestamp() + $1 * interval '1 microsecond'
			AND (c.expires_at IS NULL OR c.expires_at > statement_timestamp())
		GROUP BY c.school_id
	UNION ALL
	SELECT r.school_id, r.at, false FROM retry r WHERE r.at <= statement_timestamp() + $1 * interval '1 microsecond'
	UNION ALL
	SELECT b.school_id, min(b.send_deadline), true FROM push_batches b
		WHERE b.settled_at IS NULL AND b.send_deadline <= statement_timestamp()
		GROUP BY b.school_id
), earliest AS (
	SELECT w.school_id, min(w.at) AS at, min(w.at) FILTER (WHERE w.drain) AS orphaned FROM work w GROUP BY w.school_id
)
SELECT e.school_id, s.sender, ceil(extract(epoch FROM d.at - statement_timestamp()) * 1000000)::bigint
FROM earliest e JOIN schools s ON s.id = e.school_id JOIN school_terms t ON t.school_id = e.school_id
	CROSS JOIN LATERAL (SELECT CASE WHEN t.paused THEN e.orphaned ELSE e.at END AS at) d
WHERE d.at IS NOT NULL
ORDER BY d.at, e.school_id`

// Due lists the schools that have work: a due notice with recipients beyond its
// frontier, a due retry, an unsettled batch past its send deadline; and those
// whose earliest work comes within horizon. Longest due first. A paused school is
// among them for its unsettled batches alone: what a dead owner left gets its
// outcome, and nothing more is claimed. school.ErrUnavailable.
func (db *DB) Due(ctx context.Context, horizon time.Duration) ([]school.Due, error) {
	rows, err := db.dispatch.Query(ctx, dueSQL, horizon.Microseconds())
	if err != nil {
		return nil, readError("due schools", err)
	}
	due, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (school.Due, error) {
		var (
			d  school.Due
			in int64
		)
		if err := row.Scan(&d.School, &d.Sender, &in); err != nil {
			return d, err
		}
		if in > 0 {
			d.In = micros(in)
		} else {
			d.Since = micros(-in)
		}
		return d, nil
	})
	if err != nil {
		return nil, readError("due schools", err)
	}
	return due, nil
}

// workInSQL probes the same indexes for one school.
const workInSQL = `
SELECT ceil(extract(epoch FROM min(w.at) - statement_timestamp()) * 1000000)::bigint
FROM school_terms t JOIN schools s ON s.id = t.school_id CROSS JOIN LATERAL (
	SELECT n.due_at AS at, false AS drain FROM generate_series(0, 2) AS p(priority) CROSS JOIN LATERAL (
		SELECT c.due_at FROM push_clusters c
		WHERE c.school_id = $1 AND c.ended_at IS NULL AND c.priority = p.priority AND c.closing IS NULL
			AND c.frontier < c.total_count AND (c.expires_at IS NULL OR c.expires_at > statement_timestamp())
		ORDER BY c.due_at LIMIT 1) n
	UNION ALL
	(SELECT r.retry_after, false FROM push_cluster_tokens r
		WHERE r.school_id = $1 AND r.retry_after IS NOT NULL ORDER BY r.retry_after LIMIT 1)
	UNION ALL
	SELECT min(b.send_deadline), true FROM push_batches b WHERE b.school_id = $1 AND b.settled_at IS NULL
) w
WHERE t.school_id = $1 AND (w.drain OR NOT t.paused)`

// WorkIn tells when the school has work next: a due or scheduled notice with
// recipients beyond its frontier, a retry, an unsettled batch that reaches its
// send deadline; only the last counts in a paused school. 0 is now; school.Never is
// not at all, or the school is not there. school.ErrUnavailable.
func (db *DB) WorkIn(ctx context.Context, schoolID string) (time.Duration, error) {
	var in *int64
	if err := db.dispatch.QueryRow(ctx, workInSQL, schoolID).Scan(&in); err != nil {
		return 0, readError("work of school "+schoolID, err)
	}
	if in == nil {
		return school.Never, nil
	}
	return max(0, micros(*in)), nil
}
