package redislease_test

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/deploy/local"
	"schoolbell/scripts"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
)

const etc = 3 * time.Second

func (s *server) keeper(t *testing.T, owner string) *watchdog.Keeper {
	t.Helper()
	k, err := watchdog.New(watchdog.Config{ProgressWithin: time.Hour}, owner, s.Locks, slog.New(slog.DiscardHandler), nil)
	require.NoError(t, err)
	return k
}

func eventually(t *testing.T, within time.Duration, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !condition(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "did not come: %s", what)
	}
}

func TestLockIsReadableWithRedisCLI(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	require.NoError(t, s.keeper(t, "host-7f3a").Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
		require.NoError(t, l.Bind(ctx, 1187))
		before := time.Now().Add(-time.Second)
		eventually(t, etc, "a renewal", func() bool { lock, _ := s.Lock("A"); return lock.Renewals == 1 })
		fields := s.direct.HGetAll(ctx, "schoolbell:{A}:lock").Val()
		acquired, err := time.Parse(time.RFC3339, fields["acquired_at"])
		require.NoError(t, err)
		require.WithinRange(t, acquired, before.Add(-etc), time.Now())
		expires, err := time.Parse(time.RFC3339, fields["expires_at"])
		require.NoError(t, err)
		ttl := s.direct.PTTL(ctx, "schoolbell:{A}:lock").Val()
		require.WithinDuration(t, time.Now().Add(ttl), expires, 500*time.Millisecond)
		require.Greater(t, expires.Sub(acquired), watchdog.LeaseFor(etc), "the renewal moved the end")
		delete(fields, "acquired_at")
		delete(fields, "expires_at")
		require.Equal(t, map[string]string{
			"owner": "host-7f3a", "acq": l.Acquisition(), "fence": "1187", "etc_ms": "3000", "lease_ms": "4500", "renewals": "1", "batch": "",
		}, fields)
		return nil
	}))
}

func TestUnknownScriptsAreSentAgain(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx := t.Context()
	flush := func() { require.NoError(t, s.direct.ScriptFlush(ctx).Err()) }
	flush()
	require.NoError(t, s.Acquire(ctx, watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}))
	flush()
	require.NoError(t, s.Bind(ctx, "A", "a", 3))
	flush()
	require.NoError(t, s.Extend(ctx, "A", "a", time.Minute, 1))
	flush()
	require.NoError(t, s.Release(ctx, "A", "a"))
}

// One call is one execution, also when its answer gets lost: go-redis would send
// it again up to three times, and its Cluster client whatever it is told.
func TestOneCallIsExecutedOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"single", "cluster"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			client := s.client
			if mode == "cluster" {
				s = startServer(t, "--cluster-enabled", "yes")
				client = s.oneNodeCluster(t)
			}
			locks := redislease.NewLocks(client, s.keys)
			ctx := t.Context()
			require.NoError(t, locks.Acquire(ctx, watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}))
			require.NoError(t, s.direct.ScriptLoad(ctx, scripts.Extend().Source).Err())
			require.NoError(t, s.direct.ConfigResetStat(ctx).Err())

			s.proxy.SwallowReply(local.RequestContains(scripts.Extend().SHA), 100)
			callCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			err := locks.Extend(callCtx, "A", "a", time.Minute, 1)
			require.Error(t, err)
			require.NotErrorIs(t, err, watchdog.ErrLeaseLost)
			require.ErrorIs(t, err, watchdog.ErrServerChanged, "the connection ended: worth a try at once")
			require.Equal(t, 1, s.executions(t, "evalsha"))
			require.Equal(t, 1, s.proxy.Swallowed())
		})
	}
}

