package node

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// psql is a session of PostgreSQL's own client, a process with which somebody
// types.
type psql struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader
}

func startPsql(t *testing.T, url string) *psql {
	t.Helper()
	cmd := exec.Command("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", url)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start(), "psql comes with PostgreSQL (postgresql-client)")
	t.Cleanup(func() {
		_ = in.Close()
		require.NoError(t, cmd.Wait(), stderr.String())
	})
	return &psql{t, in, bufio.NewReader(out)}
}

func (p *psql) say(sql string) {
	p.t.Helper()
	_, err := io.WriteString(p.in, sql+"\n")
	require.NoError(p.t, err)
}

// ask is for statements that answer with one row of one column.
func (p *psql) ask(sql string) string {
	p.t.Helper()
	p.say(sql)
	line, err := p.out.ReadString('\n')
	require.NoError(p.t, err)
	return strings.TrimSpace(line)
}

// TestInterleaving19AnApplicationsCommitIsHeard: what psql enqueues in a
// transaction is sent as soon as that commits, by a replica that will not look by
// itself for an hour; rolled back, to a savepoint or whole, it leaves nothing, with
// the receiver or in a table (R18, R19).
func TestInterleaving19AnApplicationsCommitIsHeard(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	slow := srv.settings("one")
	slow.Dispatch.FirstTick, slow.Dispatch.Tick = time.Hour, time.Hour
	one := run(t, slow, Deps{})
	eventually(t, "ready", func() bool { r, err := one.client.Ready(t.Context()); return err == nil && r.Ready })
	conn, err := pgx.Connect(t.Context(), srv.database)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.Background())) })
	eventually(t, "the replica listens", func() bool {
		var n int
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'schoolbell-listen' AND query LIKE 'LISTEN%' AND state = 'idle' AND datname = current_database()`).Scan(&n))
		return n == 1
	})
	app := startPsql(t, srv.database)
	enqueue := func(schoolID, token string) string {
		return app.ask(fmt.Sprintf(`SELECT schoolbell_enqueue('%s', 'Snow', 'No school tomorrow', NULL, ARRAY['%s'], '{}');`, schoolID, token))
	}
	arrived := func(id string) (at time.Time) {
		eventually(t, "notice "+id+" arrives", func() bool {
			for _, a := range srv.receiver.Arrivals() {
				if a.Notice == id {
					at = time.Unix(0, a.T)
					return true
				}
			}
			return false
		})
		return at
	}
	for _, schoolID := range []string{"new", "new", "new", "other"} {
		app.say(`BEGIN;`)
		id := enqueue(schoolID, "kept")
		app.say(`SAVEPOINT s;`)
		undone := enqueue(schoolID, "undone")
		app.say(`ROLLBACK TO SAVEPOINT s;`)
		require.Equal(t, "1", app.ask(`SELECT 1;`))
		began := time.Now()
		app.say(`COMMIT;`)
		lag := arrived(id).Sub(began)
		t.Logf("%s: from COMMIT to the receiver in %s", schoolID, lag)
		require.Less(t, lag, 20*time.Second)

		app.say(`BEGIN;`)
		rolledBack := enqueue(schoolID, "rolled back")
		elsewhere := enqueue("never-"+schoolID, "rolled back")
		app.say(`ROLLBACK;`)
		app.say(`BEGIN;`)
		after := enqueue(schoolID, "after")
		app.say(`COMMIT;`)
		arrived(after)
		for _, lost := range []string{undone, rolledBack, elsewhere} {
			for _, a := range srv.receiver.Arrivals() {
				require.NotEqual(t, lost, a.Notice)
			}
			n, err := school.ParseNoticeID(lost)
			require.NoError(t, err)
			for _, table := range []string{"push_clusters WHERE id", "push_cluster_tokens WHERE cluster_id", "push_batch_ranges WHERE cluster_id"} {
				var count int
				require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM `+table+` = $1`, n).Scan(&count))
				require.Zero(t, count, table)
			}
		}
	}
	eventually(t, "every notice ends", func() bool {
		var open int
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM push_clusters WHERE ended_at IS NULL`).Scan(&open))
		return open == 0
	})
	counts := srv.receiver.Counts()
	require.EqualValues(t, 8, counts.Arrivals)
	require.EqualValues(t, 8, counts.Distinct)
	var never int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM schools WHERE id LIKE 'never-%'`).Scan(&never))
	require.Zero(t, never)
}
