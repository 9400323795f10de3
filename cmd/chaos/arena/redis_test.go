package arena

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/sender/simulator"
)

// What Redis answers when it is moved, replaced or emptied, and what it forgets
// then, while schools send. Each test goes through its faults one after the other,
// once; with -full several times.

const busySchools = 6

// openBusy is a production of two replicas whose schools all have work until
// stop is called.
func openBusy(ctx context.Context, t *testing.T, cfg Config) (a *Arena, stop func()) {
	t.Helper()
	cfg.Replicas, cfg.Limit, cfg.Rest = 2, 300, time.Second
	if cfg.Topology != Single {
		// Nobody sends while a master is replaced. The rest is longer than that, or it
		// would be kept by itself where it was forgotten.
		cfg.Limit, cfg.Rest = 600, 5*time.Second
	}
	cfg.Settings = short()
	cfg.Settings["SCHOOLBELL_DISPATCH_BATCH"] = "50"
	cfg.Behaviour = simulator.Behaviour{Latency: simulator.Latency{Base: 30 * time.Millisecond, Spread: 20 * time.Millisecond}}
	a = open(t, cfg)
	posting, cancel := context.WithCancel(ctx)
	var (
		done sync.WaitGroup
		err  error
	)
	done.Go(func() { err = keepBusy(posting, a) })
	stop = sync.OnceFunc(func() {
		cancel()
		done.Wait()
		require.NoError(t, err)
	})
	t.Cleanup(stop)
	allSend(ctx, t, a)
	return a, stop
}

// keepBusy gives each school a notice whenever its last one is over, until ctx
// ends.
func keepBusy(ctx context.Context, a *Arena) error {
	for {
		// What was begun when ctx ends is carried through: it counts as accepted.
		rows, err := a.DB.Query(context.WithoutCancel(ctx), `SELECT school_id FROM push_clusters WHERE ended_at IS NULL`)
		if err != nil {
			return err
		}
		open, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		has := map[string]bool{}
		for _, s := range open {
			has[s] = true
		}
		for i := range busySchools {
			if s := school(i); !has[s] && ctx.Err() == nil {
				if _, err := a.Post(context.WithoutCancel(ctx), s, 400); err != nil {
					return err
				}
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func school(i int) string { return fmt.Sprintf("S%02d", i) }

func lockKey(school string) string  { return "schoolbell:{" + school + "}:lock" }
func quotaKey(school string) string { return "schoolbell:{" + school + "}:quota" }

// allSend waits until every school has begun a batch from now on.
func allSend(ctx context.Context, t *testing.T, a *Arena) {
	t.Helper()
	var from time.Time
	require.NoError(t, a.DB.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&from))
	until(ctx, t, "every school sends on", func() (bool, error) {
		var n int
		err := a.DB.QueryRow(ctx, `SELECT count(DISTINCT school_id) FROM push_batches WHERE claimed_at > $1`, from).Scan(&n)
		return n == busySchools, err
	})
}

// counter sums a metric over the replicas.
func counter(ctx context.Context, t *testing.T, a *Arena, name string) (sum float64) {
	t.Helper()
	for _, r := range a.Replicas() {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL()+"/metrics", nil)
		require.NoError(t, err)
		resp, err := httpClient.Do(req)
		require.NoError(t, err)
		found := false
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			labelled, value, _ := strings.Cut(lines.Text(), " ")
			if metric, _, _ := strings.Cut(labelled, "{"); metric == name {
				n, err := strconv.ParseFloat(value, 64)
				require.NoError(t, err)
				found = true
				sum += n
			}
		}
		require.NoError(t, resp.Body.Close())
		require.True(t, found, "%s has no %s", r.Name, name)
	}
	return sum
}

const (
	rebuilds  = "schoolbell_quota_rebuilds_total"
	leaseLost = "schoolbell_lease_lost_total"
)

// grows waits until a metric has grown by what do does, and every school sends on.
func grows(ctx context.Context, t *testing.T, a *Arena, metric string, do func()) {
	t.Helper()
	before := counter(ctx, t, a, metric)
	do()
	until(ctx, t, metric+" grows", func() (bool, error) { return counter(ctx, t, a, metric) > before, nil })
	allSend(ctx, t, a)
}

// refused is how often a server has answered with that error since it started.
func refused(ctx context.Context, t *testing.T, code string, servers ...*local.Redis) (n int) {
	t.Helper()
	for _, r := range servers {
		stats, err := r.Do(ctx, "INFO errorstats")
		require.NoError(t, err)
		if _, count, ok := strings.Cut(stats, "errorstat_"+code+":count="); ok {
			one, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(count, "\n", 2)[0]))
			require.NoError(t, err)
			n += one
		}
	}
	return n
}