// oneNodeCluster makes the server a Cluster of one node that tells its clients to
// come through the proxy.
func (s *server) oneNodeCluster(t *testing.T) redis.UniversalClient {
	t.Helper()
	ctx := t.Context()
	_, port, _ := strings.Cut(s.proxy.Addr(), ":")
	require.NoError(t, s.direct.ConfigSet(ctx, "cluster-announce-port", port).Err())
	require.NoError(t, s.direct.ClusterAddSlotsRange(ctx, 0, 16383).Err())
	eventually(t, 20*time.Second, "the cluster is whole", func() bool {
		info, err := s.direct.ClusterInfo(ctx).Result()
		return err == nil && strings.Contains(info, "cluster_state:ok")
	})
	return s.connect("redis+cluster://" + s.proxy.Addr())
}

// executions reads how often the server ran a command since its counts were reset.
func (s *server) executions(t *testing.T, command string) int {
	t.Helper()
	info, err := s.direct.Info(t.Context(), "commandstats").Result()
	require.NoError(t, err)
	_, stat, found := strings.Cut(info, "cmdstat_"+command+":calls=")
	if !found {
		return 0
	}
	n, err := strconv.Atoi(stat[:strings.IndexByte(stat, ',')])
	require.NoError(t, err)
	return n
}

func TestCallsKeepTheirDeadline(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	require.ErrorIs(t, s.Release(t.Context(), "A", "a"), watchdog.ErrNotHeld)
	require.NoError(t, s.redis.Pause())
	defer func() { require.NoError(t, s.redis.Resume()) }()
	for name, call := range map[string]func(ctx context.Context) error{
		"acquire": func(ctx context.Context) error {
			return s.Acquire(ctx, watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second})
		},
		"extend":  func(ctx context.Context) error { return s.Extend(ctx, "A", "a", time.Minute, 1) },
		"release": func(ctx context.Context) error { return s.Release(ctx, "A", "a") },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		before := time.Now()
		err := call(ctx)
		cancel()
		require.Error(t, err, name)
		require.Less(t, time.Since(before), 900*time.Millisecond, "%s waited for the server, not for its context", name)
	}
	// Without a deadline of the caller the client's own second holds.
	before := time.Now()
	require.Error(t, s.Release(t.Context(), "A", "a"))
	require.Less(t, time.Since(before), 3*time.Second)
}

func TestOwnerStopsWhileRedisStandsStill(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	lease := watchdog.LeaseFor(etc)
	err := s.keeper(t, "one").Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
		began := time.Now()
		require.NoError(t, s.redis.Pause())
		<-ctx.Done()
		require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseExpired)
		require.Less(t, time.Since(began), lease, "stopped after the lease had ended")
		require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired)

		// Now the server executes the extensions that wait in its socket, where the
		// lock is still there. Nothing of it may open the gate again.
		require.NoError(t, s.redis.Resume())
		require.NoError(t, s.direct.Ping(context.WithoutCancel(ctx)).Err())
		require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired)
		require.Error(t, l.Ensure(context.WithoutCancel(ctx), time.Millisecond))
		return nil
	})
	require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
	_, held := s.Lock("A")
	require.False(t, held)
}

func TestAcquireThatWasHeldUpIsRefused(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx := t.Context()
	require.ErrorIs(t, s.Release(ctx, "A", "a"), watchdog.ErrNotHeld) // the server's time is known from here on
	require.NoError(t, s.direct.ScriptLoad(ctx, scripts.Acquire().Source).Err())

	require.NoError(t, s.proxy.Stall())
	err := s.keeper(t, "one").Hold(ctx, "A", etc, func(context.Context, *watchdog.Lease) error { return nil })
	require.Error(t, err)
	time.Sleep(400 * time.Millisecond) // the caller's patience of 300 ms has passed at the server too
	require.NoError(t, s.direct.ConfigResetStat(ctx).Err())
	require.NoError(t, s.proxy.Pass())
	eventually(t, 5*time.Second, "the held up packet arrives", func() bool { return s.executions(t, "evalsha") > 0 })
	_, held := s.Lock("A")
	require.False(t, held, "a packet that came late took the lock for nobody")
}

