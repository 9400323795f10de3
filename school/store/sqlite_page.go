package store

import (
	"context"
	"fmt"
	"time"

	"schoolbell/school"
)

// openRows are the due notices of a school that have recipients beyond their
// frontiers, by priority and age.
const openRows = `FROM push_clusters AS c INDEXED BY push_clusters_open
	WHERE c.school_id = ?1 AND c.ended_at IS NULL AND c.closing IS NULL AND c.due_at <= ?2
		AND c.frontier < c.total_count AND (c.expires_at IS NULL OR c.expires_at > ?2)
	ORDER BY c.priority, c.due_at, c.id`

// Page does what DB.Page does, in one snapshot.
func (db *SQLite) Page(ctx context.Context, t school.Term, limit int) (page school.Page, err error) {
	op := "page of school " + t.School
	if limit < 1 {
		return school.Page{}, fmt.Errorf("%s: limit %d: at least 1", op, limit)
	}
	err = db.read(ctx, db.dispatch, op, func(tx *sqliteTx) error {
		list := make([]pageRow, 0, limit)
		if list, err = tx.pageAgain(list, t.School, limit); err != nil {
			return err
		}
		if list, err = tx.pageFirst(list, t.School, limit); err != nil {
			return err
		}
		if err := tx.markOff(list, t.School); err != nil {
			return err
		}
		notices, err := tx.pageNotices(list, t.School)
		if err != nil {
			return err
		}
		page = school.Page{More: len(list) >= limit}
		if page.NextDue, err = tx.nextDue(t.School); err != nil {
			return err
		}
		return compose(&page, list, notices, limit)
	})
	if err != nil {
		return school.Page{}, err
	}
	return page, nil
}

// pageAgain reads due retries, from their partial index in the order in which
// they became due. What is not due yet stands behind them and blocks nothing (R23).
func (tx *sqliteTx) pageAgain(list []pageRow, schoolID string, limit int) ([]pageRow, error) {
	err := tx.each(`SELECT t.cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, t.requeued,
			t.enabled IS 0, t.reason IS 'OUTCOME_UNKNOWN', t.badge, t.token, t.data
		FROM push_cluster_tokens AS t INDEXED BY push_cluster_tokens_retry CROSS JOIN push_clusters AS c ON c.id = t.cluster_id
		WHERE t.school_id = ?1 AND t.retry_after IS NOT NULL AND t.retry_after <= ?2
			AND c.ended_at IS NULL AND c.closing IS NULL AND (c.expires_at IS NULL OR c.expires_at > ?2)
		ORDER BY t.retry_after, t.cluster_id, t.seq LIMIT ?3`, []any{schoolID, tx.now, limit}, func(scan func(...any) error) error {
		r := pageRow{place: int64(len(list)), work: school.Work{Kind: school.Again}}
		w, s := &r.work, &r.work.Standing
		var (
			off  bool
			data []byte
		)
		if err := scan(&r.notice, &w.Seq, &s.State, &s.Attempts, &s.Retries, &s.Orphanings, &w.Requeued, &off, &w.Uncertain, &w.Badge, &w.Token, &data); err != nil {
			return err
		}
		list = append(list, r)
		return list[len(list)-1].complete(off, data)
	})
	return list, err
}

// pageFirst reads what lies beyond the frontiers, up to limit, as one range of the
// primary key a notice. It was never handed over, so there is no standing to read.
func (tx *sqliteTx) pageFirst(list []pageRow, schoolID string, limit int) ([]pageRow, error) {
	var ranges [][3]any
	ahead := 0
	err := tx.each(`SELECT c.id, c.frontier, c.total_count `+openRows+` LIMIT ?3`, []any{schoolID, tx.now, limit}, func(scan func(...any) error) error {
		var (
			id             int64
			frontier, upto int
		)
		if err := scan(&id, &frontier, &upto); err != nil || ahead >= limit {
			return err
		}
		upto = min(upto, frontier+limit-ahead)
		ranges = append(ranges, [3]any{id, frontier, upto})
		ahead += upto - frontier
		return nil
	})
	if err != nil || len(ranges) == 0 {
		return list, err
	}
	text, err := table(ranges)
	if err != nil {
		return list, err
	}
	err = tx.each(`SELECT x.key, t.cluster_id, t.seq, t.job_status, t.enabled IS 0, t.badge, t.token, t.data
		FROM json_each(?1) AS x CROSS JOIN push_cluster_tokens AS t
			ON t.cluster_id = x.value->>0 AND t.seq > x.value->>1 AND t.seq <= x.value->>2`, []any{text}, func(scan func(...any) error) error {
		r := pageRow{work: school.Work{Kind: school.First}}
		w := &r.work
		var (
			off  bool
			data []byte
		)
		if err := scan(&r.place, &r.notice, &w.Seq, &w.Standing.State, &off, &w.Badge, &w.Token, &data); err != nil {
			return err
		}
		list = append(list, r)
		return list[len(list)-1].complete(off, data)
	})
	return list, err
}

