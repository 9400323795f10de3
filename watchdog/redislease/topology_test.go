package redislease_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
	"schoolbell/watchdog/watchdogtest"
)

// TestClusterIsABackend runs the suite of the locks on three nodes.
func TestClusterIsABackend(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	n := 0
	watchdogtest.TestBackend(t, 3*time.Second, func(t *testing.T, test func(t *testing.T, s watchdogtest.Server)) {
		n++
		prefix := fmt.Sprint("backend-", n)
		t.Parallel()
		test(t, onCluster(t, c, prefix))
	})
}

func TestClusterIsARegistry(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	n := 0
	watchdogtest.TestRegistry(t, 300*time.Millisecond, func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func())) {
		n++
		prefix := fmt.Sprint("registry-", n)
		t.Parallel()
		s := onCluster(t, c, prefix)
		test(t, redislease.NewRegistry(s.client, s.keys), s.Forget)
	})
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	s := onCluster(t, c, "schoolbell")
	t.Run("locks on every node", func(t *testing.T) {
		k, err := watchdog.New(watchdog.Config{}, "one", s.Locks, slog.New(slog.DiscardHandler), nil)
		require.NoError(t, err)
		nodes := map[*local.Redis]bool{}
		for i := range 30 {
			name := fmt.Sprint("school-", i)
			// A call may take a tenth of the etc, a second at most.
			require.NoError(t, k.Hold(t.Context(), name, 10*time.Second, func(ctx context.Context, l *watchdog.Lease) error {
				require.NoError(t, l.Bind(ctx, 1))
				return s.Extend(ctx, name, l.Acquisition(), time.Minute, 1)
			}))
			slot, err := c.Slot(t.Context(), s.keys.Lock(name))
			require.NoError(t, err)
			owner, err := c.Owner(t.Context(), slot)
			require.NoError(t, err)
			nodes[owner] = true
		}
		require.Len(t, nodes, 3)
		for _, node := range c.Nodes {
			size, err := node.Do(t.Context(), "DBSIZE")
			require.NoError(t, err)
			require.Equal(t, ":0", size)
		}
	})
	t.Run("a lock moves with its slot while it is held", func(t *testing.T) { holdThroughMigration(t, s) })
	for _, test := range []struct {
		name string
		run  func(t *testing.T, s *server)
	}{
		{"a slot is taken once", slotIsTakenOnce},
		{"a slot is the server's time", slotIsTheServersTime},
		{"a slot taken without an answer", slotTakenWithoutAnAnswer},
		{"a wake reaches every replica", wakeReachesEveryReplica},
		{"a subscriber comes back", subscriberComesBack},
		{"a wake fails while the cluster is away", wakeFailsWhileAway},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, onCluster(t, c, "schoolbell")) })
	}
}

// holdThroughMigration moves the slot of a held lock from its node to another,
// step by step, and uses the lock at each.
func holdThroughMigration(t *testing.T, s *server) {
	ctx, key := t.Context(), s.keys.Lock("A")
	slot, err := s.cluster.Slot(ctx, key)
	require.NoError(t, err)
	source, err := s.cluster.Owner(ctx, slot)
	require.NoError(t, err)
	target := s.cluster.Nodes[0]
	if target == source {
		target = s.cluster.Nodes[1]
	}
	request := watchdog.Request{Name: "A", Owner: "one", Acquisition: "a", Lease: time.Minute, ETC: etc, Patience: time.Second}
	require.NoError(t, s.Acquire(ctx, request))

	move, err := s.cluster.Move(ctx, slot, target)
	require.NoError(t, err)
	require.NoError(t, s.Extend(ctx, "A", "a", time.Minute, 1), "the lock is still at its old node")
	require.NoError(t, move.Key(ctx, key))
	require.NoError(t, s.Extend(ctx, "A", "a", time.Minute, 2), "the lock is at its new node, the slot is not")
	require.NoError(t, s.Bind(ctx, "A", "a", 5))
	require.NoError(t, s.Release(ctx, "A", "a"))
	request.Acquisition = "b"
	require.NoError(t, s.Acquire(ctx, request), "a lock that is nowhere is made at the new node")
	require.NoError(t, move.Finish(ctx))
	require.NoError(t, s.Extend(ctx, "A", "b", time.Minute, 1), "the slot is at its new node")
	acquisition, err := target.Do(ctx, "HGET "+key+" acq")
	require.NoError(t, err)
	require.Equal(t, "b", acquisition)
	require.NoError(t, s.Release(ctx, "A", "b"))
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
