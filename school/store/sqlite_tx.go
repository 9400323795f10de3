package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	gosqlite "github.com/glebarez/go-sqlite"
	"gorm.io/gorm"

	"schoolbell/school"
)

// turnstile lets one through at a time, in the order in which they came; the
// pools of database/sql wake waiters at random.
type turnstile struct {
	token  chan struct{}
	waits  *atomic.Int64
	waited *atomic.Int64 // nanoseconds
}

func newTurnstile() turnstile {
	return turnstile{token: make(chan struct{}, 1), waits: new(atomic.Int64), waited: new(atomic.Int64)}
}

func (t turnstile) pass(ctx context.Context) error {
	select {
	case t.token <- struct{}{}:
		return nil
	default:
	}
	began := time.Now()
	t.waits.Add(1)
	defer func() { t.waited.Add(int64(time.Since(began))) }()
	select {
	case t.token <- struct{}{}:
		return nil
	case <-ctx.Done():
		return stopped(ctx)
	}
}

func (t turnstile) leave() { <-t.token }

func (t turnstile) stats() poolStats {
	n := len(t.token)
	return poolStats{acquired: n, idle: 1 - n, max: 1, waits: t.waits.Load(), waited: time.Duration(t.waited.Load())}
}

// sqliteTx is a transaction. It lives within one call, so it carries the call's
// context: looked at between statements and never given to the driver. With a
// context that has ended the driver may leave a statement out and report success
// (it does, within some dozens of tries at a COMMIT), and its interruption may hit
// the statement after. No statement here takes long but those cut into steps.
type sqliteTx struct {
	ctx  context.Context
	conn *sql.Conn
	now  int64 // microseconds since 1970, from when the transaction had begun
	told func(query string, args []any)
}

// change runs fn in an immediate transaction and commits it. Where it fails
// nothing was changed, but for the one school.ErrCommitUnknown of a disk that
// fails under a COMMIT.
func (db *SQLite) change(ctx context.Context, op string, fn func(*sqliteTx) error) error {
	if err := db.enter(op); err != nil {
		return err
	}
	defer db.leave()
	if err := db.turn.pass(ctx); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	defer db.turn.leave()
	conn, err := db.writer.Conn(ctx)
	if err != nil {
		return sqliteMeaning(op, err)
	}
	defer conn.Close()
	return db.transact(ctx, conn, op, "BEGIN IMMEDIATE", fn)
}

// read runs fn in one snapshot.
func (db *SQLite) read(ctx context.Context, pool *sql.DB, op string, fn func(*sqliteTx) error) error {
	if err := db.enter(op); err != nil {
		return err
	}
	defer db.leave()
	conn, err := pool.Conn(ctx)
	if err != nil {
		return sqliteMeaning(op, err)
	}
	defer conn.Close()
	return db.transact(ctx, conn, op, "BEGIN", fn)
}

