package store_test

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
)

// TestInterleaving21AfterAFailoverDrainsWaitLonger promotes a standby. What was claimed before
// has its deadline from another machine's clock, so it is taken over 30 s later;
// what is claimed afterwards is not.
func TestInterleaving21AfterAFailoverDrainsWaitLonger(t *testing.T) {
	t.Parallel()
	server := localtest.OwnPostgres(t, local.PostgresConfig{Fast: true})
	url, err := server.CreateDatabase(t.Context(), "bell")
	require.NoError(t, err)
	_, err = store.Migrate(t.Context(), url)
	require.NoError(t, err)
	next := func(db *store.DB, owner string) school.Term {
		t.Helper()
		term, err := db.OpenTerm(t.Context(), "A", owner, owner)
		require.NoError(t, err)
		return term
	}
	// orphan claims a batch of 5 whose deadline passed a second ago.
	orphan := func(db *store.DB, batch string) {
		t.Helper()
		accept(t, db, "A", 5)
		term := next(db, "dead")
		page, err := db.Page(t.Context(), term, 5)
		require.NoError(t, err)
		require.NoError(t, db.Claim(t.Context(), term, claimOf(batch, page.Work)))
		exec(t, connect(t, url), `UPDATE push_batches SET send_deadline = clock_timestamp() - interval '1 second' WHERE settled_at IS NULL`)
	}
	takeover := func(db *store.DB) school.Orphans {
		t.Helper()
		o, err := db.Takeover(t.Context(), next(db, "next"), school.RetryPolicy{Max: 3, Base: time.Minute})
		require.NoError(t, err)
		return o
	}
	before := open(t, url)
	orphan(before, "before")
	require.Equal(t, 5, takeover(before).Recipients, "nothing happened yet")
	orphan(before, "across")
	before.Close()

	require.NoError(t, server.Promote(t.Context(), local.Fast))
	var log bytes.Buffer
	after, err := store.Open(t.Context(), store.Config{URL: url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer after.Close()
	require.Contains(t, log.String(), "timeline=2")
	o := takeover(after)
	require.Zero(t, o.Recipients, "its call may be in flight by the other machine's clock")
	require.InDelta(t, 29*time.Second, o.Wait, float64(5*time.Second))
	exec(t, connect(t, url), `UPDATE push_batches SET send_deadline = send_deadline - interval '30 seconds' WHERE settled_at IS NULL`)
	o = takeover(after)
	require.Equal(t, 5, o.Recipients)
	require.Zero(t, o.Wait)

	orphan(after, "after")
	require.Equal(t, 5, takeover(after).Recipients, "claimed on this timeline")
}

// TestASilentServiceIsNoFailover: some services do not tell the timeline. Then
// nothing waits longer, and the log says so.
func TestASilentServiceIsNoFailover(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	conn := connect(t, url)
	exec(t, conn, `CREATE OR REPLACE FUNCTION schoolbell_timeline() RETURNS integer LANGUAGE sql AS 'SELECT NULL::integer'`)
	var log bytes.Buffer
	db, err := store.Open(t.Context(), store.Config{URL: url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	defer db.Close()
	require.Contains(t, log.String(), "timeline_unknown")
	accept(t, db, "A", 5)
	term, err := db.OpenTerm(t.Context(), "A", "next", "next")
	require.NoError(t, err)
	o, err := db.Takeover(t.Context(), term, school.RetryPolicy{Max: 3, Base: time.Minute})
	require.NoError(t, err)
	require.Zero(t, o.Wait)
}

// TestInterleaving20ASweepGoesOnWhereAnotherReplicaStopped: how far it got is in the database.
func TestInterleaving20ASweepGoesOnWhereAnotherReplicaStopped(t *testing.T) {
	t.Parallel()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		url := migrated(t)
		conn := connect(t, url)
		var replicas []*store.DB
		for range 2 {
			db, err := store.Open(t.Context(), store.Config{URL: url}.SweepRows(10))
			require.NoError(t, err)
			t.Cleanup(db.Close)
			replicas = append(replicas, db)
		}
		for range 3 {
			accept(t, replicas[0], "A", 10)
		}
		wrong := func() int {
			return len(query(t, conn, `SELECT id FROM push_clusters WHERE success_count > 0`))
		}
		for round := range 2 { // it begins again after the end
			exec(t, conn, `UPDATE push_clusters SET success_count = 1`)
			for i := range 3 {
				_, err := replicas[i%2].Sweep(t.Context())
				require.NoError(t, err)
				require.Equal(t, 2-i, wrong(), "round %d, sweep %d", round, i)
			}
		}
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "bell.db")
		for i := range 3 {
			db, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path, Relaxed: true}.SweepRows(10))
			require.NoError(t, err)
			if i == 0 {
				for range 3 {
					accept(t, db, "A", 10)
				}
				_, err = db.OnWriter(t.Context(), `UPDATE push_clusters SET success_count = 1 RETURNING id`)
				require.NoError(t, err)
			}
			_, err = db.Sweep(t.Context())
			require.NoError(t, err)
			left, err := db.OnWriter(t.Context(), `SELECT count(*) FROM push_clusters WHERE success_count > 0`)
			require.NoError(t, err)
			require.Equal(t, string(rune('2'-i)), left)
			db.Close()
		}
	})
}
