package redislease_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
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

// server is a real redis-server behind a proxy, with a client that looks past it.
type server struct {
	*redislease.Locks
	t      *testing.T
	redis  *local.Redis
	proxy  *local.Proxy
	client redis.UniversalClient // through the proxy, as in production
	direct *redis.Client
	keys   scripts.Keys
}

var _ watchdogtest.Server = (*server)(nil)

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{t: t, keys: testKeys(t), redis: localtest.RedisWith(t, local.RedisConfig{Memory: true, Args: args})}
	var err error
	s.proxy, err = local.StartProxy(s.redis.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.proxy.Close()) })
	s.direct = redis.NewClient(&redis.Options{Addr: s.redis.Addr()})
	t.Cleanup(func() { require.NoError(t, s.direct.Close()) })
	s.client = s.connect("redis://" + s.proxy.Addr())
	s.Locks = redislease.NewLocks(s.client, s.keys)
	return s
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

func (s *server) Forget() { require.NoError(s.t, s.direct.FlushAll(context.Background()).Err()) }

func (s *server) LoseReply(op watchdogtest.Op, n int) {
	s.t.Helper()
	script := map[watchdogtest.Op]scripts.Script{
		watchdogtest.Acquire: scripts.Acquire(), watchdogtest.Bind: scripts.Bind(),
		watchdogtest.Extend: scripts.Extend(), watchdogtest.Release: scripts.Release(),
	}[op]
	// Known to the server beforehand, so that it is the script's answer that gets
	// lost and not the one that the server does not know it.
	require.NoError(s.t, s.direct.ScriptLoad(context.Background(), script.Source).Err())
	s.proxy.SwallowReply(local.RequestContains(script.SHA), n)
}

func (s *server) Cut() { require.NoError(s.t, s.proxy.BlackHole()) }

func (s *server) Restore() { require.NoError(s.t, s.proxy.Pass()) }

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
