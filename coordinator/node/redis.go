package node

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// redisTimeout bounds a dial, and a read or write whose context has no end.
const redisTimeout = 2 * time.Second

// newRedis is the client for everything but locks. Its calls are idempotent by
// ids their callers made, so go-redis may repeat them; each is bounded by its
// context.
func newRedis(where *redis.UniversalOptions) redis.UniversalClient {
	o := *where
	o.ContextTimeoutEnabled = true
	o.DialTimeout = redisTimeout
	o.ReadTimeout = redisTimeout
	o.WriteTimeout = redisTimeout
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewUniversalClient(&o)
}

// LogRedis makes the Redis client library say what it has to say of connections
// as debug lines of log instead of on stderr. The library has one logger for the
// whole process, so this is for main, before anything runs.
func LogRedis(log *slog.Logger) { redis.SetLogger(redisLog{log.With("component", "go-redis")}) }

type redisLog struct{ log *slog.Logger }

func (l redisLog) Printf(ctx context.Context, format string, v ...any) {
	l.log.DebugContext(ctx, "the redis client says", "event", "redis_client", "says", fmt.Sprintf(format, v...))
}

// memoryRedis is a Redis inside this process. It runs the same scripts as a real
// one, listens on no port, and forgets everything with the process: the ledger in
// the database fills it again.
type memoryRedis struct{ server *miniredis.Miniredis }

func newMemoryRedis() memoryRedis {
	s := miniredis.NewMiniRedis()
	s.ClockTTL(true) // by itself it ages no key: a dead owner's lock would never end
	return memoryRedis{server: s}
}

// options are where its clients dial.
func (r memoryRedis) options() *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs:  []string{"embedded"}, // for error messages
		Dialer: func(context.Context, string, string) (net.Conn, error) { return r.server.Dial() },
	}
}

// close ends the connections and forgets everything.
func (r memoryRedis) close() { r.server.Close() }
