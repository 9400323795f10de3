package node

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/settings"
	"schoolbell/sender/simulator/verdict"
)

// TestThreeReplicas lets three replicas share schools on a real database and
// Redis while one after the other is replaced, as in a rolling restart: nothing
// is lost, nothing is sent twice, every rest is kept.
func TestThreeReplicas(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	began := time.Now()
	var all []*running
	for i := range 3 {
		all = append(all, run(t, srv.settings(fmt.Sprintf("r%d", i)), Deps{}))
	}
	const schools, each = 6, 1200 // three cycles a school
	accepted := make([]api.Accepted, schools)
	var posting sync.WaitGroup
	for i := range schools {
		posting.Go(func() {
			var err error
			accepted[i], err = all[i%3].client.Send(t.Context(), notice(fmt.Sprintf("S%d", i), each), fmt.Sprintf("key-%d", i))
			if err != nil {
				t.Error(err)
			}
		})
	}
	posting.Wait()
	for i := range 3 {
		eventually(t, "more arrives", func() bool { return srv.receiver.Counts().Distinct >= int64((i+1)*schools*each/5) })
		next := run(t, srv.settings(fmt.Sprintf("r%d", i+3)), Deps{})
		require.NoError(t, all[i].end(t))
		all[i] = next
	}
	eventually(t, "every notice ends", func() bool {
		for i, a := range accepted {
			n, err := all[i%3].client.Notice(t.Context(), a.ID)
			require.NoError(t, err)
			if n.EndedAt == nil {
				return false
			}
			require.Equal(t, each, n.Success)
		}
		return true
	})
	for _, r := range all {
		require.NoError(t, r.end(t))
	}
	j, err := verdict.New(verdict.Config{Rule: verdict.Rule{Limit: 500, Rest: time.Second}, Start: began})
	require.NoError(t, err)
	for _, a := range accepted {
		require.NoError(t, j.AcceptNotice(verdict.Notice{ID: a.ID, School: a.School, Total: a.Total}))
	}
	for _, a := range srv.receiver.Arrivals() {
		j.Arrival(a)
	}
	v := j.Verdict()
	require.Empty(t, v.Violations)
	require.Equal(t, schools*each, v.Arrived)
	require.Zero(t, v.Repeated)
	require.Positive(t, v.Rule.Cycles)
	// A reservation that nothing was sent for, because the machine was too busy to
	// claim in time, leaves a cycle that the receiver does not see as full.
	require.LessOrEqual(t, v.Rule.Cycles, schools*2)
	srv.nothingOpen(t)
}

// TestRedisAway: while Redis is away the replica says that it is degraded, takes
// notices all the same and sends nothing; when it is back, without its data, work
// goes on by itself (R17).
func TestRedisAway(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	var log events
	one := run(t, srv.settings("one"), Deps{Log: log.logger()})
	eventually(t, "ready", func() bool {
		r, err := one.client.Ready(t.Context())
		return err == nil && r.Ready && len(r.Degraded) == 0
	})
	srv.redis.Kill()
	eventually(t, "degraded", func() bool {
		r, err := one.client.Ready(t.Context())
		require.NoError(t, err)
		require.True(t, r.Ready, "it can accept notices")
		return len(r.Degraded) == 1 && r.Degraded[0] == "redis"
	})
	a, err := one.client.Send(t.Context(), notice("A", 30), "")
	require.NoError(t, err)
	// Its answers stay answers, and say what they cannot know.
	cluster, err := one.client.Cluster(t.Context())
	require.NoError(t, err)
	require.True(t, cluster.Degraded)
	s, err := one.client.School(t.Context(), "A")
	require.NoError(t, err)
	require.True(t, s.Degraded)
	require.Zero(t, srv.receiver.Counts().Arrivals, "nothing is sent without the arbiter")

	require.NoError(t, srv.redis.Restart(t.Context(), false))
	eventually(t, "everything is sent", func() bool {
		n, err := one.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		return n.Success == 30
	})
	eventually(t, "no longer degraded", func() bool {
		r, err := one.client.Ready(t.Context())
		require.NoError(t, err)
		return r.Ready && len(r.Degraded) == 0
	})
	require.NoError(t, one.end(t))

	// Said once each, with the setting, however many connections saw it.
	var said []string
	for _, line := range log.lines(t) {
		if event, _ := line["event"].(string); event == "redis_away" || event == "redis_back" {
			require.Equal(t, srv.redis.Addr(), line["address"])
			said = append(said, fmt.Sprint(line["level"], " ", line["msg"]))
		}
		text, _ := line["error"].(string)
		require.LessOrEqual(t, strings.Count(text, "school A: "), 1, text)
	}
	require.Equal(t, []string{
		"WARN the Redis at redis.url does not answer: nothing is sent until it does, notices are accepted; is redis-server running there, and is the address right?",
		"INFO the Redis at redis.url answers again",
	}, said)
}

