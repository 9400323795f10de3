package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// PutSchool makes a school, with its ledger row, or changes the fields that are
// given; it reports whether the school is new. Its settings version grows with
// each change, also over a deletion, and its ledger is never reset.
// school.ErrUnavailable, school.ErrCommitUnknown (asking again is harmless).
func (db *DB) PutSchool(ctx context.Context, id string, c school.SchoolChange) (s school.School, created bool, err error) {
	op := "put school " + id
	var rest *int64
	if c.Rest != nil {
		ms := restMillis(*c.Rest)
		rest = &ms
	}
	err = change(ctx, db.ingest, op, func(conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT schoolbell_put_school($1, $2, $3, $4, $5)`, id, c.Name, c.Sender, c.Limit, rest).Scan(&created)
	})
	if err != nil {
		return school.School{}, false, err
	}
	b, err := db.School(ctx, id)
	return b.School, created, err
}

// DeleteSchool removes a school and its devices. Its ledger row stays, so that
// making it again resets nothing; so do its notices. school.ErrConflict while it
// has recipients that wait or are under way, school.ErrNotFound,
// school.ErrUnavailable, school.ErrCommitUnknown.
func (db *DB) DeleteSchool(ctx context.Context, id string) error {
	return change(ctx, db.ingest, "delete school "+id, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `SELECT schoolbell_delete_school($1)`, id)
		return err
	})
}

// Pause stops a school: no claim of it commits after Pause returned (R28). A
// batch that was claimed before is sent and recorded. Pausing twice is no error.
// school.ErrNotFound, school.ErrUnavailable, school.ErrCommitUnknown.
func (db *DB) Pause(ctx context.Context, id string) error {
	return db.setPaused(ctx, "pause school "+id, id, true)
}

// Resume lets a paused school go on. Errors as Pause.
func (db *DB) Resume(ctx context.Context, id string) error {
	return db.setPaused(ctx, "resume school "+id, id, false)
}

// setPaused writes the school's term: a claim under way holds that row and
// commits before, and each later one looks at it first.
func (db *DB) setPaused(ctx context.Context, op, id string, paused bool) error {
	return change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		tag, err := c.Exec(ctx, `UPDATE school_terms t SET paused = $2
			WHERE t.school_id = $1 AND EXISTS (SELECT FROM schools s WHERE s.id = t.school_id)`, id, paused)
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return school.ErrNotFound
		}
		return nil
	})
}

const backlogSQL = `
SELECT s.id, s.name, s.sender, s."limit", s.rest, s.settings_version, s.created_at, t.paused,
	t.fence, t.cycle, t.attempted, t.next_eligible_at IS NOT NULL,
	coalesce(greatest(0, ceil(extract(epoch FROM t.next_eligible_at - statement_timestamp()) * 1000000)), 0)::bigint,
	t."limit", t.rest, t.settings_version,
	coalesce(w.waiting, 0), coalesce(w.scheduled, 0), coalesce(w.in_progress, 0),
	greatest(0, coalesce(w.retry_pending, 0) - r.due), r.due,
	coalesce(extract(epoch FROM statement_timestamp() - least(w.oldest, r.oldest)) * 1000000, 0)::bigint
FROM schools s JOIN school_terms t ON t.school_id = s.id
CROSS JOIN LATERAL (
	SELECT sum(c.waiting_count) FILTER (WHERE c.due_at <= statement_timestamp()) AS waiting,
		sum(c.waiting_count) FILTER (WHERE c.due_at > statement_timestamp()) AS scheduled,
		sum(c.in_progress_count) AS in_progress, sum(c.retry_pending_count) AS retry_pending,
		min(c.due_at) FILTER (WHERE c.due_at <= statement_timestamp() AND c.waiting_count > 0) AS oldest
	FROM push_clusters c WHERE c.school_id = s.id AND c.ended_at IS NULL
) w
CROSS JOIN LATERAL (
	SELECT count(*) FILTER (WHERE k.job_status = 'RETRY_PENDING') AS due, min(k.retry_after) AS oldest
	FROM push_cluster_tokens k
	WHERE k.school_id = s.id AND k.retry_after IS NOT NULL AND k.retry_after <= statement_timestamp()
) r
WHERE `

// School returns a school with its ledger and its work. school.ErrNotFound,
// school.ErrUnavailable.
func (db *DB) School(ctx context.Context, id string) (school.Backlog, error) {
	op := "school " + id
	rows, err := db.reads.Query(ctx, backlogSQL+`s.id = $1`, id)
	if err != nil {
		return school.Backlog{}, readError(op, err)
	}
	b, err := pgx.CollectExactlyOneRow(rows, scanBacklog)
	if err != nil {
		return school.Backlog{}, readError(op, err)
	}
	return b, nil
}

// Schools lists schools with an id above afterID, in order of id by byte.
// school.ErrUnavailable; *school.FieldError for a limit outside 1 … 1000.
func (db *DB) Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error) {
	const op = "schools"
	if err := checkLimit(op, limit); err != nil {
		return nil, err
	}
	rows, err := db.reads.Query(ctx, backlogSQL+`s.id > $1 ORDER BY s.id LIMIT $2`, afterID, limit)
	if err != nil {
		return nil, readError(op, err)
	}
	list, err := pgx.CollectRows(rows, scanBacklog)
	if err != nil {
		return nil, readError(op, err)
	}
	return list, nil
}

func scanBacklog(row pgx.CollectableRow) (school.Backlog, error) {
	var (
		b                 school.Backlog
		rest              *int64
		resting, ruleRest int64
		oldest            int64
	)
	err := row.Scan(&b.School.ID, &b.School.Name, &b.School.Sender, &b.School.Limit, &rest, &b.School.SettingsVersion, &b.School.CreatedAt, &b.School.Paused,
		&b.Fence, &b.Ledger.Cycle, &b.Ledger.Attempted, &b.Ledger.Filled, &resting,
		&b.Ledger.Rule.Limit, &ruleRest, &b.Ledger.Rule.Version,
		&b.Waiting, &b.Scheduled, &b.InProgress, &b.RetryWaiting, &b.RetryDue, &oldest)
	b.School.Rest = restOrNil(rest)
	b.Ledger.Resting, b.Ledger.Rule.Rest = micros(resting), restFromMillis(ruleRest)
	b.OldestWaitingFor = max(0, time.Duration(oldest)*time.Microsecond)
	return b, err
}
