package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// redisCheckTimeout bounds the look at the start; a Redis that is away then is
	// waited for later, as at any other time (R17).
	redisCheckTimeout = 3 * time.Second
	// redisCheckEvery is how old a look may be: settings change and masters are
	// replaced while a replica runs.
	redisCheckEvery = time.Minute
)

// unfitRedis is a Redis that must not be used as it is.
type unfitRedis struct {
	state string // in a few words, for /readyz
	text  string // what is wrong and what to do
}

func (e *unfitRedis) Error() string { return e.text }

// State is what /readyz shows.
func (e *unfitRedis) State() string { return e.state }

// redisCheck looks at how Redis is set up: at the start, and then as often as
// somebody asks how this replica is.
type redisCheck struct {
	client redis.UniversalClient
	every  time.Duration

	mu     sync.Mutex
	looked time.Time // zero: look again
	unfit  error
}

// start refuses a Redis that is unfit. One that cannot be asked, because it is
// away or says nothing of itself, is taken as it is, with a warning.
func (c *redisCheck) start(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, redisCheckTimeout)
	defer cancel()
	err := fitRedis(ctx, c.client)
	var unfit *unfitRedis
	if errors.As(err, &unfit) {
		return fmt.Errorf("redis.url: %w", err)
	}
	var silence *net.OpError
	if errors.As(err, &silence) && silence.Op == "dial" {
		return nil // redisWatch has said so
	}
	if err != nil {
		log.Warn("how Redis is set up could not be read: see to it that its maxmemory-policy is noeviction",
			"event", "redis_unchecked", "error", err)
	}
	return nil
}

// health is nil where Redis answers and is, as far as is known, fit.
func (c *redisCheck) health(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.client.Ping(ctx).Err(); err != nil {
		c.looked = time.Time{} // what comes back may be another server
		return err
	}
	if time.Since(c.looked) >= c.every {
		var unfit *unfitRedis
		if err := fitRedis(ctx, c.client); err == nil || errors.As(err, &unfit) {
			c.unfit = err
		} // else nothing is known that was not known before
		c.looked = time.Now()
	}
	return c.unfit
}

// fitRedis says what is wrong with the Redis behind c: an *unfitRedis, or another
// error where that cannot be read. Of a Cluster every node is looked at, since
// each of them may come to be a master; behind Sentinel the master.
func fitRedis(ctx context.Context, c redis.UniversalClient) error {
	cluster, ok := c.(*redis.ClusterClient)
	if !ok {
		single, ok := c.(*redis.Client)
		if !ok {
			return fmt.Errorf("a client of type %T is not known", c)
		}
		return fitServer(ctx, single, false)
	}
	var (
		mu   sync.Mutex
		errs []error
	)
	err := cluster.ForEachShard(ctx, func(ctx context.Context, node *redis.Client) error {
		err := fitServer(ctx, node, true)
		mu.Lock()
		defer mu.Unlock()
		errs = append(errs, err)
		return nil
	})
	if redis.HasErrorPrefix(err, "This instance has cluster support disabled") {
		return &unfitRedis{"no cluster", "the server is not part of a Redis Cluster; write redis://host:port (or redis+sentinel://) instead of redis+cluster://"}
	}
	err = errors.Join(append(errs, err)...)
	var unfit *unfitRedis
	if errors.As(err, &unfit) {
		return unfit // one is enough, and all there is to do about
	}
	return err
}

func fitServer(ctx context.Context, c *redis.Client, cluster bool) error {
	info, err := c.Info(ctx).Result()
	if err == nil && !cluster && infoField(info, "cluster_enabled") == "1" {
		return &unfitRedis{"part of a cluster", fmt.Sprintf("%s is a node of a Redis Cluster; write redis+cluster://host:port instead of redis://", serverName(c))}
	}
	policy := infoField(info, "maxmemory_policy")
	if policy == "" { // INFO may be forbidden, or leave this out
		var given map[string]string
		given, configErr := c.ConfigGet(ctx, "maxmemory-policy").Result()
		policy = given["maxmemory-policy"]
		err = errors.Join(err, configErr)
	}
	switch policy {
	case "noeviction":
		return nil
	case "":
		return fmt.Errorf("%s does not say its maxmemory-policy: %w", serverName(c), errors.Join(err, errSilent))
	}
	return &unfitRedis{"may evict keys", fmt.Sprintf("%s has maxmemory-policy %s: when its memory is full it throws keys away, locks first and the schools' counts with them; "+
		"set it to noeviction (redis-cli CONFIG SET maxmemory-policy noeviction, and in redis.conf or the service's parameters so that it stays), or give schoolbell a Redis of its own", serverName(c), policy)}
}

var errSilent = errors.New("neither INFO nor CONFIG GET shows it")

func serverName(c *redis.Client) string {
	if addr := c.Options().Addr; strings.Contains(addr, ":") {
		return "the Redis at " + addr
	}
	return "the master behind Sentinel"
}

// infoField is one line of the answer to INFO.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
