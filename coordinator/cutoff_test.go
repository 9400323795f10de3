package coordinator_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
)

// cutOff is one replica's way to the store, lost from a moment on for a while.
type cutOff struct {
	coordinator.Queue
	from, until time.Time
}

func (c *cutOff) away() error {
	if now := time.Now(); !now.Before(c.from) && now.Before(c.until) {
		return errAway
	}
	return nil
}

func (c *cutOff) Record(ctx context.Context, r school.BatchRecord) error {
	if err := c.away(); err != nil {
		return err
	}
	return c.Queue.Record(ctx, r)
}

func (c *cutOff) Ping(ctx context.Context) error {
	if err := c.away(); err != nil {
		return err
	}
	return c.Queue.Ping(ctx)
}

func (c *cutOff) Due(ctx context.Context, horizon time.Duration) ([]school.Due, error) {
	if err := c.away(); err != nil {
		return nil, err
	}
	return c.Queue.Due(ctx, horizon)
}

// TestInterleaving16AReplicaThatLostTheStoreLosesItsSchools: what it sent and cannot record is
// known to it alone, and yet it must not keep the school from those that have a
// store for as long as it cannot.
func TestInterleaving16AReplicaThatLostTheStoreLosesItsSchools(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		lost := &cutOff{Queue: w.outbox, from: time.Now().Add(250 * time.Millisecond), until: time.Now().Add(time.Hour)}
		w.outbox.accept("A", 1000)
		w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Queue = lost })
		w.pass(250 * time.Millisecond)
		require.Equal(w, "r1", w.arbiter.heldBy("A"))
		w.tick(w.start("r2"), 10*time.Second)
		w.pass(2 * time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("A"), "half a minute without progress, a lease, and a tick")
		require.Len(w, w.receiver.of("A"), 6, "the batch that was not recorded came twice")

		// Its results are void when the store is there again.
		w.pass(time.Hour)
		require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("A"))
		require.Len(w, w.receiver.of("A"), 6)
		w.judge("A", limit, rest)
	})
}

// TestABlinkOfTheStoreRepeatsNothing: for as long as a failover takes, the owner
// keeps its school and records what it sent.
func TestABlinkOfTheStoreRepeatsNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		lost := &cutOff{Queue: w.outbox, from: time.Now().Add(250 * time.Millisecond), until: time.Now().Add(time.Minute)}
		w.outbox.accept("A", 1000)
		w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Queue = lost })
		w.pass(250 * time.Millisecond)
		w.tick(w.start("r2"), 10*time.Second)
		w.pass(10 * time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("A"))
		require.Len(w, w.receiver.of("A"), 5, "each once")
	})
}

// TestAStoreThatIsAwayForAllRepeatsNothing: nobody could do better, so the owners
// keep their schools until they can record.
func TestAStoreThatIsAwayForAllRepeatsNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		const schools = 10
		from, until := time.Now().Add(250*time.Millisecond), time.Now().Add(10*time.Minute)
		for i := range schools {
			w.outbox.accept(fmt.Sprintf("school-%d", i), 1000)
		}
		w.unable = map[string]bool{}
		for _, name := range []string{"r1", "r2", "r3"} {
			w.tick(w.start(name, func(_ *coordinator.Config, d *coordinator.Deps) {
				d.Queue = &cutOff{Queue: w.outbox, from: from, until: until}
			}), 10*time.Second)
			w.mu.Lock()
			w.unable[name] = true // the next heartbeats tell
			w.mu.Unlock()
		}
		w.pass(20 * time.Minute)
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states(id), id)
			require.Len(w, w.receiver.of(id), 5, "each once")
		}
	})
}
