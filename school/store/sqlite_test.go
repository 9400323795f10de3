package store_test

import (
	"crypto/sha256"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school/store"
	"schoolbell/school/store/storetest"
)

func TestSQLite(t *testing.T) {
	storetest.Run(t, func(t *testing.T) *storetest.Instance {
		path := filepath.Join(t.TempDir(), "school.db")
		db := openFile(t, path)
		beside := beside(t, path)
		return &storetest.Instance{
			Store: db,
			Query: func(tb testing.TB, query string) [][]string {
				tb.Helper()
				return rowsOf(tb, beside, query)
			},
			Exec: func(tb testing.TB, query string) {
				tb.Helper()
				execOn(tb, beside, query)
			},
			Device: func(tb testing.TB, schoolID, token string, enabled, retired bool) {
				tb.Helper()
				sha := sha256.Sum256([]byte(token))
				now := time.Now().UnixMicro()
				var retiredAt any
				if retired {
					retiredAt = now
				}
				execOn(tb, beside, `INSERT INTO devices (school_id, token_sha, token, enabled, registered_at, updated_at, retired_at)
					VALUES (?, ?, ?, ?, ?, ?, ?)`, schoolID, sha[:], token, enabled, now, now, retiredAt)
			},
			Elapse: func(tb testing.TB, d time.Duration) {
				tb.Helper()
				elapseFile(tb, beside, d)
			},
		}
	})
}

func openFile(tb testing.TB, path string) *store.SQLite {
	tb.Helper()
	db, err := store.OpenSQLite(tb.Context(), store.SQLiteConfig{Path: path})
	require.NoError(tb, err)
	tb.Cleanup(db.Close)
	return db
}

// beside opens the file as another program would, for looking and meddling.
func beside(tb testing.TB, path string) *sql.DB {
	tb.Helper()
	dsn := url.URL{Scheme: "file", Path: path, RawQuery: url.Values{"_txlock": {"immediate"}, "_pragma": {"busy_timeout(10000)"}}.Encode()}
	db, err := sql.Open("sqlite", dsn.String())
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, db.Close()) })
	return db
}

func rowsOf(tb testing.TB, db *sql.DB, query string, args ...any) (out [][]string) {
	tb.Helper()
	rows, err := db.QueryContext(tb.Context(), query, args...)
	require.NoError(tb, err)
	defer rows.Close()
	columns, err := rows.Columns()
	require.NoError(tb, err)
	for rows.Next() {
		values, words := make([]any, len(columns)), make([]string, len(columns))
		for i := range values {
			values[i] = new(any)
		}
		require.NoError(tb, rows.Scan(values...))
		for i := range values {
			if v := *values[i].(*any); v != nil {
				words[i] = fmt.Sprint(v)
			}
		}
		out = append(out, words)
	}
	require.NoError(tb, rows.Err())
	return out
}

func execOn(tb testing.TB, db *sql.DB, query string, args ...any) {
	tb.Helper()
	_, err := db.ExecContext(tb.Context(), query, args...)
	require.NoError(tb, err)
}

// elapseFile moves every time in the database d into the past.
func elapseFile(tb testing.TB, db *sql.DB, d time.Duration) {
	tb.Helper()
	for _, column := range timeColumns {
		table, name, _ := strings.Cut(column, ".")
		execOn(tb, db, fmt.Sprintf(`UPDATE %s SET %s = %s - ? WHERE %s IS NOT NULL`, table, name, name, name), d.Microseconds())
	}
}
