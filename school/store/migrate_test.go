package store_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school/store"
)

func TestMigrateUpAndDownAndUp(t *testing.T) {
	t.Parallel()
	url := localtest.Database(t)
	conn := connect(t, url)
	_, err := store.Open(t.Context(), store.Config{URL: url})
	require.ErrorIs(t, err, store.ErrSchemaOld)
	status, err := store.MigrationStatus(t.Context(), url)
	require.NoError(t, err)
	require.Len(t, status, store.SchemaVersion)
	require.True(t, status[0].AppliedAt.IsZero())

	for range 2 {
		steps, err := store.Migrate(t.Context(), url)
		require.NoError(t, err)
		require.Len(t, steps, store.SchemaVersion)
		steps, err = store.Migrate(t.Context(), url)
		require.NoError(t, err)
		require.Empty(t, steps)
		open(t, url)

		steps, err = store.MigrateDown(t.Context(), url, store.SchemaVersion-1)
		require.NoError(t, err)
		require.Len(t, steps, 1)
		_, err = store.Open(t.Context(), store.Config{URL: url})
		require.ErrorIs(t, err, store.ErrSchemaOld)
		_, err = store.MigrateDown(t.Context(), url, 0)
		require.NoError(t, err)
		require.Equal(t, [][]string{{"schema_migrations"}},
			query(t, conn, `SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v')`))
		require.Equal(t, [][]string{{"0"}}, query(t, conn, `SELECT count(*) FROM pg_proc WHERE proname LIKE 'schoolbell%'`))
	}
}

func TestMigrateDownBeyondTheSchemaIsRefused(t *testing.T) {
	t.Parallel()
	url := localtest.Database(t)
	for _, c := range []struct {
		to   int64
		want string
	}{
		{99, fmt.Sprintf("migrate down: the schema is at version %d, so it cannot be taken back to 99; give 0 to %[1]d", store.SchemaVersion)},
		{-1, fmt.Sprintf("migrate down: the schema is at version %d, so it cannot be taken back to -1; give 0 to %[1]d", store.SchemaVersion)},
		{store.SchemaVersion, ""},
		{3, ""},
		{4, "migrate down: the schema is at version 3, so it cannot be taken back to 4; give 0 to 3"},
		{0, ""},
		{1, "migrate down: the schema is at version 0, so it cannot be taken back to 1; give 0 to 0"},
	} {
		if c.to == 99 {
			_, err := store.Migrate(t.Context(), url)
			require.NoError(t, err)
		}
		_, err := store.MigrateDown(t.Context(), url, c.to)
		if c.want == "" {
			require.NoError(t, err)
			continue
		}
		require.EqualError(t, err, c.want)
		var beyond *store.VersionError
		require.ErrorAs(t, err, &beyond)
	}
}

func TestMigrateBySeveralAtOnceIsDoneOnce(t *testing.T) {
	t.Parallel()
	url := localtest.Database(t)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		total int
		errs  []error
	)
	for range 4 {
		wg.Go(func() {
			steps, err := store.Migrate(t.Context(), url)
			mu.Lock()
			defer mu.Unlock()
			total += len(steps)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, store.SchemaVersion, total)
}

func TestSchemaMayBeOneStepAhead(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	conn := connect(t, url)
	exec(t, conn, `INSERT INTO schema_migrations (version_id, is_applied) VALUES ($1, true)`, store.SchemaVersion+1)
	open(t, url)
	exec(t, conn, `INSERT INTO schema_migrations (version_id, is_applied) VALUES ($1, true)`, store.SchemaVersion+2)
	_, err := store.Open(t.Context(), store.Config{URL: url})
	require.ErrorIs(t, err, store.ErrSchemaNew)
}