func TestServersClockIsLearnt(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	request := watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}
	require.NoError(t, s.Acquire(t.Context(), request), "the first request of a process learns the time and takes the lock")
	request.Name = "B"
	require.NoError(t, s.direct.ConfigResetStat(t.Context()).Err())
	require.NoError(t, s.Acquire(t.Context(), request))
	require.Equal(t, 1, s.executions(t, "evalsha"), "later ones need one round trip")
}

func TestLockWithoutEndGetsOne(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx := t.Context()
	require.NoError(t, s.direct.HSet(ctx, s.keys.Lock("A"), "owner", "somebody's hand").Err())
	var busy *watchdog.BusyError
	require.ErrorAs(t, s.keeper(t, "one").Hold(ctx, "A", etc, nil), &busy)
	require.Equal(t, "somebody's hand", busy.Owner)
	require.Positive(t, s.direct.PTTL(ctx, s.keys.Lock("A")).Val(), "nobody could ever take this school again")
}

func TestReadOnlyServerIsNamed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx := t.Context()
	require.NoError(t, s.Acquire(ctx, watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}))
	// A master of before that a failover made a replica; its new master is not there.
	port, err := local.FreePort()
	require.NoError(t, err)
	require.NoError(t, s.direct.SlaveOf(ctx, "127.0.0.1", strconv.Itoa(port)).Err())
	err = s.Extend(ctx, "A", "a", time.Minute, 1)
	require.ErrorIs(t, err, watchdog.ErrServerChanged)
	require.NotErrorIs(t, err, watchdog.ErrLeaseLost)
}

func TestManyHoldsOnOneClient(t *testing.T) {
	t.Parallel()
	const holds = 500
	s := startServer(t)
	k := s.keeper(t, "one")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var running sync.WaitGroup
	failed := make(chan error, holds)
	starting := make(chan struct{}, 16) // all at once may take a busy machine longer than a call may last
	for i := range holds {
		running.Go(func() {
			starting <- struct{}{}
			started := sync.OnceFunc(func() { <-starting })
			defer started()
			err := k.Hold(ctx, strconv.Itoa(i), 30*time.Second, func(ctx context.Context, l *watchdog.Lease) error {
				err := s.Extend(ctx, strconv.Itoa(i), l.Acquisition(), time.Minute, 1)
				started()
				if err != nil {
					return err
				}
				<-ctx.Done()
				return nil
			})
			if err != nil {
				failed <- err
			}
		})
	}
	eventually(t, 30*time.Second, "all are held", func() bool { return k.Held() == holds || len(failed) > 0 })
	cancel()
	running.Wait()
	close(failed)
	require.NoError(t, errors.Join(<-failed))
	require.Empty(t, s.direct.Keys(t.Context(), "*").Val())
	require.LessOrEqual(t, s.proxy.Conns(), 100)
}

