package store_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

func TestSQLiteIsAStore(t *testing.T) {
	t.Parallel()
	var _ storetest.Store = (*store.SQLite)(nil)
	_, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{})
	require.ErrorContains(t, err, "Path is required")
	_, err = store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: filepath.Join(t.TempDir(), "missing", "school.db")})
	require.ErrorIs(t, err, os.ErrNotExist)

	// What stands in a file's name is no part of an address.
	path := filepath.Join(t.TempDir(), "a b%20?c#d&_pragma=query_only(1).db")
	db := openFile(t, path)
	accept(t, db, "A", 3)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "it holds tokens")
}

func TestSQLiteSettings(t *testing.T) {
	t.Parallel()
	for _, relaxed := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "school.db")
		db, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path, Relaxed: relaxed})
		require.NoError(t, err)
		for pragma, want := range map[string]string{
			"journal_mode": "wal", "foreign_keys": "1", "busy_timeout": "2000",
			"synchronous": map[bool]string{false: "2", true: "1"}[relaxed],
		} {
			got, err := db.OnWriter(t.Context(), "PRAGMA "+pragma)
			require.NoError(t, err)
			require.Equal(t, want, got, pragma)
		}
		db.Close()
		_, err = os.Stat(path + "-wal")
		require.ErrorIs(t, err, os.ErrNotExist, "the log is moved into the file at the end")
	}
}

func TestSQLiteFileIsForOne(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "school.db")
	db := openFile(t, path)
	link := filepath.Join(dir, "link.db")
	require.NoError(t, os.Symlink(path, link))
	for _, name := range []string{path, link, filepath.Join(dir, ".", "..", filepath.Base(dir), "school.db")} {
		_, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: name})
		require.ErrorIs(t, err, store.ErrInUse)
		require.ErrorContains(t, err, "this process has "+path)
		_, err = store.MigrateSQLiteDown(t.Context(), name, 0)
		require.ErrorIs(t, err, store.ErrInUse)
	}
	accept(t, db, "A", 3)
	db.Close()
	db.Close()
	again := openFile(t, link)
	list, err := again.Notices(t.Context(), school.NoticeFilter{Limit: 10})
	require.NoError(t, err)
	require.Len(t, list, 1)
}

func TestSQLiteAfterCloseIsUnavailable(t *testing.T) {
	t.Parallel()
	db := openFile(t, filepath.Join(t.TempDir(), "school.db"))
	reading, proceed := make(chan struct{}), make(chan struct{})
	accepted := make(chan error, 1)
	go func() {
		_, err := db.Accept(t.Context(), notice("A"), 5000, func(yield func(school.NewRecipient, error) bool) {
			for i := range 5000 {
				if i == 4000 {
					close(reading)
					<-proceed
				}
				if !yield(school.NewRecipient{Token: fmt.Sprint(i)}, nil) {
					return
				}
			}
		})
		accepted <- err
	}()
	<-reading
	closed := make(chan struct{})
	go func() { db.Close(); close(closed) }()
	require.Eventually(t, func() bool { return db.Ping(t.Context()) != nil }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, db.Ping(t.Context()), school.ErrUnavailable)
	_, err := db.Notice(t.Context(), 1)
	require.ErrorIs(t, err, school.ErrUnavailable)
	select {
	case <-closed:
		t.Fatal("it did not wait for the call under way")
	case <-time.After(50 * time.Millisecond):
	}
	close(proceed)
	require.NoError(t, <-accepted)
	<-closed
}

func TestSQLiteMigrateUpAndDownAndUp(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	look := beside(t, path)
	tables := func() (names []string) {
		for _, r := range rowsOf(t, look, `SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name`) {
			names = append(names, r[0])
		}
		return names
	}
	for range 2 {
		db := openFile(t, path)
		accept(t, db, "A", 3)
		db.Close()
		require.Equal(t, []string{"alert_states", "alerts", "api_keys", "device_brakes", "device_flags", "device_topics", "devices", "job_positions", "push_batch_ranges", "push_batches", "push_cluster_counts",
			"push_cluster_token_states", "push_cluster_tokens", "push_clusters", "push_fallbacks", "schema_migrations", "school_terms", "schools"}, tables())
		steps, err := store.MigrateSQLiteDown(t.Context(), path, store.SQLiteSchemaVersion-1)
		require.NoError(t, err)
		require.Len(t, steps, 1)
		openFile(t, path).Close() // up again with its data
		require.Equal(t, [][]string{{"3"}}, rowsOf(t, look, `SELECT count(*) FROM push_cluster_tokens`))
		steps, err = store.MigrateSQLiteDown(t.Context(), path, 0)
		require.NoError(t, err)
		require.Len(t, steps, store.SQLiteSchemaVersion)
		require.Equal(t, []string{"schema_migrations"}, tables())
	}
}

