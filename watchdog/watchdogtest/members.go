package watchdogtest

import (
	"context"
	"time"

	"schoolbell/watchdog"
)

type member struct {
	watchdog.Member
	ends time.Time
}

var _ watchdog.Registry = (*Memory)(nil)

// Beat implements watchdog.Registry.
func (m *Memory) Beat(ctx context.Context, w watchdog.Member, ttl time.Duration) (time.Time, error) {
	now := time.Now()
	return now, m.reach(ctx, func() {
		w.Heartbeat = now
		if w.Since.IsZero() {
			w.Since = now
		}
		m.members[w.Instance] = member{Member: w, ends: now.Add(ttl)}
	})
}

// Leave implements watchdog.Registry.
func (m *Memory) Leave(ctx context.Context, instance string) error {
	return m.reach(ctx, func() { delete(m.members, instance) })
}

// Members implements watchdog.Registry.
func (m *Memory) Members(ctx context.Context) ([]watchdog.Member, error) {
	var all []watchdog.Member
	err := m.reach(ctx, func() {
		for _, w := range m.members {
			if time.Now().Before(w.ends) {
				all = append(all, w.Member)
			}
		}
	})
	return all, err
}

// reach runs step at the server, unless it is cut off.
func (m *Memory) reach(ctx context.Context, step func()) error {
	reached := false
	m.with(func() {
		if reached = !m.cut && ctx.Err() == nil; reached {
			step()
		}
	})
	if reached {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}
