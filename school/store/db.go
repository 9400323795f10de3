// Package store keeps notices, their recipients and the schools' ledgers: the
// outbox from which the scheduler works and the read models that people look at.
// DB keeps them in PostgreSQL, for several replicas; SQLite in one file, for one
// process.
//
// It takes a notice with all its recipients in one transaction, issues the
// fencing number of each school, hands out pages of work, and writes claims,
// records, takeovers and withdrawals, each in one transaction, on PostgreSQL in
// one round trip with its COMMIT. It does not send, does not decide what an
// outcome means (school.Next does; PostgreSQL's set-based takeover is tested
// against it) and does not wake anybody. Time is the database's clock.
//
// Invariants: a recipient that waits is beyond its notice's frontier, or has
// retry_after, or is covered by exactly one open batch; a notice's counters add
// up to its total at every commit; no claim and no takeover of an older fence
// commits after a newer term was opened; a batch is settled once. DESIGN.md
// beside this file says how.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/prometheus/client_golang/prometheus"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"schoolbell/school"
)

// Config says which database, and how much of it. Zero fields take defaults.
type Config struct {
	URL string // postgres://…; required

	// MaxConns bounds all connections but the one that listens: half of them
	// dispatch, and so record, at most; the rest is divided between ingest and
	// reads. Default 10, at least 3.
	MaxConns int

	// Statements that take longer are cancelled by the server.
	IngestTimeout   time.Duration // default 5 min: a million recipients are one statement
	DispatchTimeout time.Duration // default 5 s
	ReadTimeout     time.Duration // default 10 s

	Log        *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: metrics are not registered

	Now func() time.Time // for the ids of notices, which show their age; nil: time.Now

	onNotice    func(*pgconn.Notice) // what the server says beside its answers; tests read plans
	sweepRows   int                  // counted by one sweep
	listenProbe time.Duration        // silence after which a listening connection is asked for an answer; 20 s
}

func (c Config) withDefaults() (Config, error) {
	if c.URL == "" {
		return c, errors.New("store: URL is required")
	}
	if c.MaxConns == 0 {
		c.MaxConns = 10
	}
	if c.MaxConns < 3 {
		return c, fmt.Errorf("store: MaxConns is %d: ingest, dispatch and reads need one each, so at least 3", c.MaxConns)
	}
	for _, d := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"IngestTimeout", &c.IngestTimeout, 5 * time.Minute},
		{"DispatchTimeout", &c.DispatchTimeout, 5 * time.Second},
		{"ReadTimeout", &c.ReadTimeout, 10 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.def
		}
		if *d.v < time.Millisecond {
			return c, fmt.Errorf("store: %s is %s: at least 1ms", d.name, *d.v)
		}
	}
	if c.listenProbe == 0 {
		c.listenProbe = 20 * time.Second
	}
	if c.sweepRows == 0 {
		c.sweepRows = sweepRows
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c, nil
}

// DB is the store on PostgreSQL. Its methods may be called concurrently.
//
// Ingest, dispatch and reads have pools of their own, so that a flood of one
// cannot starve another.
type DB struct {
	cfg      Config
	log      *slog.Logger
	metrics  *metrics
	ingest   *pgxpool.Pool
	dispatch *pgxpool.Pool
	reads    *pgxpool.Pool
	readSQL  *sql.DB
	links    *links
	readModels
}

// Open connects and checks the schema: ErrSchemaOld where it must be migrated
// first, ErrSchemaNew where it is more than one step ahead of this program,
// ErrLogin and ErrNoDatabase where the server says so, school.ErrUnavailable
// where the database cannot be reached.
func Open(ctx context.Context, cfg Config) (_ *DB, err error) {
	cfg, err = cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	db := &DB{cfg: cfg, log: cfg.Log, links: &links{conns: map[net.Conn]struct{}{}}}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	dispatch := cfg.MaxConns / 2
	ingest := (cfg.MaxConns - dispatch + 1) / 2
	if db.ingest, err = newPool(ctx, cfg, db.links, "ingest", ingest, cfg.IngestTimeout, map[string]string{
		// The client streams into COPY without pause or not at all.
		"idle_in_transaction_session_timeout": "60s",
	}); err != nil {
		return nil, err
	}
	if db.dispatch, err = newPool(ctx, cfg, db.links, "dispatch", dispatch, cfg.DispatchTimeout, map[string]string{
		// Every statement here finds its rows by key. With a table without
		// statistics, or a plan made while it was tiny, the planner may think
		// otherwise, and a scan of a million finished rows would stop a school.
		// Forbidding what is never right makes the plans the same on the first
		// day and on the last, so they may as well be kept.
		"enable_seqscan":                      "off",
		"enable_hashjoin":                     "off",
		"enable_mergejoin":                    "off",
		"jit":                                 "off",
		"plan_cache_mode":                     "force_generic_plan",
		"idle_in_transaction_session_timeout": "2s",
	}); err != nil {
		return nil, err
	}
	if db.reads, err = newPool(ctx, cfg, db.links, "reads", cfg.MaxConns-dispatch-ingest, cfg.ReadTimeout, map[string]string{
		"jit":                                 "off",
		"idle_in_transaction_session_timeout": "5s",
	}); err != nil {
		return nil, err
	}
	if err := db.dispatch.Ping(ctx); err != nil {
		return nil, reach(&db.dispatch.Config().ConnConfig.Config, err)
	}
	if err := db.checkSchema(ctx); err != nil {
		return nil, err
	}
	db.noteTimeline(ctx)
	if err := db.mutate(ctx); err != nil {
		return nil, err
	}
	db.readSQL = stdlib.OpenDBFromPool(db.reads)
	// gorm's own logger would print statements with their values, tokens among them.
	models, err := gorm.Open(postgres.New(postgres.Config{Conn: db.readSQL}), &gorm.Config{
		Logger:                 logger.Discard,
		SkipDefaultTransaction: true,
		TranslateError:         true,
		DisableAutomaticPing:   true,
	})
	if err != nil {
		return nil, fmt.Errorf("store: open: %w", err)
	}
	db.readModels = readModels{
		run: func(ctx context.Context, op string, fn func(*gorm.DB) error) error {
			return readError(op, fn(models.WithContext(ctx)))
		},
		when: func(t time.Time) any { return t },
	}
	db.metrics, err = newMetrics(cfg.Registerer, map[string]func() poolStats{
		"ingest": pgxStats(db.ingest), "dispatch": pgxStats(db.dispatch), "reads": pgxStats(db.reads),
	})
	if err != nil {
		return nil, fmt.Errorf("store: metrics: %w", err)
	}
	return db, nil
}

