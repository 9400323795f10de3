package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"gorm.io/gorm"

	"schoolbell/school"
)

// ErrMismatch says that results do not cover the batch that they are for:
// too many, too few, or of other recipients. Nothing was written.
var ErrMismatch = errors.New("results do not match the batch")

// errTopicTooLarge says that a topic has more devices than a notice may have
// recipients.
var errTopicTooLarge = errors.New("topic has too many devices")

// errDeviceMoved says that a device was deleted while it was registered.
var errDeviceMoved = errors.New("a device was deleted meanwhile")

// Codes that the functions in the database raise; 00004_turn.sql lists most of them.
var raised = map[string]error{
	"SB001": school.ErrFenced,
	"SB002": school.ErrPaused,
	"SB003": school.ErrStalePage,
	"SB004": school.ErrTakenOver,
	"SB005": school.ErrNotFound,
	"SB006": ErrMismatch,
	"SB007": school.ErrConflict,
	"SB008": school.ErrRuleChanged,
	"SB009": errTopicTooLarge,
	"SB010": errDeviceMoved,
}

// transient are definite refusals that say nothing about the caller: a lock or
// a statement took too long, a deadlock was broken, the server is full.
var transient = map[string]bool{
	"40001": true,                                                             // serialization_failure
	"40P01": true,                                                             // deadlock_detected
	"53000": true, "53100": true, "53200": true, "53300": true, "53400": true, // insufficient_resources
	"55P03": true, // lock_not_available
	"57014": true, // query_canceled: statement_timeout
	"25006": true, // read_only_sql_transaction: a standby, after a failover
}

// change runs fn, which is one statement that commits by itself or a
// transaction, and says what its error means for what was stored:
// school.ErrUnavailable where nothing was, school.ErrCommitUnknown where that is
// not known.
func change(ctx context.Context, pool *pgxpool.Pool, op string, fn func(*pgx.Conn) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, err)
	}
	defer conn.Release()
	return meaning(op, fn(conn.Conn()), school.ErrCommitUnknown)
}

// meaning classifies the error of a statement. lost is what a connection that
// broke after the statement was sent means to the caller.
func meaning(op string, err error, lost error) error {
	if err == nil {
		return nil
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		if kind, ok := raised[pg.Code]; ok {
			return fmt.Errorf("%s: %w (%s)", op, kind, pg.Message)
		}
		// An ERROR rolled the statement back. A FATAL ends the session, and may
		// reach the client instead of the answer to a commit that succeeded.
		if pg.SeverityUnlocalized != "FATAL" && pg.SeverityUnlocalized != "PANIC" {
			if transient[pg.Code] {
				return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, redact(pg))
			}
			return fmt.Errorf("%s: %w", op, redact(pg))
		}
		return fmt.Errorf("%s: %w: %w", op, lost, redact(pg))
	}
	if errors.Is(err, school.ErrNotFound) {
		return fmt.Errorf("%s: %w", op, err)
	}
	if pgconn.SafeToRetry(err) {
		return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, err)
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w: %w", op, lost, err)
}

// serverError is what may be told of a *pgconn.PgError: its message, details
// and context can quote the data.
type serverError struct {
	code, routine string
}

func (e *serverError) Error() string { return "SQLSTATE " + e.code + " (" + e.routine + ")" }

func redact(pg *pgconn.PgError) error { return &serverError{code: pg.Code, routine: pg.Routine} }

func isUniqueViolation(err error) bool {
	e, ok := errors.AsType[*serverError](err)
	return ok && e.code == "23505"
}

// readError classifies the error of a statement that changes nothing.
func readError(op string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, pgx.ErrNoRows) || errors.Is(err, gorm.ErrRecordNotFound) {
		return fmt.Errorf("%s: %w", op, school.ErrNotFound)
	}
	return meaning(op, err, school.ErrUnavailable)
}