func TestSQLiteSchemaMayBeOneStepAhead(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	openFile(t, path).Close()
	look := beside(t, path)
	ahead := func(n int) {
		execOn(t, look, `INSERT INTO schema_migrations (version_id, is_applied) VALUES (?, 1)`, store.SQLiteSchemaVersion+n)
	}
	ahead(1)
	openFile(t, path).Close()
	ahead(2)
	_, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path})
	require.ErrorIs(t, err, store.ErrSchemaNew)
	_, err = store.MigrateSQLiteDown(t.Context(), path, store.SQLiteSchemaVersion)
	require.NotErrorIs(t, err, store.ErrInUse, "the file was given back")
}

// TestSQLiteColumnsArePostgresColumns: tools read either by the same names. A file
// has no standby, so no timelines, and no applications beside it, whose schools arrive.
func TestSQLiteColumnsArePostgresColumns(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	openFile(t, path)
	var embedded, served []string
	for _, r := range rowsOf(t, beside(t, path), `SELECT m.name, c.name FROM sqlite_schema AS m JOIN pragma_table_xinfo(m.name) AS c
		WHERE m.type IN ('table', 'view') AND m.name NOT LIKE 'sqlite_%' AND m.name <> 'schema_migrations' ORDER BY 1, 2`) {
		embedded = append(embedded, strings.Join(r, "."))
	}
	for _, r := range query(t, connect(t, migrated(t)), `SELECT table_name::text, column_name::text FROM information_schema.columns
		WHERE table_schema = 'public' AND table_name NOT IN ('schema_migrations', 'database_timelines', 'school_arrivals') ORDER BY table_name COLLATE "C", column_name COLLATE "C"`) {
		served = append(served, strings.Join(r, "."))
	}
	require.Equal(t, served, embedded)
}

// TestSQLiteIsNeverLocked: a transaction that reads before it writes cannot be
// turned away half way, however many there are, and though another program writes
// as well.
func TestSQLiteIsNeverLocked(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	const workers, rounds = 20, 10
	for w := range workers {
		accept(t, db, fmt.Sprint("school-", w), rounds)
	}
	look := beside(t, path)
	working, stop := context.WithCancel(t.Context())
	var meddler sync.WaitGroup
	meddler.Go(func() {
		for working.Err() == nil {
			if _, err := look.Exec(`UPDATE schools SET name = 'meddled with'`); err != nil {
				t.Error(err)
			}
		}
	})
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			id := fmt.Sprint("school-", w)
			for r := range rounds {
				term, err := db.OpenTerm(t.Context(), id, "acq", "x")
				if err != nil {
					t.Error(err)
					return
				}
				page, err := db.Page(t.Context(), term, 1)
				if err != nil || len(page.Work) != 1 {
					t.Error(err, len(page.Work))
					return
				}
				c := claimOf(fmt.Sprint(id, "-", r), page.Work)
				if err := errors.Join(db.Claim(t.Context(), term, c), db.Record(t.Context(), recordOf(t, term, c, accepted))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	stop()
	meddler.Wait()
	counts, err := db.RecipientCounts(t.Context())
	require.NoError(t, err)
	require.Equal(t, store.RecipientCounts{}, counts)
}

func TestSQLiteTellsACommitFromNone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	look := beside(t, path)
	id := accept(t, db, "A", 100)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 100)
	require.NoError(t, err)
	batches := func() string { return rowsOf(t, look, `SELECT count(*) FROM push_batches`)[0][0] }

	t.Run("a context that has ended", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("lease lost"))
		err := db.Claim(ctx, term, claimOf("never", page.Work[:10]))
		require.ErrorIs(t, err, school.ErrUnavailable)
		require.NotErrorIs(t, err, school.ErrCommitUnknown)
	})
	t.Run("a context that ends between two statements", func(t *testing.T) {
		for at := range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			n := 0
			db.OnStatement(func(string, []any) {
				if n++; n == at+1 {
					cancel()
				}
			})
			err := db.Claim(ctx, term, claimOf("never", page.Work[:10]))
			db.OnStatement(nil)
			require.ErrorIs(t, err, school.ErrUnavailable)
			require.ErrorContains(t, err, "context canceled")
			require.NotErrorIs(t, err, school.ErrCommitUnknown)
			require.Equal(t, "0", batches())
		}
	})
	t.Run("a context that ends while it commits", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		db.BeforeCommit(cancel)
		err := db.Claim(ctx, term, claimOf("done", page.Work[:10]))
		db.BeforeCommit(nil)
		require.Error(t, ctx.Err())
		require.NoError(t, err, "it happened, and so it says")
		require.Equal(t, "1", batches())
		require.Equal(t, 10, progress(t, db, id).Counts.InProgress)
		for i := range 300 { // nothing that is still on its way interrupts this commit or the next
			ctx, cancel := context.WithCancel(t.Context())
			db.BeforeCommit(cancel)
			require.NoError(t, db.Pause(ctx, "A"), "commit %d", i)
			db.BeforeCommit(nil)
			require.NoError(t, db.Resume(t.Context(), "A"), "after commit %d", i)
		}
	})
	t.Run("waiting for its turn", func(t *testing.T) {
		inside, proceed := make(chan struct{}), make(chan struct{})
		db.BeforeCommit(func() { close(inside); <-proceed })
		done := make(chan error, 1)
		go func() { done <- db.Pause(t.Context(), "A") }()
		select {
		case <-inside:
		case err := <-done:
			t.Fatalf("it did not come to its commit: %v", err)
		}
		db.BeforeCommit(nil)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		err := db.Resume(ctx, "A")
		require.ErrorIs(t, err, school.ErrUnavailable)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		_, err = db.School(t.Context(), "A") // a reader waits for nobody
		require.NoError(t, err)
		close(proceed)
		require.NoError(t, <-done)
		require.Equal(t, [][]string{{"1"}}, rowsOf(t, look, `SELECT paused FROM school_terms`))
	})
}

