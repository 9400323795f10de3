package local

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func startedPostgres(t *testing.T, cfg PostgresConfig) *Postgres {
	t.Helper()
	p, err := StartPostgres(bounded(t), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func connected(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(bounded(t), url)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

func show(t *testing.T, conn *pgx.Conn, setting string) string {
	t.Helper()
	var v string
	require.NoError(t, conn.QueryRow(bounded(t), "SELECT current_setting($1)", setting).Scan(&v))
	return v
}

func TestPostgresIsDurableUnlessFast(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cfg  PostgresConfig
		want map[string]string
	}{
		"judged": {PostgresConfig{}, map[string]string{
			"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "max_connections": "200",
		}},
		"fast": {PostgresConfig{Fast: true, MaxConnections: 50, Settings: map[string]string{"work_mem": "7MB", "jit": "on"}},
			map[string]string{
				"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on", "max_connections": "50",
				"work_mem": "7MB", "jit": "on",
			}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn := connected(t, startedPostgres(t, tc.cfg).URL("postgres"))
			for k, v := range tc.want {
				require.Equal(t, v, show(t, conn, k), k)
			}
			require.Equal(t, "UTC", show(t, conn, "TimeZone"))
			require.Equal(t, "UTF8", show(t, conn, "server_encoding"))
		})
	}
}

func TestPostgresLife(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	p := startedPostgres(t, PostgresConfig{})
	addr := p.Addr()
	url, err := p.CreateDatabase(ctx, `odd "name"`)
	require.NoError(t, err)
	require.Equal(t, p.URL(`odd "name"`), url)
	_, err = p.CreateDatabase(ctx, `odd "name"`)
	require.ErrorContains(t, err, "already exists")

	conn := connected(t, url)
	_, err = conn.Exec(ctx, "CREATE TABLE kept AS SELECT 1 AS n")
	require.NoError(t, err)
	kept := func() {
		t.Helper()
		require.Equal(t, addr, p.Addr())
		conn := connected(t, url)
		var n int
		require.NoError(t, conn.QueryRow(ctx, "SELECT n FROM kept").Scan(&n))
	}

	require.NoError(t, p.Restart(ctx, Fast))
	kept()
	require.NoError(t, p.Restart(ctx, Immediate))
	kept()
	require.NoError(t, p.Stop(ctx, Fast))
	require.Zero(t, p.PID())
	require.NoError(t, p.Restart(ctx, Fast))
	kept()
	p.Kill()
	require.Zero(t, p.PID())
	require.NoError(t, p.Restart(ctx, Fast))
	kept()

	require.NoError(t, p.DropDatabase(ctx, `odd "name"`), "also with a session open")
	require.NoError(t, p.DropDatabase(ctx, `odd "name"`), "also when gone")
}

func TestFastPostgresKeepsWhatItCommitted(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	p := startedPostgres(t, PostgresConfig{Fast: true})
	conn := connected(t, p.URL("postgres"))
	_, err := conn.Exec(ctx, "CREATE TABLE kept (n int)")
	require.NoError(t, err)
	for want := 1; want <= 6; want++ {
		_, err = conn.Exec(ctx, "INSERT INTO kept VALUES ($1)", want)
		require.NoError(t, err)
		if want%2 == 0 { // within the moment in which a lazy server would not have written yet
			p.Kill()
		}
		require.NoError(t, p.Restart(ctx, Immediate))
		conn = connected(t, p.URL("postgres"))
		var n int
		require.NoError(t, conn.QueryRow(ctx, "SELECT count(*) FROM kept").Scan(&n))
		require.Equal(t, want, n)
	}
}

func TestPostgresPausedAnswersNobodyUntilResumed(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	p := startedPostgres(t, PostgresConfig{Fast: true})
	conn := connected(t, p.URL("postgres"))
	require.NoError(t, conn.Ping(ctx))
	require.NoError(t, p.Pause())
	for _, id := range append(childrenOf(p.PID()), p.PID()) {
		eventually(t, "every process stands still", func() bool {
			st, err := readStat(id)
			return err == nil && st.state == 'T'
		})
	}
	answered := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, "SELECT 1")
		answered <- err
	}()
	select {
	case err := <-answered:
		t.Fatalf("a stopped server answered: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	require.NoError(t, p.Resume())
	require.NoError(t, <-answered)

	require.NoError(t, p.Pause())
	require.NoError(t, p.Restart(ctx, Fast), "also from a pause")
	require.NoError(t, p.Pause())
	p.Kill()
	require.ErrorIs(t, p.Pause(), os.ErrProcessDone)
	require.ErrorIs(t, p.Resume(), os.ErrProcessDone)
}

func TestPostgresLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*Postgres){
		"closed":              func(*Postgres) {},
		"closed while paused": func(p *Postgres) { _ = p.Pause() },
		"killed":              func(p *Postgres) { p.Kill() },
		"stopped":             func(p *Postgres) { _ = p.Stop(context.Background(), Fast) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startedPostgres(t, PostgresConfig{Fast: true})
			connected(t, p.URL("postgres"))
			dir, pids := p.srv.dir, append(childrenOf(p.PID()), p.PID())
			require.Greater(t, len(pids), 4)
			_, segment, _ := p.readLockFile()
			require.NotZero(t, segment)
			require.True(t, segmentExists(t, segment))

			end(p)
			require.NoError(t, p.Close())
			require.NoError(t, p.Close(), "again")
			for _, id := range pids {
				eventually(t, "its processes are gone", func() bool { return gone(id) })
			}
			require.True(t, noFolder(dir))
			require.False(t, segmentExists(t, segment))
			require.Error(t, p.Restart(bounded(t), Fast))
		})
	}
}