// untilRefused does something and waits until the servers have answered with that
// error once more.
func untilRefused(ctx context.Context, t *testing.T, code string, do func(), servers ...*local.Redis) {
	t.Helper()
	before := refused(ctx, t, code, servers...) // what is done may be met before do returns
	do()
	until(ctx, t, "an answer is "+code, func() (bool, error) { return refused(ctx, t, code, servers...) > before, nil })
}

func do(ctx context.Context, t *testing.T, r *local.Redis, command string) string {
	t.Helper()
	answer, err := r.Do(ctx, command)
	require.NoError(t, err)
	return answer
}

// harmless ends the work and judges: no message lost, none sent twice, since no
// replica was killed, and the rule kept.
func harmless(ctx context.Context, t *testing.T, a *Arena, stop func()) {
	t.Helper()
	stop()
	require.NoError(t, a.WaitEnded(ctx))
	v := sound(ctx, t, a)
	require.Zero(t, v.Lost)
	require.Zero(t, v.Repeated)
	require.Zero(t, v.Rule.Violations)
	require.Positive(t, v.Rule.Cycles)
	require.Equal(t, v.Accepted, v.Arrived)
}

func rounds() int {
	if *full {
		return 5
	}
	return 1
}

// TestSlotsOfAClusterMoveWhileTheirSchoolsSend moves the slot of a school step by
// step, so that its replicas get every answer that a Cluster has for them, and
// lets a node die and come back, with its data or without.
func TestSlotsOfAClusterMoveWhileTheirSchoolsSend(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, stop := openBusy(ctx, t, Config{Topology: Cluster})
	for round := range rounds() {
		moving := school(round % busySchools)
		slot, err := a.Cluster.Slot(ctx, lockKey(moving))
		require.NoError(t, err)
		from, err := a.Cluster.Owner(ctx, slot)
		require.NoError(t, err)
		to := a.Cluster.Nodes[0]
		if to == from {
			to = a.Cluster.Nodes[1]
		}
		a.Broke("redis-reshard", moving)
		move, err := a.Cluster.Move(ctx, slot, to)
		require.NoError(t, err)
		// The school's two keys on two nodes: what needs both has to wait.
		untilRefused(ctx, t, "TRYAGAIN", func() { require.NoError(t, move.Key(ctx, quotaKey(moving))) }, from, to)
		// Both at the new node, which nobody else knows of.
		untilRefused(ctx, t, "ASK", func() { require.NoError(t, move.Key(ctx, lockKey(moving))) }, from)
		untilRefused(ctx, t, "MOVED", func() { require.NoError(t, move.Finish(ctx)) }, from)
		allSend(ctx, t, a)

		// Without one of its nodes the whole Cluster is down.
		victim := a.Cluster.Nodes[round%3]
		others := []*local.Redis{a.Cluster.Nodes[(round+1)%3], a.Cluster.Nodes[(round+2)%3]}
		a.Broke("redis-kill", victim.Addr())
		untilRefused(ctx, t, "CLUSTERDOWN", victim.Kill, others...)
		if round%2 == 1 {
			require.NoError(t, victim.Restart(ctx, true))
			allSend(ctx, t, a)
			continue
		}
		grows(ctx, t, a, rebuilds, func() { require.NoError(t, victim.Restart(ctx, false)) })
	}
	harmless(ctx, t, a, stop)
}

