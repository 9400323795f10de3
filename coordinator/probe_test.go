package coordinator_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// TestADeadReceiverCostsASchoolOneBatchAndTheProbes: each attempt is one of the
// school's cycle, also where it never left this machine (R2). What is on the way
// when the receiver dies is lost to the cycle; from then on one message at a time
// finds out, of whichever school, and the operator is told once.
func TestADeadReceiverCostsASchoolOneBatchAndTheProbes(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var dead atomic.Bool
		dead.Store(true)
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			if dead.Load() {
				return sender.Fill(b.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed})
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		r := w.start("r1")
		const schools = 20
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1000)
			r.Wake(id)
		}
		w.pass(50 * time.Millisecond)
		w.tick(r, 10*time.Second)
		w.pass(10 * time.Minute)
		whole, probes := 0, 0
		for _, a := range w.receiver.of("") {
			if len(a.ids) == 1 {
				probes++
			} else {
				whole++
			}
		}
		require.Equal(w, schools, whole, "what went out before anybody could know")
		require.GreaterOrEqual(w, probes, 12, "it is tried on")
		require.LessOrEqual(w, probes, 6+10, "behind 1, 2, 4 … 60 s")
		require.Less(w, w.script.count("hold"), schools+3*probes, "and no lock is taken to no purpose")
		lines := w.log.events("sender_unanswered")
		require.Len(w, lines, 1, "once, not with each try")
		require.Equal(w, "WARN", lines[0]["level"])
		require.Equal(w, sender.CodeConnectFailed, lines[0]["code"])
		require.EqualValues(w, 1000, lines[0]["next_try_ms"])
		require.Empty(w, w.log.events("sender_answered"))
		state := r.Lanes()[0]
		require.True(w, state.Broken)
		require.Equal(w, sender.CodeConnectFailed, state.Code)

		dead.Store(false)
		before := len(w.receiver.of(""))
		w.pass(62 * time.Second)
		require.Len(w, w.log.events("sender_answered"), 1)
		as := w.receiver.of("")[before:]
		require.Len(w, as[0].ids, 1, "a probe opens it")
		found := as[0].start.Add(100 * time.Millisecond)
		served := map[string]bool{}
		for _, a := range as[1:] {
			require.False(w, a.start.Before(found), "one at a time")
			if a.start.Sub(found) <= 10*time.Millisecond {
				served[a.school] = true
			}
		}
		require.Len(w, served, schools, "and everybody goes on at once")
		w.pass(10 * time.Minute)
		for i := range schools {
			require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states(fmt.Sprintf("school-%d", i)))
		}
		require.False(w, r.Lanes()[0].Broken)
	})
}

// TestWhoeverProbesGivesThePlaceOn: a turn that has the place of the probe and
// ends without one, for whatever reason, keeps nobody else from it.
func TestWhoeverProbesGivesThePlaceOn(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"peek", "hold", "open", "page", "ensure", "reserve", "claim"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
					if n <= 2 {
						return sender.Fill(b.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed})
					}
					return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
				})
				r := w.start("r1")
				w.outbox.accept("A", 500)
				r.Wake("A")
				w.pass(500 * time.Millisecond) // closed for a second
				w.outbox.accept("B", 500)
				r.Wake("B")
				w.script.onCall(op, panics(w.script.count(op)+1)) // whoever comes first
				w.pass(4 * time.Second)
				require.Len(w, w.log.events("turn_panicked"), 1)
				opened := false
				for _, a := range w.receiver.of("")[2:] {
					opened = opened || len(a.ids) == 200
				}
				require.True(w, opened, "the other one, without a wait")
			})
		})
	}
}

// TestInterleaving17ASenderIsStoppedWhereNobodyIsAnswered: a receiver that answers another
// replica is there.
func TestInterleaving17ASenderIsStoppedWhereNobodyIsAnswered(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		reg := prometheus.NewRegistry()
		lost := &blind{next: w.receiver, until: time.Now().Add(5 * time.Minute)}
		r1 := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes, d.Registerer = []coordinator.Lane{{Name: "fcm", Sender: lost}}, reg
		})
		r2 := w.start("r2")
		gauges := func() []float64 {
			all := gathered(w, reg)
			return []float64{all["schoolbell_sender_unanswered"], all["schoolbell_sender_stopped"]}
		}
		require.Equal(w, []float64{0, 0}, gauges())
		for i := range 20 { // some are r1's to go first with
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 300)
			r2.Wake(id)
		}
		w.pass(2 * time.Second)
		require.True(w, r1.Lanes()[0].Broken)
		require.Equal(w, []float64{1, 0}, gauges(), "the other one is answered")
		w.halt(r2)
		require.Equal(w, []float64{1, 1}, gauges())
		w.tick(r1, 10*time.Second)
		w.outbox.accept("late", 1)
		w.pass(10 * time.Minute)
		require.Equal(w, []float64{0, 0}, gauges())
	})
}
