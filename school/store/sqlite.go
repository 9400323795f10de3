package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/glebarez/sqlite"
	"github.com/prometheus/client_golang/prometheus"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"schoolbell/school"
)

// SQLiteConfig says which file. Zero fields take defaults.
type SQLiteConfig struct {
	Path string // of the database; required; made where it does not exist, its directory is not

	// Relaxed lets the newest commits be lost when the machine loses its power.
	// What a killed process had committed survives either way. For a
	// demonstration or a test: with it a commit does not wait for the disk.
	Relaxed bool

	Log        *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: metrics are not registered

	sweepRows int // counted by one sweep
}

// Connections. One writes, and a few more hold what streams in until it is
// written; the rest reads, for the scheduler and for people apart.
const (
	sqliteStreams   = 4 // long notices on their way in at once; more wait
	sqliteDispatch  = 4
	sqliteReads     = 2
	sqliteBusy      = 2 * time.Second // for another program's lock, an open sqlite3 session for instance
	sqlitePage      = 8192            // bytes; long rows of one notice lie side by side
	sqliteCacheKiB  = 8192            // pages in memory, of each connection
	sqliteWALBytes  = 64 << 20        // what is left of the log after a big notice
	sqliteReadCheck = 256             // rows between two looks at the context
)

// SQLite is the store in one file of this machine, for one process: the default
// of a program that is told of no server, and what a demonstration runs on. It
// does what DB does with the same tables, and its methods may be called
// concurrently.
//
// Time is this process's clock. Every change is one transaction that is
// immediate, so that it has the one write lock before it reads; changes queue in
// the order in which they came. Reads have a snapshot and wait for nobody.
//
// No commit is unknown here as long as the process lives: a call whose context
// ends before its commit has begun is rolled back (school.ErrUnavailable), and
// one whose context ends after that returns what the commit did.
type SQLite struct {
	cfg     SQLiteConfig
	path    string // resolved
	log     *slog.Logger
	metrics *metrics
	lock    *fileLock

	turn     turnstile // whoever is through it may write
	writer   *sql.DB   // the connection that writes
	ingest   *sql.DB   // connections that hold a long notice before it is written
	dispatch *sql.DB   // reads of the scheduler
	reads    *sql.DB   // reads of people
	readModels

	keys keysInProgress

	mu     sync.RWMutex
	closed bool
	calls  sync.WaitGroup

	// For tests.
	beforeCommit func()                         // between the last look at the context and COMMIT
	onStatement  func(query string, args []any) // before each statement
}

// OpenSQLite opens the file, takes it for this process and applies the steps of
// the schema that are missing. ErrInUse where another process, or another store
// of this one, has it; ErrSchemaNew where it is more than one step ahead of this
// program.
func OpenSQLite(ctx context.Context, cfg SQLiteConfig) (_ *SQLite, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.sweepRows == 0 {
		cfg.sweepRows = sweepRows
	}
	path, lock, err := takeFile(cfg.Path)
	if err != nil {
		return nil, err
	}
	db := &SQLite{cfg: cfg, path: path, log: cfg.Log, lock: lock, turn: newTurnstile()}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	db.writer = openSQLiteFile(path, cfg.Relaxed)
	db.writer.SetMaxOpenConns(1)
	if err := migrateSQLite(ctx, db.writer); err != nil {
		return nil, err
	}
	db.ingest = openSQLiteFile(path, cfg.Relaxed, "wal_autocheckpoint(0)") // see acceptStream
	db.ingest.SetMaxOpenConns(sqliteStreams)
	db.ingest.SetMaxIdleConns(-1) // its temporary tables end with it
	db.dispatch = openSQLiteFile(path, cfg.Relaxed, "query_only(ON)")
	db.dispatch.SetMaxOpenConns(sqliteDispatch)
	db.dispatch.SetMaxIdleConns(sqliteDispatch)
	db.reads = openSQLiteFile(path, cfg.Relaxed, "query_only(ON)")
	db.reads.SetMaxOpenConns(sqliteReads)
	db.reads.SetMaxIdleConns(sqliteReads)

	// gorm's own logger would print statements with their values, tokens among them.
	models, err := gorm.Open(&sqlite.Dialector{Conn: db.reads}, &gorm.Config{
		Logger:                 logger.Discard,
		SkipDefaultTransaction: true,
		DisableAutomaticPing:   true,
	})
	if err != nil {
		return nil, sqliteMeaning("open", err)
	}
	db.readModels = readModels{
		run: func(ctx context.Context, op string, fn func(*gorm.DB) error) error {
			return db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
				session := models.Session(&gorm.Session{NewDB: true, Context: context.WithoutCancel(ctx)})
				session.Statement.ConnPool = tx.conn
				return fn(session)
			})
		},
		when: func(t time.Time) any { return t.UnixMicro() },
	}
	db.metrics, err = newMetrics(cfg.Registerer, map[string]func() poolStats{
		"write": db.turn.stats, "ingest": sqlStats(db.ingest), "dispatch": sqlStats(db.dispatch), "reads": sqlStats(db.reads),
	})
	if err != nil {
		return nil, fmt.Errorf("store: metrics: %w", err)
	}
	return db, nil
}

