package localtest_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
)

func TestMain(m *testing.M) { localtest.Main(m) }

func TestSharedServerIsOne(t *testing.T) {
	t.Parallel()
	require.Same(t, localtest.Postgres(t), localtest.Postgres(t))
}

func TestDatabasesAreSeparateAndDropped(t *testing.T) {
	t.Parallel()
	var name string
	t.Run("made / with an odd name — 이름", func(t *testing.T) {
		one, two := connect(t, localtest.Database(t)), connect(t, localtest.Database(t))
		exec(t, one, "CREATE TABLE mine (n int)")
		var there *string
		require.NoError(t, two.QueryRow(t.Context(), "SELECT to_regclass('mine')::text").Scan(&there))
		require.Nil(t, there)
		require.NoError(t, one.QueryRow(t.Context(), "SELECT current_database()").Scan(&name))
	})
	admin := connect(t, localtest.Postgres(t).URL("postgres"))
	var left int
	require.NoError(t, admin.QueryRow(t.Context(), "SELECT count(*) FROM pg_database WHERE datname = $1", name).Scan(&left))
	require.Zero(t, left, "the database went with its test")
}

func TestPreparedDatabaseIsPreparedOnce(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	prepare := func(ctx context.Context, url string) error {
		calls.Add(1)
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		_, err = conn.Exec(ctx, "CREATE TABLE filled AS SELECT 7 AS n")
		return err
	}
	for range 3 {
		conn := connect(t, localtest.PreparedDatabase(t, "once", prepare))
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT n FROM filled").Scan(&n))
		require.Equal(t, 7, n)
		exec(t, conn, "UPDATE filled SET n = 8")
	}
	require.EqualValues(t, 1, calls.Load())
}

func TestRedisIsPrivate(t *testing.T) {
	t.Parallel()
	require.NotEqual(t, localtest.Redis(t).Addr(), localtest.Redis(t).Addr())
}

func TestProgramIsBuiltAndRun(t *testing.T) {
	t.Parallel()
	const pkg = "schoolbell/deploy/local/testdata/program"
	path := localtest.Build(t, pkg)
	require.Equal(t, path, localtest.Build(t, pkg))
	p := localtest.Program(t, local.ProgramConfig{Path: path, Args: []string{"exit", "4"}})
	code, err := p.Wait(t.Context())
	require.NoError(t, err)
	require.Equal(t, 4, code)
}

func TestProxyBeforePostgres(t *testing.T) {
	t.Parallel()
	server := localtest.Postgres(t)
	proxy := localtest.Proxy(t, server.Addr())
	conn := connect(t, strings.Replace(server.URL("postgres"), server.Addr(), proxy.Addr(), 1))
	proxy.SwallowReply(local.RequestContains("select 7"), 1)
	_, err := conn.Exec(t.Context(), "SELECT 7")
	require.Error(t, err)
	require.Equal(t, 1, proxy.Swallowed())
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}
