package local

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestClusterServesAllSlots(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	c, err := StartCluster(ctx, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	require.Len(t, c.Addrs(), 3)

	// One of the nodes takes the key, the others say which.
	var owner *Redis
	var moved int
	for _, node := range c.Nodes {
		answer := asked(t, node.Addr(), "SET {A}k v")
		if answer == "+OK" {
			owner = node
		} else if strings.HasPrefix(answer, "-MOVED ") {
			moved++
		}
	}
	require.NotNil(t, owner)
	require.Equal(t, 2, moved)
	require.True(t, strings.HasPrefix(asked(t, owner.Addr(), "EVAL return{} 2 {A}k {B}k"), "-CROSSSLOT"))

	up := func() bool {
		for _, node := range c.Nodes {
			info, err := node.ask(ctx, "CLUSTER INFO")
			if err != nil || !strings.Contains(info, "cluster_state:ok") {
				return false
			}
		}
		return true
	}
	require.NoError(t, owner.Restart(ctx, true))
	eventually(t, "the cluster is whole again", up)
	require.Equal(t, "v", asked(t, owner.Addr(), "GET {A}k"))
	require.NoError(t, owner.Restart(ctx, false))
	eventually(t, "the cluster is whole again", up)
	require.Equal(t, "$-1", asked(t, owner.Addr(), "GET {A}k"), "its place is kept, its data is not")

	// A slot moves step by step; in between each side has its keys.
	slot, err := c.Slot(ctx, "{A}k")
	require.NoError(t, err)
	at, err := c.Owner(ctx, slot)
	require.NoError(t, err)
	require.Same(t, owner, at)
	for _, key := range []string{"k", "l", "m"} {
		require.Equal(t, "+OK", asked(t, owner.Addr(), "SET {A}"+key+" v"))
	}
	_, err = c.Move(ctx, slot, owner)
	require.ErrorContains(t, err, "is at")
	to := c.Nodes[0]
	if to == owner {
		to = c.Nodes[1]
	}
	move, err := c.Move(ctx, slot, to)
	require.NoError(t, err)
	require.NoError(t, move.Key(ctx, "{A}k"))
	require.True(t, strings.HasPrefix(asked(t, owner.Addr(), "GET {A}k"), "-ASK "))
	require.True(t, strings.HasPrefix(asked(t, owner.Addr(), "MGET {A}k {A}l"), "-TRYAGAIN "))
	require.Equal(t, "v", asked(t, owner.Addr(), "GET {A}l"))
	require.NoError(t, move.Finish(ctx))
	require.True(t, strings.HasPrefix(asked(t, owner.Addr(), "GET {A}k"), "-MOVED "))
	require.Equal(t, "v\nv\nv", asked(t, to.Addr(), "MGET {A}k {A}l {A}m"))
	_, err = owner.Do(ctx, "GET {A}k")
	require.ErrorContains(t, err, "MOVED")

	_, err = StartCluster(ctx, 2)
	require.ErrorContains(t, err, "at least 3")
}

func TestSentinelPromotesTheReplica(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	s, err := StartSentinel(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.Len(t, s.Addrs(), 3)
	at := func(ctx context.Context) string {
		addr, err := s.MasterAddr(ctx)
		if err != nil {
			return err.Error()
		}
		return addr
	}
	require.Equal(t, s.Master.Addr(), at(ctx))
	require.Equal(t, "+OK", asked(t, s.Master.Addr(), "SET k v"))
	eventually(t, "the write is replicated", func() bool {
		answer, err := ask(s.Replica.Addr(), "GET k")
		return err == nil && answer == "v"
	})

	crashed := make(chan error, 1)
	go func() { crashed <- s.Crash(ctx, 2*time.Second) }()
	eventually(t, "the master is alone", func() bool {
		info, err := ask(s.Master.Addr(), "INFO replication")
		return err == nil && strings.Contains(info, "connected_slaves:0")
	})
	require.Equal(t, "+OK", asked(t, s.Master.Addr(), "SET k lost"))
	require.NoError(t, <-crashed)
	eventually(t, "the replica is the master", func() bool { return at(ctx) == s.Replica.Addr() })
	eventually(t, "it takes writes", func() bool {
		answer, err := ask(s.Replica.Addr(), "SET other w")
		return err == nil && answer == "+OK"
	})
	require.Equal(t, "v", asked(t, s.Replica.Addr(), "GET k"), "the last write got lost")
}
