package redisquota

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/quota"
	"schoolbell/school/quota/quotatest"
	"schoolbell/scripts"
)

func TestMain(m *testing.M) { localtest.Main(m) }

// timeLine is the one place in which a script reads the clock. Tests that need
// virtual time put a list in its place; that is the only difference to what
// runs in production.
const timeLine = "redis.call('TIME')"

// edit changes a script's text before it is run: a mutation.
type edit struct{ script, old, new string }

// server is the Redis of a test and what its subjects share.
type server struct {
	*local.Redis // nil with a Cluster

	client redis.UniversalClient
	serial atomic.Int64
}

func startServer(tb testing.TB) *server {
	r := localtest.RedisWith(tb, local.RedisConfig{Memory: true})
	c := redis.NewClient(&redis.Options{Addr: r.Addr()})
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return &server{Redis: r, client: c}
}

// startCluster is a Redis of three nodes, over which the subjects are spread.
func startCluster(tb testing.TB) *server {
	ctx, cancel := context.WithTimeout(tb.Context(), time.Minute)
	defer cancel()
	cluster, err := local.StartCluster(ctx, 3)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, cluster.Close()) })
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.Addrs()})
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return &server{client: c}
}

// live is the rule in Lua on a real Redis, under a clock that the test sets.
type live struct {
	tb    testing.TB
	c     redis.UniversalClient
	b     *Budget
	keys  scripts.Keys
	id    string
	clock string
	now   int64
}

func (s *server) subject(tb testing.TB, edits ...edit) *live {
	n := s.serial.Add(1)
	keys, err := scripts.NewKeys("test")
	require.NoError(tb, err)
	b, err := New(s.client, keys, nil)
	require.NoError(tb, err)
	id := fmt.Sprintf("S%d", n)
	l := &live{tb: tb, c: s.client, b: b, keys: keys, id: id, clock: "clock:{" + id + "}"}
	texts := map[string]**redis.Script{
		"peek": &b.peek, "reconcile": &b.reconcile, "rebuild": &b.rebuild, "reserve": &b.reserve, "settle": &b.settle,
	}
	all, err := scripts.All()
	require.NoError(tb, err)
	for _, sc := range all {
		if texts[sc.Name] == nil {
			continue
		}
		require.Equal(tb, 1, strings.Count(sc.Source, timeLine), "%s reads the clock once", sc.Name)
		src := strings.Replace(sc.Source, timeLine, "redis.call('LRANGE', '"+l.clock+"', 0, 1)", 1)
		for _, e := range edits {
			if e.script == sc.Name {
				require.Equal(tb, 1, strings.Count(src, e.old), "%s holds what is to be mutated once: %s", sc.Name, e.old)
				src = strings.Replace(src, e.old, e.new, 1)
			}
		}
		*texts[sc.Name] = redis.NewScript(src)
	}
	l.At(quotatest.Epoch)
	return l
}

func (l *live) At(ms int64) {
	if ms == l.now {
		return
	}
	l.now = ms
	p := l.c.Pipeline()
	p.Del(context.Background(), l.clock)
	p.RPush(context.Background(), l.clock, ms/1000, ms%1000*1000)
	_, err := p.Exec(context.Background())
	require.NoError(l.tb, err)
}

func (l *live) Own(acquisition string, fence int64) {
	key := l.keys.Lock(l.id)
	p := l.c.Pipeline()
	p.HSet(context.Background(), key, "owner", "test", "acq", acquisition, "fence", fence, "batch", "")
	p.PExpire(context.Background(), key, 24*time.Hour)
	_, err := p.Exec(context.Background())
	require.NoError(l.tb, err)
}

func (l *live) Reserve(r school.Reservation) (school.Grant, error) {
	r.School = l.id
	return l.b.Reserve(context.Background(), r)
}

func (l *live) Settle(x school.Settlement) error {
	x.School = l.id
	return l.b.Settle(context.Background(), x)
}

func (l *live) Reconcile(ledger school.Ledger, r school.Rule) error {
	return l.b.Reconcile(context.Background(), l.id, ledger, r)
}

func (l *live) Rebuild(acquisition string, fence int64, ledger school.Ledger, r school.Rule) error {
	return l.b.Rebuild(context.Background(), l.id, acquisition, fence, ledger, r)
}

func (l *live) Peek() (school.Peek, error) { return l.b.Peek(context.Background(), l.id) }

func (l *live) hash() map[string]string {
	h, err := l.c.HGetAll(context.Background(), l.keys.Quota(l.id)).Result()
	require.NoError(l.tb, err)
	return h
}

func (l *live) Save() any { return maps.Clone(l.hash()) }

func (l *live) Load(saved any) {
	require.NoError(l.tb, l.c.Del(context.Background(), l.keys.Quota(l.id)).Err())
	if h, _ := saved.(map[string]string); len(h) > 0 {
		require.NoError(l.tb, l.c.HSet(context.Background(), l.keys.Quota(l.id), h).Err())
	}
}

// state reads what Redis holds as the pure rule would hold it.
func (l *live) state() quota.State {
	h := l.hash()
	if len(h) == 0 {
		return quota.State{}
	}
	num := func(name string) int64 {
		require.Contains(l.tb, h, name)
		n, err := strconv.ParseInt(h[name], 10, 64)
		require.NoError(l.tb, err, name)
		return n
	}
	s := quota.State{
		Known: true, Since: num("inc"), Cycle: num("cycle"), Attempted: int(num("attempted")),
		Limit: int(num("limit")), Rest: num("rest_ms"),
		Setting: quota.Setting{Version: num("setting_version"), Limit: int(num("setting_limit")), Rest: num("setting_rest_ms")},
		Next:    num("nextEligibleMs"), Span: num("span_ms"), LastEnd: num("last_end_ms"),
		FloorAttempted: int(num("floor_attempted")), FloorNext: num("floor_next_ms"),
	}
	for _, text := range strings.Fields(h["open"]) {
		f := strings.Split(text, ",")
		require.Len(l.tb, f, 8)
		n := make([]int64, len(f))
		for i, v := range f[1:] {
			var err error
			n[i+1], err = strconv.ParseInt(v, 10, 64)
			require.NoError(l.tb, err)
		}
		s.Open = append(s.Open, quota.Open{
			Batch: f[0], Size: int(n[1]), Cycle: n[2], Deadline: n[3], Longest: n[4],
			Attempted: int(n[5]), Filled: n[6] == 1, Rested: n[7],
		})
	}
	for _, text := range strings.Fields(h["settled"]) {
		batch, attempted, _ := strings.Cut(text, ",")
		n, err := strconv.Atoi(attempted)
		require.NoError(l.tb, err)
		s.Settled = append(s.Settled, quota.Settled{Batch: batch, Attempted: n})
	}

	want := ""
	if s.Next > 0 {
		want = time.UnixMilli(s.Next + 999).UTC().Truncate(time.Second).Format(time.RFC3339)
	}
	require.Equal(l.tb, want, h["nextEligibleAt"])
	return s
}
