package redislease_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
	"schoolbell/watchdog/watchdogtest"
)

func startCluster(t *testing.T) (*local.Cluster, redis.UniversalClient) {
	t.Helper()
	c, err := local.StartCluster(t.Context(), 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	o, err := redislease.ParseURL("redis+cluster://" + c.Addrs()[0] + "?addr=" + c.Addrs()[1])
	require.NoError(t, err)
	client := redislease.NewClient(o)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return c, client
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c, client := startCluster(t)
	keys := testKeys(t)

	t.Run("locks on every node", func(t *testing.T) {
		locks := redislease.NewLocks(client, keys)
		k, err := watchdog.New(watchdog.Config{}, "one", locks, slog.New(slog.DiscardHandler), nil)
		require.NoError(t, err)
		for i := range 30 {
			name := fmt.Sprint("school-", i)
			require.NoError(t, k.Hold(t.Context(), name, etc, func(ctx context.Context, l *watchdog.Lease) error {
				require.NoError(t, l.Bind(ctx, 1))
				return locks.Extend(ctx, name, l.Acquisition(), time.Minute, 1)
			}))
		}
		for _, node := range c.Nodes {
			direct := redis.NewClient(&redis.Options{Addr: node.Addr()})
			require.Zero(t, direct.DBSize(t.Context()).Val())
			require.NoError(t, direct.Close())
		}
	})
	t.Run("a lock moves with its slot while it is held", func(t *testing.T) { holdThroughMigration(t, c, client) })
	t.Run("slots and wakes", func(t *testing.T) {
		taken, _, err := redislease.NewSlots(client, keys, "one").Take(t.Context(), "sweep", time.Hour)
		require.NoError(t, err)
		require.True(t, taken)
		s := &server{t: t, keys: keys}
		l := s.listen(t, client)
		receive(t, "listens", l.ready)
		require.NoError(t, redislease.NewWakes(client, keys, slog.New(slog.DiscardHandler)).Wake(t.Context(), "A"))
		require.Equal(t, "A", receive(t, "a wake", l.wakes))
	})
	t.Run("registry", func(t *testing.T) {
		watchdogtest.TestRegistry(t, 300*time.Millisecond, func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func())) {
			forget := func() {
				for _, node := range c.Nodes {
					direct := redis.NewClient(&redis.Options{Addr: node.Addr()})
					require.NoError(t, direct.FlushAll(context.Background()).Err())
					require.NoError(t, direct.Close())
				}
			}
			forget()
			test(t, redislease.NewRegistry(client, keys), forget)
		})
	})
}

// holdThroughMigration moves the slot of a held lock from its node to another,
// step by step, and uses the lock at each.
func holdThroughMigration(t *testing.T, c *local.Cluster, client redis.UniversalClient) {
	ctx, keys := t.Context(), testKeys(t)
	nodes := map[string]*redis.Client{} // by node id
	slot, err := client.ClusterKeySlot(ctx, keys.Lock("A")).Result()
	require.NoError(t, err)
	var source, target string
	for _, n := range c.Nodes {
		direct := redis.NewClient(&redis.Options{Addr: n.Addr()})
		t.Cleanup(func() { require.NoError(t, direct.Close()) })
		id, err := direct.Do(ctx, "cluster", "myid").Text()
		require.NoError(t, err)
		nodes[id] = direct
		if err := direct.Get(ctx, "{A}").Err(); err == nil || err == redis.Nil {
			source = id // the only one that does not send us on
		} else {
			target = id
		}
	}
	require.NotEmpty(t, source)
	setSlot := func(on string, args ...any) {
		require.NoError(t, nodes[on].Do(ctx, append([]any{"cluster", "setslot", slot}, args...)...).Err())
	}
	locks := redislease.NewLocks(client, keys)
	request := watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}
	require.NoError(t, locks.Acquire(ctx, request))

	setSlot(target, "importing", source)
	setSlot(source, "migrating", target)
	require.NoError(t, locks.Extend(ctx, "A", "a", time.Minute, 1), "the lock is still at its old node")

	_, port, _ := strings.Cut(nodes[target].Options().Addr, ":")
	require.NoError(t, nodes[source].Migrate(ctx, "127.0.0.1", port, keys.Lock("A"), 0, 5*time.Second).Err())
	require.NoError(t, locks.Extend(ctx, "A", "a", time.Minute, 2), "the lock is at its new node, the slot is not")
	require.NoError(t, locks.Bind(ctx, "A", "a", 5))
	require.NoError(t, locks.Release(ctx, "A", "a"))
	request.Acquisition = "b"
	require.NoError(t, locks.Acquire(ctx, request), "a lock that is nowhere is made at the new node")

	setSlot(target, "node", target)
	setSlot(source, "node", target)
	require.NoError(t, locks.Extend(ctx, "A", "b", time.Minute, 1), "the slot is at its new node")
	require.Equal(t, "b", nodes[target].HGet(ctx, keys.Lock("A"), "acq").Val())
	require.NoError(t, locks.Release(ctx, "A", "b"))
	for id := range nodes {
		setSlot(id, "node", target) // all of them know
	}
}

func TestHoldGoesOnThroughAFailover(t *testing.T) {
	t.Parallel()
	s, err := local.StartSentinel(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	o, err := redislease.ParseURL("redis+sentinel://" + s.Addrs()[0] + "?master_name=" + local.MasterName + "&addr=" + s.Addrs()[1] + "&addr=" + s.Addrs()[2])
	require.NoError(t, err)
	client := redislease.NewClient(o)
	t.Cleanup(func() { require.NoError(t, client.Close()) })

	keys := testKeys(t)
	k, err := watchdog.New(watchdog.Config{ProgressWithin: time.Hour}, "one", redislease.NewLocks(client, keys), slog.New(slog.DiscardHandler), nil)
	require.NoError(t, err)
	const etc = 20 * time.Second // a failover takes a few seconds, the lease has to outlast it
	trust := watchdog.LeaseFor(etc) - watchdog.Margin(watchdog.LeaseFor(etc))
	require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
		master := redis.NewClient(&redis.Options{Addr: s.Master.Addr()})
		replicas, err := master.Wait(ctx, 1, 5*time.Second).Result()
		require.NoError(t, err)
		require.EqualValues(t, 1, replicas, "the lock has not reached the replica")
		require.NoError(t, master.Close())

		s.Master.Kill()
		failed := 0
		eventually(t, l.Left(), "the lease is extended at the new master", func() bool {
			err := l.Ensure(ctx, trust-time.Second/2)
			if err != nil {
				failed++
			}
			return err == nil && failed > 0
		})
		require.NoError(t, ctx.Err())
		require.NoError(t, l.Check())
		now, err := s.MasterAddr(ctx)
		require.NoError(t, err)
		require.Equal(t, s.Replica.Addr(), now)
		return nil
	}))
}
