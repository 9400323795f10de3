// Package redislease keeps locks, the list of replicas, the slots of cluster-wide
// jobs and wake-ups in Redis: one server, Sentinel or Cluster (R17).
//
// A lock is a hash with a TTL that redis-cli shows in words; all that is decided
// about it is decided by the scripts of package scripts, each one atomic step on
// one key. Redis may lose all of it at any moment: package watchdog and the
// store's fencing number are made for that.
//
// It has a client of its own (NewClient), small and impatient, so that neither
// load nor a slow command of the rest of the program delays a renewal, and no
// call is sent twice behind one answer.
package redislease

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// ParseURL reads where Redis is. The forms are go-redis's own:
//
//	redis://[user:password@]host:port/db                      one server
//	rediss://…                                                with TLS
//	redis+sentinel://[user:password@]host:port/db?master_name=…&addr=host:port   Sentinel; rediss+sentinel:// with TLS
//	redis+cluster://[user:password@]host:port?addr=host:port  Cluster; rediss+cluster:// with TLS
//
// Errors never hold the URL's user or password.
func ParseURL(raw string) (*redis.UniversalOptions, error) {
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		return nil, errors.New("redis URL: no scheme; one of redis://, rediss://, redis+sentinel://, redis+cluster:// is needed")
	}
	base, kind, _ := strings.Cut(scheme, "+")
	if base != "redis" && base != "rediss" {
		return nil, fmt.Errorf("redis URL: scheme %q is none of redis, rediss, redis+sentinel, redis+cluster", scheme)
	}
	plain := base + "://" + rest
	switch kind {
	case "":
		o, err := redis.ParseURL(plain)
		if err != nil {
			return nil, withoutURL(err)
		}
		return fromSimple(o), nil
	case "sentinel":
		o, err := redis.ParseFailoverURL(plain)
		if err != nil {
			return nil, withoutURL(err)
		}
		if o.MasterName == "" {
			return nil, errors.New("redis URL: redis+sentinel:// needs ?master_name=…, the name that the sentinels know the master by")
		}
		if o.ReplicaOnly || o.UseDisconnectedReplicas || o.RouteByLatency || o.RouteRandomly {
			return nil, errors.New("redis URL: replica_only, use_disconnected_replicas, route_by_latency and route_randomly read from replicas, which lag behind; leave them out")
		}
		return fromFailover(o), nil
	case "cluster":
		o, err := redis.ParseClusterURL(plain)
		if err != nil {
			return nil, withoutURL(err)
		}
		if o.ReadOnly || o.RouteByLatency || o.RouteRandomly {
			return nil, errors.New("redis URL: read_only, route_by_latency and route_randomly read from replicas, which lag behind; leave them out")
		}
		return fromCluster(o), nil
	default:
		return nil, fmt.Errorf("redis URL: scheme %q is none of redis, rediss, redis+sentinel, redis+cluster", scheme)
	}
}

// withoutURL drops the URL, which may hold a password, from a parse error.
func withoutURL(err error) error {
	var parse *url.Error
	if errors.As(err, &parse) {
		err = parse.Err
	}
	return fmt.Errorf("redis URL: %w", err)
}

func fromSimple(o *redis.Options) *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs: []string{o.Addr}, ClientName: o.ClientName, DB: o.DB, Protocol: o.Protocol,
		Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
		MaxRetries: o.MaxRetries, MinRetryBackoff: o.MinRetryBackoff, MaxRetryBackoff: o.MaxRetryBackoff,
		DialTimeout: o.DialTimeout, DialerRetries: o.DialerRetries, DialerRetryTimeout: o.DialerRetryTimeout,
		ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, ContextTimeoutEnabled: o.ContextTimeoutEnabled,
		PoolFIFO: o.PoolFIFO, PoolSize: o.PoolSize, PoolTimeout: o.PoolTimeout,
		MinIdleConns: o.MinIdleConns, MaxIdleConns: o.MaxIdleConns, MaxActiveConns: o.MaxActiveConns,
		ConnMaxIdleTime: o.ConnMaxIdleTime, ConnMaxLifetime: o.ConnMaxLifetime,
	}
}

func fromFailover(o *redis.FailoverOptions) *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs: o.SentinelAddrs, MasterName: o.MasterName, ClientName: o.ClientName, DB: o.DB, Protocol: o.Protocol,
		Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
		SentinelUsername: o.SentinelUsername, SentinelPassword: o.SentinelPassword,
		MaxRetries: o.MaxRetries, MinRetryBackoff: o.MinRetryBackoff, MaxRetryBackoff: o.MaxRetryBackoff,
		DialTimeout: o.DialTimeout, DialerRetries: o.DialerRetries, DialerRetryTimeout: o.DialerRetryTimeout,
		ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, ContextTimeoutEnabled: o.ContextTimeoutEnabled,
		PoolFIFO: o.PoolFIFO, PoolSize: o.PoolSize, PoolTimeout: o.PoolTimeout,
		MinIdleConns: o.MinIdleConns, MaxIdleConns: o.MaxIdleConns, MaxActiveConns: o.MaxActiveConns,
		ConnMaxIdleTime: o.ConnMaxIdleTime, ConnMaxLifetime: o.ConnMaxLifetime,
	}
}

func fromCluster(o *redis.ClusterOptions) *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs: o.Addrs, IsClusterMode: true, ClientName: o.ClientName, Protocol: o.Protocol,
		Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig, MaxRedirects: o.MaxRedirects,
		MaxRetries: o.MaxRetries, MinRetryBackoff: o.MinRetryBackoff, MaxRetryBackoff: o.MaxRetryBackoff,
		DialTimeout: o.DialTimeout, DialerRetries: o.DialerRetries, DialerRetryTimeout: o.DialerRetryTimeout,
		ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout, ContextTimeoutEnabled: o.ContextTimeoutEnabled,
		PoolFIFO: o.PoolFIFO, PoolSize: o.PoolSize, PoolTimeout: o.PoolTimeout,
		MinIdleConns: o.MinIdleConns, MaxIdleConns: o.MaxIdleConns, MaxActiveConns: o.MaxActiveConns,
		ConnMaxIdleTime: o.ConnMaxIdleTime, ConnMaxLifetime: o.ConnMaxLifetime,
	}
}

// NewClient connects to where o points with a client for locks alone: one try a
// call, nothing that takes longer than a second, deadlines of contexts kept. What
// o says about these is set aside; o itself is not changed. Close it at the end.
func NewClient(o *redis.UniversalOptions) redis.UniversalClient {
	lock := *o
	lock.MaxRetries = -1 // the loop of a Cluster client needs oneTry as well
	lock.DialTimeout = time.Second
	lock.DialerRetries = 1
	lock.ReadTimeout = time.Second
	lock.WriteTimeout = time.Second
	lock.PoolTimeout = time.Second
	lock.ContextTimeoutEnabled = true
	lock.MinIdleConns = max(1, lock.MinIdleConns) // a renewal does not wait for a dial
	// In a planned maintenance the server would stretch our read timeout to 10 s.
	lock.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewUniversalClient(&lock)
}

// oneTry is a command that go-redis sends once. Its Cluster client repeats a
// command that timed out inside the loop that follows redirects, and switching
// that off for the client would switch off redirects as well.
type oneTry struct{ *redis.Cmd }

func (oneTry) NoRetry() bool { return true }

// do sends one command once.
func do(ctx context.Context, c redis.UniversalClient, args ...any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, args...)
	_ = c.Process(ctx, oneTry{cmd}) // the error is the command's
	return cmd
}
