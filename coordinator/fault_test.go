package coordinator_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// longest is B with the defaults: 4 s to claim and 15 s for the call; grace is
// what the store adds for the record.
const (
	longest = 19 * time.Second
	grace   = 2 * time.Second
)

func TestInterleaving13NoNextBatchBeforeTheLastIsRecorded(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("record", func(context.Context, int) error { return errAway })
		r := w.start("r1")
		w.outbox.accept("A", 400)
		r.Wake("A")
		w.pass(5 * time.Minute)
		require.Equal(w, batches(1), w.sizes("A"))
		require.Equal(w, 1, w.script.count("reserve"))
		require.Equal(w, "r1", w.arbiter.heldBy("A"), "the lease is kept while results wait")
		require.Greater(w, w.script.count("record"), 100, "tried again at least every 1.25 s")
		require.NotEmpty(w, w.log.events("record_failed"))
		w.script.onCall("record", nil)
		w.pass(10 * time.Second)
		require.Equal(w, batches(2), w.sizes("A"))
		require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("A"))
	})
}

func TestInterleaving13ResultsThatAreVoidAreDropped(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("record", func(_ context.Context, n int) error {
			if n == 1 { // a newer owner settled it: as Takeover does
				w.arbiter.lose("A", time.Minute)
				w.outbox.mu.Lock()
				defer w.outbox.mu.Unlock()
				w.outbox.schools["A"].fence++
				for _, b := range w.outbox.batches {
					b.settled = "other"
					for _, c := range b.covers {
						c.write(school.Change{State: school.RetryPending, Attempts: 1, Orphanings: 1}, time.Now())
					}
				}
			}
			return nil
		})
		r := w.start("r1")
		w.outbox.accept("A", 400)
		r.Wake("A")
		w.pass(10 * time.Second)
		require.Equal(w, steps(begins, batchOf(200)[:7]), w.script.of("A")[:14])
		require.NotContains(w, w.script.of("A"), "settle:200", "the new owner's word counts")
		require.Contains(w, w.log.events("turn_failed")[0]["error"], "taken over")
		w.pass(10 * time.Minute)
		require.Equal(w, batches(3), w.sizes("A"), "the first batch again, as the new owner decided")
		require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("A"))
	})
}

func TestInterleaving13TheStopGivesUpOnResultsThatCannotBeRecorded(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("record", func(context.Context, int) error { return errAway })
		r := w.start("r1")
		w.outbox.accept("A", 400)
		r.Wake("A")
		w.pass(10 * time.Second)
		began := time.Now()
		require.ErrorContains(w, w.end(r), "results given up of 1 batches")
		require.GreaterOrEqual(w, time.Since(began), 45*time.Second)
		require.Less(w, time.Since(began), 46*time.Second)
		require.Empty(w, w.arbiter.heldBy("A"), "the lock is given back")
		require.Equal(w, 1, w.outbox.unsettled("A"), "the batch is left to a successor")
		require.NotEmpty(w, w.log.events("turn_failed"), "and that is said")
		require.Contains(w, w.told, "A")

		w.script.onCall("record", nil)
		w.start("r2")
		w.pass(10 * time.Minute)
		require.Equal(w, batches(3), w.sizes("A"))
		require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("A"))
		require.Equal(w, 600, w.arbiter.state("A").Attempted)
	})
}

// TestAPanicOutsideOfATurnEndsNothing lets what is asked beside the turns panic:
// a row that nobody thought of must not end one replica after the other.
func TestAPanicOutsideOfATurnEndsNothing(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"due", "expire", "sweep", "tell"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				w.script.onCall(op, panics(1))
				r := w.start("r1") // asks what is due
				if op == "sweep" {
					require.ErrorContains(w, r.Sweep(r.ctx), "panicked")
				}
				w.outbox.accept("A", 3)
				r.Wake("A")
				w.pass(time.Second)
				lines := w.log.events("call_panicked")
				require.Len(w, lines, 1)
				require.Equal(w, "*errors.errorString", lines[0]["kind"], "by type, without the value")
				require.Equal(w, []int{3}, w.sizes("A"))
				require.NoError(w, r.Sweep(r.ctx))
				w.outbox.accept("B", 1)
				r.Wake("B")
				w.pass(time.Second)
				require.Contains(w, w.told, "B", "the peers are told again")
			})
		})
	}
}

