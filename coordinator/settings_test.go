package coordinator_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
)

// TestInterleaving01ALowerLimitActsInTheTurnThatRuns: a turn of a school alone may last for a
// whole cycle, and the operator who lowers its limit means now.
func TestInterleaving01ALowerLimitActsInTheTurnThatRuns(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.start("r1")
		r := w.start("r2")
		w.outbox.accept("A", 2000)
		r.Wake("A")
		w.pass(530 * time.Millisecond) // five batches are out or done
		sent := len(w.receiver.of("A"))
		require.Less(w, sent, 8)
		low, pause := 500, time.Minute
		w.outbox.put(school.School{ID: "A", Limit: &low, Rest: &pause})
		changed := time.Now()
		w.pass(30 * time.Second)
		for _, a := range w.receiver.of("A")[sent:] {
			require.Fail(w, "sent by the old limit", "%d messages %s after the change", len(a.ids), a.start.Sub(changed))
		}
		w.pass(10 * time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 2000}, w.outbox.states("A"))
		as := w.receiver.of("A")
		require.GreaterOrEqual(w, gap(as, sent), pause)
		require.Less(w, gap(as, sent), pause+time.Second, "by the new rest, from the last call's end")
	})
}

// TestAnotherSenderActsInTheTurnThatRuns leaves no batch for the sender that the
// school has no more.
func TestAnotherSenderActsInTheTurnThatRuns(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		relay := newReceiver(w.script)
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes = append(d.Lanes, coordinator.Lane{Name: "relay", Sender: relay})
		})
		w.outbox.accept("A", 2000)
		r.Wake("A")
		w.pass(250 * time.Millisecond)
		require.Len(w, w.receiver.of("A"), 3)
		w.outbox.put(school.School{ID: "A", Sender: "relay"})
		w.pass(time.Minute)
		require.Len(w, w.receiver.of("A"), 3, "the one that was on the wire")
		require.Len(w, relay.of("A"), 7)
		require.Equal(w, 10*100*time.Millisecond, relay.of("A")[6].end.Sub(w.receiver.of("A")[0].start), "and no time was lost")
	})
}
