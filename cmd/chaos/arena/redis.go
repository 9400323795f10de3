package arena

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"schoolbell/deploy/local"
	"schoolbell/sender/simulator/verdict"
)

// Topology is how the Redis of an arena is set up.
type Topology int

const (
	Single   Topology = iota // one server
	Cluster                  // three masters that share the slots
	Sentinel                 // a master and a replica, watched by three Sentinels
)

func (a *Arena) startRedis(ctx context.Context) (err error) {
	cfg := a.cfg.Redis
	if a.cfg.Clocks {
		if a.clock, err = local.NewFakeClock(filepath.Join(a.dir, "redis-clock")); err != nil {
			return err
		}
		fake, err := a.clock.Env()
		if err != nil {
			return err
		}
		cfg.Env = append(fake, cfg.Env...)
	}
	switch a.cfg.Topology {
	case Single:
		a.Redis, err = local.StartRedis(ctx, cfg)
	case Cluster:
		a.Cluster, err = local.StartClusterWith(ctx, 3, cfg)
	case Sentinel:
		a.Sentinel, err = local.StartSentinelWith(ctx, cfg)
	default:
		err = fmt.Errorf("topology %d is none", a.cfg.Topology)
	}
	return err
}

func (a *Arena) closeRedis() error {
	var errs []error
	if a.Redis != nil {
		errs = append(errs, a.Redis.Close())
	}
	if a.Cluster != nil {
		errs = append(errs, a.Cluster.Close())
	}
	if a.Sentinel != nil {
		errs = append(errs, a.Sentinel.Close())
	}
	return errors.Join(errs...)
}

// redisURL is what the replicas are told.
func (a *Arena) redisURL() string {
	switch {
	case a.Cluster != nil:
		first, more := a.Cluster.Addrs()[0], a.Cluster.Addrs()[1:]
		return "redis+cluster://" + first + "?addr=" + strings.Join(more, "&addr=")
	case a.Sentinel != nil:
		first, more := a.Sentinel.Addrs()[0], a.Sentinel.Addrs()[1:]
		return "redis+sentinel://" + first + "/0?master_name=" + local.MasterName + "&addr=" + strings.Join(more, "&addr=")
	}
	return a.Redis.URL()
}

// redisServers are the addresses that a replica may be told of.
func (a *Arena) redisServers() []string {
	switch {
	case a.Cluster != nil:
		return a.Cluster.Addrs()
	case a.Sentinel != nil:
		return append(a.Sentinel.Addrs(), a.Sentinel.Master.Addr(), a.Sentinel.Replica.Addr())
	}
	return []string{a.Redis.Addr()}
}

// Masters are the servers that take writes now.
func (a *Arena) Masters(ctx context.Context) ([]*local.Redis, error) {
	switch {
	case a.Cluster != nil:
		return a.Cluster.Nodes, nil
	case a.Sentinel != nil:
		addr, err := a.Sentinel.MasterAddr(ctx)
		if err != nil {
			return nil, err
		}
		for _, r := range []*local.Redis{a.Sentinel.Master, a.Sentinel.Replica} {
			if r.Addr() == addr {
				return []*local.Redis{r}, nil
			}
		}
		return nil, fmt.Errorf("the master at %s is none of ours", addr)
	}
	return []*local.Redis{a.Redis}, nil
}

// Broke notes something that was done to the arena from outside, for the verdict.
func (a *Arena) Broke(kind, target string) {
	a.note(verdict.Fault{At: time.Now(), Kind: kind, Target: target})
}

// FlushRedis takes all data from Redis.
func (a *Arena) FlushRedis(ctx context.Context) error {
	masters, err := a.Masters(ctx)
	if err != nil {
		return fmt.Errorf("flush redis: %w", err)
	}
	for _, r := range masters {
		a.Broke("redis-flush", r.Addr())
		if _, err := r.Do(ctx, "FLUSHALL"); err != nil {
			return fmt.Errorf("flush redis: %w", err)
		}
	}
	return nil
}
