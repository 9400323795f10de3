package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// RaiseAlert does what DB.RaiseAlert does.
func (db *SQLite) RaiseAlert(ctx context.Context, c school.Condition) (told bool, err error) {
	err = db.change(ctx, "raise alert "+c.Key, func(tx *sqliteTx) error {
		told = false
		var active bool
		var since, toldAt, seenAt, seen int64
		found, err := tx.one(`SELECT active, since, told_at, seen_at, seen FROM alert_states WHERE key = ?1`, []any{c.Key}, &active, &since, &toldAt, &seenAt, &seen)
		if err != nil || c.Remind && !active {
			return err
		}
		if !found || !active || seenAt < tx.now-c.Lapse.Microseconds() {
			told, since, seen = true, tx.now, 0
		}
		seen += int64(max(1, c.Count))
		if told || toldAt <= tx.now-c.Every.Microseconds() {
			if err := tx.alert(c.Kind, c.Body, since, seen); err != nil {
				return err
			}
			told, toldAt, seen = true, tx.now, 0
		}
		_, err = tx.exec(`INSERT INTO alert_states (key, active, since, told_at, seen_at, seen) VALUES (?1, 1, ?2, ?3, ?4, ?5)
			ON CONFLICT (key) DO UPDATE SET active = 1, since = excluded.since, told_at = excluded.told_at, seen_at = excluded.seen_at, seen = excluded.seen`,
			c.Key, since, toldAt, tx.now, seen)
		return err
	})
	return told, err
}

func (tx *sqliteTx) alert(kind string, body []byte, since, seen int64) error {
	_, err := tx.exec(`INSERT INTO alerts (kind, body, since, seen, retry_after, created_at) VALUES (?1, ?2, ?3, ?4, ?5, ?5)`,
		kind, string(body), since, seen, tx.now)
	return err
}

// EndAlert does what DB.EndAlert does.
func (db *SQLite) EndAlert(ctx context.Context, key, kind string, body []byte) (told bool, err error) {
	err = db.change(ctx, "end alert "+key, func(tx *sqliteTx) error {
		var since int64
		told, err = tx.one(`SELECT since FROM alert_states WHERE key = ?1 AND active = 1`, []any{key}, &since)
		if err != nil || !told {
			return err
		}
		if _, err := tx.exec(`UPDATE alert_states SET active = 0, seen_at = ?2, seen = 0 WHERE key = ?1`, key, tx.now); err != nil {
			return err
		}
		return tx.alert(kind, body, since, 0)
	})
	return told, err
}

