package local

import (
	"context"
	"strings"
	"testing"

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

	s.Master.Kill()
	eventually(t, "the replica is the master", func() bool { return at(ctx) == s.Replica.Addr() })
	eventually(t, "it takes writes", func() bool {
		answer, err := ask(s.Replica.Addr(), "SET k w")
		return err == nil && answer == "+OK"
	})
}