func TestPostgresFailedStartSaysWhy(t *testing.T) {
	t.Parallel()
	_, err := StartPostgres(bounded(t), PostgresConfig{Fast: true, Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "no_such_setting")
}

func TestPostgresProgramsAreTheNewest(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	dir := t.TempDir()
	pattern := filepath.Join(dir, "*", "bin")
	_, err := postgresPrograms(pattern)
	require.ErrorIs(t, err, exec.ErrNotFound)
	require.ErrorContains(t, err, "Debian package postgresql")

	for _, v := range []string{"9.6", "15", "17"} {
		bin := filepath.Join(dir, v, "bin")
		require.NoError(t, os.MkdirAll(bin, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(bin, "initdb"), nil, 0o755))
		if v != "17" { // only the client is installed
			require.NoError(t, os.WriteFile(filepath.Join(bin, "postgres"), nil, 0o755))
		}
	}
	bin, err := postgresPrograms(pattern)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "15", "bin"), bin)
}

func TestPostgresFolderCanBeEnteredByItsUser(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	inside := filepath.Join(dir, "inside")
	require.NoError(t, os.Mkdir(inside, 0o755))
	t.Setenv("TMPDIR", inside)
	require.Equal(t, inside, folderFor(nil), "we are its user")
	require.Equal(t, "/tmp", folderFor(&syscall.Credential{Uid: 1}))
}

// Each session is a process of its own; one that computes does not notice that
// its parent was killed.
func TestPostgresKillEndsBusySessions(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	p := startedPostgres(t, PostgresConfig{Fast: true})
	conn := connected(t, p.URL("postgres"))
	backend := int(conn.PgConn().PID())
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, "SELECT count(*) FROM generate_series(1, 1e15::bigint)")
		ended <- err
	}()
	watch := connected(t, p.URL("postgres"))
	eventually(t, "the session is busy", func() bool {
		var busy bool
		err := watch.QueryRow(ctx, "SELECT state = 'active' FROM pg_stat_activity WHERE pid = $1", backend).Scan(&busy)
		return err == nil && busy
	})
	p.Kill()
	require.True(t, gone(backend), "already when Kill returns")
	require.Error(t, <-ended)
	require.NoError(t, p.Restart(ctx, Fast))
}

func TestPostgresReportsThatItsPortIsTaken(t *testing.T) {
	t.Parallel()
	p := startedPostgres(t, PostgresConfig{Fast: true})
	p.Kill()
	thief, err := net.Listen("tcp4", p.Addr())
	require.NoError(t, err)
	p.srv.mu.Lock()
	err = p.start(bounded(t))
	p.srv.mu.Unlock()
	require.ErrorIs(t, err, errAddressInUse)
	require.NoError(t, thief.Close())
	require.NoError(t, p.Restart(bounded(t), Fast))
}