// ClaimAlerts does what DB.ClaimAlerts does. Where nothing is due it does not ask
// for the write lock.
func (db *SQLite) ClaimAlerts(ctx context.Context, limit int, lease time.Duration) (list []school.Alert, err error) {
	const op = "claim alerts"
	read := func(tx *sqliteTx) error {
		list = nil
		return tx.each(`SELECT id, kind, body, created_at, since, seen, attempts + 1 FROM alerts INDEXED BY alerts_due
			WHERE retry_after IS NOT NULL AND retry_after <= ?1 ORDER BY retry_after, id LIMIT ?2`, []any{tx.now, limit}, func(scan func(...any) error) error {
			var a school.Alert
			var at, since int64
			err := scan(&a.ID, &a.Kind, &a.Body, &at, &since, &a.Seen, &a.Attempt)
			a.At, a.Since, a.Age = time.UnixMicro(at), time.UnixMicro(since), micros(tx.now-at)
			list = append(list, a)
			return err
		})
	}
	if err := db.read(ctx, db.dispatch, op, read); err != nil || len(list) == 0 {
		return nil, err
	}
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		if err := read(tx); err != nil {
			return err
		}
		for _, a := range list {
			if _, err := tx.exec(`UPDATE alerts SET attempts = ?2, retry_after = ?3 WHERE id = ?1`, a.ID, a.Attempt, tx.now+lease.Microseconds()); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// SettleAlert does what DB.SettleAlert does.
func (db *SQLite) SettleAlert(ctx context.Context, a school.Alert, p school.Posted) error {
	return db.change(ctx, "settle alert", func(tx *sqliteTx) error {
		var retryAfter, sentAt *int64
		switch p.State {
		case school.PostPending:
			at := tx.now + p.RetryIn.Microseconds()
			retryAfter = &at
		case school.PostSent:
			sentAt = &tx.now
		}
		_, err := tx.exec(`UPDATE alerts SET job_status = ?3, error_code = ?4, retry_after = ?5, sent_at = ?6
			WHERE id = ?1 AND job_status = 'PENDING' AND (attempts = ?2 OR ?3 = 'SENT')`,
			a.ID, a.Attempt, string(p.State), stringOrNil(p.Code), retryAfter, sentAt)
		return err
	})
}

// StartDigest does what DB.StartDigest does.
func (db *SQLite) StartDigest(ctx context.Context) error {
	return db.change(ctx, "start digest", func(tx *sqliteTx) error {
		_, err := tx.exec(`INSERT INTO job_positions VALUES ('digest', ?1, ?1) ON CONFLICT DO NOTHING`, tx.now)
		return err
	})
}

// NewFailures does what DB.NewFailures does. Here a transaction's time is read
// under the lock that it writes with, so what is committed later is later.
func (db *SQLite) NewFailures(ctx context.Context) (f school.Failures, err error) {
	const op = "new failures"
	var from, until int64
	var list []sweepCandidate
	// A change, though it changes nothing: behind all that began before it.
	err = db.change(ctx, op, func(tx *sqliteTx) error { until = tx.now; return nil })
	if err != nil {
		return f, err
	}
	err = db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
		found, err := tx.one(`SELECT position FROM job_positions WHERE job = 'digest'`, nil, &from)
		if err != nil {
			return err
		}
		if !found {
			return school.ErrNotFound
		}
		until = max(from, min(until, from+digestSpan.Microseconds()))
		list = nil
		return tx.each(`SELECT id, frontier FROM push_clusters INDEXED BY push_clusters_open WHERE ended_at IS NULL AND permanent_fail_count > 0
			UNION ALL
			SELECT id, frontier FROM push_clusters INDEXED BY push_clusters_ended
				WHERE ended_at IS NOT NULL AND ended_at > ?1 AND permanent_fail_count > 0 AND purged_at IS NULL`, []any{from}, func(scan func(...any) error) error {
			var c sweepCandidate
			err := scan(&c.ID, &c.Total)
			list = append(list, c)
			return err
		})
	})
	if err != nil {
		return f, err
	}
	f.From, f.Until = time.UnixMicro(from), time.UnixMicro(until)
	var counts failureCounts
	for _, part := range digestParts(list) {
		rows := make([][3]any, len(part))
		for i, r := range part {
			rows[i] = [3]any{r.notice, r.from, r.to}
		}
		text, err := table(rows)
		if err != nil {
			return f, err
		}
		err = db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
			return tx.each(`SELECT t.school_id, coalesce(max(s.name), ''), coalesce(t.error_code, t.reason, ''), coalesce(t.reason, ''), count(*)
				FROM json_each(?1) AS x CROSS JOIN push_cluster_tokens AS t
					ON t.cluster_id = x.value->>0 AND t.seq > x.value->>1 AND t.seq <= x.value->>2
				LEFT JOIN schools AS s ON s.id = t.school_id
				WHERE t.job_status = 'PERMANENT_FAIL' AND t.processed_at > ?2 AND t.processed_at <= ?3
				GROUP BY t.school_id, t.error_code, t.reason`, []any{text, from, until}, func(scan func(...any) error) error {
				var c school.FailureCount
				err := scan(&c.School, &c.Name, &c.Code, &c.Reason, &c.Count)
				counts.add(c)
				return err
			})
		})
		if err != nil {
			return f, err
		}
	}
	f.Counts = counts.sorted()
	return f, nil
}

// TellFailures does what DB.TellFailures does.
func (db *SQLite) TellFailures(ctx context.Context, f school.Failures, kind string, body []byte) (told bool, err error) {
	err = db.change(ctx, "tell failures", func(tx *sqliteTx) error {
		told = false
		n, err := tx.exec(`UPDATE job_positions SET position = ?2, moved_at = ?3 WHERE job = 'digest' AND position = ?1`,
			f.From.UnixMicro(), f.Until.UnixMicro(), tx.now)
		if err != nil || n == 0 {
			return err
		}
		if body != nil {
			if err := tx.alert(kind, body, f.From.UnixMicro(), int64(f.Recipients())); err != nil {
				return err
			}
			told = true
		}
		_, err = tx.exec(`DELETE FROM alerts WHERE retry_after IS NULL AND created_at < ?1`, tx.now-(7*24*time.Hour).Microseconds())
		return err
	})
	return told, err
}
