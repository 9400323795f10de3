package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// wakeChannel is where the SQL function tells of schools it wrote for.
const wakeChannel = "schoolbell_wake"

const (
	listenAnswer   = 5 * time.Second // how long the server may take to say that it is there
	listenRetryMin = 200 * time.Millisecond
	listenRetryMax = 5 * time.Second
)

// Listen hears, on a connection of its own, of schools that applications wrote
// for inside their own transactions, and calls onSchool with each id until ctx
// ends; it returns nil then. Where the connection breaks it makes another.
//
// What is told while nobody listens is lost, so onReady is called each time that
// listening has begun, the first included: whoever looks at what is due from
// there on misses nothing. Both are called from this goroutine and should return
// soon.
func (db *DB) Listen(ctx context.Context, onReady func(), onSchool func(schoolID string)) error {
	cfg, err := pgx.ParseConfig(db.cfg.URL)
	if err != nil {
		return fmt.Errorf("listen: database URL: %w", err)
	}
	connConfig(cfg, "listen")
	wait := listenRetryMin
	for {
		heard, err := listenOnce(ctx, cfg, db.cfg.listenProbe, onReady, onSchool)
		if ctx.Err() != nil {
			return nil
		}
		if heard {
			wait = listenRetryMin
		}
		// Logged and not returned: the tick finds everything meanwhile, and
		// nothing is gained by ending.
		db.log.WarnContext(ctx, "listening was interrupted", "event", "listen_interrupted", "retry_in_ms", wait.Milliseconds(), "error", err)
		pause := time.NewTimer(wait/2 + rand.N(wait/2))
		select {
		case <-ctx.Done():
			pause.Stop()
			return nil
		case <-pause.C:
		}
		wait = min(2*wait, listenRetryMax)
	}
}

// listenOnce listens on one connection until it breaks; heard says that it had
// begun.
func listenOnce(ctx context.Context, cfg *pgx.ConnConfig, probeAfter time.Duration, onReady func(), onSchool func(string)) (heard bool, err error) {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return false, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		conn.Close(closing)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+wakeChannel); err != nil {
		return false, err
	}
	onReady()
	for {
		waiting, cancel := context.WithTimeout(ctx, probeAfter)
		n, err := conn.WaitForNotification(waiting)
		cancel()
		switch {
		case err == nil:
			onSchool(n.Payload)
		case ctx.Err() != nil:
			return true, ctx.Err()
		case pgconn.Timeout(err) && errors.Is(err, context.DeadlineExceeded) && !conn.IsClosed():
			// Nobody spoke. A dead peer says nothing either.
			probe, cancel := context.WithTimeout(ctx, listenAnswer)
			err = conn.Ping(probe)
			cancel()
			if err != nil {
				return true, err
			}
		default:
			return true, err
		}
	}
}
