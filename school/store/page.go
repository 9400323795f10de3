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

// pageSQL reads due retries and what lies beyond the frontiers of due notices,
// up to $2 of each, with each notice's content once. All by key: retries from
// their partial index in the order in which they became due, first attempts as
// one range of the primary key a notice. What is not due yet stands in neither
// and so blocks nothing (R23).
//
// The running sum over the open notices cuts a big one at the limit and lets
// many small ones fill one page. A device that is switched off is looked up only
// where the school has any.
const pageSQL = `
WITH off AS MATERIALIZED (
	SELECT EXISTS (SELECT FROM devices d WHERE d.school_id = $1 AND NOT d.enabled AND d.retired_at IS NULL) AS used
), again AS MATERIALIZED (
	SELECT t.cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, t.requeued, t.enabled,
		t.badge, t.data, t.token, t.retry_after, t.reason
	FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
	WHERE t.school_id = $1 AND t.retry_after IS NOT NULL AND t.retry_after <= statement_timestamp()
		AND c.ended_at IS NULL AND c.closing IS NULL AND (c.expires_at IS NULL OR c.expires_at > statement_timestamp())
	ORDER BY t.retry_after LIMIT $2
), open AS MATERIALIZED (
	SELECT c.id, c.priority, c.due_at, c.frontier, c.total_count
	FROM push_clusters c
	WHERE c.school_id = $1 AND c.ended_at IS NULL AND c.closing IS NULL AND c.due_at <= statement_timestamp()
		AND c.frontier < c.total_count AND (c.expires_at IS NULL OR c.expires_at > statement_timestamp())
	ORDER BY c.priority, c.due_at, c.id LIMIT $2
), turn AS MATERIALIZED (
	SELECT o.*, row_number() OVER w AS place, sum(o.total_count - o.frontier) OVER w - (o.total_count - o.frontier) AS ahead
	FROM open o WINDOW w AS (ORDER BY o.priority, o.due_at, o.id)
), first AS MATERIALIZED (
	SELECT n.place, n.id AS cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, t.requeued, t.enabled,
		t.badge, t.data, t.token
	FROM turn n CROSS JOIN LATERAL (
		SELECT r.* FROM push_cluster_tokens r
		WHERE r.cluster_id = n.id AND r.seq > n.frontier AND r.seq <= least(n.total_count, n.frontier + $2 - n.ahead)
	) t
	WHERE n.ahead < $2
)
SELECT 0 AS part, 0 AS place, c.id AS cluster_id, 0 AS seq, '' AS job_status, 0 AS attempts, 0 AS retry_count, 0 AS orphan_count,
	0 AS requeued, false AS off, false AS uncertain, NULL::integer AS badge, NULL::text AS token, NULL::jsonb AS data,
	jsonb_build_object('title', c.title, 'body', c.body, 'data', c.data, 'image', c.image, 'link', c.link,
		'priority', c.priority, 'delivery', c.delivery, 'scheduled_at', c.scheduled_at, 'expires_at', c.expires_at,
		'traceparent', c.traceparent,
		'due_for_us', (extract(epoch FROM statement_timestamp() - c.due_at) * 1000000)::bigint) AS notice
	FROM (SELECT cluster_id FROM again UNION SELECT id FROM turn WHERE ahead < $2) n JOIN push_clusters c ON c.id = n.cluster_id
UNION ALL
SELECT 1, row_number() OVER (ORDER BY a.retry_after, a.cluster_id, a.seq), a.cluster_id, a.seq, a.job_status, a.attempts, a.retry_count, a.orphan_count, a.requeued,
	a.enabled IS FALSE OR ((SELECT used FROM off) AND EXISTS (SELECT FROM devices d WHERE d.school_id = $1
		AND d.token_sha = sha256(convert_to(a.token, 'UTF8')) AND NOT d.enabled AND d.retired_at IS NULL)),
	a.reason IS NOT DISTINCT FROM 'OUTCOME_UNKNOWN', a.badge, a.token, a.data, NULL FROM again a
UNION ALL
SELECT 2, f.place, f.cluster_id, f.seq, f.job_status, f.attempts, f.retry_count, f.orphan_count, f.requeued,
	f.enabled IS FALSE OR ((SELECT used FROM off) AND EXISTS (SELECT FROM devices d WHERE d.school_id = $1
		AND d.token_sha = sha256(convert_to(f.token, 'UTF8')) AND NOT d.enabled AND d.retired_at IS NULL)),
	false, f.badge, f.token, f.data, NULL FROM first f`