// markOff looks devices up only where the school has any that is off.
func (tx *sqliteTx) markOff(list []pageRow, schoolID string) error {
	var one int
	found, err := tx.one(`SELECT 1 FROM devices INDEXED BY devices_off WHERE school_id = ?1 AND enabled = 0 AND retired_at IS NULL LIMIT 1`, []any{schoolID}, &one)
	if err != nil || !found {
		return err
	}
	var keys []string
	index := map[string][]int{}
	for i := range list {
		if !list[i].work.Sendable() {
			continue
		}
		key := tokenKey(list[i].work.Token)
		keys = append(keys, key)
		index[key] = append(index[key], i)
	}
	text, err := table(keys)
	if err != nil {
		return err
	}
	return tx.each(`SELECT x.value FROM json_each(?2) AS x CROSS JOIN devices AS d ON d.school_id = ?1 AND d.token_sha = unhex(x.value)
		WHERE d.enabled = 0 AND d.retired_at IS NULL`, []any{schoolID, text}, func(scan func(...any) error) error {
		var key string
		err := scan(&key)
		for _, i := range index[key] {
			list[i].work.Skip = school.Disabled
		}
		return err
	})
}

// pageNotices reads the content of each notice on the page, once.
func (tx *sqliteTx) pageNotices(list []pageRow, schoolID string) (map[int64]*school.Notice, error) {
	notices := map[int64]*school.Notice{}
	var ids []int64
	for i := range list {
		id := list[i].notice
		if _, known := notices[id]; !known {
			notices[id] = nil
			ids = append(ids, id)
		}
	}
	text, err := table(ids)
	if err != nil {
		return nil, err
	}
	err = tx.each(`SELECT c.id, c.title, c.body, c.data, c.image, c.link, c.priority, c.delivery, c.scheduled_at, c.expires_at, c.traceparent, coalesce(c.fallback_sms, ''), c.due_at
		FROM json_each(?1) AS x CROSS JOIN push_clusters AS c ON c.id = x.value`, []any{text}, func(scan func(...any) error) error {
		n := &school.Notice{School: schoolID}
		var (
			priority           int
			data               []byte
			scheduled, expires instant
			due                int64
		)
		err := scan(&n.ID, &n.Content.Title, &n.Content.Body, &data, &n.Content.Image, &n.Content.Link, &priority, &n.Delivery,
			&scheduled, &expires, &n.TraceParent, &n.Fallback, &due)
		if err != nil {
			return err
		}
		n.ScheduledAt, n.ExpiresAt, n.DueFor = scheduled.Time, expires.Time, max(0, micros(tx.now-due))
		if !expires.IsZero() {
			n.ExpiresIn = micros(expires.UnixMicro() - tx.now)
		}
		if n.Priority, err = priorityWord(priority); err != nil {
			return fmt.Errorf("notice %d: %w", n.ID, err)
		}
		if n.Content.Data, err = dataMap(data); err != nil {
			return fmt.Errorf("data of notice %d: %w", n.ID, err)
		}
		notices[n.ID] = n
		return nil
	})
	return notices, err
}

// nextDue finds the earliest later work of a school, by one probe of an index for
// retries and one a priority for notices.
func (tx *sqliteTx) nextDue(schoolID string) (time.Duration, error) {
	var at *int64
	if _, err := tx.one(`SELECT min(at) FROM (
		SELECT min(retry_after) AS at FROM push_cluster_tokens INDEXED BY push_cluster_tokens_retry WHERE school_id = ?1 AND retry_after IS NOT NULL AND retry_after > ?2
		UNION ALL
		SELECT (SELECT min(c.due_at) FROM push_clusters AS c INDEXED BY push_clusters_open
			WHERE c.school_id = ?1 AND c.ended_at IS NULL AND c.priority = p.column1 AND c.due_at > ?2)
		FROM (VALUES (0), (1), (2)) AS p)`, []any{schoolID, tx.now}, &at); err != nil || at == nil {
		return 0, err
	}
	return max(tx.until(at), time.Microsecond), nil
}
