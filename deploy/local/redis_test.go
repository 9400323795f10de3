package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func startedRedis(t *testing.T, cfg RedisConfig) *Redis {
	t.Helper()
	r, err := StartRedis(bounded(t), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

// ask sends one inline command, also to what is not a Redis of ours.
func ask(addr, command string) (string, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	r := &Redis{}
	if r.port, err = strconv.Atoi(port); err != nil {
		return "", err
	}
	return r.ask(context.Background(), command)
}

func asked(t *testing.T, addr, command string) string {
	t.Helper()
	answer, err := ask(addr, command)
	require.NoError(t, err)
	return answer
}

func TestRedisIsConfiguredAsInProduction(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{Args: []string{"--maxmemory", "64mb"}})
	require.Equal(t, "redis://"+r.Addr()+"/0", r.URL())
	info := asked(t, r.Addr(), "INFO")
	require.Contains(t, info, "aof_enabled:1")
	require.Contains(t, info, "maxmemory_policy:noeviction")
	require.Contains(t, info, "maxmemory:67108864")
	require.Contains(t, info, fmt.Sprintf("process_id:%d\r\n", r.PID()))

	_, err := StartRedis(bounded(t), RedisConfig{Fsync: "sometimes"})
	require.ErrorContains(t, err, "fsync")
}

func TestRedisRestartKeepsOrLosesData(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	r := startedRedis(t, RedisConfig{Fsync: "always"})
	addr, first := r.Addr(), r.PID()
	require.Equal(t, "+OK", asked(t, addr, "SET k v"))

	require.NoError(t, r.Restart(ctx, true))
	require.Equal(t, addr, r.Addr())
	require.NotEqual(t, first, r.PID())
	require.Equal(t, "v", asked(t, addr, "GET k"), "kept in order")

	r.Kill()
	require.Zero(t, r.PID())
	_, err := ask(addr, "PING")
	require.Error(t, err)
	require.NoError(t, r.Restart(ctx, true))
	require.Equal(t, "v", asked(t, addr, "GET k"), "kept through a crash")

	require.NoError(t, r.Restart(ctx, false))
	require.Equal(t, "$-1", asked(t, addr, "GET k"), "lost")
}

func TestRedisInMemoryForgets(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{Memory: true})
	require.Equal(t, "+OK", asked(t, r.Addr(), "SET k v"))
	require.NoError(t, r.Restart(bounded(t), true))
	require.Equal(t, "$-1", asked(t, r.Addr(), "GET k"))
}

func TestRedisPausedAnswersNobodyUntilResumed(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{})
	conn, err := net.Dial("tcp", r.Addr())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, r.Pause())

	_ = conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
	_, err = fmt.Fprint(conn, "SET late 1\r\n")
	require.NoError(t, err, "the connection stays open")
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)

	require.NoError(t, r.Resume())
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	answer, err := bufio.NewReader(conn).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", answer, "what was sent meanwhile is executed")
}

func TestRedisStopsAlsoWhilePaused(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	r := startedRedis(t, RedisConfig{})
	require.NoError(t, r.Pause())
	require.NoError(t, r.Restart(ctx, true))
	require.Equal(t, "+PONG", asked(t, r.Addr(), "PING"))

	require.NoError(t, r.Pause())
	dir, pid := r.srv.dir, r.PID()
	require.NoError(t, r.Close())
	require.True(t, gone(pid))
	require.True(t, noFolder(dir))

	require.NoError(t, r.Close(), "again")
	require.ErrorIs(t, r.Pause(), os.ErrProcessDone)
	require.ErrorIs(t, r.Resume(), os.ErrProcessDone)
	require.Error(t, r.Restart(ctx, true))
	require.True(t, noFolder(dir))
}

func TestRedisFailedStartSaysWhyAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	_, err := StartRedis(bounded(t), RedisConfig{Args: []string{"--no-such-option", "1"}})
	require.ErrorContains(t, err, "no-such-option")

	ctx, cancel := context.WithCancelCause(bounded(t))
	why := errors.New("not wanted any more")
	cancel(why)
	_, err = StartRedis(ctx, RedisConfig{})
	require.ErrorIs(t, err, why)

	r, err := StartRedis(bounded(t), RedisConfig{})
	require.NoError(t, err)
	require.Equal(t, 1, countFolders(t, dir))
	require.NoError(t, r.Close())
	require.Zero(t, countFolders(t, dir))
}

func countFolders(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	return len(entries)
}

// Another Redis may win the race for the port: the server must not be reported
// ready because somebody answers.
func TestRedisReadyMeansOurs(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{})
	require.True(t, r.answers(bounded(t), r.PID()))
	require.False(t, r.answers(bounded(t), r.PID()+1))
}

func TestRedisReturnsToItsPortOnceThatIsFree(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{})
	r.Kill()
	thief, err := net.Listen("tcp4", r.Addr())
	require.NoError(t, err)
	r.srv.mu.Lock()
	err = r.start(bounded(t))
	r.srv.mu.Unlock()
	require.ErrorIs(t, err, errAddressInUse)

	time.AfterFunc(120*time.Millisecond, func() { _ = thief.Close() })
	require.NoError(t, r.Restart(bounded(t), true))
}

func TestRedisTakesAnotherPortWhenItsIsTaken(t *testing.T) {
	t.Parallel()
	winner := startedRedis(t, RedisConfig{Memory: true})
	role, err := plainRedis(RedisConfig{Memory: true})
	require.NoError(t, err)
	plain, starts := role.args, 0
	role.args = func(r *Redis) ([]string, error) {
		if starts++; starts == 1 {
			r.port = winner.port // taken between choosing and binding
		}
		return plain(r)
	}
	r, err := startRedis(bounded(t), role)
	require.NoError(t, err)
	defer r.Close()
	require.Equal(t, 2, starts)
	require.NotEqual(t, winner.Addr(), r.Addr())
}

func TestManyRedisStartAtOnce(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		addrs = map[string]bool{}
	)
	for range 8 {
		wg.Go(func() {
			r, err := StartRedis(ctx, RedisConfig{Memory: true})
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			mu.Lock()
			addrs[r.Addr()] = true
			mu.Unlock()
		})
	}
	wg.Wait()
	require.Len(t, addrs, 8)
}
