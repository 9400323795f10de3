package node

import (
	"context"
	"errors"

	"schoolbell/coordinator/node/settings"
	"schoolbell/school/store"
)

// Step is one step of the database schema.
type Step = store.Step

var errNoDatabase = errors.New("database_url is not set: there is no schema to migrate")

// MigrateUp applies the steps that are missing and returns them. It needs
// nothing but the database URL.
func MigrateUp(ctx context.Context, s settings.Settings) ([]Step, error) {
	if s.DatabaseURL == "" {
		return nil, errNoDatabase
	}
	steps, err := store.Migrate(ctx, string(s.DatabaseURL))
	return steps, databaseError(s, err)
}

// MigrateStatus lists all steps, applied or not.
func MigrateStatus(ctx context.Context, s settings.Settings) ([]Step, error) {
	if s.DatabaseURL == "" {
		return nil, errNoDatabase
	}
	steps, err := store.MigrationStatus(ctx, string(s.DatabaseURL))
	return steps, databaseError(s, err)
}

// MigrateDown takes steps back until only those up to version are applied; a
// *VersionError where the schema has not come so far.
func MigrateDown(ctx context.Context, s settings.Settings, version int64) ([]Step, error) {
	if s.DatabaseURL == "" {
		return nil, errNoDatabase
	}
	steps, err := store.MigrateDown(ctx, string(s.DatabaseURL), version)
	return steps, databaseError(s, err)
}
