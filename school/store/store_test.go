package store_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childFile); path != "" {
		fmt.Fprintln(os.Stderr, child(path, os.Getenv(childStop)))
		os.Exit(1)
	}
	// A history is some thirty steps of a dozen round trips each. More with
	// -rapid.checks.
	if err := flag.Set("rapid.checks", "25"); err != nil {
		panic(err)
	}
	localtest.Main(m)
}

// migrated returns the URL of a fresh database with the schema.
func migrated(tb testing.TB) string {
	tb.Helper()
	return localtest.PreparedDatabase(tb, "store", func(ctx context.Context, url string) error {
		_, err := store.Migrate(ctx, url)
		return err
	})
}

func open(tb testing.TB, url string) *store.DB {
	tb.Helper()
	db, err := store.Open(tb.Context(), store.Config{URL: url})
	require.NoError(tb, err)
	tb.Cleanup(db.Close)
	return db
}

// connect opens a session beside the store's, for looking and meddling.
func connect(tb testing.TB, url string) *pgx.Conn {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), url)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

func instance(t *testing.T) *storetest.Instance {
	url := migrated(t)
	conn := connect(t, url)
	return &storetest.Instance{
		Store: open(t, url),
		Query: func(tb testing.TB, sql string) [][]string {
			tb.Helper()
			return query(tb, conn, sql)
		},
		Exec: func(tb testing.TB, sql string) {
			tb.Helper()
			exec(tb, conn, sql)
		},
		Device: func(tb testing.TB, schoolID, token string, enabled, retired bool) {
			tb.Helper()
			exec(tb, conn, `INSERT INTO devices (school_id, token_sha, token, enabled, retired_at)
				VALUES ($1, sha256(convert_to($2, 'UTF8')), $2, $3, CASE WHEN $4 THEN now() END)`, schoolID, token, enabled, retired)
		},
		Elapse: func(tb testing.TB, d time.Duration) {
			tb.Helper()
			elapse(tb, conn, d)
		},
	}
}

func TestPostgres(t *testing.T) {
	storetest.Run(t, instance)
}

func query(tb testing.TB, conn *pgx.Conn, sql string, args ...any) [][]string {
	tb.Helper()
	rows, err := conn.Query(tb.Context(), sql, args...)
	require.NoError(tb, err)
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]string, error) {
		values, err := row.Values()
		if err != nil {
			return nil, err
		}
		words := make([]string, len(values))
		for i, v := range values {
			switch v := v.(type) {
			case nil:
			case bool:
				words[i] = map[bool]string{true: "1", false: "0"}[v]
			case time.Time:
				words[i] = v.UTC().Format(time.RFC3339Nano)
			default:
				words[i] = fmt.Sprint(v)
			}
		}
		return words, nil
	})
	require.NoError(tb, err)
	return out
}

func exec(tb testing.TB, conn *pgx.Conn, sql string, args ...any) {
	tb.Helper()
	_, err := conn.Exec(tb.Context(), sql, args...)
	require.NoError(tb, err)
}

// timeColumns are the times that matter, in either engine.
var timeColumns = []string{
	"push_cluster_tokens.retry_after", "push_cluster_tokens.processed_at",
	"push_clusters.due_at", "push_clusters.scheduled_at", "push_clusters.expires_at", "push_clusters.created_at",
	"push_clusters.first_send_at", "push_clusters.last_send_at", "push_clusters.ended_at", "push_clusters.purged_at", "push_clusters.emptied_at",
	"push_batches.claimed_at", "push_batches.send_deadline", "push_batches.settled_at",
	"push_fallbacks.retry_after", "push_fallbacks.created_at",
	"school_terms.next_eligible_at", "devices.registered_at", "devices.retired_at", "device_flags.claimed_at",
	"alerts.retry_after", "alerts.created_at", "alerts.since", "alert_states.since", "alert_states.told_at", "alert_states.seen_at",
}

// elapse moves every time in the database d into the past.
func elapse(tb testing.TB, conn *pgx.Conn, d time.Duration) {
	tb.Helper()
	for _, column := range timeColumns {
		table, name, _ := strings.Cut(column, ".")
		exec(tb, conn, fmt.Sprintf(`UPDATE %s SET %s = %s - $1 * interval '1 microsecond' WHERE %s IS NOT NULL`, table, name, name, name), d.Microseconds())
	}
}