// TestARedisThatIsNotThereAtTheStart is told of in the same words, once.
func TestARedisThatIsNotThereAtTheStart(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	srv.redis.Kill()
	var log events
	one := run(t, srv.settings("one"), Deps{Log: log.logger()})
	eventually(t, "several connections failed", func() bool { return slices.Contains(log.names(t), "wake_channel_lost") })
	require.NoError(t, one.end(t))
	away := 0
	for _, line := range log.lines(t) {
		if line["event"] == "redis_away" {
			away++
		}
		require.NotEqual(t, "redis_unchecked", line["event"], "that is said already")
	}
	require.Equal(t, 1, away)
}

// TestInterleaving22Killed cuts a replica's life in the middle of a batch: Run says so when its
// goroutines have ended, the lock and the batch stay as they are, as with a
// process that got SIGKILL, and the next replica takes over what it left.
func TestInterleaving22Killed(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	life, kill := context.WithCancel(context.Background())
	defer kill()
	var log events
	one := run(t, srv.settings("one"), Deps{Life: life, Log: log.logger()})
	behave := srv.receiver.Behaviour()
	behave.Latency.Base = 2 * time.Second // a long call
	require.NoError(t, srv.receiver.SetBehaviour(behave))
	a, err := one.client.Send(t.Context(), notice("A", 150), "")
	require.NoError(t, err)
	eventually(t, "a batch is with the receiver", func() bool { return srv.receiver.Counts().InFlight == 150 })
	kill()
	killed := time.Now()
	require.ErrorIs(t, one.wait(t), ErrKilled)
	require.Less(t, time.Since(killed), 5*time.Second, "it ends without its timeouts")
	for _, line := range log.lines(t) {
		require.NotContains(t, []any{"batch_recorded", "replica_stopping", "replica_stopped"}, line["event"], "the dead say nothing")
	}
	srv.nothingOpen(t)
	c := redis.NewClient(&redis.Options{Addr: srv.redis.Addr()})
	defer func() { require.NoError(t, c.Close()) }()
	owner, err := c.HGet(t.Context(), "schoolbell:{A}:lock", "owner").Result()
	require.NoError(t, err, "the lock was not released")
	require.Equal(t, "one", owner)
	live, err := c.Exists(t.Context(), "schoolbell:replica:one").Result()
	require.NoError(t, err)
	require.EqualValues(t, 1, live, "it did not leave the roster")
	conn, err := pgx.Connect(t.Context(), srv.database)
	require.NoError(t, err)
	var unsettled int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM push_batches WHERE settled_at IS NULL AND size = 150`).Scan(&unsettled))
	require.Equal(t, 1, unsettled, "the batch is left to be taken over")
	require.NoError(t, conn.Close(t.Context()))

	behave.Latency.Base = 0
	require.NoError(t, srv.receiver.SetBehaviour(behave))
	two := run(t, srv.settings("two"), Deps{})
	eventually(t, "the rest is sent by the next replica", func() bool {
		n, err := two.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		return n.RetrySuccess == 150
	})
	require.LessOrEqual(t, srv.receiver.Counts().Repeated, int64(150), "at most the batch in flight is repeated")
	require.NoError(t, two.end(t))
}

// TestKilledWhileStopping: while a stopping replica waits for its load balancer to
// look away it goes on accepting and sending; a kill waits for none of that, nor
// for a call on the wire.
func TestKilledWhileStopping(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	life, kill := context.WithCancel(context.Background())
	defer kill()
	s := srv.settings("one")
	s.StopDelay, s.StopTimeout = 10*time.Minute, 10*time.Minute
	s.Lock.ETC, s.Lock.ETCMax = 10*time.Minute, 10*time.Minute
	relay := s.Senders[settings.KindRelay]
	relay.CallTimeout, relay.ReadTimeout = 5*time.Minute, 5*time.Minute
	s.Senders = map[string]settings.Sender{settings.KindRelay: relay}
	one := run(t, s, Deps{Life: life})
	eventually(t, "ready", func() bool { r, err := one.client.Ready(t.Context()); return err == nil && r.Ready })
	one.stop()
	eventually(t, "draining", func() bool { r, err := one.client.Ready(t.Context()); return err == nil && r.Draining })
	a, err := one.client.Send(t.Context(), notice("A", 10), "")
	require.NoError(t, err)
	eventually(t, "it is sent all the same", func() bool {
		n, err := one.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		return n.Success == 10
	})
	behave := srv.receiver.Behaviour()
	behave.Latency.Base = 5 * time.Minute
	require.NoError(t, srv.receiver.SetBehaviour(behave))
	_, err = one.client.Send(t.Context(), notice("B", 10), "")
	require.NoError(t, err)
	eventually(t, "a batch is with the receiver", func() bool { return srv.receiver.Counts().InFlight == 10 })
	kill()
	require.ErrorIs(t, one.wait(t), ErrKilled)
	eventually(t, "the receiver's caller is gone", func() bool { return srv.receiver.Counts().InFlight == 0 })
	srv.nothingOpen(t)
}

// TestPeople looks at what people and Prometheus see of a replica at work: the
// roster with each replica's rate, the gauges that are read from the stores.
func TestPeople(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	long := func(instance string) settings.Settings {
		s := srv.settings(instance)
		s.Quota.Rest = time.Hour
		return s
	}
	one, two := run(t, long("one"), Deps{}), run(t, long("two"), Deps{})
	later := time.Now().Add(time.Hour)
	for name, n := range map[string]int{"full": 700, "idle": 20, "later": 5} {
		req := notice(name, n)
		if name == "later" {
			req.ScheduledAt = &later
		}
		_, err := one.client.Send(t.Context(), req, "")
		require.NoError(t, err)
	}
	eventually(t, "what may be sent is sent", func() bool { return srv.receiver.Counts().Distinct == 520 })
	eventually(t, "the roster tells the rate of who sent", func() bool {
		c, err := two.client.Cluster(t.Context())
		require.NoError(t, err)
		require.False(t, c.Degraded)
		rate := 0.0
		for _, r := range c.Replicas {
			rate += r.RatePerSecond
			require.Equal(t, r.Instance == "two", r.Self)
		}
		return len(c.Replicas) == 2 && rate > 0
	})
	eventually(t, "the school rests", func() bool {
		full, err := two.client.School(t.Context(), "full")
		require.NoError(t, err)
		return full.State == api.Resting && full.Lock == nil
	})
	require.NoError(t, one.gauges.refresh(t.Context()))
	metrics := get(t, "http://"+one.Addr()+"/metrics")
	for _, line := range []string{
		`schoolbell_schools{state="resting"} 1`,
		`schoolbell_schools{state="idle"} 2`,
		`schoolbell_schools{state="sending"} 0`,
		`schoolbell_recipients{state="waiting"} 200`,
		`schoolbell_recipients{state="scheduled"} 5`,
		`schoolbell_recipients{state="retry_due"} 0`,
		`schoolbell_stranded_recipients 0`,
	} {
		require.Contains(t, metrics, line+"\n")
	}
	require.NotContains(t, metrics, "schoolbell_oldest_waiting_seconds 0\n", "200 wait for the rest's end")
	require.NoError(t, one.end(t))
	require.NoError(t, two.end(t))
}

func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	var b strings.Builder
	_, err = io.Copy(&b, resp.Body)
	require.NoError(t, err)
	return b.String()
}