// Every script, run again, late or out of order, changes nothing but a TTL (and
// expires_at, which is the TTL in words).
func TestRepeatedScriptsChangeNothing(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx := context.Background()
	key := s.keys.Lock("A")
	type call struct {
		script scripts.Script
		args   []any
	}
	run := func(t *rapid.T, c call, args ...any) []any {
		reply, err := s.direct.Eval(ctx, c.script.Source, []string{key}, append(append([]any{}, c.args...), args...)...).Slice()
		require.NoError(t, err)
		return reply
	}
	fields := func(t *rapid.T) map[string]string {
		all, err := s.direct.HGetAll(ctx, key).Result()
		require.NoError(t, err)
		delete(all, "expires_at")
		return all
	}
	serverNow := func(t *rapid.T) int64 {
		now, err := s.direct.Time(ctx).Result()
		require.NoError(t, err)
		return now.UnixMilli()
	}

	rapid.Check(t, func(t *rapid.T) {
		require.NoError(t, s.direct.FlushAll(ctx).Err())
		owner := ""             // the model: who holds the lock
		fence, renewals := 0, 0 // and what is on it
		released := map[string]bool{}
		var past []call
		for next := 1; next <= 30; {
			if len(past) > 0 && rapid.Bool().Draw(t, "repeat") {
				c := rapid.SampledFrom(past).Draw(t, "which")
				looked := time.Now()
				before, ttl := fields(t), s.direct.PTTL(ctx, key).Val()
				if c.script.Name == "acquire" {
					// In time where it is still held, else late: that is what not-after is for.
					notAfter := serverNow(t) - 1
					if c.args[1] == owner {
						notAfter += 1000
					}
					run(t, c, notAfter)
				} else {
					run(t, c)
				}
				require.Equal(t, before, fields(t), "%s %v", c.script.Name, c.args)
				require.GreaterOrEqual(t, s.direct.PTTL(ctx, key).Val(), ttl-time.Since(looked)-5*time.Millisecond, "a TTL was shortened")
				continue
			}
			next++
			acquisition := "acq-" + strconv.Itoa(rapid.IntRange(1, 6).Draw(t, "acquisition"))
			switch rapid.SampledFrom([]string{"acquire", "bind", "extend", "release"}).Draw(t, "call") {
			case "acquire":
				if released[acquisition] { // no Hold uses an acquisition again
					continue
				}
				c := call{scripts.Acquire(), []any{"owner", acquisition, 60_000, 40_000}}
				reply := run(t, c, serverNow(t)+1000)
				switch owner {
				case "":
					require.Equal(t, "OK", reply[0])
					owner, fence, renewals = acquisition, 0, 0
				case acquisition:
					require.Equal(t, "OK_AGAIN", reply[0])
				default:
					require.Equal(t, "BUSY", reply[0])
					continue // a repeat of it may take the lock later: the caller did not give up, it was refused
				}
				past = append(past, c)
			case "bind":
				n := rapid.IntRange(1, 9).Draw(t, "fence")
				c := call{scripts.Bind(), []any{acquisition, n}}
				reply := run(t, c)
				if owner != acquisition {
					require.Equal(t, "LOST", reply[0])
					continue
				}
				require.Equal(t, "OK", reply[0])
				fence = max(fence, n)
				past = append(past, c)
			case "extend":
				c := call{scripts.Extend(), []any{acquisition, rapid.IntRange(1000, 90_000).Draw(t, "lease"), renewals + 1}}
				reply := run(t, c)
				if owner != acquisition {
					require.Equal(t, "LOST", reply[0])
					continue
				}
				require.Equal(t, "OK", reply[0])
				renewals++
				past = append(past, c)
			case "release":
				c := call{scripts.Release(), []any{acquisition}}
				reply := run(t, c)
				if owner != acquisition {
					require.Equal(t, "NOT_HELD", reply[0])
					continue
				}
				require.Equal(t, "OK", reply[0])
				owner, released[acquisition] = "", true
				past = append(past, c)
			}
			got := fields(t)
			require.Equal(t, owner, got["acq"])
			if owner != "" {
				require.Equal(t, strconv.Itoa(fence), got["fence"])
				require.Equal(t, strconv.Itoa(renewals), got["renewals"])
			}
		}
	})
}

// The scripts write times for people with a calendar of their own, since Redis
// gives Lua none.
func TestTimesInWordsAreRight(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for _, script := range []scripts.Script{scripts.Acquire(), scripts.Extend()} {
		var function string
		for _, name := range []string{"utc", "rfc3339"} {
			begin := strings.Index(script.Source, "local function "+name)
			require.Positive(t, begin, script.Name)
			end := strings.Index(script.Source[begin:], "\nend\n")
			function += script.Source[begin:begin+end] + "\nend\n"
		}
		function += "return rfc3339(tonumber(ARGV[1]))"
		rapid.Check(t, func(t *rapid.T) {
			at := time.UnixMilli(rapid.Int64Range(0, 4_102_444_800_000).Draw(t, "ms")).UTC() // to the year 2100
			text, err := s.direct.Eval(context.Background(), function, nil, at.UnixMilli()).Text()
			require.NoError(t, err)
			require.Equal(t, at.Format("2006-01-02T15:04:05.000Z"), text)
		})
	}
}
