package node

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/quota/quotatest"
	"schoolbell/school/quota/redisquota"
	"schoolbell/scripts"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
	"schoolbell/watchdog/watchdogtest"
)

func TestMain(m *testing.M) {
	LogRedis(discard())
	localtest.Main(m)
}

func testKeys(tb testing.TB) scripts.Keys {
	tb.Helper()
	keys, err := scripts.NewKeys("schoolbell")
	require.NoError(tb, err)
	return keys
}

// The Redis inside the process has to do all that a real one is asked to do:
// the rule's and the locks' own suites decide, in virtual time.

func TestMemoryRedisKeepsTheRule(t *testing.T) {
	t.Parallel()
	fresh := func(tb testing.TB) quotatest.Subject { return newMemoryQuota(tb) }
	quotatest.RunCases(t, "../../school/quota/testdata/rule.json", fresh)
	quotatest.RunSentences(t, fresh)
}

// memoryQuota is one school's quota in the Redis inside the process.
type memoryQuota struct {
	*redisquota.Budget
	tb     testing.TB
	redis  memoryRedis
	client redis.UniversalClient
	keys   scripts.Keys
}

const quotaSchool = "S"

func newMemoryQuota(tb testing.TB) *memoryQuota {
	q := &memoryQuota{tb: tb, redis: newMemoryRedis(), keys: testKeys(tb)}
	q.At(quotatest.Epoch)
	q.client = newRedis(q.redis.options())
	tb.Cleanup(func() {
		require.NoError(tb, q.client.Close())
		q.redis.close()
	})
	var err error
	q.Budget, err = redisquota.New(q.client, q.keys, nil)
	require.NoError(tb, err)
	return q
}

func (q *memoryQuota) At(ms int64) { q.redis.server.SetTime(time.UnixMilli(ms)) }

func (q *memoryQuota) Own(acquisition string, fence int64) {
	ctx, key := context.Background(), q.keys.Lock(quotaSchool)
	require.NoError(q.tb, q.client.HSet(ctx, key, "owner", "test", "acq", acquisition, "fence", fence, "batch", "").Err())
	require.NoError(q.tb, q.client.PExpire(ctx, key, 24*time.Hour).Err())
}

func (q *memoryQuota) Reserve(r school.Reservation) (school.Grant, error) {
	r.School = quotaSchool
	return q.Budget.Reserve(context.Background(), r)
}

func (q *memoryQuota) Settle(s school.Settlement) error {
	s.School = quotaSchool
	return q.Budget.Settle(context.Background(), s)
}

func (q *memoryQuota) Reconcile(l school.Ledger, r school.Rule) error {
	return q.Budget.Reconcile(context.Background(), quotaSchool, l, r)
}

func (q *memoryQuota) Rebuild(acquisition string, fence int64, l school.Ledger, r school.Rule) error {
	return q.Budget.Rebuild(context.Background(), quotaSchool, acquisition, fence, l, r)
}

func (q *memoryQuota) Peek() (school.Peek, error) {
	return q.Budget.Peek(context.Background(), quotaSchool)
}

func (q *memoryQuota) Save() any {
	h, err := q.client.HGetAll(context.Background(), q.keys.Quota(quotaSchool)).Result()
	require.NoError(q.tb, err)
	return maps.Clone(h)
}

func (q *memoryQuota) Load(saved any) {
	ctx, key := context.Background(), q.keys.Quota(quotaSchool)
	require.NoError(q.tb, q.client.Del(ctx, key).Err())
	if h, _ := saved.(map[string]string); len(h) > 0 {
		require.NoError(q.tb, q.client.HSet(ctx, key, h).Err())
	}
}

func TestMemoryRedisIsABackend(t *testing.T) {
	watchdogtest.TestBackend(t, 3*time.Second, func(t *testing.T, test func(t *testing.T, s watchdogtest.Server)) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { test(t, newMemoryServer(t)) })
	})
}

func TestMemoryRedisIsARegistry(t *testing.T) {
	watchdogtest.TestRegistry(t, 300*time.Millisecond, func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func())) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			s := newMemoryServer(t)
			test(t, redislease.NewRegistry(s.client, s.keys), s.Forget)
		})
	})
}

// memoryServer is the Redis inside the process with a client whose connections
// can fail, and one that looks past them.
type memoryServer struct {
	*redislease.Locks
	tb             testing.TB
	client, direct redis.UniversalClient
	keys           scripts.Keys

	mu    sync.Mutex
	cut   bool
	lose  int // replies to requests that hold the name of
	after string
}

var _ watchdogtest.Server = (*memoryServer)(nil)

func newMemoryServer(tb testing.TB) *memoryServer {
	r := newMemoryRedis()
	s := &memoryServer{tb: tb, keys: testKeys(tb)}
	s.direct = newRedis(r.options())
	o := r.options()
	dial := o.Dialer
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		return &faultyConn{Conn: c, s: s}, err
	}
	s.client = redislease.NewClient(o)
	s.Locks = redislease.NewLocks(s.client, s.keys)
	tb.Cleanup(func() {
		require.NoError(tb, s.client.Close())
		require.NoError(tb, s.direct.Close())
		r.close()
	})
	return s
}

