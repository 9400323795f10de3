package coordinator_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
)

// orphan makes the last n recipients accepted for the school a batch that a
// dead owner claimed: reserved, claimed, perhaps sent, not recorded. deadline is
// how far ahead its send deadline lies.
func (w *world) orphan(schoolID string, n int, deadline time.Duration) (batch string) {
	w.Helper()
	w.outbox.mu.Lock()
	row := w.outbox.schools[schoolID]
	row.fence++
	row.acquisition = "dead"
	fence := row.fence
	notice := w.outbox.notices[len(w.outbox.notices)-1]
	rule := school.Rule{Limit: limit, Rest: rest, Version: row.settings.SettingsVersion}
	if row.settings.Limit != nil {
		rule.Limit = *row.settings.Limit
	}
	ledger := row.ledger()
	w.outbox.mu.Unlock()

	batch = "orphan"
	w.arbiter.mu.Lock()
	w.arbiter.locks[schoolID] = &lock{owner: "dead", acquisition: "dead", fence: fence, expires: time.Now().Add(time.Hour)}
	w.arbiter.mu.Unlock()
	ctx := context.Background()
	require.NoError(w, w.arbiter.Reconcile(ctx, schoolID, ledger, rule))
	g, err := w.arbiter.Reserve(ctx, school.Reservation{
		School: schoolID, Acquisition: "dead", Fence: fence, Batch: batch, Want: n, Longest: max(deadline-grace, time.Millisecond), Floor: ledger, Rule: rule,
	})
	require.NoError(w, err)
	require.Equal(w, school.Granted, g.Kind)
	require.Equal(w, n, g.Size)
	c := school.Claim{Batch: batch, Sender: "fcm", Grant: g, Longest: max(deadline-grace, 0), Record: min(grace, deadline), Rule: rule}
	for seq := notice.frontier + 1; seq <= notice.frontier+n; seq++ {
		c.Work = append(c.Work, school.Work{Notice: notice.notice, Seq: seq, Kind: school.First, Standing: school.Standing{State: school.Pending}})
	}
	require.NoError(w, w.outbox.Claim(ctx, school.Term{School: schoolID, Acquisition: "dead", Owner: "dead", Fence: fence}, c))
	w.arbiter.mu.Lock()
	delete(w.arbiter.locks, schoolID)
	w.arbiter.mu.Unlock()
	w.script.forget()
	return batch
}

func TestInterleaving03ADeadOwnersBatchIsTakenOverAtOnceWhenItsDeadlineHasPassed(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		n := w.outbox.accept("A", 250)
		w.orphan("A", 200, 10*time.Second)
		w.pass(11 * time.Second)
		w.start("r1")
		w.pass(time.Second)
		require.Equal(w, steps("peek", "work in", "hold", "open", "bind", "takeover", "settle:200", "reconcile", "page", batchOf(200), batchOf(50), "page", "release"), w.script.of("A"))
		require.Equal(w, 450, w.arbiter.state("A").Attempted, "what the dead one reserved counts as made")
		require.Equal(w, map[school.State]int{school.Success: 250}, w.outbox.states("A"))
		require.Equal(w, 2, n.recipients[0].Attempts)
		require.Zero(w, n.recipients[0].Retries, "no retry is used")
		recovered := w.log.events("orphans_recovered")
		require.Len(w, recovered, 1)
		require.EqualValues(w, 200, recovered[0]["recipients"])
	})
}

