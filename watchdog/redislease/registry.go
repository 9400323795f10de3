package redislease

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"schoolbell/scripts"
	"schoolbell/watchdog"
)

// Registry is a watchdog.Registry in Redis: a hash with a TTL for each replica,
// and a sorted set of their ids by last heartbeat, so that nobody scans the key
// space. The hash decides who lives; the set is only an index.
type Registry struct {
	client redis.UniversalClient
	keys   scripts.Keys
}

var _ watchdog.Registry = (*Registry)(nil)

// storeWord says whether a replica's store answers, by whether it is unable to
// work.
var storeWord = map[bool]string{false: "ok", true: "away"}

// NewRegistry returns the registry behind client, which stays the caller's.
func NewRegistry(client redis.UniversalClient, keys scripts.Keys) *Registry {
	return &Registry{client: client, keys: keys}
}

// Beat implements watchdog.Registry. Hash and TTL are written in one transaction,
// so that no hash without an end is left behind; the index follows.
func (r *Registry) Beat(ctx context.Context, m watchdog.Member, ttl time.Duration) (time.Time, error) {
	now, err := r.client.Time(ctx).Result()
	if err != nil {
		return time.Time{}, fmt.Errorf("read the server's time: %w", err)
	}
	since := m.Since
	if since.IsZero() {
		since = now
	}
	key := r.keys.Replica(m.Instance)
	if _, err := r.client.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.HSet(ctx, key,
			"since", since.UTC().Format(time.RFC3339Nano), "version", m.Version, "address", m.Address,
			"schools_held", m.SchoolsHeld, "rate_per_second", strconv.FormatFloat(m.Rate, 'f', 1, 64),
			"store", storeWord[m.Unable], "unanswered", strings.Join(m.Unanswered, ","), "heartbeat_at", now.UTC().Format(time.RFC3339Nano))
		p.PExpire(ctx, key, ttl)
		return nil
	}); err != nil {
		return time.Time{}, fmt.Errorf("write replica %s: %w", m.Instance, err)
	}
	if err := r.client.ZAdd(ctx, r.keys.Replicas(), redis.Z{Score: float64(now.UnixMilli()), Member: m.Instance}).Err(); err != nil {
		return time.Time{}, fmt.Errorf("write the index of replicas: %w", err)
	}
	return now, nil
}

// Leave implements watchdog.Registry.
func (r *Registry) Leave(ctx context.Context, instance string) error {
	if err := r.client.Del(ctx, r.keys.Replica(instance)).Err(); err != nil {
		return fmt.Errorf("remove replica %s: %w", instance, err)
	}
	if err := r.client.ZRem(ctx, r.keys.Replicas(), instance).Err(); err != nil {
		return fmt.Errorf("remove replica %s from the index: %w", instance, err)
	}
	return nil
}

// Members implements watchdog.Registry. An entry of the index whose hash is gone
// is removed; a replica that comes back puts itself there again with its next
// heartbeat.
func (r *Registry) Members(ctx context.Context) ([]watchdog.Member, error) {
	instances, err := r.client.ZRange(ctx, r.keys.Replicas(), 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("read the index of replicas: %w", err)
	}
	if len(instances) == 0 {
		return nil, nil
	}
	hashes := make([]*redis.MapStringStringCmd, len(instances))
	if _, err := r.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, instance := range instances {
			hashes[i] = p.HGetAll(ctx, r.keys.Replica(instance))
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read replicas: %w", err)
	}
	members := make([]watchdog.Member, 0, len(instances))
	var gone []any
	for i, instance := range instances {
		fields := hashes[i].Val()
		if len(fields) == 0 {
			gone = append(gone, instance)
			continue
		}
		members = append(members, memberOf(instance, fields))
	}
	if len(gone) > 0 {
		if err := r.client.ZRem(ctx, r.keys.Replicas(), gone...).Err(); err != nil {
			return nil, fmt.Errorf("remove gone replicas from the index: %w", err)
		}
	}
	return members, nil
}

// memberOf reads a hash that people may have written too: what does not parse is
// left empty, the replica is there all the same.
func memberOf(instance string, fields map[string]string) watchdog.Member {
	m := watchdog.Member{Instance: instance, Version: fields["version"], Address: fields["address"]}
	m.Since, _ = time.Parse(time.RFC3339Nano, fields["since"])
	m.Heartbeat, _ = time.Parse(time.RFC3339Nano, fields["heartbeat_at"])
	m.SchoolsHeld, _ = strconv.Atoi(fields["schools_held"])
	m.Rate, _ = strconv.ParseFloat(fields["rate_per_second"], 64)
	m.Unable = fields["store"] == storeWord[true]
	if names := fields["unanswered"]; names != "" {
		m.Unanswered = strings.Split(names, ",")
	}
	return m
}
