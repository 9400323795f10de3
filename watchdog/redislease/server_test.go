package redislease_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/scripts"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
	"schoolbell/watchdog/watchdogtest"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(ownerURL); url != "" {
		if err := own(url, os.Stdout); err != nil {
			fmt.Fprintln(os.Stdout, "end", err)
			os.Exit(1)
		}
		return
	}
	localtest.Main(m)
}

func testKeys(t *testing.T) scripts.Keys {
	t.Helper()
	keys, err := scripts.NewKeys("schoolbell")
	require.NoError(t, err)
	return keys
}

// server is a real redis-server behind a proxy, or a Cluster each of whose nodes
// is behind one, with a client that looks past them.
type server struct {
	*redislease.Locks
	t       *testing.T
	redis   *local.Redis   // nil with a Cluster
	cluster *local.Cluster // nil without
	proxies []*local.Proxy
	proxy   *local.Proxy          // the first
	client  redis.UniversalClient // through the proxies, as in production
	direct  redis.UniversalClient
	keys    scripts.Keys
}

var _ watchdogtest.Server = (*server)(nil)

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{t: t, keys: testKeys(t), redis: localtest.RedisWith(t, local.RedisConfig{Memory: true, Args: args})}
	s.begin(s.redis.Addr())
	return s
}

func startCluster(t *testing.T) *local.Cluster {
	t.Helper()
	c, err := local.StartCluster(t.Context(), 3)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// onCluster is a test's own part of a Cluster that it shares with others: a prefix,
// and a way there.
func onCluster(t *testing.T, c *local.Cluster, prefix string) *server {
	t.Helper()
	keys, err := scripts.NewKeys(prefix)
	require.NoError(t, err)
	s := &server{t: t, keys: keys, cluster: c}
	s.begin(c.Addrs()...)
	return s
}

func (s *server) begin(addrs ...string) {
	for _, addr := range addrs {
		p, err := local.StartProxy(addr)
		require.NoError(s.t, err)
		s.t.Cleanup(func() { require.NoError(s.t, p.Close()) })
		s.proxies = append(s.proxies, p)
	}
	s.proxy = s.proxies[0]
	s.direct = redis.NewUniversalClient(&redis.UniversalOptions{Addrs: addrs, IsClusterMode: s.cluster != nil})
	s.t.Cleanup(func() { require.NoError(s.t, s.direct.Close()) })
	s.client = s.replica()
	s.Locks = redislease.NewLocks(s.client, s.keys)
}

// replica returns a lock client through the proxies, as another replica has one.
func (s *server) replica() redis.UniversalClient {
	s.t.Helper()
	if s.cluster == nil {
		return s.connect("redis://" + s.proxy.Addr())
	}
	// The nodes tell their clients of one another, past the proxies.
	through := map[string]string{}
	for i, addr := range s.cluster.Addrs() {
		through[addr] = s.proxies[i].Addr()
	}
	o, err := redislease.ParseURL("redis+cluster://" + s.cluster.Addrs()[0] + "?addr=" + s.cluster.Addrs()[1])
	require.NoError(s.t, err)
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := net.Dialer{Timeout: time.Second}
		return d.DialContext(ctx, network, through[addr])
	}
	client := redislease.NewClient(o)
	s.t.Cleanup(func() { require.NoError(s.t, client.Close()) })
	return client
}

// connect returns a lock client of its own, as another replica has.
func (s *server) connect(url string) redis.UniversalClient {
	s.t.Helper()
	o, err := redislease.ParseURL(url)
	require.NoError(s.t, err)
	client := redislease.NewClient(o)
	s.t.Cleanup(func() { require.NoError(s.t, client.Close()) })
	return client
}

// each does something to every proxy.
func (s *server) each(do func(p *local.Proxy) error) {
	s.t.Helper()
	for _, p := range s.proxies {
		require.NoError(s.t, do(p))
	}
}

