package redislease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"schoolbell/scripts"
)

// Slots decides which replica runs a cluster-wide job in one slot of its
// schedule: who takes the slot first. It is never given back, so that a job
// which ends quickly does not run again on a replica whose clock is behind (R16).
//
// It does not make a job run exactly once: a replica that takes the slot and
// dies leaves it unrun until the next one. Jobs are idempotent.
type Slots struct {
	client   redis.UniversalClient
	keys     scripts.Keys
	instance string
}

// NewSlots returns the slots as seen by instance. client stays the caller's.
func NewSlots(client redis.UniversalClient, keys scripts.Keys, instance string) *Slots {
	return &Slots{client: client, keys: keys, instance: instance}
}

// Take takes the current slot of the job called name, which is due once every
// period: the server's time, rounded down to the period. It says whether this
// call took it, and names the slot by its RFC 3339 time. The slot is remembered
// for two periods. A period is at least 1 ms.
func (s *Slots) Take(ctx context.Context, name string, period time.Duration) (taken bool, slot string, err error) {
	if period < time.Millisecond {
		return false, "", fmt.Errorf("take slot of job %s: period %s is below a millisecond", name, period)
	}
	now, err := s.client.Time(ctx).Result()
	if err != nil {
		return false, "", fmt.Errorf("take slot of job %s: read the server's time: %w", name, err)
	}
	at := time.UnixMicro(now.UnixMicro() - now.UnixMicro()%period.Microseconds()).UTC()
	slot = at.Format(time.RFC3339Nano)
	taken, err = s.TakeAt(ctx, name, slot, 2*period)
	return taken, slot, err
}

// TakeAt takes a slot that the caller names, for schedules that are not a fixed
// period: the scheduled time, the same text on every replica. ttl is how long it
// is remembered, at least 1 ms; two periods are enough for replicas whose clocks
// differ by less than one.
func (s *Slots) TakeAt(ctx context.Context, name, slot string, ttl time.Duration) (taken bool, err error) {
	if ttl < time.Millisecond {
		return false, fmt.Errorf("take slot %s of job %s: time to live %s is below a millisecond", slot, name, ttl)
	}
	key := s.keys.Job(name, slot)
	var firstErr error
	for range 2 {
		err = do(ctx, s.client, "set", key, s.instance, "px", ttl.Milliseconds(), "nx").Err()
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, redis.Nil) && firstErr == nil:
			return false, nil
		case errors.Is(err, redis.Nil):
			// The first try had no answer: if the slot carries our name, it took it.
			owner, err := do(ctx, s.client, "get", key).Text()
			if err != nil {
				return false, fmt.Errorf("take slot %s of job %s: read who has it: %w", slot, name, err)
			}
			return owner == s.instance, nil
		}
		firstErr = err
	}
	return false, fmt.Errorf("take slot %s of job %s: %w", slot, name, err)
}
