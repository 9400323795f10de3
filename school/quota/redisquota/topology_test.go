package redisquota

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/school"
	"schoolbell/scripts"
)

func newBudget(t *testing.T, c redis.UniversalClient) (*Budget, scripts.Keys) {
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	keys, err := scripts.NewKeys("test")
	require.NoError(t, err)
	b, err := New(c, keys, nil)
	require.NoError(t, err)
	return b, keys
}

// fill takes a school through its cycle under the real clock.
func fill(t *testing.T, ctx context.Context, b *Budget, c redis.UniversalClient, keys scripts.Keys, id string) {
	require.NoError(t, c.HSet(ctx, keys.Lock(id), "owner", "test", "acq", "acq-1", "fence", 7).Err())
	require.NoError(t, c.PExpire(ctx, keys.Lock(id), time.Minute).Err())
	require.NoError(t, b.Reconcile(ctx, id, school.Ledger{}, rule))
	r := reservation("b1", 5000)
	r.School = id
	g, err := b.Reserve(ctx, r)
	require.NoError(t, err)
	require.Equal(t, 5000, g.Size)
	require.True(t, g.Filled)
	require.NoError(t, b.Settle(ctx, school.Settlement{School: id, Batch: "b1", Attempted: 5000}))
	p, err := b.Peek(ctx, id)
	require.NoError(t, err)
	require.True(t, p.Held)
	require.InDelta(t, 180, p.Resting.Seconds(), 10)
}

func TestOnACluster(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cluster, err := local.StartCluster(ctx, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	b, keys := newBudget(t, c)
	slots := map[int64]bool{}
	for i := range 12 {
		id := fmt.Sprintf("school-%d", i)
		fill(t, ctx, b, c, keys, id)
		slot, err := c.ClusterKeySlot(ctx, keys.Quota(id)).Result()
		require.NoError(t, err)
		slots[slot*3/16384] = true
		require.NoError(t, b.Rebuild(ctx, id, "acq-1", 7, school.Ledger{Attempted: 5000, Filled: true, Rule: rule}, rule))
		require.NoError(t, b.Forget(ctx, id))
	}
	require.Len(t, slots, 3, "every node had schools")
}

func TestBehindSentinel(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := local.StartSentinel(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: local.MasterName, SentinelAddrs: s.Addrs(),
		DialTimeout: time.Second, ReadTimeout: time.Second})
	b, keys := newBudget(t, c)
	fill(t, ctx, b, c, keys, "A")
	require.Equal(t, int64(1), c.Wait(ctx, 1, 10*time.Second).Val(), "the replica has it")

	s.Master.Kill()
	// The promoted replica knows no script and keeps the rest.
	r := reservation("b2", 1)
	r.School = "A"
	r.Floor = school.Ledger{Attempted: 5000, Filled: true, Rule: rule}
	var g school.Grant
	require.Eventually(t, func() bool {
		g, err = b.Reserve(ctx, r)
		if err != nil {
			require.ErrorIs(t, err, school.ErrUnavailable)
		}
		return err == nil
	}, 45*time.Second, 100*time.Millisecond)
	require.Equal(t, school.Resting, g.Kind)
	require.Greater(t, g.Wait, 100*time.Second)
}
