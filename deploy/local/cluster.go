package local

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// Cluster is a private Redis Cluster of masters without replicas.
type Cluster struct {
	// Nodes may be restarted, paused and killed one by one; what a killed node
	// held is unreachable until it is back, and so is the whole cluster
	// (cluster-require-full-coverage is on, as it is by default).
	Nodes []*Redis
}

// StartCluster starts n masters (at least 3, as Redis demands) and returns when
// all of them see all slots served. It takes two to three seconds. The caller
// closes it.
func StartCluster(ctx context.Context, n int) (*Cluster, error) {
	return StartClusterWith(ctx, n, RedisConfig{})
}

// StartClusterWith is StartCluster with a configuration of the nodes.
func StartClusterWith(ctx context.Context, n int, cfg RedisConfig) (_ *Cluster, err error) {
	if n < 3 {
		return nil, fmt.Errorf("start cluster: %d masters, want at least 3", n)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	cli, err := exec.LookPath("redis-cli")
	if err != nil {
		return nil, fmt.Errorf("start cluster: install the Debian package redis-tools: %w", err)
	}
	plain, err := plainRedis(cfg)
	if err != nil {
		return nil, err
	}
	role := redisRole{
		env: plain.env,
		args: func(r *Redis) ([]string, error) {
			args, err := plain.args(r)
			// Outside the data folder: who the node is survives a restart
			// without data.
			return append(args,
				"--cluster-enabled", "yes",
				"--cluster-config-file", filepath.Join(r.srv.dir, "nodes.conf"),
				"--cluster-node-timeout", "2000"), err
		},
		offsets: []int{busOffset},
	}
	roles := make([]redisRole, n)
	for i := range roles {
		roles[i] = role
	}
	nodes, err := startAll(ctx, roles)
	if err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	c := &Cluster{Nodes: nodes}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start cluster: %w", err), c.Close())
		}
	}()
	create := exec.CommandContext(ctx, cli, append([]string{"--cluster", "create", "--cluster-yes"}, c.Addrs()...)...)
	if out, err := create.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	err = poll(ctx, nil, func() (bool, error) {
		for _, node := range c.Nodes {
			info, err := node.ask(ctx, "CLUSTER INFO")
			if err != nil || !strings.Contains(info, "cluster_state:ok") ||
				!strings.Contains(info, "cluster_slots_ok:16384") ||
				!strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d\r\n", n)) {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Addrs are the nodes' "127.0.0.1:port".
func (c *Cluster) Addrs() []string { return addrs(c.Nodes) }

// Close ends the nodes and removes their folders.
func (c *Cluster) Close() error { return closeAll(c.Nodes) }

// startAll starts several at once: all of them or none.
func startAll(ctx context.Context, roles []redisRole) ([]*Redis, error) {
	var (
		wg      sync.WaitGroup
		servers = make([]*Redis, len(roles))
		errs    = make([]error, len(roles))
	)
	for i, role := range roles {
		wg.Go(func() { servers[i], errs[i] = startRedis(ctx, role) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, errors.Join(err, closeAll(servers))
	}
	return servers, nil
}

func closeAll(servers []*Redis) error {
	var errs []error
	for _, r := range servers {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	return errors.Join(errs...)
}

func addrs(servers []*Redis) []string {
	var list []string
	for _, r := range servers {
		list = append(list, r.Addr())
	}
	return list
}
