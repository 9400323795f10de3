package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// closeStep is how many recipients one step of closing a notice writes: it
// holds the notice's lock for some tens of milliseconds, which is what a claim
// or a record of that notice may have to wait.
const closeStep = 10_000

// cancelSteps bounds how much of a closing Cancel writes before it answers; the
// rest is written by Expire.
const cancelSteps = 5

// closer is what an engine does to one notice.
type closer interface {
	// closeNotice answers closing, closed (that reason already), ended or absent.
	closeNotice(ctx context.Context, op string, notice int64, why school.Reason) (answer string, err error)
	// closeOneStep says whether there is more to do, nil where it did nothing:
	// nothing is left, or, unless wait, another works on it.
	closeOneStep(ctx context.Context, op string, notice int64, wait bool) (more *bool, err error)
	// expired lists notices that are to be closed.
	expired(ctx context.Context, op string, limit int) ([]int64, error)
	// unfinished lists notices whose closing is not written to all recipients.
	unfinished(ctx context.Context, op string, limit int) ([]int64, error)
}

// Cancel closes a notice: nothing of it is claimed after Cancel returned. What
// waits for its first attempt is SKIPPED, what waits for another one is
// PERMANENT_FAIL, both with reason CANCELLED; what an open batch covers gets its
// outcome, but no retry (R20, R28). Counts change at once, rows of a big notice
// in bounded steps, and the notice is CANCELLED when the last one is done.
// Cancelling twice is no error.
//
// school.ErrNotFound; school.ErrConflict for a notice that has ended or expired;
// school.ErrUnavailable; school.ErrCommitUnknown (asking again is harmless).
func (db *DB) Cancel(ctx context.Context, notice int64) error { return cancel(ctx, db, notice) }

func cancel(ctx context.Context, db closer, notice int64) error {
	op := fmt.Sprintf("cancel notice %d", notice)
	answer, err := db.closeNotice(ctx, op, notice, school.Cancelled)
	if err != nil {
		return err
	}
	switch answer {
	case "absent":
		return fmt.Errorf("%s: %w", op, school.ErrNotFound)
	case "ended":
		return fmt.Errorf("%s: it has ended: %w", op, school.ErrConflict)
	}
	for range cancelSteps {
		more, err := db.closeOneStep(ctx, op, notice, true)
		if err != nil {
			return err
		}
		if more == nil || !*more {
			break
		}
	}
	return nil
}

// Expire closes notices whose expires_at has passed, as Cancel does but with
// reason EXPIRED, and writes one step of each closing that is not finished. At
// most limit notices; it returns how many it did something to, so that a caller
// may go on until there is none. Several replicas may call it at once: they skip
// what another works on. school.ErrUnavailable.
func (db *DB) Expire(ctx context.Context, limit int) (int, error) { return expire(ctx, db, limit) }

func expire(ctx context.Context, db closer, limit int) (int, error) {
	const op = "expire notices"
	expired, err := db.expired(ctx, op, limit)
	if err != nil {
		return 0, err
	}
	touched := map[int64]bool{}
	for _, id := range expired {
		answer, err := db.closeNotice(ctx, op, id, school.Expired)
		if err != nil {
			return len(touched), err
		}
		if answer == "closing" {
			touched[id] = true
		}
	}
	closing, err := db.unfinished(ctx, op, limit)
	if err != nil {
		return len(touched), err
	}
	for _, id := range closing {
		more, err := db.closeOneStep(ctx, op, id, false)
		if err != nil {
			return len(touched), err
		}
		if more != nil {
			touched[id] = true
		}
	}
	return len(touched), nil
}

func (db *DB) expired(ctx context.Context, op string, limit int) ([]int64, error) {
	return db.noticeIDs(ctx, op, `SELECT id FROM push_clusters
		WHERE ended_at IS NULL AND closing IS NULL AND expires_at IS NOT NULL AND expires_at <= statement_timestamp()
		ORDER BY expires_at LIMIT $1`, limit)
}

func (db *DB) unfinished(ctx context.Context, op string, limit int) ([]int64, error) {
	return db.noticeIDs(ctx, op, `SELECT id FROM push_clusters
		WHERE ended_at IS NULL AND closing IS NOT NULL AND closing_seq < total_count
		ORDER BY id LIMIT $1`, limit)
}

func (db *DB) noticeIDs(ctx context.Context, op, sql string, args ...any) ([]int64, error) {
	rows, err := db.dispatch.Query(ctx, sql, args...)
	if err != nil {
		return nil, readError(op, err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, readError(op, err)
	}
	return ids, nil
}

func (db *DB) closeNotice(ctx context.Context, op string, notice int64, why school.Reason) (answer string, err error) {
	err = change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT schoolbell_close($1, $2)`, notice, string(why)).Scan(&answer)
	})
	return answer, err
}

func (db *DB) closeOneStep(ctx context.Context, op string, notice int64, wait bool) (more *bool, err error) {
	err = change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT schoolbell_close_step($1, $2, $3)`, notice, closeStep, wait).Scan(&more)
	})
	return more, err
}
