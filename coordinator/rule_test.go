package coordinator_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

const (
	limit = 5000
	rest  = 180 * time.Second
)

// batches is n batches of 200.
func batches(n int) []int { return slices.Repeat([]int{200}, n) }

// used lets a replica send n recipients of the school, so that a test can begin
// in the middle of a cycle.
func (w *world) used(r *replica, schoolID string, n int) {
	w.Helper()
	w.outbox.accept(schoolID, n)
	r.Wake(schoolID)
	w.pass(time.Minute)
	require.Equal(w, n, w.arbiter.state(schoolID).Attempted)
	require.Equal(w, n, w.outbox.ledger(schoolID).Attempted)
	w.receiver.mu.Lock()
	w.receiver.arrivals = nil
	w.receiver.mu.Unlock()
	w.script.forget()
}

// gap is the silence before the i-th batch.
func gap(as []arrival, i int) time.Duration { return as[i].start.Sub(as[i-1].end) }

func TestCycleIsCutExactlyAtTheLimit(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name          string
		used, waiting int
		want          []int
	}{
		{"4,800 attempted and 500 waiting", 4800, 500, []int{200, 200, 100}},
		{"4,950 attempted and 250 waiting", 4950, 250, []int{50, 200}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				r := w.start("r1")
				w.used(r, "A", tc.used)
				w.outbox.accept("A", tc.waiting)
				r.Wake("A")
				w.pass(time.Hour)
				require.Equal(w, tc.want, w.sizes("A"))
				as := w.receiver.of("A")
				require.Equal(w, rest, gap(as, 1), "rests once, from the end of the call that filled the cycle")
				for i := 2; i < len(as); i++ {
					require.Zero(w, gap(as, i))
				}
				require.Equal(w, map[school.State]int{school.Success: tc.used + tc.waiting}, w.outbox.states("A"))
				w.outbox.sound(w)

				started := w.log.events("cooldown_started")
				completed := w.log.events("cooldown_completed")
				require.Len(w, started, 1)
				require.Len(w, completed, 1)
				require.EqualValues(w, rest.Milliseconds(), completed[0]["waited_ms"])
			})
		})
	}
}

func TestARestingSchoolDelaysNoOther(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 4800)
		w.outbox.accept("A", 400)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, batches(1), w.sizes("A"), "A rests")
		w.outbox.accept("B", 200)
		accepted := time.Now()
		r.Wake("B")
		w.pass(time.Second)
		require.Equal(w, accepted, w.receiver.of("B")[0].start)
		require.Empty(w, w.arbiter.heldBy("A"), "no lock is held through a rest")
		require.Zero(w, r.Working())
	})
}

func TestTheFillingCallMayFail(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 4800)
		w.outbox.accept("A", 400)
		w.receiver.takes(time.Hour) // never answers: ends by its own deadline
		r.Wake("A")
		w.pass(20 * time.Second)
		w.receiver.takes(100 * time.Millisecond)
		w.pass(rest - 20*time.Second) // the rest counts from the failure, 15 s later
		require.Equal(w, batches(1), w.sizes("A"))
		require.Equal(w, limit, w.arbiter.state("A").Attempted, "nothing is given back")
		require.Equal(w, map[school.State]int{school.Success: 4800, school.Pending: 200, school.RetryPending: 200}, w.outbox.states("A"))
		w.pass(time.Hour)
		require.Equal(w, []int{200, 1, 200, 199}, w.sizes("A"), "a probe, since nobody had answered, the rest and then the retries")
		require.Equal(w, rest, gap(w.receiver.of("A"), 1))
		require.Equal(w, map[school.State]int{school.Success: 5200}, w.outbox.states("A"))
		w.judge("A", limit, rest)
	})
}