func TestACallThatMayStillBeInFlightIsWaitedForWithoutASlot(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.accept("A", 250)
		w.orphan("A", 200, 21*time.Second)
		deadline := time.Now().Add(21 * time.Second)
		r := w.start("r1", func(c *coordinator.Config, _ *coordinator.Deps) { c.Slots = 1 })
		w.tick(r, 10*time.Second)
		w.pass(time.Second)
		require.Equal(w, []string{"peek", "work in", "hold", "open", "bind", "takeover", "release"}, w.script.of("A"))
		require.Zero(w, r.Working())
		require.Empty(w, w.arbiter.heldBy("A"))

		w.outbox.accept("B", 1) // the one slot is B's meanwhile
		r.Wake("B")
		w.pass(time.Second)
		require.Equal(w, []int{1}, w.sizes("B"))

		for range 100 {
			r.Wake("A") // nothing could be sent
		}
		w.pass(time.Until(deadline) - time.Millisecond)
		require.Empty(w, w.sizes("A"))
		require.Len(w, w.script.of("A"), 7, "looked at again at the deadline, not before")
		w.pass(time.Second)
		require.Equal(w, []int{200, 50}, w.sizes("A"))
		require.WithinDuration(w, deadline, w.receiver.of("A")[0].start, 10*time.Millisecond)
	})
}

func TestOrphansOfARestingSchoolDoNotWaitForItsRest(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 4800)
		n := w.outbox.accept("A", 300, func(n *school.Notice) { n.Delivery = school.AtMostOnce })
		w.orphan("A", 200, 21*time.Second) // it filled the cycle
		w.pass(22 * time.Second)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, []string{"peek", "work in", "hold", "open", "bind", "takeover", "settle:200", "reconcile", "release"}, w.script.of("A"))
		require.Equal(w, school.OutcomeUnknown, n.recipients[0].reason, "known long before the rest ends")
		require.Empty(w, w.arbiter.heldBy("A"))
		w.pass(rest - 30*time.Second)
		require.Empty(w, w.sizes("A"))
		w.pass(time.Minute)
		require.Equal(w, []int{100}, w.sizes("A"))
	})
}

func TestAnOwnerThatDiesInTheFillingCallIsFollowedWhenItsLeaseEnds(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 4800)
		w.outbox.accept("A", 300)
		w.orphan("A", 200, 21*time.Second)
		w.arbiter.lock("A", "dead", 50*time.Second) // nobody extends it
		w.tick(r, 10*time.Second)
		w.pass(49 * time.Second)
		require.Equal(w, 1, w.outbox.unsettled("A"))
		require.Equal(w, []string{"peek"}, w.script.of("A"), "it rests: nobody looks each tick")
		w.pass(2 * time.Second)
		require.Zero(w, w.outbox.unsettled("A"), "the rest lasts two minutes more")
		w.pass(time.Hour)
		require.Equal(w, []int{200, 100}, w.sizes("A"))
	})
}

func TestABusySchoolIsLookedAtWhenTheOthersLeaseEnds(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.accept("A", 1)
		w.arbiter.lock("A", "other", 30*time.Second)
		ends := time.Now().Add(30 * time.Second)
		w.start("r1")
		w.pass(29 * time.Second)
		require.Equal(w, []string{"peek"}, w.script.of("A"))
		w.pass(2 * time.Second)
		require.Equal(w, []int{1}, w.sizes("A"))
		require.WithinDuration(w, ends, w.receiver.of("A")[0].start, 50*time.Millisecond)
	})
}

func TestTheLoserOfARaceForTheLockWaitsForTheLease(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.accept("A", 1)
		w.script.onCall("hold", func(_ context.Context, n int) error {
			if n == 1 { // between the look and the taking
				w.arbiter.lock("A", "other", 30*time.Second)
			}
			return nil
		})
		w.start("r1")
		w.pass(29 * time.Second)
		require.Equal(w, []string{"peek", "work in", "hold"}, w.script.of("A"))
		require.Empty(w, w.log.events("turn_failed"), "that is no failure")
		w.pass(2 * time.Second)
		require.Equal(w, []int{1}, w.sizes("A"))
	})
}

func TestATakeoverThatIsFencedEndsTheTurn(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.outbox.accept("A", 200)
		w.orphan("A", 200, 0)
		w.script.onCall("takeover", at(1, school.ErrFenced))
		w.start("r1")
		w.pass(time.Second - time.Millisecond)
		require.Equal(w, []string{"peek", "work in", "hold", "open", "bind", "takeover", "release"}, w.script.of("A"))
		w.pass(time.Second)
		require.Equal(w, batches(1), w.sizes("A"))
	})
}