func TestSQLitePanicRollsBack(t *testing.T) {
	t.Parallel()
	db := openFile(t, filepath.Join(t.TempDir(), "school.db"))
	accept(t, db, "A", 1)
	db.BeforeCommit(func() { panic("boom") })
	require.PanicsWithValue(t, "boom", func() { _ = db.Pause(t.Context(), "A") })
	db.BeforeCommit(nil)
	b, err := db.School(t.Context(), "A")
	require.NoError(t, err)
	require.False(t, b.School.Paused)
	require.NoError(t, db.Pause(t.Context(), "A"), "the next one finds the connection and the turn free")
}

func TestSQLiteFullDiskStoresNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	id := accept(t, db, "A", 10)
	pages, err := db.OnWriter(t.Context(), `PRAGMA page_count`)
	require.NoError(t, err)
	_, err = db.OnWriter(t.Context(), `PRAGMA max_page_count = `+pages)
	require.NoError(t, err)
	_, err = db.Accept(t.Context(), notice("B"), 1500, devices(1500))
	require.ErrorIs(t, err, school.ErrUnavailable)
	require.NotErrorIs(t, err, school.ErrCommitUnknown)
	require.Equal(t, [][]string{{"1", "10"}}, rowsOf(t, beside(t, path), `SELECT (SELECT count(*) FROM push_clusters), (SELECT count(*) FROM push_cluster_tokens)`))
	require.NoError(t, db.Cancel(t.Context(), id), "what fits goes on")
	_, err = db.OnWriter(t.Context(), `PRAGMA max_page_count = 100000`)
	require.NoError(t, err)
	_, err = db.Accept(t.Context(), notice("B"), 1500, devices(1500))
	require.NoError(t, err)
}

func TestSQLiteWaitsForAnotherProgramAndThenSaysSo(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	db := openFile(t, path)
	accept(t, db, "A", 1)
	session, err := beside(t, path).BeginTx(t.Context(), nil) // as a person with a transaction left open
	require.NoError(t, err)
	err = db.Pause(t.Context(), "A")
	require.ErrorIs(t, err, school.ErrUnavailable)
	require.ErrorContains(t, err, "SQLITE_BUSY")
	_, err = db.School(t.Context(), "A")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- db.Pause(t.Context(), "A") }()
	require.NoError(t, session.Rollback())
	require.NoError(t, <-done)
}

func TestSQLiteListenIsReadyOnce(t *testing.T) {
	t.Parallel()
	db := openFile(t, filepath.Join(t.TempDir(), "school.db"))
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan struct{}, 2)
	done := make(chan error, 1)
	go func() {
		done <- db.Listen(ctx, func() { ready <- struct{}{} }, func(string) { t.Error("nobody calls") })
	}()
	<-ready
	cancel()
	require.NoError(t, <-done)
	require.Empty(t, ready)
}

// told counts log records by event.
type told struct {
	slog.Handler
	events *atomic.Int64
}

func (h told) Enabled(context.Context, slog.Level) bool { return true }

func (h told) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "event" && a.Value.String() == "notice_repaired" {
			h.events.Add(1)
		}
		return true
	})
	return nil
}

func TestSQLiteMetricsAndRepairs(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	reg := prometheus.NewRegistry()
	repaired := new(atomic.Int64)
	db, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path, Registerer: reg, Log: slog.New(told{slog.DiscardHandler, repaired})})
	require.NoError(t, err)
	defer db.Close()
	id := accept(t, db, "A", 10)
	execOn(t, beside(t, path), `UPDATE push_clusters SET success_count = 3 WHERE id = ?`, id)
	_, err = db.Sweep(t.Context())
	require.NoError(t, err)
	require.Equal(t, int64(1), repaired.Load())
	require.Equal(t, school.Counts{Total: 10, Waiting: 10}, progress(t, db, id).Counts)
	values := map[string]float64{}
	families, err := reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += "/" + l.GetValue()
			}
			values[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	require.Equal(t, 1.0, values["schoolbell_counts_repaired_total"])
	require.Equal(t, 1.0, values["schoolbell_db_pool_max_conns/write"])
	require.Equal(t, 0.0, values["schoolbell_db_pool_acquired_conns/write"])
	require.Contains(t, values, "schoolbell_db_pool_waits_total/dispatch")
	db.Close()
	families, err = reg.Gather()
	require.NoError(t, err)
	require.Empty(t, families, "given back with the file")
}
