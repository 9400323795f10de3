package node

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// redisWatch says when Redis stops answering and when it answers again, once
// each. It stands where connections are made, the one place that every client
// and every part of the replica passes through: each of them meets the same
// absence by itself, over and over, and none knows the setting.
type redisWatch struct {
	log     *slog.Logger
	setting string // that the address is from
	one     bool   // server, which everything depends on

	mu   sync.Mutex
	away map[string]bool // by address
}

func newRedisWatch(where *redis.UniversalOptions, setting string, log *slog.Logger) *redisWatch {
	return &redisWatch{
		log: log, setting: setting, away: map[string]bool{},
		one: len(where.Addrs) == 1 && where.MasterName == "" && !where.IsClusterMode,
	}
}

// dial passes connections on that next makes; nil: the way the library would.
func (w *redisWatch) dial(where *redis.UniversalOptions, next func(ctx context.Context, network, addr string) (net.Conn, error)) func(ctx context.Context, network, addr string) (net.Conn, error) {
	if next == nil {
		dialer := &net.Dialer{Timeout: redisTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 5 * time.Second, Count: 3}}
		next = dialer.DialContext
		if where.TLSConfig != nil {
			next = (&tls.Dialer{NetDialer: dialer, Config: where.TLSConfig}).DialContext
		}
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := next(ctx, network, addr)
		w.saw(addr, err)
		return c, err
	}
}

// saw takes note of a try. One that its caller gave up says nothing.
func (w *redisWatch) saw(addr string, err error) {
	if errors.Is(err, context.Canceled) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock() // behind the line: two in the wrong order would say the opposite
	changed := w.away[addr] != (err != nil)
	w.away[addr] = err != nil
	switch {
	case !changed:
	case err == nil:
		w.log.Info(w.subject()+" answers again", "event", "redis_back", "address", addr)
	case w.one:
		w.log.Warn(w.subject()+" does not answer: nothing is sent until it does, notices are accepted; is redis-server running there, and is the address right?",
			"event", "redis_away", "address", addr, "error", err)
	default: // the others may do
		w.log.Warn(w.subject()+" does not answer", "event", "redis_away", "address", addr, "error", err)
	}
}

func (w *redisWatch) subject() string {
	if w.one {
		return "the Redis at " + w.setting
	}
	return "a Redis server behind " + w.setting
}