// TestFailoversWhileSchoolsSend replaces the master while it lives, so that there
// are two for a while, and lets it die with its last writes.
func TestFailoversWhileSchoolsSend(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, stop := openBusy(ctx, t, Config{Topology: Sentinel})
	for range rounds() {
		old, next, err := a.Sentinel.Roles(ctx)
		require.NoError(t, err)
		a.Broke("redis-switch", old.Addr())
		require.NoError(t, a.Sentinel.Failover(ctx))
		until(ctx, t, "the replica is the master", func() (bool, error) {
			master, _, err := a.Sentinel.Roles(ctx)
			return err == nil && master == next, nil
		})
		allSend(ctx, t, a)
		require.NoError(t, a.Sentinel.Follow(ctx, old))
		until(ctx, t, "the old master has caught up with the new one", func() (bool, error) {
			info, err := old.Do(ctx, "INFO replication")
			return strings.Contains(info, "master_link_status:up"), err
		})
		grows(ctx, t, a, rebuilds, func() { require.NoError(t, a.FailoverRedis(ctx, time.Second)) })
	}
	harmless(ctx, t, a, stop)
}

// TestRedisForgetsWhileSchoolsSend takes data from Redis in every way there is.
// What is granted afterwards is granted from the ledger.
func TestRedisForgetsWhileSchoolsSend(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	a, stop := openBusy(ctx, t, Config{Redis: local.RedisConfig{Memory: true, Args: []string{
		// Loading is slow enough to be met, and answers while it lasts.
		"--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024",
	}}})
	// taken deletes a key of any school that has it.
	taken := func(key func(school string) string) func() {
		return func() {
			until(ctx, t, "there is such a key", func() (bool, error) {
				for i := range busySchools {
					if answer, err := a.Redis.Do(ctx, "DEL "+key(school(i))); err != nil || answer == ":1" {
						a.Broke("redis-del", key(school(i)))
						return true, err
					}
				}
				return false, nil
			})
		}
	}
	for range rounds() {
		grows(ctx, t, a, rebuilds, func() { require.NoError(t, a.FlushRedis(ctx)) })
		grows(ctx, t, a, rebuilds, taken(quotaKey))
		grows(ctx, t, a, leaseLost, taken(lockKey))

		a.Broke("redis-script-flush", a.Redis.Addr())
		untilRefused(ctx, t, "NOSCRIPT", func() { do(ctx, t, a.Redis, "SCRIPT FLUSH SYNC") }, a.Redis)
		allSend(ctx, t, a)

		for _, refusal := range []struct{ code, begin, end string }{
			{"READONLY", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"},
			{"OOM", "CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"},
			{"NOREPLICAS", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"},
		} {
			a.Broke("redis-refuses", refusal.code)
			untilRefused(ctx, t, refusal.code, func() { do(ctx, t, a.Redis, refusal.begin) }, a.Redis)
			do(ctx, t, a.Redis, refusal.end)
			allSend(ctx, t, a)
		}

		// An older dump comes back, with the counts of then.
		do(ctx, t, a.Redis, `EVAL "for i = 1, 1000 do redis.call('set', 'filler:'..i, string.rep('x', 1000)) end" 0`)
		do(ctx, t, a.Redis, "SAVE")
		allSend(ctx, t, a)
		allSend(ctx, t, a)
		grows(ctx, t, a, rebuilds, func() {
			a.Broke("redis-restore", a.Redis.Addr())
			a.Redis.Kill()
			require.NoError(t, a.Redis.Restart(ctx, true))
			require.Positive(t, refused(ctx, t, "LOADING", a.Redis), "it was asked while it loaded")
		})

		grows(ctx, t, a, rebuilds, func() {
			a.Broke("redis-kill", a.Redis.Addr())
			require.NoError(t, a.Redis.Restart(ctx, false))
		})
	}
	harmless(ctx, t, a, stop)
}