func TestAFailedCallBelowTheLimitGivesNothingBack(t *testing.T) {
	t.Parallel()
	for _, class := range sender.Classes() {
		t.Run(class.String(), func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				r := w.start("r1")
				w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
					return sender.Fill(b.Messages, sender.Result{Class: class, Code: "CODE"})
				})
				w.outbox.accept("A", 200)
				r.Wake("A")
				w.pass(time.Second)
				require.Equal(w, 200, w.arbiter.state("A").Attempted)
				require.Equal(w, 200, w.outbox.ledger("A").Attempted)
				w.outbox.sound(w)
			})
		})
	}
}

func TestALaterRunWaitsOnlyForWhatIsLeftOfTheRest(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ into, wait time.Duration }{
		{75 * time.Second, 105 * time.Second},
		{rest - time.Millisecond, time.Millisecond},
		{rest, 0},
		{time.Hour, 0},
	} {
		t.Run(tc.into.String(), func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				r := w.start("r1")
				w.used(r, "A", 4800)
				w.outbox.accept("A", 200)
				r.Wake("A")
				w.pass(100 * time.Millisecond)
				require.Len(w, w.receiver.of("A"), 1)
				w.pass(tc.into)
				w.outbox.accept("A", 1)
				accepted := time.Now()
				r.Wake("A")
				w.pass(time.Hour)
				as := w.receiver.of("A")
				require.Len(w, as, 2)
				require.Equal(w, tc.wait, as[1].start.Sub(accepted))
			})
		})
	}
}

func TestNobodyWaitsWhenTheLimitIsReachedWithTheLastRecipient(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", limit)
		r.Wake("A")
		w.pass(2500 * time.Millisecond)
		require.Equal(w, batches(25), w.sizes("A"))
		require.Zero(w, r.Working())
		require.Empty(w, w.arbiter.heldBy("A"))
		require.Equal(w, rest, w.outbox.ledger("A").Resting, "the rest is written all the same")
		w.script.forget()
		w.pass(24 * time.Hour)
		require.Empty(w, w.script.of("A"), "nothing comes back for a school without work")
	})
}

func TestANoticeAfterTheRestDoesNotWaitForLaterWork(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", limit)
		w.outbox.accept("A", 10, func(n *school.Notice) { n.ScheduledAt = time.Now().Add(12 * time.Hour) })
		r.Wake("A")
		w.pass(10 * time.Minute)
		require.Equal(w, batches(25), w.sizes("A"))
		w.outbox.accept("A", 1)
		accepted := time.Now()
		r.Wake("A")
		w.pass(time.Minute)
		as := w.receiver.of("A")
		require.Len(w, as, 26)
		require.Equal(w, accepted, as[25].start)
		w.pass(12 * time.Hour)
		require.Len(w, w.receiver.of("A"), 27, "and the scheduled one came in its time")
	})
}

func TestStoppingWhileASchoolRestsLeavesNothingHeld(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", limit+1)
		r.Wake("A")
		w.pass(30 * time.Second)
		require.Equal(w, batches(25), w.sizes("A"))
		w.script.forget()
		began := time.Now()
		w.halt(r)
		require.Equal(w, began, time.Now(), "nobody waits for a rest")
		require.Empty(w, w.arbiter.heldBy("A"))
		require.Empty(w, w.script.of("A"))
		w.pass(time.Hour)
		require.Len(w, w.receiver.of("A"), 25)

		w.start("r2") // fills its agenda from the store
		w.pass(time.Second)
		require.Len(w, w.receiver.of("A"), 26)
	})
}

func TestStoppingBetweenBatchesSendsNoNextOne(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 600)
		r.Wake("A")
		w.pass(150 * time.Millisecond) // in the middle of the second call
		w.told = nil
		w.halt(r)
		require.Equal(w, batches(2), w.sizes("A"))
		require.Equal(w, map[school.State]int{school.Success: 400, school.Pending: 200}, w.outbox.states("A"), "what was on the wire is recorded")
		require.Equal(w, 400, w.arbiter.state("A").Attempted)
		require.Empty(w, w.arbiter.state("A").Open, "and settled")
		require.Empty(w, w.arbiter.heldBy("A"))
		require.Contains(w, w.told, "A", "others learn that it has work")
	})
}

