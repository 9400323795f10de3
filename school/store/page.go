package store

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// A page is read by four statements in one snapshot, all in one message. now()
// is the same in all of them.
const (
	beginPage = `BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY`
	endPage   = `COMMIT`
)

// againRows are due retries, from their partial index in the order in which they
// became due. What is not due yet stands behind them and blocks nothing (R23).
const againRows = `
	SELECT t.cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, t.requeued, t.enabled, t.badge, t.token, t.data, t.reason
	FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
	WHERE t.school_id = $1 AND t.retry_after IS NOT NULL AND t.retry_after <= now()
		AND c.ended_at IS NULL AND c.closing IS NULL AND (c.expires_at IS NULL OR c.expires_at > now())
	ORDER BY t.retry_after, t.cluster_id, t.seq LIMIT $2`

// switchedOff looks a device up only where the school has any that is off.
const switchedOff = `t.enabled IS FALSE OR ((SELECT EXISTS (SELECT FROM devices d WHERE d.school_id = $1 AND NOT d.enabled AND d.retired_at IS NULL))
		AND EXISTS (SELECT FROM devices d WHERE d.school_id = $1 AND d.token_sha = sha256(convert_to(t.token, 'UTF8'))
			AND NOT d.enabled AND d.retired_at IS NULL))`

const againSQL = `SELECT t.cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, t.requeued, ` + switchedOff + `,
		t.reason IS NOT DISTINCT FROM 'OUTCOME_UNKNOWN', t.badge, t.token, t.data FROM (` + againRows + `) t`

// turnRows are the due notices that have recipients beyond their frontiers, by
// priority and age, with how many stand ahead of each: the sum cuts a big one at
// the limit and lets many small ones fill a page.
const turnRows = `
	SELECT o.*, row_number() OVER w AS place, sum(o.total_count - o.frontier) OVER w - (o.total_count - o.frontier) AS ahead
	FROM (
		SELECT c.id, c.priority, c.due_at, c.frontier, c.total_count FROM push_clusters c
		WHERE c.school_id = $1 AND c.ended_at IS NULL AND c.closing IS NULL AND c.due_at <= now()
			AND c.frontier < c.total_count AND (c.expires_at IS NULL OR c.expires_at > now())
		ORDER BY c.priority, c.due_at, c.id LIMIT $2
	) o WINDOW w AS (ORDER BY o.priority, o.due_at, o.id)`

// firstSQL reads what lies beyond the frontiers, as one range of the primary key
// a notice. It was never handed over, so there is no standing to read.
const firstSQL = `SELECT n.place, n.id, t.seq, t.job_status, ` + switchedOff + `, t.badge, t.token, t.data
	FROM (` + turnRows + `) n CROSS JOIN LATERAL (
		SELECT r.* FROM push_cluster_tokens r
		WHERE r.cluster_id = n.id AND r.seq > n.frontier AND r.seq <= least(n.total_count, n.frontier + $2 - n.ahead)
	) t WHERE n.ahead < $2`

// noticesSQL reads the content of each notice on the page, once.
const noticesSQL = `SELECT c.id, c.title, c.body, c.data, c.image, c.link, c.priority, c.delivery, c.scheduled_at, c.expires_at, c.traceparent, coalesce(c.fallback_sms, ''),
		(extract(epoch FROM now() - c.due_at) * 1000000)::bigint, (extract(epoch FROM c.expires_at - now()) * 1000000)::bigint
	FROM (SELECT n.id FROM (` + turnRows + `) n WHERE n.ahead < $2 UNION SELECT a.cluster_id FROM (` + againRows + `) a) i
	JOIN push_clusters c ON c.id = i.id`

// nextDueSQL finds the earliest later work of a school, by one probe of an index
// for retries and one a priority for notices.
const nextDueSQL = `
SELECT ceil(extract(epoch FROM min(w.at) - now()) * 1000000)::bigint FROM (
	SELECT (SELECT t.retry_after FROM push_cluster_tokens t
		WHERE t.school_id = $1 AND t.retry_after IS NOT NULL AND t.retry_after > now()
		ORDER BY t.retry_after LIMIT 1) AS at
	UNION ALL
	SELECT n.due_at FROM generate_series(0, 2) AS p(priority) CROSS JOIN LATERAL (
		SELECT c.due_at FROM push_clusters c
		WHERE c.school_id = $1 AND c.ended_at IS NULL AND c.priority = p.priority AND c.due_at > now()
		ORDER BY c.due_at LIMIT 1) n
) w`

// pageRow is a recipient on its way into a page.
type pageRow struct {
	work   school.Work
	notice int64
	place  int64 // among its kind
}

