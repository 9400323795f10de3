package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// SchemaVersion is the step of the schema that this program was written for.
// It works with exactly one step more, so that a schema can be migrated while
// the replicas of the release before still run.
const SchemaVersion = 18

var (
	ErrSchemaOld = errors.New("schema is older than this program: run `schoolbell migrate up`")
	ErrSchemaNew = errors.New("schema is more than one step newer than this program: upgrade it")
)

const schemaTable = "schema_migrations"

//go:embed migrations/postgres/*.sql
var migrations embed.FS

// Step is one step of the schema.
type Step struct {
	Version   int64
	Name      string
	AppliedAt time.Time // zero: not yet
}

// Migrate applies all steps that are missing, each in a transaction of its own,
// and returns them. Several programs may call it at once: one works, the others
// wait for it. It needs nothing but the URL.
func Migrate(ctx context.Context, url string) ([]Step, error) {
	return migrate(ctx, url, "migrate up", func(p *goose.Provider) ([]*goose.MigrationResult, error) { return p.Up(ctx) })
}

// MigrateDown takes steps back until version is the newest one applied, 0 for
// an empty database, and returns them. Data goes with its tables. A version that
// the schema has not reached is a *VersionError.
func MigrateDown(ctx context.Context, url string, version int64) ([]Step, error) {
	return migrate(ctx, url, "migrate down", func(p *goose.Provider) ([]*goose.MigrationResult, error) {
		current, err := p.GetDBVersion(ctx)
		if err != nil {
			return nil, err
		}
		if version < 0 || version > current {
			return nil, &VersionError{Wanted: version, Current: current}
		}
		return p.DownTo(ctx, version)
	})
}

// VersionError is a version that the schema cannot be taken back to.
type VersionError struct{ Wanted, Current int64 }

func (e *VersionError) Error() string {
	return fmt.Sprintf("the schema is at version %d, so it cannot be taken back to %d; give 0 to %d", e.Current, e.Wanted, e.Current)
}

// MigrationStatus lists all steps that this program knows.
func MigrationStatus(ctx context.Context, url string) ([]Step, error) {
	var steps []Step
	err := withProvider(ctx, url, func(p *goose.Provider) error {
		status, err := p.Status(ctx)
		if err != nil {
			return err
		}
		for _, s := range status {
			steps = append(steps, Step{Version: s.Source.Version, Name: s.Source.Path, AppliedAt: s.AppliedAt})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("migrate status: %w", err)
	}
	return steps, nil
}

func migrate(ctx context.Context, url, op string, run func(*goose.Provider) ([]*goose.MigrationResult, error)) ([]Step, error) {
	var steps []Step
	err := withProvider(ctx, url, func(p *goose.Provider) error {
		results, err := run(p)
		for _, r := range results {
			steps = append(steps, Step{Version: r.Source.Version, Name: r.Source.Path, AppliedAt: time.Now()})
		}
		return err
	})
	if err != nil {
		return steps, fmt.Errorf("%s: %w", op, err)
	}
	return steps, nil
}

func withProvider(ctx context.Context, url string, fn func(*goose.Provider) error) error {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return fmt.Errorf("database URL: %w", err)
	}
	connConfig(cfg, "migrate")
	// A step may have to wait for statements under way; programs that wait for
	// the step before them hold no lock.
	cfg.RuntimeParams["lock_timeout"] = "30s"
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	if err := db.PingContext(ctx); err != nil {
		return reach(&cfg.Config, err)
	}
	// Tried once a second for five minutes.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300))
	if err != nil {
		return err
	}
	provider, err := newProvider(db, goose.WithSessionLocker(locker))
	if err != nil {
		return err
	}
	return fn(provider)
}

func newProvider(db *sql.DB, opts ...goose.ProviderOption) (*goose.Provider, error) {
	dir, err := fs.Sub(migrations, "migrations/postgres")
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectPostgres, db, dir,
		append(opts, goose.WithTableName(schemaTable), goose.WithDisableGlobalRegistry(true))...)
}

// checkSchema compares the schema with what this program needs.
func (db *DB) checkSchema(ctx context.Context) error {
	var version int64
	err := db.reads.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM `+schemaTable+` WHERE is_applied`).Scan(&version)
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "42P01" {
		version, err = 0, nil // no such table
	}
	if err != nil {
		return readError("schema version", err)
	}
	switch {
	case version < SchemaVersion:
		return fmt.Errorf("version %d, needed %d: %w", version, SchemaVersion, ErrSchemaOld)
	case version > SchemaVersion+1:
		return fmt.Errorf("version %d, known %d: %w", version, SchemaVersion, ErrSchemaNew)
	}
	return nil
}

// noteTimeline notes on which timeline the database is, so that a failover is
// known of when something of before it is to be taken over. Where the service does
// not tell, that is all that is lost.
func (db *DB) noteTimeline(ctx context.Context) {
	var timeline *int
	var since *time.Time
	err := db.dispatch.QueryRow(ctx, `SELECT schoolbell_timeline(), schoolbell_failed_over_at()`).Scan(&timeline, &since)
	switch {
	case err != nil || timeline == nil:
		db.log.WarnContext(ctx, "the database does not tell its timeline: after a failover, what a dead owner left is taken over 30 s sooner than is safe where the machines' clocks differ",
			"event", "timeline_unknown", "error", err)
	case since != nil:
		db.log.InfoContext(ctx, "the database was failed over", "event", "timeline_changed", "timeline", *timeline, "since", *since)
	}
}
