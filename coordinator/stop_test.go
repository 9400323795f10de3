package coordinator_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
)

func TestAGracefulStopFinishesWhatIsOnTheWire(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.receiver.takes(8 * time.Second)
		for _, id := range []string{"A", "B", "C"} {
			w.outbox.accept(id, 400)
			r.Wake(id)
		}
		w.pass(time.Second)
		w.told = nil
		began := time.Now()
		w.halt(r)
		require.Equal(w, 7*time.Second, time.Since(began), "as long as the calls")
		calls := len(w.script.calls)
		for _, id := range []string{"A", "B", "C"} {
			require.Equal(w, batches(1), w.sizes(id))
			require.Equal(w, map[school.State]int{school.Success: 200, school.Pending: 200}, w.outbox.states(id))
			require.Empty(w, w.arbiter.heldBy(id))
			require.Empty(w, w.arbiter.state(id).Open)
			require.Contains(w, w.told, id)
		}
		require.Empty(w, w.log.events("turn_failed"))
		w.pass(time.Hour)
		require.Len(w, w.script.calls, calls, "nothing comes after Run has returned")
	})
}

func TestARollingRestartSendsEverythingOnce(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r1, r2 := w.start("r1"), w.start("r2")
		for i := range 20 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 3000)
			r1.Wake(id)
		}
		w.pass(550 * time.Millisecond)
		w.halt(r1)
		r3 := w.start("r3")
		w.pass(550 * time.Millisecond)
		w.halt(r2)
		began := time.Now()
		_ = r3
		w.pass(time.Minute)
		seen := map[string]int{}
		var last time.Time
		for _, a := range w.receiver.of("") {
			last = latestOf(last, a.end)
			for _, id := range a.ids {
				seen[id]++
			}
		}
		require.Len(w, seen, 60_000)
		for id, n := range seen {
			require.Equal(w, 1, n, id)
		}
		require.Less(w, last.Sub(began), 5*time.Second, "no tick was needed")
	})
}

// TestAStopAtAnyStepLeavesNothing stops the replica during each call of a turn.
func TestAStopAtAnyStepLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"peek", "work in", "hold", "open", "bind", "reconcile", "page", "ensure", "reserve", "check", "claim", "send", "record", "settle", "release"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				var r *replica
				w.script.onCall(op, func(ctx context.Context, n int) error {
					if n == 1 {
						synctest.Wait() // the peers have been told of the notice
						w.mu.Lock()
						w.told = nil
						w.mu.Unlock()
						r.stop()
						synctest.Wait()
						return ctx.Err()
					}
					return nil
				})
				r = w.start("r1")
				w.outbox.accept("A", 400)
				r.Wake("A")
				w.pass(time.Minute)
				w.halt(r)
				require.Empty(w, w.arbiter.heldBy("A"))
				require.Zero(w, r.Working())
				require.Zero(w, w.outbox.unsettled("A"))
				if op != "release" {
					require.LessOrEqual(w, len(w.sizes("A")), 1, "no next batch")
				}
				require.Contains(w, w.told, "A", "the peers learn of the interrupted school")

				w.script.onCall(op, nil)
				w.start("r2")
				w.pass(time.Minute)
				require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("A"))
				require.Equal(w, batches(2), w.sizes("A"), "each once")
			})
		})
	}
}

func TestEveryInterruptedSchoolIsToldAtTheStop(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		const schools = 250 // more than one message to the peers takes
		r := w.start("r1", slots(schools))
		w.receiver.takes(time.Second)
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 400)
			r.Wake(id)
		}
		w.pass(500 * time.Millisecond)
		w.mu.Lock()
		w.told = nil
		w.mu.Unlock()
		w.halt(r)
		told := map[string]bool{}
		for _, id := range w.told {
			told[id] = true
		}
		require.Len(w, told, schools)
	})
}

func TestWorkersMayBeWaitingForRoomAtTheStop(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		room := w.room(200)
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes[0].Room = room })
		w.receiver.takes(5 * time.Second)
		for i := range 10 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 200)
			r.Wake(id)
		}
		w.pass(time.Second)
		w.halt(r)
		require.Len(w, w.receiver.of(""), 1)
		require.Zero(w, room.InUse())
	})
}