func (s *server) closeConns() {
	for _, p := range s.proxies {
		p.CloseConns()
	}
}

// loseRepliesTo makes the answer to the next request that contains the text vanish.
func (s *server) loseRepliesTo(text string) {
	for _, p := range s.proxies {
		p.SwallowReply(local.RequestContains(text), 1)
	}
}

func (s *server) swallowed() (n int) {
	for _, p := range s.proxies {
		n += p.Swallowed()
	}
	return n
}

// servers are what holds data.
func (s *server) servers() []*local.Redis {
	if s.cluster != nil {
		return s.cluster.Nodes
	}
	return []*local.Redis{s.redis}
}

func (s *server) Lock(name string) (watchdogtest.Lock, bool) {
	s.t.Helper()
	ctx, key := context.Background(), s.keys.Lock(name)
	fields, err := s.direct.HGetAll(ctx, key).Result()
	require.NoError(s.t, err)
	ttl, err := s.direct.PTTL(ctx, key).Result()
	require.NoError(s.t, err)
	fence, _ := strconv.ParseInt(fields["fence"], 10, 64)
	renewals, _ := strconv.ParseInt(fields["renewals"], 10, 64)
	return watchdogtest.Lock{
		Owner: fields["owner"], Acquisition: fields["acq"], Fence: fence, Renewals: renewals, TTL: ttl,
	}, len(fields) > 0 && ttl > 0
}

func (s *server) Steal(name, owner string, lease time.Duration) {
	s.t.Helper()
	ctx, key := context.Background(), s.keys.Lock(name)
	_, err := s.direct.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Del(ctx, key)
		p.HSet(ctx, key, "owner", owner, "acq", "stolen-by-"+owner)
		p.PExpire(ctx, key, lease)
		return nil
	})
	require.NoError(s.t, err)
}

// Forget drops the keys of this test; others may be on the same servers.
func (s *server) Forget() {
	ctx := context.Background()
	for _, r := range s.servers() {
		node := redis.NewClient(&redis.Options{Addr: r.Addr()})
		for keys := node.Scan(ctx, 0, "*", 1000).Iterator(); keys.Next(ctx); {
			if key := keys.Val(); strings.HasPrefix(key, strings.TrimSuffix(s.keys.Wake(), "wake")) {
				require.NoError(s.t, node.Del(ctx, key).Err())
			}
		}
		require.NoError(s.t, node.Close())
	}
}

func (s *server) LoseReply(op watchdogtest.Op, n int) {
	s.t.Helper()
	script := map[watchdogtest.Op]scripts.Script{
		watchdogtest.Acquire: scripts.Acquire(), watchdogtest.Bind: scripts.Bind(),
		watchdogtest.Extend: scripts.Extend(), watchdogtest.Release: scripts.Release(),
	}[op]
	// Known to the servers beforehand, so that it is the script's answer that gets
	// lost and not the one that a server does not know it.
	for _, r := range s.servers() {
		node := redis.NewClient(&redis.Options{Addr: r.Addr()})
		require.NoError(s.t, node.ScriptLoad(context.Background(), script.Source).Err())
		require.NoError(s.t, node.Close())
	}
	for _, p := range s.proxies {
		p.SwallowReply(local.RequestContains(script.SHA), n)
	}
}

func (s *server) Cut() { s.each((*local.Proxy).BlackHole) }

func (s *server) Restore() { s.each((*local.Proxy).Pass) }

func TestRedisIsABackend(t *testing.T) {
	watchdogtest.TestBackend(t, 3*time.Second, func(t *testing.T, test func(t *testing.T, s watchdogtest.Server)) {
		t.Parallel()
		test(t, startServer(t))
	})
}

func TestRedisIsARegistry(t *testing.T) {
	watchdogtest.TestRegistry(t, 300*time.Millisecond, func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func())) {
		t.Parallel()
		s := startServer(t)
		test(t, redislease.NewRegistry(s.client, s.keys), s.Forget)
	})
}
