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
	"schoolbell/school/quota/quotatest"
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

// TestOnACluster runs the rule's own suites on three nodes.
func TestOnACluster(t *testing.T) {
	t.Parallel()
	srv := startCluster(t)
	fresh := func(tb testing.TB) quotatest.Subject { return srv.subject(tb) }
	t.Run("cases", func(t *testing.T) { quotatest.RunCases(t, "../testdata/rule.json", fresh) })
	t.Run("sentences", func(t *testing.T) { quotatest.RunSentences(t, fresh) })
	t.Run("histories", func(t *testing.T) {
		for seed := range uint64(2) {
			h, err := quotatest.Happen(newSeeded(seed), srv.subject(t), quotatest.Plan{Terms: 40, Settings: true})
			require.NoError(t, err, "seed %d", seed)
			require.Empty(t, h.Wrong(), "seed %d", seed)
		}
	})
	t.Run("the pure rule", func(t *testing.T) {
		for seed := range uint64(3) {
			l := srv.subject(t)
			require.NoError(t, quotatest.Compare(newSeeded(seed), l, l.state, 150, forever), "seed %d", seed)
		}
	})
	t.Run("under the real clock", func(t *testing.T) {
		keys, err := scripts.NewKeys("real")
		require.NoError(t, err)
		b, err := New(srv.client, keys, nil)
		require.NoError(t, err)
		nodes := map[int64]bool{}
		for i := range 12 {
			id := fmt.Sprintf("school-%d", i)
			fill(t, t.Context(), b, srv.client, keys, id)
			slot, err := srv.client.ClusterKeySlot(t.Context(), keys.Quota(id)).Result()
			require.NoError(t, err)
			nodes[slot*3/16384] = true
			require.NoError(t, b.Rebuild(t.Context(), id, "acq-1", 7, school.Ledger{Attempted: 5000, Filled: true, Rule: rule}, rule))
			require.NoError(t, b.Forget(t.Context(), id))
		}
		require.Len(t, nodes, 3, "every node had schools")
	})
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