// Close ends all connections, after the calls that use them have returned. Where
// the database does not answer it takes two seconds.
func (db *DB) Close() {
	if db.metrics != nil {
		db.metrics.unregister()
	}
	db.links.closeWith(func() {
		if db.readSQL != nil {
			db.readSQL.Close()
		}
		var pools sync.WaitGroup
		for _, p := range []*pgxpool.Pool{db.ingest, db.dispatch, db.reads} {
			if p != nil {
				pools.Go(p.Close)
			}
		}
		pools.Wait()
	}, closePatience)
}

// Ping asks the database for an answer on the connections that dispatch.
// school.ErrUnavailable.
func (db *DB) Ping(ctx context.Context) error {
	if err := db.dispatch.Ping(ctx); err != nil {
		return fmt.Errorf("store: ping: %w: %w", school.ErrUnavailable, err)
	}
	return nil
}

// How soon a connection to a peer that vanished counts as dead.
const (
	keepAliveIdle     = 10 * time.Second
	keepAliveInterval = 5 * time.Second
	keepAliveCount    = 3
	unackedTimeout    = 10 * time.Second
	connectTimeout    = 5 * time.Second
)

// connConfig reads url and makes its connections such that neither side waits
// long for a dead one, and that nothing depends on the server's defaults.
func connConfig(cfg *pgx.ConnConfig, name string) {
	dialer := &net.Dialer{
		Timeout: connectTimeout,
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: keepAliveIdle, Interval: keepAliveInterval, Count: keepAliveCount,
		},
		Control: setUserTimeout,
	}
	cfg.DialFunc = dialer.DialContext
	cfg.ConnectTimeout = connectTimeout
	p := cfg.RuntimeParams
	p["application_name"] = "schoolbell-" + name
	p["default_transaction_isolation"] = "read committed"
	p["default_transaction_read_only"] = "off"
	p["timezone"] = "UTC"
	p["lock_timeout"] = "2s"
	p["tcp_keepalives_idle"] = fmt.Sprint(int(keepAliveIdle.Seconds()))
	p["tcp_keepalives_interval"] = fmt.Sprint(int(keepAliveInterval.Seconds()))
	p["tcp_keepalives_count"] = fmt.Sprint(keepAliveCount)
	p["tcp_user_timeout"] = fmt.Sprint(unackedTimeout.Milliseconds())
}

func newPool(ctx context.Context, config Config, links *links, name string, conns int, timeout time.Duration, params map[string]string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(config.URL)
	if err != nil {
		// The driver's error hides the password.
		return nil, fmt.Errorf("store: database URL: %w", err)
	}
	connConfig(cfg.ConnConfig, name)
	cfg.ConnConfig.DialFunc = links.dialer(cfg.ConnConfig.DialFunc)
	for k, v := range params {
		cfg.ConnConfig.RuntimeParams[k] = v
	}
	cfg.ConnConfig.RuntimeParams["statement_timeout"] = fmt.Sprint(timeout.Milliseconds())
	if config.onNotice != nil {
		cfg.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { config.onNotice(n) }
	}
	cfg.MaxConns = int32(conns)
	cfg.MinConns = 0
	cfg.MaxConnLifetime = time.Hour
	cfg.MaxConnLifetimeJitter = 5 * time.Minute
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("store: %s pool: %w", name, err)
	}
	return pool, nil
}
