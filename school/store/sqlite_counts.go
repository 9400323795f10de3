package store

import (
	"fmt"

	"schoolbell/school"
)

// The counters of a notice that recipients move between, by name; those of
// skipped ones are named for the reason.
const (
	counterWaiting       = "waiting"
	counterInProgress    = "in_progress"
	counterRetryPending  = "retry_pending"
	counterSuccess       = "success"
	counterFail          = "fail"
	counterRetrySuccess  = "retry_success"
	counterRetryFail     = "retry_fail"
	counterPermanentFail = "permanent_fail"
)

// counters is the order in which moveSQL takes them.
var counters = [...]string{
	counterWaiting, counterInProgress, counterRetryPending, counterSuccess, counterFail, counterRetrySuccess, counterRetryFail,
	counterPermanentFail, string(school.Disabled), string(school.Cancelled), string(school.Expired), string(school.NotAllowed),
}

// counterOf is the counter that a recipient stands under once its attempt is over.
func counterOf(c *school.Change) string {
	switch c.State {
	case school.Pending:
		return counterWaiting
	case school.RetryPending:
		return counterRetryPending
	case school.PermanentFail:
		return counterPermanentFail
	case school.Skipped:
		return string(c.Reason)
	case school.Success:
		return firstOr(c.Attempts, counterSuccess, counterRetrySuccess)
	case school.Fail:
		return firstOr(c.Attempts, counterFail, counterRetryFail)
	}
	return string(c.State) // none: moving there fails
}

func firstOr(attempts int, first, later string) string {
	if attempts <= 1 {
		return first
	}
	return later
}

// counterMoves collects how many recipients of which notice move from one counter
// to another. They come sorted by notice, or nearly.
type counterMoves struct {
	rows    [][1 + len(counters)]int64 // notice, then what each counter gains
	unknown string
}

func (m *counterMoves) add(notice int64, from, to string, n int) {
	if len(m.rows) == 0 || m.rows[len(m.rows)-1][0] != notice {
		m.rows = append(m.rows, [1 + len(counters)]int64{notice})
	}
	row := &m.rows[len(m.rows)-1]
	for _, half := range [2]struct {
		name string
		n    int64
	}{{from, int64(-n)}, {to, int64(n)}} {
		known := false
		for i, name := range counters {
			if name == half.name {
				row[1+i] += half.n
				known = true
			}
		}
		if !known {
			m.unknown = half.name
		}
	}
}

// moveSQL adds what the counters gain, and ends a notice of which nothing remains.
// A closing notice ends only when its closing is written to every recipient.
const moveSQL = `UPDATE push_clusters AS c SET
	in_progress_count = c.in_progress_count + m.in_progress,
	retry_pending_count = c.retry_pending_count + m.retry_pending,
	success_count = c.success_count + m.success,
	fail_count = c.fail_count + m.fail,
	retry_success_count = c.retry_success_count + m.retry_success,
	retry_fail_count = c.retry_fail_count + m.retry_fail,
	permanent_fail_count = c.permanent_fail_count + m.permanent_fail,
	skipped_disabled_count = c.skipped_disabled_count + m.disabled,
	skipped_cancelled_count = c.skipped_cancelled_count + m.cancelled,
	skipped_expired_count = c.skipped_expired_count + m.expired,
	skipped_not_allowed_count = c.skipped_not_allowed_count + m.not_allowed,
	frontier = CASE WHEN m.ends THEN c.total_count ELSE c.frontier END,
	ended_at = CASE WHEN m.ends THEN ?2 ELSE c.ended_at END,
	job_status = CASE WHEN NOT m.ends THEN c.job_status WHEN c.closing = 'CANCELLED' THEN 'CANCELLED' ELSE 'COMPLETED' END
	FROM (
		SELECT g.*, p.ended_at IS NULL AND (p.closing IS NULL OR p.closing_seq = p.total_count)
			AND p.waiting_count + g.waiting + p.in_progress_count + g.in_progress + p.retry_pending_count + g.retry_pending = 0 AS ends
		FROM (
			SELECT x.value->>0 AS notice, sum(x.value->>1) AS waiting, sum(x.value->>2) AS in_progress, sum(x.value->>3) AS retry_pending,
				sum(x.value->>4) AS success, sum(x.value->>5) AS fail, sum(x.value->>6) AS retry_success, sum(x.value->>7) AS retry_fail,
				sum(x.value->>8) AS permanent_fail, sum(x.value->>9) AS disabled, sum(x.value->>10) AS cancelled,
				sum(x.value->>11) AS expired, sum(x.value->>12) AS not_allowed
			FROM json_each(?1) AS x GROUP BY 1
		) AS g CROSS JOIN push_clusters AS p ON p.id = g.notice
	) AS m
	WHERE c.id = m.notice`

// move applies the moves. Counters change here and in a claim only, and never by
// themselves, so they always add up.
func (tx *sqliteTx) move(m *counterMoves) error {
	if m.unknown != "" {
		return fmt.Errorf("%q is no counter of a notice", m.unknown)
	}
	if len(m.rows) == 0 {
		return nil
	}
	text, err := table(m.rows)
	if err != nil {
		return err
	}
	_, err = tx.exec(moveSQL, text, tx.now)
	return err
}