func TestAttemptsAddUpAcrossReplicas(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r1 := w.start("r1")
		w.outbox.accept("A", 3000)
		r1.Wake("A")
		w.pass(time.Minute)
		require.Len(w, w.receiver.of("A"), 15)
		w.halt(r1)
		w.arbiter.flush() // not even the arbiter remembers
		r2 := w.start("r2")
		w.pass(24 * time.Hour)
		w.outbox.accept("A", 2001)
		r2.Wake("A")
		w.pass(time.Hour)
		require.Equal(w, append(batches(25), 1), w.sizes("A"))
		require.Equal(w, rest, gap(w.receiver.of("A"), 25))
		w.judge("A", limit, rest)
	})
}

func TestDisabledRecipientsDoNotCount(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		n := w.outbox.accept("A", 6000)
		for i := 3; i < 6000; i += 6 {
			n.recipients[i].disabled = true
		}
		r.Wake("A")
		w.pass(time.Hour)
		require.Equal(w, batches(25), w.sizes("A"), "5,000 attempts, and no second cycle")
		require.Equal(w, map[school.State]int{school.Success: 5000, school.Skipped: 1000}, w.outbox.states("A"))
		require.Equal(w, school.Disabled, n.recipients[3].reason)
		require.Equal(w, limit, w.arbiter.state("A").Attempted)
		require.Equal(w, 6000, n.frontier, "the notice reached its end")
	})
}

func TestANoticeOfDisabledRecipientsIsSkippedWithoutAReservation(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		n := w.outbox.accept("A", 1500)
		for _, r := range n.recipients {
			r.disabled = true
		}
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Skipped: 1500}, w.outbox.states("A"))
		require.Equal(w, []string{"peek", "work in", "hold", "open", "bind", "reconcile", "page", "skip:1000", "page", "skip:500", "page", "release"}, w.script.of("A"))
	})
}

func TestEverythingThatWaitsIsSentInOneRun(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 3000)
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, batches(15), w.sizes("A"))
		require.Equal(w, 1, w.script.count("hold"))
		require.Equal(w, 4, w.script.count("page"), "pages of 1,000 and the one that was empty")
	})
}

func TestASchoolsOwnRuleWins(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		own, pause := 330, time.Minute
		w.outbox.put(school.School{ID: "A", Limit: &own, Rest: &pause})
		r := w.start("r1", func(c *coordinator.Config, _ *coordinator.Deps) { c.Headroom = 30 })
		w.outbox.accept("A", 700)
		r.Wake("A")
		w.pass(time.Hour)
		require.Equal(w, []int{200, 100, 200, 100, 100}, w.sizes("A"), "300 a cycle: its own limit less the headroom")
		as := w.receiver.of("A")
		require.Equal(w, pause, gap(as, 2))
		require.Equal(w, pause, gap(as, 4))
		w.judge("A", 300, pause)
	})
}

func TestRetriesComeWhenTheyAreDueAndNotBefore(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			return sender.Fill(b.Messages, sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE"})
		})
		w.outbox.accept("A", 1)
		r.Wake("A")
		w.pass(time.Hour)
		as := w.receiver.of("A")
		require.Len(w, as, 4, "three retries after the first attempt")
		for i, least := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute} {
			require.GreaterOrEqual(w, gap(as, i+1), least)
			require.LessOrEqual(w, gap(as, i+1), least*12/10+500*time.Millisecond, "jitter, and a moment to gather others")
		}
		require.Equal(w, []int{1, 2, 3, 4}, []int{as[0].messages[0].Attempt, as[1].messages[0].Attempt, as[2].messages[0].Attempt, as[3].messages[0].Attempt})
		require.Equal(w, map[school.State]int{school.PermanentFail: 1}, w.outbox.states("A"))
		require.Equal(w, 4, w.script.count("hold"), "one turn for each, and none in between")
		synctest.Wait()
	})
}