func (db *SQLite) transact(ctx context.Context, conn *sql.Conn, op, begin string, fn func(*sqliteTx) error) error {
	detached := context.WithoutCancel(ctx)
	if _, err := conn.ExecContext(detached, begin); err != nil {
		rollbackSQLite(detached, conn) // whatever state it is in, the next one has a sound connection
		return sqliteMeaning(op, err)
	}
	open := true
	defer func() {
		if open { // an error, or a panic on its way
			rollbackSQLite(detached, conn)
		}
	}()
	if err := fn(&sqliteTx{ctx: ctx, conn: conn, now: time.Now().UnixMicro(), told: db.onStatement}); err != nil {
		return sqliteMeaning(op, err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", op, stopped(ctx))
	}
	if db.beforeCommit != nil {
		db.beforeCommit()
	}
	// From here on the context has no say: the commit happens or fails.
	if _, err := conn.ExecContext(detached, "COMMIT"); err != nil {
		return commitMeaning(op, err)
	}
	open = false
	return nil
}

// rollbackSQLite ends a transaction. SQLite ends some by itself, and then says
// that there is none; a connection that says anything is not used again.
func rollbackSQLite(ctx context.Context, conn *sql.Conn) {
	if _, err := conn.ExecContext(ctx, "ROLLBACK"); err != nil {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
}

// stopped is what a context that has ended means to a call that changed nothing.
func stopped(ctx context.Context) error {
	return fmt.Errorf("%w: %w", school.ErrUnavailable, context.Cause(ctx))
}

// exec runs a statement and returns how many rows it changed.
func (tx *sqliteTx) exec(query string, args ...any) (int, error) {
	if tx.ctx.Err() != nil {
		return 0, stopped(tx.ctx)
	}
	if tx.told != nil {
		tx.told(query, args)
	}
	r, err := tx.conn.ExecContext(context.WithoutCancel(tx.ctx), query, bound(args)...)
	if err != nil {
		return 0, err
	}
	n, err := r.RowsAffected()
	return int(n), err
}

// each reads all rows of a query.
func (tx *sqliteTx) each(query string, args []any, read func(scan func(dest ...any) error) error) error {
	if tx.ctx.Err() != nil {
		return stopped(tx.ctx)
	}
	if tx.told != nil {
		tx.told(query, args)
	}
	rows, err := tx.conn.QueryContext(context.WithoutCancel(tx.ctx), query, bound(args)...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for n := 1; rows.Next(); n++ {
		if n%sqliteReadCheck == 0 && tx.ctx.Err() != nil {
			return stopped(tx.ctx)
		}
		if err := read(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// one reads the first row of a query, if there is any.
func (tx *sqliteTx) one(query string, args []any, dest ...any) (found bool, err error) {
	err = tx.each(query, args, func(scan func(...any) error) error {
		if found {
			return nil
		}
		found = true
		return scan(dest...)
	})
	return found, err
}

// bound puts times into the form in which they are stored.
func bound(args []any) []any {
	for i, a := range args {
		switch t := a.(type) {
		case time.Time:
			args[i] = t.UnixMicro()
		case *time.Time:
			args[i] = nil
			if t != nil {
				args[i] = t.UnixMicro()
			}
		}
	}
	return args
}

// table makes rows the one argument of a statement that reads them with
// json_each: the driver looks each of n arguments up among all n. A nil table is
// empty.
func table[R any](rows []R) (string, error) {
	if rows == nil {
		return "[]", nil
	}
	b, err := json.Marshal(rows)
	return string(b), err
}

// Primary result codes, in the lowest byte of each.
const (
	sqliteInternal  = 2
	sqlitePerm      = 3
	sqliteBusyCode  = 5
	sqliteLocked    = 6
	sqliteNoMem     = 7
	sqliteReadOnly  = 8
	sqliteInterrupt = 9
	sqliteIO        = 10
	sqliteFull      = 13
	sqliteCantOpen  = 14
	sqliteProtocol  = 15
)

// sqliteTransient are refusals that say nothing about the caller: they may pass.
var sqliteTransient = map[int]bool{
	sqlitePerm: true, sqliteBusyCode: true, sqliteLocked: true, sqliteNoMem: true, sqliteReadOnly: true, sqliteInterrupt: true,
	sqliteIO: true, sqliteFull: true, sqliteCantOpen: true, sqliteProtocol: true,
}

// sqliteMeaning says what an error means of a transaction that was rolled back.
func sqliteMeaning(op string, err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*gosqlite.Error](err); ok {
		// Its text names tables, columns and files. It may quote a statement, in
		// which nothing stands that a caller wrote.
		if sqliteTransient[e.Code()&0xff] {
			return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, e)
		}
		return fmt.Errorf("%s: %w", op, e)
	}
	switch {
	case errors.Is(err, gorm.ErrRecordNotFound):
		err = school.ErrNotFound
	case errors.Is(err, school.ErrUnavailable):
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, sql.ErrConnDone):
		return fmt.Errorf("%s: %w: %w", op, school.ErrUnavailable, err)
	}
	return fmt.Errorf("%s: %w", op, err)
}

// commitMeaning says what the error of a COMMIT means. Refused is definite. A
// disk that fails may have the commit in its log all the same: this process does
// not see it and writes over it, but one that starts after a crash might.
func commitMeaning(op string, err error) error {
	if e, ok := errors.AsType[*gosqlite.Error](err); ok {
		switch e.Code() & 0xff {
		case sqliteIO, sqliteInternal, sqliteNoMem:
			return fmt.Errorf("%s: %w: %w", op, school.ErrCommitUnknown, e)
		}
	}
	return sqliteMeaning(op, err)
}