// TestAPanicConcernsOneSchoolAlone lets each call of a turn panic once.
func TestAPanicConcernsOneSchoolAlone(t *testing.T) {
	t.Parallel()
	for _, op := range []string{
		"peek", "work in", "hold", "open", "bind", "takeover", "reconcile", "page", "skip",
		"ensure", "reserve", "check", "claim", "send", "record", "settle", "withdraw",
	} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				room, err := sender.NewRoom(200)
				require.NoError(w, err)
				n := w.outbox.accept("A", 200)
				switch op {
				case "skip":
					for _, r := range n.recipients {
						r.disabled = true
					}
				case "withdraw":
					w.script.onReturn("claim", at(1, school.ErrCommitUnknown))
				case "takeover":
					w.orphan("A", 1, 0)
				}
				w.script.onCall(op, panics(1))
				r := w.start("r1", func(c *coordinator.Config, d *coordinator.Deps) {
					c.Slots = 1
					d.Lanes[0].Room = room
				})
				r.Wake("A")
				w.pass(400 * time.Millisecond)
				require.Zero(w, r.Working(), "the slot is free")
				require.Empty(w, w.arbiter.heldBy("A"), "the lock is free")
				require.Zero(w, room.InUse(), "the room is free")
				lines := w.log.events("turn_panicked")
				require.Len(w, lines, 1)
				require.Equal(w, "A", lines[0]["school"])
				require.Equal(w, "*errors.errorString", lines[0]["kind"], "by type, without the value")

				w.outbox.accept("B", 1)
				accepted := time.Now()
				r.Wake("B")
				w.pass(200 * time.Millisecond)
				require.Equal(w, []int{1}, w.sizes("B"))
				require.Equal(w, accepted, w.receiver.of("B")[0].start)

				w.pass(10 * time.Minute)
				states := w.outbox.states("A")
				require.Equal(w, len(n.recipients), states[school.Success]+states[school.Skipped], "A goes on as well")
				require.Zero(w, w.outbox.unsettled("A"))
				w.outbox.accept("A", 1)
				r.Wake("A")
				w.pass(time.Minute)
				require.Empty(w, w.arbiter.state("A").Open, "the next reservation closes what was left open")
			})
		})
	}
}

func TestASenderThatIsNotConfiguredHereFailsItsSchoolAlone(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.put(school.School{ID: "A", Sender: "elsewhere"})
		r := w.start("r1", func(c *coordinator.Config, _ *coordinator.Deps) { c.Slots = 1 })
		w.outbox.accept("A", 1)
		w.outbox.accept("B", 1)
		r.Wake("A", "B")
		w.pass(time.Minute)
		require.Empty(w, w.sizes("A"))
		require.Equal(w, []int{1}, w.sizes("B"))
		require.Contains(w, w.log.events("turn_failed")[0]["error"], `sender "elsewhere" is not configured on this replica`)
		require.Less(w, w.script.count("open"), 10, "it backs off")
		require.Empty(w, w.arbiter.heldBy("A"))
		require.Zero(w, r.Working())
	})
}

func TestASenderThatMiscountsLosesNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			results := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			if n == 1 {
				return results[1:]
			}
			return results
		})
		r := w.start("r1")
		n := w.outbox.accept("A", 200)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, 1, w.outbox.unsettled("A"), "nobody knows: as unknown as after a crash")
		w.pass(time.Minute)
		as := w.receiver.of("A")
		require.Len(w, as, 2)
		require.GreaterOrEqual(w, as[1].start.Sub(as[0].start), longest+grace)
		require.Equal(w, map[school.State]int{school.Success: 200}, w.outbox.states("A"))
		require.Equal(w, 1, n.recipients[0].Orphanings)
	})
}

func TestAClassThatIsNoneCountsAsUnknown(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result { return sender.Fill(b.Messages, sender.Result{}) })
		r := w.start("r1")
		n := w.outbox.accept("A", 1)
		m := w.outbox.accept("A", 1, func(n *school.Notice) { n.Delivery = school.AtMostOnce })
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, school.RetryPending, n.recipients[0].State)
		require.Equal(w, school.PermanentFail, m.recipients[0].State)
		require.Equal(w, school.OutcomeUnknown, m.recipients[0].reason)
	})
}

func TestInterleaving16AFailingSchoolBacksOffWhoeverWakesIt(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("peek", func(context.Context, int) error { return errAway })
		r := w.start("r1")
		w.outbox.accept("A", 1)
		for range 6000 { // a minute of a busy application
			r.Wake("A")
			w.pass(10 * time.Millisecond)
		}
		require.LessOrEqual(w, w.script.count("peek"), 40)
		w.script.onCall("peek", nil)
		w.pass(2 * time.Second)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, []int{1}, w.sizes("A"), "a wake-up brings it back soon")
	})
}

func TestInterleaving12AnUnknownCommitWhileTheStoreIsAwayIsTakenOverLater(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onReturn("claim", at(1, school.ErrCommitUnknown))
		w.script.onCall("open", at(2, errAway))
		r := w.start("r1")
		n := w.outbox.accept("A", 200, func(n *school.Notice) { n.Delivery = school.AtMostOnce })
		r.Wake("A")
		w.pass(longest)
		require.Empty(w, w.sizes("A"), "nothing may be sent")
		require.Equal(w, 1, w.outbox.unsettled("A"))
		w.pass(time.Minute)
		require.Zero(w, w.outbox.unsettled("A"))
		require.Empty(w, w.sizes("A"))
		require.Equal(w, school.OutcomeUnknown, n.recipients[0].reason, "the store cannot know that nothing was sent")
		require.Equal(w, 200, w.arbiter.state("A").Attempted, "and counts it")
	})
}
