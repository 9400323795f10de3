package coordinator_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

func TestAWakeStormOfARestingSchoolCostsNoTurns(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", limit+1)
		r.Wake("A")
		w.pass(10 * time.Second)
		require.Equal(w, batches(25), w.sizes("A"))
		w.script.forget()
		for range 10_000 {
			r.Wake("A")
			r.Hear("A")
			time.Sleep(time.Millisecond)
		}
		require.NoError(w, r.Tick(w.Context()))
		w.pass(time.Second)
		require.Empty(w, w.script.of("A"))
		w.pass(3 * time.Minute)
		require.Equal(w, append(batches(25), 1), w.sizes("A"))
		require.Equal(w, rest, gap(w.receiver.of("A"), 25))
		require.Equal(w, 1, w.script.count("hold"))
	})
}

func TestAWakeDuringATurnIsNotLost(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.script.onCall("release", func(_ context.Context, n int) error {
			if n == 1 { // the last page was empty, and now there is work
				w.outbox.accept("A", 1)
				r.Wake("A")
			}
			return nil
		})
		w.outbox.accept("A", 200)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, []int{200, 1}, w.sizes("A"))
		require.Zero(w, gap(w.receiver.of("A"), 1))
	})
}

func TestWakesWhileATurnRunsCostOneMoreTurn(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 200)
		r.Wake("A")
		w.pass(50 * time.Millisecond)
		for range 10_000 {
			r.Wake("A")
		}
		w.pass(time.Minute)
		require.Equal(w, 2, w.script.count("peek"))
		require.Equal(w, 1, w.script.count("hold"), "and no lock where the work is done")
	})
}

func TestHintsThatAreNoIdsAreIgnored(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		before := len(w.script.calls)
		r.Hear("", "a b", "{A}", "A:lock", strings.Repeat("x", 65), "schule-ü", "A\n")
		w.pass(time.Hour)
		require.Len(w, w.script.calls, before)
	})
}

func TestInterleaving19WakeTellsThePeersAndHearDoesNot(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		r.Hear("A")
		w.pass(time.Second)
		require.Empty(w, w.told)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, []string{"A"}, w.told)
	})
}

func TestPeersThatCannotBeToldCostNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("tell", func(ctx context.Context, _ int) error {
			<-ctx.Done()
			return ctx.Err()
		})
		r := w.start("r1")
		began := time.Now()
		for i := range 2000 { // more than are kept
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1)
			r.Wake(id)
		}
		require.Equal(w, began, time.Now(), "waking never waits")
		w.pass(time.Minute)
		require.Len(w, w.receiver.of(""), 2000)
	})
}

func TestInterleaving06TheTickFindsWhatNobodyToldOf(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 1)
		w.outbox.accept("later", 1, func(n *school.Notice) { n.ScheduledAt = time.Now().Add(15 * time.Second) })
		w.outbox.accept("much later", 1, func(n *school.Notice) { n.ScheduledAt = time.Now().Add(time.Hour) })
		w.pass(time.Minute)
		require.Empty(w, w.receiver.of(""))
		w.outbox.accept("soon", 1, func(n *school.Notice) { n.ScheduledAt = time.Now().Add(15 * time.Second) })
		due := time.Now().Add(15 * time.Second)
		require.NoError(w, r.Tick(w.Context()))
		w.pass(time.Second)
		require.Equal(w, []int{1}, w.sizes("A"))
		require.Equal(w, []int{1}, w.sizes("later"))
		w.pass(time.Minute)
		require.Equal(w, due, w.receiver.of("soon")[0].start, "in its time, not at a tick")
		require.Empty(w, w.sizes("much later"))
		require.NoError(w, r.Tick(w.Context()))
	})
}

func TestInterleaving06TheAgendaIsFilledAtTheStart(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.accept("A", 1)
		began := time.Now()
		w.start("r1")
		w.pass(time.Second)
		require.Equal(w, began, w.receiver.of("A")[0].start)
	})
}

func TestATickThatFailsSaysSo(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.script.onCall("due", at(2, errAway))
		require.ErrorIs(w, r.Tick(w.Context()), school.ErrUnavailable)
		w.script.onCall("expire", at(2, errAway))
		require.ErrorIs(w, r.Tick(w.Context()), school.ErrUnavailable)
		w.script.onCall("sweep", at(1, errAway))
		require.ErrorIs(w, r.Sweep(w.Context()), school.ErrUnavailable)
		require.NoError(w, r.Sweep(w.Context()))
	})
}

func TestATickGoesOnWithAClosingForAWhile(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		steps := 0
		w.outbox.expire = func() int { // 100 ms a step
			time.Sleep(100 * time.Millisecond)
			if steps++; steps == 8 {
				return 0
			}
			return 1
		}
		require.NoError(w, r.Tick(w.Context()))
		require.Equal(w, 8, steps, "until nothing is left to do")
		began := time.Now()
		require.NoError(w, r.Tick(w.Context()))
		require.Equal(w, 2*time.Second, time.Since(began), "and not for ever")
	})
}
