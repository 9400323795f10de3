package coordinator_test

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

func slots(n int) func(*coordinator.Config, *coordinator.Deps) {
	return func(c *coordinator.Config, _ *coordinator.Deps) { c.Slots = n }
}

// order is the schools in the order in which their batches went out, runs of
// one school taken together.
func (w *world) order() []string {
	var order []string
	for _, a := range w.receiver.of("") {
		order = append(order, a.school)
	}
	return slices.Compact(order)
}

func TestInterleaving18SchoolsAlternateOnOneSlot(t *testing.T) {
	t.Parallel()
	t.Run("after five batches", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			r := w.start("r1", slots(1))
			w.outbox.accept("A", 3000)
			w.outbox.accept("B", 3000)
			r.Wake("A", "B")
			w.pass(time.Hour)
			require.Equal(w, []string{"A", "B", "A", "B", "A", "B"}, w.order())
			require.Equal(w, batches(15), w.sizes("A"))
			require.Contains(w, w.told, "A", "another replica may have a slot free")
		})
	})
	t.Run("after two seconds", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			r := w.start("r1", slots(1))
			w.receiver.takes(900 * time.Millisecond)
			w.outbox.accept("A", 1200)
			w.outbox.accept("B", 1200)
			r.Wake("A", "B")
			w.pass(time.Hour)
			require.Equal(w, []string{"A", "B", "A", "B"}, w.order(), "three batches of 0.9 s each")
		})
	})
}

func TestNobodyYieldsWhereNobodyWaits(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1", slots(2))
		w.receiver.takes(time.Second)
		w.outbox.accept("A", 3000)
		w.outbox.accept("B", 3000)
		r.Wake("A", "B")
		w.pass(time.Hour)
		require.Equal(w, 2, w.script.count("hold"))
	})
}

func TestASlowReceiverDelaysOnlyItsOwnSchools(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		slow := newReceiver(w.script)
		slow.takes(14 * time.Second)
		r := w.start("r1", slots(4), func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes = append(d.Lanes, coordinator.Lane{Name: "relay", Sender: slow})
		})
		for i := range 8 {
			id := fmt.Sprintf("slow-%d", i)
			w.outbox.put(school.School{ID: id, Sender: "relay"})
			w.outbox.accept(id, 4800)
		}
		require.NoError(w, r.Tick(w.Context())) // the store knows each school's sender
		w.pass(time.Minute)
		for i := range 4 {
			w.outbox.accept(fmt.Sprintf("fast-%d", i), 200)
		}
		began := time.Now()
		require.NoError(w, r.Tick(w.Context()))
		w.pass(5 * time.Minute)
		var last time.Time
		for _, a := range w.receiver.of("") {
			last = latestOf(last, a.end)
		}
		require.Len(w, w.receiver.of(""), 4)
		require.Less(w, last.Sub(began), 30*time.Second, "the first free slots are theirs")
		require.Equal(w, 4, r.Working(), "and no slot stays empty")
	})
}

func latestOf(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// goroutines counts those of this world.
func (w *world) goroutines() int {
	bubble := regexp.MustCompile(`synctest bubble \d+`)
	stacks := make([]byte, 16<<20)
	own := bubble.Find(stacks[:runtime.Stack(stacks, false)])
	require.NotEmpty(w, own)
	own = slices.Clone(own)
	n := 0
	for _, other := range bubble.FindAll(stacks[:runtime.Stack(stacks, true)], -1) {
		if bytes.Equal(own, other) {
			n++
		}
	}
	return n
}

func TestARestingSchoolHoldsNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		own, pause := 200, time.Hour
		r := w.start("r1")
		w.pass(time.Second)
		before := w.goroutines()
		for i := range 300 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.put(school.School{ID: id, Limit: &own, Rest: &pause})
			w.outbox.accept(id, 300)
			r.Wake(id)
		}
		w.pass(10 * time.Second)
		require.Len(w, w.receiver.of(""), 300)
		require.Zero(w, r.Working())
		require.Zero(w, w.arbiter.lockCount())
		require.Equal(w, before, w.goroutines())
		w.pass(2 * time.Hour)
		require.Len(w, w.receiver.of(""), 600)
		require.Equal(w, before, w.goroutines())
	})
}

func TestAWaitingSchoolHoldsNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.takes(14 * time.Second)
		r := w.start("r1", slots(1))
		w.outbox.accept("busy", 1)
		r.Wake("busy")
		w.pass(time.Second)
		before := w.goroutines()
		for i := range 100 {
			id := fmt.Sprintf("waits-%d", i) // for the slot
			w.outbox.accept(id, 1)
			r.Wake(id)
		}
		w.pass(time.Second)
		require.Equal(w, 1, r.Working())
		require.Equal(w, 1, w.arbiter.lockCount())
		require.Equal(w, before, w.goroutines())
		w.receiver.takes(0)
		w.pass(time.Minute)
		require.Len(w, w.receiver.of(""), 101)

		before = w.goroutines()
		for i := range 100 {
			id := fmt.Sprintf("locked-%d", i) // for another's lease to end
			w.outbox.accept(id, 1)
			w.arbiter.lock(id, "other", time.Minute)
			r.Wake(id)
		}
		w.pass(time.Second)
		require.Zero(w, r.Working())
		require.Equal(w, before, w.goroutines())
		w.pass(time.Minute)
		require.Len(w, w.receiver.of(""), 201)
	})
}

func TestAThousandRestsThatEndInTenSecondsResumeOnTime(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		const schools = 1000
		own := 200
		for i := range schools {
			id := fmt.Sprintf("school-%03d", i)
			w.outbox.put(school.School{ID: id, Limit: &own})
			w.outbox.accept(id, 300)
		}
		w.script.onCall("due", at(1, errAway)) // woken one by one, 10 ms apart
		w.receiver.takes(50 * time.Millisecond)
		r := w.start("r1", slots(16))
		var over atomic.Bool
		w.script.onCall("send", func(context.Context, int) error {
			if r.Working() > 16 {
				over.Store(true)
			}
			return nil
		})
		for i := range schools {
			r.Wake(fmt.Sprintf("school-%03d", i))
			w.pass(10 * time.Millisecond)
		}
		w.tick(r, 10*time.Second)
		w.pass(10 * time.Minute)
		require.Len(w, w.receiver.of(""), 2*schools)
		var worst time.Duration
		for i := range schools {
			as := w.receiver.of(fmt.Sprintf("school-%03d", i))
			require.GreaterOrEqual(w, gap(as, 1), rest)
			worst = max(worst, gap(as, 1)-rest)
		}
		require.Less(w, worst, 10*time.Millisecond)
		require.False(w, over.Load(), "more turns than slots")
		for _, lag := range w.log.events("cooldown_completed") {
			require.InDelta(w, rest.Milliseconds(), lag["waited_ms"], 10)
		}
	})
}

func TestATurnThatMayHoldNoLongerGoesOnAtOnce(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("send", func(_ context.Context, n int) error {
			if n == 2 {
				w.arbiter.retire("A")
			}
			return nil
		})
		r := w.start("r1")
		w.outbox.accept("A", 1000)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, batches(5), w.sizes("A"))
		require.Equal(w, 2, w.script.count("hold"))
		for i := 1; i < 5; i++ {
			require.Zero(w, gap(w.receiver.of("A"), i), "no wait for the tick")
		}
	})
}

func TestInterleaving18PaceIsKeptWhoeverWakesTheSchool(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1", func(c *coordinator.Config, _ *coordinator.Deps) { c.Pace = 10 * time.Second })
		w.outbox.accept("A", 600)
		for range 60 {
			r.Wake("A")
			w.pass(time.Second)
		}
		require.Equal(w, batches(3), w.sizes("A"))
		for i := 1; i < 3; i++ {
			require.GreaterOrEqual(w, gap(w.receiver.of("A"), i), 10*time.Second)
			require.LessOrEqual(w, gap(w.receiver.of("A"), i), 12*time.Second+time.Millisecond)
		}
		require.Zero(w, r.Working())
		require.Empty(w, w.arbiter.heldBy("A"))
	})
}

