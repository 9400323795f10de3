package store_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/school/store"
)

// TestADigestWaitsForWhatIsNotCommitted: a row says when it was written, and may be
// seen only after a digest that looked at that time. It must not be in none.
func TestADigestWaitsForWhatIsNotCommitted(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db := open(t, url)
	require.NoError(t, db.StartDigest(t.Context()))
	accept(t, db, "A", 2)
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	config.RuntimeParams["application_name"] = "schoolbell-dispatch" // as a record is
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	late, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = late.Exec(t.Context(), `UPDATE push_cluster_tokens SET job_status = 'PERMANENT_FAIL', attempts = 1, error_code = 'X', reason = 'REJECTED', processed_at = clock_timestamp() WHERE seq = 1`)
	require.NoError(t, err)
	_, err = late.Exec(t.Context(), `UPDATE push_clusters SET frontier = 1, permanent_fail_count = 1`)
	require.NoError(t, err)
	for range 2 {
		f, err := db.NewFailures(t.Context())
		require.NoError(t, err)
		require.Empty(t, f.Counts)
		_, err = db.TellFailures(t.Context(), f, "failures", nil)
		require.NoError(t, err)
	}
	require.NoError(t, late.Commit(t.Context()))
	f, err := db.NewFailures(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1, f.Recipients())
}

// BenchmarkNewFailures counts the new failures of one open notice of a million
// recipients, of which 1 in 100 failed for good.
func BenchmarkNewFailures(b *testing.B) {
	url, _ := durable(b)
	db, err := store.Open(b.Context(), store.Config{URL: url})
	require.NoError(b, err)
	defer db.Close()
	require.NoError(b, db.StartDigest(b.Context()))
	accept(b, db, "A", 1_000_000)
	conn := connect(b, url)
	exec(b, conn, `UPDATE push_cluster_tokens SET job_status = CASE WHEN seq % 100 = 0 THEN 'PERMANENT_FAIL' ELSE 'SUCCESS' END,
		reason = CASE WHEN seq % 100 = 0 THEN 'REJECTED' END, error_code = CASE WHEN seq % 100 = 0 THEN 'INVALID_ARGUMENT' END, attempts = 1, processed_at = clock_timestamp()`)
	exec(b, conn, `UPDATE push_clusters SET frontier = total_count, permanent_fail_count = 10000, success_count = 989999, retry_pending_count = 1`)
	for b.Loop() {
		f, err := db.NewFailures(b.Context())
		require.NoError(b, err)
		require.Equal(b, 10_000, f.Recipients())
	}
}