func (s *memoryServer) Lock(name string) (watchdogtest.Lock, bool) {
	ctx, key := context.Background(), s.keys.Lock(name)
	fields, err := s.direct.HGetAll(ctx, key).Result()
	require.NoError(s.tb, err)
	ttl, err := s.direct.PTTL(ctx, key).Result()
	require.NoError(s.tb, err)
	fence, _ := strconv.ParseInt(fields["fence"], 10, 64)
	renewals, _ := strconv.ParseInt(fields["renewals"], 10, 64)
	return watchdogtest.Lock{Owner: fields["owner"], Acquisition: fields["acq"], Fence: fence, Renewals: renewals, TTL: ttl}, len(fields) > 0 && ttl > 0
}

func (s *memoryServer) Steal(name, owner string, lease time.Duration) {
	ctx, key := context.Background(), s.keys.Lock(name)
	require.NoError(s.tb, s.direct.Del(ctx, key).Err())
	require.NoError(s.tb, s.direct.HSet(ctx, key, "owner", owner, "acq", "stolen-by-"+owner).Err())
	require.NoError(s.tb, s.direct.PExpire(ctx, key, lease).Err())
}

func (s *memoryServer) Forget() { require.NoError(s.tb, s.direct.FlushAll(context.Background()).Err()) }

func (s *memoryServer) LoseReply(op watchdogtest.Op, n int) {
	script := map[watchdogtest.Op]scripts.Script{
		watchdogtest.Acquire: scripts.Acquire(), watchdogtest.Bind: scripts.Bind(),
		watchdogtest.Extend: scripts.Extend(), watchdogtest.Release: scripts.Release(),
	}[op]
	require.NoError(s.tb, s.direct.ScriptLoad(context.Background(), script.Source).Err())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lose, s.after = n, script.SHA
}

func (s *memoryServer) Cut()     { s.setCut(true) }
func (s *memoryServer) Restore() { s.setCut(false) }

func (s *memoryServer) setCut(cut bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cut = cut
}

// faultyConn swallows requests while the way is cut, and replies when asked to.
type faultyConn struct {
	net.Conn
	s *memoryServer

	mu      sync.Mutex
	swallow bool
}

func (c *faultyConn) Write(p []byte) (int, error) {
	c.s.mu.Lock()
	cut := c.s.cut
	lose := !cut && c.s.lose > 0 && bytes.Contains(p, []byte(c.s.after))
	if lose {
		c.s.lose--
	}
	c.s.mu.Unlock()
	if cut {
		return len(p), nil
	}
	if lose {
		c.mu.Lock()
		c.swallow = true
		c.mu.Unlock()
	}
	return c.Conn.Write(p)
}

func (c *faultyConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		c.mu.Lock()
		swallow := c.swallow
		c.mu.Unlock()
		if err != nil || !swallow {
			return n, err
		}
	}
}

// TestInterleaving22MemoryRedisForgetsWithTheClock is what a plain test Redis does not do: a
// key that was given an end has ended by then, for every command.
func TestInterleaving22MemoryRedisForgetsWithTheClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newMemoryServer(t)
		slots := redislease.NewSlots(s.client, s.keys, "one")
		for i := range 2 { // a slot comes free when its time to live has passed, and not before
			taken, err := slots.TakeAt(t.Context(), "sweep", "slot", time.Second)
			require.NoError(t, err)
			require.True(t, taken, "round %d", i)
			time.Sleep(999 * time.Millisecond)
			taken, err = redislease.NewSlots(s.client, s.keys, "two").TakeAt(t.Context(), "sweep", "slot", time.Second)
			require.NoError(t, err)
			require.False(t, taken, "round %d", i)
			time.Sleep(time.Millisecond)
		}
	})
}

// TestMemoryRedisWakes passes hints between two clients, many in one message.
func TestMemoryRedisWakes(t *testing.T) {
	t.Parallel()
	s := newMemoryServer(t)
	log := discard()
	ctx, stop := context.WithCancel(t.Context())
	ready, heard, ended := make(chan struct{}, 1), make(chan string, 500), make(chan error, 1)
	go func() {
		ended <- redislease.NewWakes(s.client, s.keys, log).Subscribe(ctx, func() { ready <- struct{}{} }, func(id string) { heard <- id })
	}()
	<-ready
	var all []string
	for i := range 450 {
		all = append(all, fmt.Sprintf("S%d", i))
	}
	require.NoError(t, redislease.NewWakes(s.direct, s.keys, log).Wake(ctx, all...))
	for _, want := range all {
		require.Equal(t, want, <-heard)
	}
	stop()
	require.NoError(t, <-ended)
}