// takeFile resolves the path, makes the file where it is missing, readable by
// this user alone since it holds device tokens, and takes its lock.
func takeFile(path string) (string, *fileLock, error) {
	if path == "" {
		return "", nil, errors.New("store: Path is required")
	}
	path, err := resolve(path)
	if err != nil {
		return "", nil, fmt.Errorf("store: database file: %w", err)
	}
	lock, err := lockFile(path)
	if err != nil {
		return "", nil, fmt.Errorf("store: %w", err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	switch {
	case err == nil:
		err = f.Close()
	case errors.Is(err, os.ErrExist):
		err = nil
	}
	if err != nil {
		lock.release()
		return "", nil, fmt.Errorf("store: database file: %w", err)
	}
	return path, lock, nil
}

// resolve follows links, so that two names of one file meet in one lock.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real, nil
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// openSQLiteFile makes a pool of connections that nothing but this program's own
// choices shape, more pragmas among them. No statement runs yet.
func openSQLiteFile(path string, relaxed bool, more ...string) *sql.DB {
	synchronous := "FULL" // the log is on the disk before COMMIT returns
	if relaxed {
		synchronous = "NORMAL"
	}
	q := url.Values{"_txlock": {"immediate"}}
	for _, p := range append([]string{
		fmt.Sprintf("busy_timeout(%d)", sqliteBusy.Milliseconds()),
		fmt.Sprintf("page_size(%d)", sqlitePage), // of a file that is new
		"journal_mode(WAL)",
		"synchronous(" + synchronous + ")",
		"foreign_keys(ON)",
		"trusted_schema(OFF)",
		fmt.Sprintf("cache_size(-%d)", sqliteCacheKiB),
		fmt.Sprintf("journal_size_limit(%d)", sqliteWALBytes),
	}, more...) {
		q.Add("_pragma", p)
	}
	dsn := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	// It fails for a driver that is not linked in, and there is one.
	db, err := sql.Open(sqlite.DriverName, dsn.String())
	if err != nil {
		panic(err)
	}
	return db
}

// Close lets the calls under way return, refuses further ones with
// school.ErrUnavailable, and gives the file back. Closing twice is no error.
func (db *SQLite) Close() {
	db.mu.Lock()
	was := db.closed
	db.closed = true
	db.mu.Unlock()
	if was {
		return
	}
	db.calls.Wait()
	if db.metrics != nil {
		db.metrics.unregister()
	}
	// The writer last: the last connection moves the log into the file.
	for _, pool := range []*sql.DB{db.reads, db.dispatch, db.ingest, db.writer} {
		if pool == nil {
			continue
		}
		if err := pool.Close(); err != nil {
			db.log.Warn("a database connection did not close", "event", "store_close_failed", "error", sqliteMeaning("close", err))
		}
	}
	db.lock.release()
}

// enter counts a call until leave.
func (db *SQLite) enter(op string) error {
	db.mu.RLock()
	defer db.mu.RUnlock()
	if db.closed {
		return fmt.Errorf("%s: %w: the store is closed", op, school.ErrUnavailable)
	}
	db.calls.Add(1)
	return nil
}

func (db *SQLite) leave() { db.calls.Done() }

// Ping reads from the file. school.ErrUnavailable.
func (db *SQLite) Ping(ctx context.Context) error {
	return db.read(ctx, db.dispatch, "ping", func(tx *sqliteTx) error {
		var n int
		_, err := tx.one(`SELECT count(*) FROM `+schemaTable+` WHERE version_id = 0`, nil, &n)
		return err
	})
}

// Listen waits until ctx ends and returns nil. Nobody writes to the file but this
// process, whose own wake-ups do not come this way; onReady is called once, so
// that whoever looks at what is due from there on misses nothing.
func (db *SQLite) Listen(ctx context.Context, onReady func(), _ func(schoolID string)) error {
	onReady()
	<-ctx.Done()
	return nil
}

func sqlStats(db *sql.DB) func() poolStats {
	return func() poolStats {
		s := db.Stats()
		return poolStats{acquired: s.InUse, idle: s.Idle, max: s.MaxOpenConnections, waits: s.WaitCount, waited: s.WaitDuration}
	}
}