// nextDueSQL finds the earliest later work of a school, by one probe of an index
// for retries and one a priority for notices.
const nextDueSQL = `
SELECT ceil(extract(epoch FROM min(w.at) - statement_timestamp()) * 1000000)::bigint FROM (
	SELECT (SELECT t.retry_after FROM push_cluster_tokens t
		WHERE t.school_id = $1 AND t.retry_after IS NOT NULL AND t.retry_after > statement_timestamp()
		ORDER BY t.retry_after LIMIT 1) AS at
	UNION ALL
	SELECT n.due_at FROM generate_series(0, 2) AS p(priority) CROSS JOIN LATERAL (
		SELECT c.due_at FROM push_clusters c
		WHERE c.school_id = $1 AND c.ended_at IS NULL AND c.priority = p.priority AND c.due_at > statement_timestamp()
		ORDER BY c.due_at LIMIT 1) n
) w`

// The parts of a page's rows.
const (
	partNotice = iota
	partAgain
	partFirst
)

type noticeJSON struct {
	Title       string            `json:"title"`
	Body        string            `json:"body"`
	Data        map[string]string `json:"data"`
	Image       string            `json:"image"`
	Link        string            `json:"link"`
	Priority    int               `json:"priority"`
	Delivery    string            `json:"delivery"`
	ScheduledAt *time.Time        `json:"scheduled_at"`
	ExpiresAt   *time.Time        `json:"expires_at"`
	TraceParent string            `json:"traceparent"`
	DueFor      int64             `json:"due_for_us"`
}

type pageRow struct {
	part, place int64
	work        school.Work
	notice      int64
	priority    school.Priority
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
	batch.Queue(pageSQL, t.School, limit)
	batch.Queue(nextDueSQL, t.School)
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
	rows, err := results.Query()
	if err != nil {
		return school.Page{}, err
	}
	notices := map[int64]*school.Notice{}
	var list []pageRow
	for rows.Next() {
		var (
			r      pageRow
			status string
			off    bool
			token  *string
			badge  *int
			data   []byte
			notice []byte
		)
		if err := rows.Scan(&r.part, &r.place, &r.notice, &r.work.Seq, &status, &r.work.Standing.Attempts, &r.work.Standing.Retries,
			&r.work.Standing.Orphanings, &r.work.Requeued, &off, &r.work.Uncertain, &badge, &token, &data, &notice); err != nil {
			rows.Close()
			return school.Page{}, err
		}
		if r.part == partNotice {
			if notices[r.notice], err = readNotice(r.notice, schoolID, notice); err != nil {
				rows.Close()
				return school.Page{}, err
			}
			continue
		}
		if len(data) > 0 {
			if err := json.Unmarshal(data, &r.work.Data); err != nil {
				rows.Close()
				return school.Page{}, fmt.Errorf("data of recipient %s: %w", school.MessageID(r.notice, r.work.Seq), err)
			}
		}
		r.work.Badge, r.work.Token = badge, *token
		r.work.Standing.State = school.State(status)
		r.work.Kind = school.First
		if r.part == partAgain {
			r.work.Kind = school.Again
		}
		switch {
		case r.work.Standing.State.Final():
			r.work.Settled = true
		case off:
			r.work.Skip = school.Disabled
		}
		list = append(list, r)
	}
	if err := rows.Err(); err != nil {
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

// compose puts the rows in the order in which they are to be worked on.
func compose(page *school.Page, list []pageRow, notices map[int64]*school.Notice, limit int) error {
	for i := range list {
		r := &list[i]
		n := notices[r.notice]
		if n == nil {
			return fmt.Errorf("notice %d of a recipient is missing", r.notice)
		}
		r.work.Notice, r.priority = n, n.Priority
	}
	group := func(r *pageRow) int {
		switch {
		case r.part == partFirst && r.priority == school.Urgent:
			return 0
		case r.part == partAgain:
			return 1
		}
		return 2
	}
	slices.SortFunc(list, func(a, b pageRow) int {
		return cmp.Or(cmp.Compare(group(&a), group(&b)), cmp.Compare(a.place, b.place), cmp.Compare(a.work.Seq, b.work.Seq))
	})
	list = list[:min(limit, len(list))]
	page.Work = make([]school.Work, len(list))
	for i := range list {
		page.Work[i] = list[i].work
	}
	return nil
}

func readNotice(id int64, schoolID string, text []byte) (*school.Notice, error) {
	var n noticeJSON
	if err := json.Unmarshal(text, &n); err != nil {
		return nil, fmt.Errorf("notice %d: %w", id, err)
	}
	priority, err := priorityWord(n.Priority)
	if err != nil {
		return nil, fmt.Errorf("notice %d: %w", id, err)
	}
	return &school.Notice{
		ID:          id,
		School:      schoolID,
		Content:     school.Content{Title: n.Title, Body: n.Body, Data: n.Data, Image: n.Image, Link: n.Link},
		Priority:    priority,
		Delivery:    school.Delivery(n.Delivery),
		ScheduledAt: orZero(n.ScheduledAt),
		ExpiresAt:   orZero(n.ExpiresAt),
		TraceParent: n.TraceParent,
		DueFor:      max(0, micros(n.DueFor)),
	}, nil
}
