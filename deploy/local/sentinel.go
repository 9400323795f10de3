package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// MasterName is the name under which Sentinel knows its master.
const MasterName = "schoolbell"

// Sentinel is a private Redis with a replica, watched by three Sentinels that
// promote the replica when the master has been silent for half a second.
type Sentinel struct {
	// Master and Replica are named for what they were at the start; a failover
	// swaps their parts. Replication is asynchronous: a failover loses what
	// the replica did not have, unless the writer waited (WAIT) and looked at
	// the answer. A master that was replaced and is restarted is a master
	// again, until Sentinel makes it a replica 10 to 20 s later.
	Master, Replica *Redis

	// Sentinels may be paused and killed too; two of the three must agree.
	Sentinels []*Redis
}

// StartSentinel starts them and returns when the replica is in sync and all
// Sentinels know each other. It takes two to three seconds. The caller closes
// it.
func StartSentinel(ctx context.Context) (*Sentinel, error) {
	return StartSentinelWith(ctx, RedisConfig{})
}

// StartSentinelWith is StartSentinel with a configuration of the two that hold
// data.
func StartSentinelWith(ctx context.Context, cfg RedisConfig) (_ *Sentinel, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s := &Sentinel{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start sentinel: %w", err), s.Close())
		}
	}()
	// By default the master waits 5 s for more replicas before it lets the
	// first one sync.
	cfg.Args = append(slices.Clone(cfg.Args), "--repl-diskless-sync-delay", "0")
	if s.Master, err = StartRedis(ctx, cfg); err != nil {
		return nil, err
	}
	cfg.Args = append(slices.Clone(cfg.Args), "--replicaof", "127.0.0.1 "+fmt.Sprint(s.Master.port))
	if s.Replica, err = StartRedis(ctx, cfg); err != nil {
		return nil, err
	}
	// Before the Sentinels: they learn of a replica by asking the master, every
	// 10 s only.
	err = poll(ctx, nil, func() (bool, error) {
		info, err := s.Replica.ask(ctx, "INFO replication")
		return err == nil && strings.Contains(info, "master_link_status:up"), nil
	})
	if err != nil {
		return nil, err
	}
	role := redisRole{args: s.sentinelArgs}
	if s.Sentinels, err = startAll(ctx, []redisRole{role, role, role}); err != nil {
		return nil, err
	}
	err = poll(ctx, nil, func() (bool, error) {
		for _, r := range s.Sentinels {
			info, err := r.ask(ctx, "INFO sentinel")
			if err != nil || !strings.Contains(info, "status=ok") || !strings.Contains(info, "slaves=1,sentinels=3") {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// sentinelArgs writes the configuration, which a Sentinel then keeps its state
// in, unless it is there from an earlier start.
func (s *Sentinel) sentinelArgs(r *Redis) ([]string, error) {
	path := filepath.Join(r.dataDir(), fmt.Sprintf("sentinel-%d.conf", r.port))
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		conf := fmt.Sprintf(`bind 127.0.0.1
port %d
dir %s
sentinel monitor %s 127.0.0.1 %d 2
sentinel down-after-milliseconds %[3]s 500
sentinel failover-timeout %[3]s 2000
`, r.port, r.dataDir(), MasterName, s.Master.port)
		if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
			return nil, err
		}
	}
	return []string{path, "--sentinel"}, nil
}

// Addrs are the Sentinels' "127.0.0.1:port".
func (s *Sentinel) Addrs() []string { return addrs(s.Sentinels) }

// MasterAddr is the address of the master as most of the Sentinels that answer
// see it now.
func (s *Sentinel) MasterAddr(ctx context.Context) (string, error) {
	votes := make(map[string]int)
	for _, r := range s.Sentinels {
		info, err := r.ask(ctx, "INFO sentinel")
		if err != nil {
			continue
		}
		_, rest, ok := strings.Cut(info, ",address=")
		if !ok {
			continue
		}
		addr, _, _ := strings.Cut(rest, ",")
		if votes[addr]++; votes[addr] >= 2 {
			return addr, nil
		}
	}
	return "", fmt.Errorf("ask sentinels for the master: no two agree: %v", votes)
}

// Failover makes Sentinel promote the replica although the master lives, which
// becomes a replica and answers READONLY. It returns when that was begun.
func (s *Sentinel) Failover(ctx context.Context) error {
	_, err := s.Sentinels[0].Do(ctx, "SENTINEL FAILOVER "+MasterName)
	return err
}

// Close ends all of them and removes their folders.
func (s *Sentinel) Close() error {
	return closeAll(append(append([]*Redis(nil), s.Sentinels...), s.Replica, s.Master))
}
