package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// recordFallbacks makes the fallbacks of a batch.
func (tx *sqliteTx) recordFallbacks(schoolID string, o *outcomes) error {
	if len(o.fallSeq) == 0 {
		return nil
	}
	rows := make([][2]any, len(o.fallSeq))
	for i := range rows {
		rows[i] = [2]any{o.fallNotice[i], o.fallSeq[i]}
	}
	text, err := table(rows)
	if err != nil {
		return err
	}
	_, err = tx.exec(`INSERT INTO push_fallbacks (cluster_id, seq, school_id, kind, retry_after, created_at)
		SELECT value->>0, value->>1, ?2, '`+smsKind+`', ?3, ?3 FROM json_each(?1) WHERE true ON CONFLICT DO NOTHING`, text, schoolID, tx.now)
	return err
}

const dueFallbacksSQL = `SELECT f.cluster_id, f.seq, f.school_id, coalesce(t.ref, ''), coalesce(c.fallback_sms, ''), f.attempts + 1, ?1 - f.created_at,
		coalesce(c.closing, CASE WHEN c.expires_at <= ?1 THEN 'EXPIRED' ELSE '' END)
	FROM push_fallbacks AS f INDEXED BY push_fallbacks_due
	CROSS JOIN push_clusters AS c ON c.id = f.cluster_id
	LEFT JOIN push_cluster_tokens AS t ON t.cluster_id = f.cluster_id AND t.seq = f.seq
	WHERE f.retry_after IS NOT NULL AND f.retry_after <= ?1 ORDER BY f.retry_after LIMIT ?2`

// ClaimFallbacks does what DB.ClaimFallbacks does. Where nothing is due it does
// not ask for the write lock.
func (db *SQLite) ClaimFallbacks(ctx context.Context, limit int, lease time.Duration) (list []school.Fallback, err error) {
	const op = "claim fallbacks"
	read := func(tx *sqliteTx) error {
		list = nil
		return tx.each(dueFallbacksSQL, []any{tx.now, limit}, func(scan func(...any) error) error {
			var f school.Fallback
			var age int64
			err := scan(&f.Notice, &f.Seq, &f.School, &f.Ref, &f.Text, &f.Attempt, &age, &f.Void)
			f.Age = micros(age)
			list = append(list, f)
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
		for _, f := range list {
			if _, err := tx.exec(`UPDATE push_fallbacks SET attempts = ?3, retry_after = ?4 WHERE cluster_id = ?1 AND seq = ?2`,
				f.Notice, f.Seq, f.Attempt, tx.now+lease.Microseconds()); err != nil {
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

// SettleFallback does what DB.SettleFallback does.
func (db *SQLite) SettleFallback(ctx context.Context, f school.Fallback, p school.Posted) error {
	return db.change(ctx, "settle fallback "+f.ID(), func(tx *sqliteTx) error {
		var retryAfter, sentAt *int64
		switch p.State {
		case school.PostPending:
			at := tx.now + p.RetryIn.Microseconds()
			retryAfter = &at
		case school.PostSent:
			sentAt = &tx.now
		}
		_, err := tx.exec(`UPDATE push_fallbacks SET job_status = ?4, error_code = ?5, retry_after = ?6, sent_at = ?7
			WHERE cluster_id = ?1 AND seq = ?2 AND job_status = 'PENDING' AND (attempts = ?3 OR ?4 = 'SENT')`,
			f.Notice, f.Seq, f.Attempt, string(p.State), stringOrNil(p.Code), retryAfter, sentAt)
		return err
	})
}
