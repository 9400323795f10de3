package coordinator_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// blind is a replica's way to the receiver that is lost for as long as it says.
type blind struct {
	next  sender.Sender
	until time.Time
	tried int
}

func (b *blind) Longest() time.Duration { return b.next.Longest() }

func (b *blind) Send(ctx context.Context, batch sender.Batch) []sender.Result {
	if time.Now().Before(b.until) {
		b.tried++
		return sender.Fill(batch.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed})
	}
	return b.next.Send(ctx, batch)
}

// TestInterleaving17AReplicaThatLostItsWayKeepsNoSchoolFromTheOthers: the peers that found a
// school held wait for the end of its lease, a minute. They must hear of it when
// its owner could not send, also without a dispatch tick.
func TestInterleaving17AReplicaThatLostItsWayKeepsNoSchoolFromTheOthers(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		lost := &blind{next: w.receiver, until: time.Now().Add(10 * time.Minute)}
		w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes = []coordinator.Lane{{Name: "fcm", Sender: lost}}
		})
		seeing := w.start("r2")
		w.start("r3")
		const schools = 30
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 300)
			seeing.Wake(id)
		}
		w.pass(7 * time.Second) // what was not sent comes again after 5 s, and up to a fifth more
		require.Positive(w, lost.tried, "the lost one was the first for some")
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			require.Equal(w, map[school.State]int{school.Success: 300}, w.outbox.states(id), id)
		}
		tried := lost.tried

		// It does not go first any more, and finds nothing left to fail with.
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1)
			seeing.Wake(id)
		}
		began := time.Now()
		w.pass(10 * time.Second)
		for _, a := range w.receiver.of("") {
			if a.start.After(began) {
				require.LessOrEqual(w, a.start.Sub(began), 30*time.Millisecond, a.school)
			}
		}
		require.Equal(w, tried, lost.tried)

		// A way that is there again is found, by one message while the others go on,
		// and the schools come home.
		w.pass(10 * time.Minute)
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1)
			seeing.Wake(id)
		}
		w.pass(10 * time.Second)
		w.script.forget()
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1)
			seeing.Wake(id)
		}
		began = time.Now()
		w.pass(10 * time.Second)
		now := 0
		for _, a := range w.receiver.of("") {
			if a.start.Equal(began) {
				now++
			}
		}
		require.Equal(w, schools, now, "each went at once, by its preferred replica")
	})
}

// TestAFailureIsToldOnce: a turn that fails under the lock is told to the peers,
// who may do better, and a school that fails everywhere is not passed round.
func TestAFailureIsToldOnce(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("page", func(context.Context, int) error { return errAway })
		r := w.start("r1")
		w.start("r2")
		w.start("r3")
		w.outbox.accept("A", 1)
		r.Hear("A")
		w.pass(10 * time.Minute)
		require.NotEmpty(w, w.told, "who found the school held must not wait for the end of its lease")
		require.LessOrEqual(w, len(w.told), 3)
		require.LessOrEqual(w, w.script.count("page"), 3*(10*2+8), "each backs off to half a minute")
	})
}