func TestInterleaving18ThePreferredReplicaGoesFirst(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		replicas := []*replica{w.start("r1"), w.start("r2"), w.start("r3")}
		for i := range 60 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 200)
			accepted := time.Now()
			replicas[i%3].Wake(id)
			w.pass(time.Second)
			require.Equal(w, accepted, w.receiver.of(id)[0].start)
		}
		require.Equal(w, 60, w.script.count("send"))
		require.Equal(w, 60, w.script.count("hold"), "the others find it held or resting, or nothing at all")
	})
}

func TestInterleaving18WhereThePreferredReplicaIsNotThereAnotherGoesAMomentLater(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r1 := w.start("r1", slots(1))
		r2 := w.start("r2", slots(1))
		w.receiver.takes(10 * time.Second)
		w.outbox.accept("one", 1) // both slots are taken, of either replica in turn
		w.outbox.accept("two", 1)
		r1.Wake("one", "two")
		w.pass(time.Second)
		require.Equal(w, 2, r1.Working()+r2.Working(), "what one cannot take the other does")
		for _, id := range []string{"one", "two"} {
			require.LessOrEqual(w, w.receiver.of(id)[0].start.Sub(w.receiver.of("")[0].start), 30*time.Millisecond)
		}
	})
}

func TestReplicasShareManySchools(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r1 := w.start("r1")
		w.start("r2")
		w.start("r3")
		for i := range 90 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1000)
			r1.Wake(id)
		}
		w.pass(time.Minute)
		for i := range 90 {
			id := fmt.Sprintf("school-%d", i)
			require.Equal(w, batches(5), w.sizes(id))
			require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states(id))
		}
		owners := map[string]int{}
		w.outbox.mu.Lock()
		defer w.outbox.mu.Unlock()
		for _, b := range w.outbox.batches {
			owners[b.owner]++
		}
		require.Len(w, owners, 3)
	})
}

func TestOneSchoolIsNeverSentByTwo(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		rs := []*replica{w.start("r1"), w.start("r2"), w.start("r3")}
		for _, r := range rs {
			w.tick(r, time.Second)
		}
		own, pause := 500, 20*time.Second
		w.outbox.put(school.School{ID: "A", Limit: &own, Rest: &pause})
		for i := range 20 {
			w.outbox.accept("A", 170)
			rs[i%3].Wake("A")
			w.pass(3 * time.Second)
		}
		w.pass(5 * time.Minute)
		as := w.receiver.of("A")
		total := 0
		for i, a := range as {
			total += len(a.ids)
			if i > 0 {
				require.GreaterOrEqual(w, gap(as, i), time.Duration(0), "two calls at once")
				require.GreaterOrEqual(w, a.fence, as[i-1].fence)
			}
		}
		require.Equal(w, 3400, total)
		w.judge("A", own, pause)
	})
}

func TestMessagesCarryWhatTheReceiverNeeds(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 3, func(n *school.Notice) {
			n.Priority = school.Urgent
			n.ExpiresAt, n.ExpiresIn = time.Now().Add(9*time.Hour), time.Hour // clocks that disagree
			n.Content.Data = map[string]string{"k": "v"}
			n.TraceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		})
		r.Wake("A")
		w.pass(time.Second)
		ms := w.receiver.of("A")[0].messages
		require.Len(w, ms, 3)
		require.Same(w, ms[0].Content, ms[2].Content, "one content for all")
		require.Equal(w, sender.Message{ID: "1.2", Notice: "1", Token: secretToken, Content: ms[0].Content, Attempt: 1}, ms[1])
		require.Equal(w, sender.Urgent, ms[0].Content.Priority)
		require.Equal(w, map[string]string{"k": "v"}, ms[0].Content.Data)
		require.WithinDuration(w, time.Now().Add(8*time.Hour), ms[0].Content.ExpiresAt, 2*time.Hour)
		require.WithinDuration(w, time.Now().Add(time.Hour), ms[0].Content.ExpiresBy, 2*time.Second, "the store's clock says how long")
		started := w.log.events("batch_started")
		require.Equal(w, "0af7651916cd43dd8448eb211c80319c", started[0]["trace_id"])
		require.EqualValues(w, 0, started[0]["attempted_in_cycle"])
		require.EqualValues(w, 3, started[0]["batch"])
		require.Len(w, w.log.events("send_started"), 1)
		require.EqualValues(w, 3, w.log.events("batch_recorded")[0]["success"])
	})
}
