package store

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/pressly/goose/v3"
)

// SQLiteSchemaVersion is the step of the embedded schema that this program was
// written for. Its steps are counted apart from PostgreSQL's.
const SQLiteSchemaVersion = 8

//go:embed migrations/sqlite/*.sql
var sqliteMigrations embed.FS

// MigrateSQLiteDown takes steps of a file's schema back until version is the
// newest one applied, 0 for an empty database, and returns them. Data goes with
// its tables. ErrInUse while a store has the file. There is no way up besides
// OpenSQLite.
func MigrateSQLiteDown(ctx context.Context, path string, version int64) (steps []Step, err error) {
	const op = "migrate down"
	path, lock, err := takeFile(path)
	if err != nil {
		return nil, err
	}
	defer lock.release()
	db := openSQLiteFile(path, false)
	defer db.Close()
	db.SetMaxOpenConns(1)
	p, err := sqliteProvider(db)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	results, err := p.DownTo(context.WithoutCancel(ctx), version)
	for _, r := range results {
		steps = append(steps, Step{Version: r.Source.Version, Name: r.Source.Path, AppliedAt: time.Now()})
	}
	return steps, sqliteMeaning(op, err)
}

// migrateSQLite brings the schema up to date. The file's lock keeps others away.
func migrateSQLite(ctx context.Context, db *sql.DB) error {
	const op = "migrate up"
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", op, stopped(ctx))
	}
	ctx = context.WithoutCancel(ctx) // see sqliteTx
	var mode string
	if err := db.QueryRowContext(ctx, `PRAGMA journal_mode`).Scan(&mode); err != nil {
		return sqliteMeaning(op, err)
	}
	if mode != "wal" {
		return fmt.Errorf("%s: the file system does not carry SQLite's write-ahead log (journal mode %s): use a local one", op, mode)
	}
	p, err := sqliteProvider(db)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if _, err := p.Up(ctx); err != nil {
		return sqliteMeaning(op, err)
	}
	version, err := p.GetDBVersion(ctx)
	if err != nil {
		return sqliteMeaning(op, err)
	}
	if version > SQLiteSchemaVersion+1 {
		return fmt.Errorf("version %d, known %d: %w", version, SQLiteSchemaVersion, ErrSchemaNew)
	}
	return nil
}

func sqliteProvider(db *sql.DB) (*goose.Provider, error) {
	dir, err := fs.Sub(sqliteMigrations, "migrations/sqlite")
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectSQLite3, db, dir,
		goose.WithTableName(schemaTable), goose.WithDisableGlobalRegistry(true))
}
