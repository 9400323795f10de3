package store

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// RaiseAlert notes that the condition holds, and makes an alert of it where it is
// new, was not seen for its lapse, or was told long enough ago, once however many
// replicas say so. told is whether this call made one. school.ErrUnavailable,
// school.ErrCommitUnknown: saying it again at worst counts it twice.
func (db *DB) RaiseAlert(ctx context.Context, c school.Condition) (told bool, err error) {
	err = change(ctx, db.ingest, "raise alert "+c.Key, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT schoolbell_raise_alert($1, $2, $3, $4, $5, $6, $7)`, c.Key, c.Kind, string(c.Body), max(1, c.Count),
			c.Every.Microseconds(), c.Lapse.Microseconds(), c.Remind).Scan(&told)
	})
	return told, err
}

// EndAlert notes that a condition that was raised holds no longer, and makes the
// alert that says so, once. Where it did not hold nothing happens. Errors as
// RaiseAlert.
func (db *DB) EndAlert(ctx context.Context, key, kind string, body []byte) (told bool, err error) {
	err = change(ctx, db.ingest, "end alert "+key, func(conn *pgx.Conn) error {
		tag, err := conn.Exec(ctx, `WITH ended AS (
				UPDATE alert_states s SET active = false, seen_at = clock_timestamp(), seen = 0 WHERE s.key = $1 AND s.active RETURNING s.since
			)
			INSERT INTO alerts (kind, body, since, seen, retry_after, created_at)
			SELECT $2, $3, e.since, 0, clock_timestamp(), clock_timestamp() FROM ended e`, key, kind, string(body))
		told = tag.RowsAffected() == 1
		return err
	})
	return told, err
}

// ClaimAlerts takes up to limit alerts that are due, oldest first, and counts a
// try of each. It is otherwise as ClaimFallbacks.
func (db *DB) ClaimAlerts(ctx context.Context, limit int, lease time.Duration) (list []school.Alert, err error) {
	err = change(ctx, db.ingest, "claim alerts", func(c *pgx.Conn) error {
		rows, err := c.Query(ctx, `WITH due AS (
				SELECT a.id FROM alerts a WHERE a.retry_after IS NOT NULL AND a.retry_after <= statement_timestamp()
				ORDER BY a.retry_after, a.id LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED
			)
			UPDATE alerts a SET attempts = a.attempts + 1, retry_after = statement_timestamp() + $2 * interval '1 microsecond'
			FROM due d WHERE a.id = d.id
			RETURNING a.id, a.kind, a.body::text, a.created_at, a.since, a.seen, a.attempts,
				(extract(epoch FROM statement_timestamp() - a.created_at) * 1000000)::bigint`, limit, lease.Microseconds())
		if err != nil {
			return err
		}
		list, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (a school.Alert, err error) {
			var age int64
			var body string
			err = row.Scan(&a.ID, &a.Kind, &body, &a.At, &a.Since, &a.Seen, &a.Attempt, &age)
			a.Body, a.Age = []byte(body), micros(age)
			return a, err
		})
		return err
	})
	return list, err
}

// SettleAlert writes what became of a try, as SettleFallback does.
func (db *DB) SettleAlert(ctx context.Context, a school.Alert, p school.Posted) error {
	return change(ctx, db.ingest, "settle alert", func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `UPDATE alerts SET job_status = $3, error_code = $4,
				retry_after = CASE WHEN $3 = 'PENDING' THEN clock_timestamp() + $5 * interval '1 microsecond' END,
				sent_at = CASE WHEN $3 = 'SENT' THEN clock_timestamp() END
			WHERE id = $1 AND job_status = 'PENDING' AND (attempts = $2 OR $3 = 'SENT')`,
			a.ID, a.Attempt, string(p.State), stringOrNil(p.Code), p.RetryIn.Microseconds())
		return err
	})
}

// digestSpan bounds what one digest looks at, so that one which was off for long
// comes to its end in steps.
const digestSpan = 7 * 24 * time.Hour

// digestRows bounds how many recipients one statement of a digest reads.
const digestRows = 200_000

// digestRange is a part of a notice's recipients.
type digestRange struct {
	notice   int64
	from, to int
}

// digestParts cuts notices into parts of statements that read a bounded number of
// recipients each.
func digestParts(list []sweepCandidate) (parts [][]digestRange) {
	var part []digestRange
	rows := 0
	for _, n := range list {
		for from := 0; from < n.Total; {
			to := min(n.Total, from+digestRows-rows)
			part = append(part, digestRange{n.ID, from, to})
			if rows += to - from; rows == digestRows {
				parts, part, rows = append(parts, part), nil, 0
			}
			from = to
		}
	}
	if len(part) > 0 {
		parts = append(parts, part)
	}
	return parts
}

// StartDigest lets the digest begin now, if it has not begun before: what failed
// before anybody was to be told is no news. school.ErrUnavailable.
func (db *DB) StartDigest(ctx context.Context) error {
	return change(ctx, db.ingest, "start digest", func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `INSERT INTO job_positions VALUES ('digest', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, clock_timestamp())
			ON CONFLICT DO NOTHING`)
		return err
	})
}

// NewFailures counts the recipients that have failed for good since the last
// digest, whatever made them fail, without an index and without a word from those
// who wrote them: each row says when it was processed, and only notices that have
// such recipients and are open, or ended since then, are read.
//
// The stretch ends before anything that is not committed yet: a row that says an
// earlier time and is seen later would be in no digest. One digest looks at a week
// at most. A recipient that was requeued before its digest is not counted.
// school.ErrNotFound where StartDigest was never called; school.ErrUnavailable.
func (db *DB) NewFailures(ctx context.Context) (school.Failures, error) {
	const op = "new failures"
	var f school.Failures
	var from, until int64
	// The clock first: a transaction that begins after it writes later times, one
	// that began before is among the open ones, or was committed and is seen.
	err := db.reads.QueryRow(ctx, `WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
		SELECT p.position, (extract(epoch FROM least(k.now, (
				SELECT min(a.xact_start) FROM pg_stat_activity a
				WHERE a.datname = current_database() AND a.application_name IN ('schoolbell-dispatch', 'schoolbell-ingest')))) * 1000000)::bigint
		FROM clock k, job_positions p WHERE p.job = 'digest'`).Scan(&from, &until)
	if err != nil {
		return f, readError(op, err)
	}
	until = max(from, min(until, from+digestSpan.Microseconds()))
	f.From, f.Until = time.UnixMicro(from), time.UnixMicro(until)
	rows, err := db.reads.Query(ctx, `
		SELECT c.id, c.frontier FROM push_clusters c WHERE c.ended_at IS NULL AND c.permanent_fail_count > 0
		UNION
		SELECT c.id, c.frontier FROM push_clusters c
			WHERE c.ended_at IS NOT NULL AND c.ended_at > $1 AND c.permanent_fail_count > 0 AND c.purged_at IS NULL`, f.From)
	if err != nil {
		return f, readError(op, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[sweepCandidate])
	if err != nil {
		return f, readError(op, err)
	}
	var counts failureCounts
	for _, part := range digestParts(list) {
		ids, lows, highs := make([]int64, len(part)), make([]int32, len(part)), make([]int32, len(part))
		for i, r := range part {
			ids[i], lows[i], highs[i] = r.notice, int32(r.from), int32(r.to)
		}
		rows, err := db.reads.Query(ctx, `
			SELECT t.school_id, coalesce(max(s.name), ''), coalesce(t.error_code, t.reason, ''), coalesce(t.reason, ''), count(*)
			FROM unnest($1::bigint[], $2::integer[], $3::integer[]) AS r(notice, low, high)
			CROSS JOIN LATERAL (SELECT t.* FROM push_cluster_tokens t
				WHERE t.cluster_id = r.notice AND t.seq > r.low AND t.seq <= r.high
					AND t.job_status = 'PERMANENT_FAIL' AND t.processed_at > $4 AND t.processed_at <= $5) t
			LEFT JOIN schools s ON s.id = t.school_id
			GROUP BY t.school_id, t.error_code, t.reason`, ids, lows, highs, f.From, f.Until)
		if err != nil {
			return f, readError(op, err)
		}
		err = counts.read(rows.Next, rows.Scan)
		rows.Close()
		if err = errors.Join(err, rows.Err()); err != nil {
			return f, readError(op, err)
		}
	}
	f.Counts = counts.sorted()
	return f, nil
}

// TellFailures moves the digest on past f, and where body is not nil makes the
// alert that tells of it, both or neither; told is false where another replica was
// first. school.ErrUnavailable; school.ErrCommitUnknown: it may have been made, and
// the next digest goes on from wherever that left it.
func (db *DB) TellFailures(ctx context.Context, f school.Failures, kind string, body []byte) (told bool, err error) {
	err = change(ctx, db.ingest, "tell failures", func(c *pgx.Conn) error {
		var text *string
		if body != nil {
			s := string(body)
			text = &s
		}
		return c.QueryRow(ctx, `SELECT schoolbell_tell_digest($1, $2, $3, $4, $5)`,
			f.From.UnixMicro(), f.Until.UnixMicro(), kind, text, f.Recipients()).Scan(&told)
	})
	return told, err
}