// Page reads up to limit recipients that are to be worked on, composed anew:
// first attempts of urgent notices, then due retries, then first attempts by
// priority and age. First attempts of one notice are consecutive from its
// frontier, the final ones among them included. It takes no lock: a claim finds
// out whether what it read still holds. Page.More says that the limit was
// reached; Page.NextDue counts from the database's now.
//
// school.ErrUnavailable.
func (db *DB) Page(ctx context.Context, t school.Term, limit int) (school.Page, error) {
	op := "page of school " + t.School
	if limit < 1 {
		return school.Page{}, fmt.Errorf("%s: limit %d: at least 1", op, limit)
	}
	var batch pgx.Batch
	batch.Queue(beginPage)
	batch.Queue(againSQL, t.School, limit)
	batch.Queue(firstSQL, t.School, limit)
	batch.Queue(noticesSQL, t.School, limit)
	batch.Queue(nextDueSQL, t.School)
	batch.Queue(endPage)
	conn, err := db.dispatch.Acquire(ctx)
	if err != nil {
		return school.Page{}, fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, err)
	}
	defer conn.Release()
	results := conn.SendBatch(ctx, &batch)
	page, err := readPage(results, t.School, limit)
	if cerr := results.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return school.Page{}, readError(op, err)
	}
	return page, nil
}

func readPage(results pgx.BatchResults, schoolID string, limit int) (school.Page, error) {
	if _, err := results.Exec(); err != nil {
		return school.Page{}, err
	}
	list := make([]pageRow, 0, limit)
	err := eachRow(results, func(rows pgx.Rows) error {
		r := pageRow{place: int64(len(list)), work: school.Work{Kind: school.Again}}
		w, s := &r.work, &r.work.Standing
		var off bool
		var data []byte
		if err := rows.Scan(&r.notice, &w.Seq, &s.State, &s.Attempts, &s.Retries, &s.Orphanings, &w.Requeued, &off, &w.Uncertain, &w.Badge, &w.Token, &data); err != nil {
			return err
		}
		list = append(list, r)
		return list[len(list)-1].complete(off, data)
	})
	if err != nil {
		return school.Page{}, err
	}
	err = eachRow(results, func(rows pgx.Rows) error {
		r := pageRow{work: school.Work{Kind: school.First}}
		w := &r.work
		var off bool
		var data []byte
		if err := rows.Scan(&r.place, &r.notice, &w.Seq, &w.Standing.State, &off, &w.Badge, &w.Token, &data); err != nil {
			return err
		}
		list = append(list, r)
		return list[len(list)-1].complete(off, data)
	})
	if err != nil {
		return school.Page{}, err
	}
	notices := map[int64]*school.Notice{}
	err = eachRow(results, func(rows pgx.Rows) error {
		n := &school.Notice{School: schoolID}
		var (
			priority           int
			data               []byte
			scheduled, expires *time.Time
			dueFor             int64
			expiresIn          *int64
		)
		err := rows.Scan(&n.ID, &n.Content.Title, &n.Content.Body, &data, &n.Content.Image, &n.Content.Link, &priority, &n.Delivery,
			&scheduled, &expires, &n.TraceParent, &n.Fallback, &dueFor, &expiresIn)
		if err != nil {
			return err
		}
		n.ScheduledAt, n.ExpiresAt, n.DueFor = orZero(scheduled), orZero(expires), max(0, micros(dueFor))
		if expiresIn != nil {
			n.ExpiresIn = micros(*expiresIn)
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
	if err != nil {
		return school.Page{}, err
	}
	var nextDue *int64
	if err := results.QueryRow().Scan(&nextDue); err != nil {
		return school.Page{}, err
	}
	page := school.Page{More: len(list) >= limit}
	if nextDue != nil {
		page.NextDue = max(micros(*nextDue), time.Microsecond)
	}
	return page, compose(&page, list, notices, limit)
}

func eachRow(results pgx.BatchResults, read func(pgx.Rows) error) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := read(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// complete works out what the columns mean.
func (r *pageRow) complete(off bool, data []byte) (err error) {
	switch {
	case r.work.Standing.State.Final():
		r.work.Settled = true
	case off:
		r.work.Skip = school.Disabled
	}
	if r.work.Data, err = dataMap(data); err != nil {
		return fmt.Errorf("data of recipient %s: %w", school.MessageID(r.notice, r.work.Seq), err)
	}
	return nil
}

// compose puts the rows in the order in which they are to be worked on.
func compose(page *school.Page, list []pageRow, notices map[int64]*school.Notice, limit int) error {
	var n *school.Notice
	for i := range list {
		r := &list[i]
		if n == nil || n.ID != r.notice {
			if n = notices[r.notice]; n == nil {
				return fmt.Errorf("notice %d of a recipient is missing", r.notice)
			}
		}
		r.work.Notice = n
	}
	group := func(r *pageRow) int {
		switch {
		case r.work.Kind == school.Again:
			return 1
		case r.work.Notice.Priority == school.Urgent:
			return 0
		}
		return 2
	}
	order := func(a, b pageRow) int {
		return cmp.Or(cmp.Compare(group(&a), group(&b)), cmp.Compare(a.place, b.place), cmp.Compare(a.work.Seq, b.work.Seq))
	}
	if !slices.IsSortedFunc(list, order) { // it mostly is
		slices.SortFunc(list, order)
	}
	list = list[:min(limit, len(list))]
	page.Work = make([]school.Work, len(list))
	for i := range list {
		page.Work[i] = list[i].work
	}
	return nil
}

// dataMap reads an object of strings; NULL is nil.
func dataMap(text []byte) (m map[string]string, err error) {
	if len(text) == 0 {
		return nil, nil
	}
	err = json.Unmarshal(text, &m)
	return m, err
}
