package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"schoolbell/school"
)

// OnNotice hears what the server says beside its answers.
func (c Config) OnNotice(f func(*pgconn.Notice)) Config {
	c.onNotice = f
	return c
}

// ListenProbe sets how long a listening connection may be silent.
func (c Config) ListenProbe(d time.Duration) Config {
	c.listenProbe = d
	return c
}

// SweepRows sets how many recipients one sweep counts.
func (c Config) SweepRows(n int) Config {
	c.sweepRows = n
	return c
}

// SweepRows sets how many recipients one sweep counts.
func (c SQLiteConfig) SweepRows(n int) SQLiteConfig {
	c.sweepRows = n
	return c
}

// BeforeCommit is called between the last look at a call's context and COMMIT.
func (db *SQLite) BeforeCommit(f func()) { db.beforeCommit = f }

// OnStatement hears of each statement before it runs.
func (db *SQLite) OnStatement(f func(query string, args []any)) { db.onStatement = f }

// OnWriter runs a statement on the connection that writes, and returns the first
// value of what it answers.
func (db *SQLite) OnWriter(ctx context.Context, statement string) (value string, err error) {
	err = db.writer.QueryRowContext(ctx, statement).Scan(&value)
	return value, err
}

func (db *DB) pool(name string) *pgxpool.Pool {
	return map[string]*pgxpool.Pool{"ingest": db.ingest, "dispatch": db.dispatch, "reads": db.reads}[name]
}

// Setting tells what the sessions of a pool go by.
func (db *DB) Setting(ctx context.Context, pool, name string) (value string, err error) {
	err = db.pool(pool).QueryRow(ctx, "SHOW "+name).Scan(&value)
	return value, err
}

// HoldSession takes a session out of a pool while f runs.
func (db *DB) HoldSession(ctx context.Context, pool string, f func()) error {
	c, err := db.pool(pool).Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	f()
	return nil
}

// RequeueStep is one step of a requeue on either engine, as it happens after the
// list of notices was read.
func RequeueStep(ctx context.Context, db Requeuer, o school.RequeueOrder, notice int64, upto int) (outcome string, n int, err error) {
	if o.From.Before, err = db.clock(ctx, "test"); err != nil {
		return "", 0, err
	}
	return db.requeueOneStep(ctx, "test", &o, notice, 0, upto)
}

// Requeuer is what RequeueStep takes.
type Requeuer = requeuer
