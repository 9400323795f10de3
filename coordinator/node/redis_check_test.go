package node

import (
	"context"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/node/settings"
	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/watchdog/redislease"
)

// connect is the client that a replica has which was told url.
func connect(t *testing.T, url string) redis.UniversalClient {
	t.Helper()
	where, err := redislease.ParseURL(url)
	require.NoError(t, err)
	c := newRedis(where)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// start is what a replica's start makes of the Redis at url, and what it logs.
func startCheck(t *testing.T, url string) ([]string, error) {
	t.Helper()
	var log events
	err := (&redisCheck{client: connect(t, url), every: redisCheckEvery}).start(t.Context(), log.logger())
	return log.names(t), err
}

// TestARedisThatEvictsIsRefused: every policy but one throws locks and counts
// away when the memory is full.
func TestARedisThatEvictsIsRefused(t *testing.T) {
	t.Parallel()
	server := localtest.Redis(t)
	set := func(policy string) {
		_, err := server.Do(t.Context(), "CONFIG SET maxmemory-policy "+policy)
		require.NoError(t, err)
	}
	for _, policy := range []string{"allkeys-lru", "volatile-lru", "allkeys-random", "volatile-ttl"} {
		set(policy)
		_, err := startCheck(t, server.URL())
		for _, part := range []string{"redis.url", server.Addr(), policy, "CONFIG SET maxmemory-policy noeviction"} {
			require.ErrorContains(t, err, part)
		}
	}
	set("noeviction")
	logged, err := startCheck(t, server.URL())
	require.NoError(t, err)
	require.Empty(t, logged)
}

// TestARedisThatSaysLittleIsAskedOtherwise: managed services forbid CONFIG, some
// cut INFO short. What is left decides; where nothing is, nobody is kept from
// starting.
func TestARedisThatSaysLittleIsAskedOtherwise(t *testing.T) {
	t.Parallel()
	server := localtest.Redis(t)
	ctx := t.Context()
	for user, forbidden := range map[string]string{"noconfig": "-config", "noinfo": "-info", "mute": "-config -info"} {
		_, err := server.Do(ctx, "ACL SETUSER "+user+" on >pw ~* &* +@all "+forbidden)
		require.NoError(t, err)
	}
	as := func(user string) string { return "redis://" + user + ":pw@" + server.Addr() }
	for _, policy := range []string{"volatile-lru", "noeviction"} {
		_, err := server.Do(ctx, "CONFIG SET maxmemory-policy "+policy)
		require.NoError(t, err)
		for _, user := range []string{"noconfig", "noinfo"} {
			logged, err := startCheck(t, as(user))
			require.Equal(t, policy == "noeviction", err == nil, "%s, %s: %v", policy, user, err)
			require.Empty(t, logged)
		}
		logged, err := startCheck(t, as("mute"))
		require.NoError(t, err)
		require.Equal(t, []string{"redis_unchecked"}, logged, "it starts, and says what it does not know")
	}
}

func TestARedisThatIsAwayAtTheStartIsWaitedFor(t *testing.T) {
	t.Parallel()
	server := localtest.Redis(t)
	server.Kill()
	logged, err := startCheck(t, server.URL())
	require.NoError(t, err)
	require.Empty(t, logged, "whoever dials says that nobody answers")
}

// TestEveryNodeOfAClusterIsLookedAt, and the URL has to say that it is one.
func TestEveryNodeOfAClusterIsLookedAt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, err := local.StartCluster(ctx, 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	url := "redis+cluster://" + c.Addrs()[0]
	logged, err := startCheck(t, url)
	require.NoError(t, err)
	require.Empty(t, logged)
	for _, node := range c.Nodes {
		_, err := node.Do(ctx, "CONFIG SET maxmemory-policy allkeys-lfu")
		require.NoError(t, err)
		_, err = startCheck(t, url)
		require.ErrorContains(t, err, node.Addr()+" has maxmemory-policy allkeys-lfu")
		_, err = node.Do(ctx, "CONFIG SET maxmemory-policy noeviction")
		require.NoError(t, err)
	}
	_, err = startCheck(t, c.Nodes[1].URL())
	require.ErrorContains(t, err, "write redis+cluster://")
	_, err = startCheck(t, "redis+cluster://"+localtest.Redis(t).Addr())
	require.ErrorContains(t, err, "not part of a Redis Cluster")
}

// TestTheMasterBehindSentinelIsLookedAt, also the one that comes later: nobody
// asked it when the replica started.
func TestTheMasterBehindSentinelIsLookedAt(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	s, err := local.StartSentinel(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	_, err = s.Replica.Do(ctx, "CONFIG SET maxmemory-policy volatile-lru")
	require.NoError(t, err)
	url := "redis+sentinel://" + s.Addrs()[0] + "?master_name=" + local.MasterName
	_, err = startCheck(t, url)
	require.NoError(t, err)
	check := &redisCheck{client: connect(t, url)} // looks each time
	require.NoError(t, check.health(ctx))
	s.Master.Kill()
	eventually(t, "the new master is found unfit", func() bool {
		err := check.health(ctx)
		unfit, ok := err.(*unfitRedis)
		return ok && unfit.State() == "may evict keys"
	})
	_, err = startCheck(t, url)
	require.ErrorContains(t, err, "volatile-lru")
}

// TestServeRefusesARedisThatEvicts is the same through a whole replica, and what
// /readyz says where the setting is changed under it.
func TestServeRefusesARedisThatEvicts(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	policy := func(p string) {
		_, err := srv.redis.Do(t.Context(), "CONFIG SET maxmemory-policy "+p)
		require.NoError(t, err)
	}
	policy("allkeys-lru")
	_, err := New(t.Context(), srv.settings("one"), Deps{Log: discard()})
	require.ErrorContains(t, err, "maxmemory-policy allkeys-lru")
	policy("noeviction")
	way := localtest.Proxy(t, srv.redis.Addr())
	conf := srv.settings("one")
	conf.Redis.URL = settings.Secret("redis://" + way.Addr())
	one := run(t, conf, Deps{})
	eventually(t, "ready", func() bool {
		r, err := one.client.Ready(t.Context())
		return err == nil && r.Ready && r.Checks["redis"] == "ok"
	})
	require.NoError(t, way.Refuse())
	way.CloseConns()
	eventually(t, "away", func() bool {
		r, err := one.client.Ready(t.Context())
		return err == nil && r.Checks["redis"] == "unreachable"
	})
	policy("allkeys-lru")
	require.NoError(t, way.Pass()) // what comes back is looked at again
	eventually(t, "it says what is wrong, and accepts notices", func() bool {
		r, err := one.client.Ready(t.Context())
		return err == nil && r.Ready && r.Checks["redis"] == "may evict keys"
	})
	require.NoError(t, one.end(t))
}
