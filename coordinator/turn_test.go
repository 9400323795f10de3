package coordinator_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/school/quota"
)

// The steps of a turn and of a batch of n, in their one order.
var begins = []string{"peek", "work in", "hold", "open", "bind", "reconcile", "page"}

func batchOf(n int) []string {
	return []string{
		"ensure", fmt.Sprintf("reserve:%d", n), "check", fmt.Sprintf("claim:%d", n), "check",
		fmt.Sprintf("send:%d", n), fmt.Sprintf("record:%d", n), fmt.Sprintf("settle:%d", n),
	}
}

func steps(parts ...any) []string {
	var all []string
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			all = append(all, p)
		case []string:
			all = append(all, p...)
		}
	}
	return all
}

func TestATurnTakesItsStepsInOneOrder(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.accept("A", 250)
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, steps(begins, batchOf(200), batchOf(50), "page", "release"), w.script.of("A"))
	})
}

func TestTheBatchThatFillsTheCycleEndsTheTurn(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 4800)
		w.outbox.accept("A", 300)
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, steps(begins, batchOf(200), "release"), w.script.of("A"))
	})
}

func TestAnArbiterThatForgetsBetweenBatchesGrantsNothingTwice(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("ensure", func(_ context.Context, n int) error {
			if n > 1 {
				w.arbiter.set("A", quota.State{})
			}
			return nil
		})
		r := w.start("r1")
		w.outbox.accept("A", limit+200)
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, batches(25), w.sizes("A"))
		w.pass(time.Hour)
		require.Equal(w, batches(26), w.sizes("A"))
		w.judge("A", limit, rest)
	})
}

// TestAFailureAtAStep makes one step of the first turn fail and compares what
// the turn does then. Afterwards everything is sent, whatever had failed.
func TestAFailureAtAStep(t *testing.T) {
	t.Parallel()
	reserved := steps(begins, "ensure", "reserve:200")
	claimed := steps(reserved, "check", "claim:200")
	wasSent := steps(claimed, "check", "send:200", "record:200")

	for _, tc := range []struct {
		name    string
		arrange func(w *world)
		turn    []string // the first turn
		batches int      // that the receiver got in the end; 0: one
		counted int      // attempts in the end; 0: 200
		reason  string   // part of the log line of the failed turn; empty: none
	}{
		{
			name:    "the arbiter is away at the peek",
			arrange: func(w *world) { w.script.onCall("peek", at(1, errAway)) },
			turn:    []string{"peek"}, reason: "peek at school A",
		},
		{
			name:    "the lock cannot be taken",
			arrange: func(w *world) { w.script.onCall("hold", at(1, errAway)) },
			turn:    []string{"peek", "work in", "hold"}, reason: "cut off",
		},
		{
			name:    "the term cannot be opened",
			arrange: func(w *world) { w.script.onCall("open", at(1, errAway)) },
			turn:    []string{"peek", "work in", "hold", "open", "release"}, reason: "open term of school A",
		},
		{
			name:    "the fence cannot be bound",
			arrange: func(w *world) { w.script.onCall("bind", at(1, errAway)) },
			turn:    []string{"peek", "work in", "hold", "open", "bind", "release"}, reason: "bind fence 1 of school A",
		},
		{
			name:    "the quota cannot be reconciled",
			arrange: func(w *world) { w.script.onCall("reconcile", at(1, errAway)) },
			turn:    []string{"peek", "work in", "hold", "open", "bind", "reconcile", "release"}, reason: "reconcile quota of school A",
		},
		{
			name:    "the page cannot be read",
			arrange: func(w *world) { w.script.onCall("page", at(1, errAway)) },
			turn:    steps(begins, "release"), reason: "read page of school A",
		},
		{
			name:    "the page is refused by a newer fence",
			arrange: func(w *world) { w.script.onCall("page", at(1, school.ErrFenced)) },
			turn:    steps(begins, "release"), reason: "read page of school A",
		},
		{
			name:    "the lease cannot be made long enough",
			arrange: func(w *world) { w.script.onCall("ensure", at(1, errAway)) },
			turn:    steps(begins, "ensure", "release"), reason: "before a batch",
		},
		{
			name:    "the reservation fails",
			arrange: func(w *world) { w.script.onCall("reserve", at(1, errAway)) },
			turn:    steps(reserved, "release"), reason: "reserve 200 attempts of school A",
		},
		{
			name:    "the reservation's answer is lost",
			arrange: func(w *world) { w.script.onReturn("reserve", at(1, errAway)) },
			turn:    steps(reserved, "release"), counted: 400, reason: "reserve 200 attempts of school A",
		},
		{
			name:    "the lock is another's at the reservation",
			arrange: func(w *world) { w.arbiter.answers(1, school.Grant{Kind: school.NotOwner}) },
			turn:    steps(reserved, "release"), reason: "the lock is not this term's",
		},
		{
			name:    "the lease is too short at the reservation and is extended",
			arrange: func(w *world) { w.arbiter.answers(1, school.Grant{Kind: school.LeaseShort}) },
			turn:    steps(reserved, "extend now", "reserve:200", batchOf(200)[2:], "page", "release"),
		},
		{
			name: "the arbiter lost an extension of the lease",
			arrange: func(w *world) {
				w.script.onCall("reserve", func(_ context.Context, n int) error {
					if n == 1 {
						w.arbiter.shorten("A", time.Second)
					}
					return nil
				})
			},
			turn: steps(reserved, "extend now", "reserve:200", batchOf(200)[2:], "page", "release"),
		},
		{
			name: "the lease stays too short",
			arrange: func(w *world) {
				w.arbiter.answers(3, school.Grant{Kind: school.LeaseShort})
			},
			turn:   steps(reserved, "extend now", "reserve:200", "extend now", "reserve:200", "release"),
			reason: "after 3 tries",
		},
		{
			name: "the arbiter forgot the quota and is told of it again",
			arrange: func(w *world) {
				w.script.onCall("ensure", func(_ context.Context, n int) error {
					if n == 1 {
						w.arbiter.set("A", quota.State{})
					}
					return nil
				})
			},
			turn: steps(reserved, "reconcile", "reserve:200", batchOf(200)[2:], "page", "release"),
		},
		{
			name:    "the batch was settled before it was reserved",
			arrange: func(w *world) { w.arbiter.answers(1, school.Grant{Kind: school.BatchSettled}) },
			turn:    steps(reserved, "release"), reason: "none that can be cured",
		},
		{
			name: "the lease is lost after the reservation",
			arrange: func(w *world) {
				w.script.onReturn("reserve", w.losesTheLease(1))
			},
			turn: steps(reserved, "check", "settle:0"), reason: "after the reservation",
		},
		{
			name:    "the claim is fenced",
			arrange: func(w *world) { w.script.onCall("claim", at(1, school.ErrFenced)) },
			turn:    steps(claimed, "settle:0", "release"), reason: "newer owner",
		},
		{
			name:    "the store is away at the claim",
			arrange: func(w *world) { w.script.onCall("claim", at(1, errAway)) },
			turn:    steps(claimed, "settle:0", "release"), reason: "claim batch",
		},
		{
			name:    "the page is stale at the claim",
			arrange: func(w *world) { w.script.onCall("claim", at(1, school.ErrStalePage)) },
			turn:    steps(claimed, "settle:0", "page", batchOf(200), "page", "release"),
		},
		{
			name:    "interleaving 12: the claim's commit is unknown and it was committed",
			arrange: func(w *world) { w.script.onReturn("claim", at(1, school.ErrCommitUnknown)) },
			turn:    steps(claimed, "open", "bind", "withdraw", "settle:0", "release"), reason: "commit unknown",
		},
		{
			name:    "interleaving 12: the claim's commit is unknown and it was not committed",
			arrange: func(w *world) { w.script.onCall("claim", at(1, school.ErrCommitUnknown)) },
			turn:    steps(claimed, "open", "bind", "withdraw", "settle:0", "release"), reason: "commit unknown",
		},
		{
			name:    "the claim fails in a way that nobody knows",
			arrange: func(w *world) { w.script.onReturn("claim", at(1, errOther)) },
			turn:    steps(claimed, "open", "bind", "withdraw", "settle:0", "release"), reason: "something else",
		},
		{
			name: "interleaving 12: the claim's commit is unknown and the arbiter is away",
			arrange: func(w *world) {
				w.script.onReturn("claim", at(1, school.ErrCommitUnknown))
				w.script.onCall("bind", at(2, errAway))
			},
			turn: steps(claimed, "open", "bind", "withdraw", "settle:0", "release"), reason: "commit unknown",
		},
		{
			name:    "the claim takes too long",
			arrange: func(w *world) { w.script.onReturn("claim", slow(1, 4001*time.Millisecond)) },
			turn:    steps(claimed, "check", "withdraw", "settle:0", "release"), reason: "longer than 4s",
		},
		{
			name:    "the claim is stuck",
			arrange: func(w *world) { w.script.onCall("claim", slow(1, 5*time.Second)) },
			turn:    steps(claimed, "settle:0", "release"), reason: "claim batch",
		},
		{
			name:    "the lease is lost after the claim",
			arrange: func(w *world) { w.script.onReturn("claim", w.losesTheLease(1)) },
			turn:    steps(claimed, "check", "withdraw", "settle:0"), reason: "before the send",
		},
		{
			name:    "the lease is lost during the send",
			arrange: func(w *world) { w.script.onCall("send", w.losesTheLease(1)) },
			turn:    steps(wasSent, "settle:200", "check"), reason: "lease lost",
		},
		{
			name: "the record fails for a while",
			arrange: func(w *world) {
				w.script.onCall("record", func(_ context.Context, n int) error {
					if n < 4 {
						return errAway
					}
					return nil
				})
			},
			turn: steps(wasSent, "record:200", "record:200", "record:200", "settle:200", "page", "release"),
		},
		{
			name:    "the settlement fails",
			arrange: func(w *world) { w.script.onCall("settle", at(1, errAway)) },
			turn:    steps(wasSent, "settle:200", "release"), reason: "settle batch",
		},
		{
			name:    "the arbiter does not know the reservation any more",
			arrange: func(w *world) { w.script.onCall("settle", at(1, school.ErrReservationUnknown)) },
			turn:    steps(wasSent, "settle:200", "page", "release"),
		},
		{
			name:    "the lock cannot be given back",
			arrange: func(w *world) { w.script.onCall("release", at(1, errAway)) },
			turn:    steps(begins, batchOf(200), "page", "release"), reason: "cut off",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				n := w.outbox.accept("A", 200)
				tc.arrange(w)
				r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {})
				r.Wake("A")
				w.pass(10 * time.Minute)

				calls := w.script.of("A")
				require.GreaterOrEqual(w, len(calls), len(tc.turn))
				require.Equal(w, tc.turn, calls[:len(tc.turn)])
				if len(calls) > len(tc.turn) {
					require.Equal(w, "peek", calls[len(tc.turn)], "the turn went on")
				}
				require.Equal(w, batches(max(1, tc.batches)), w.sizes("A"))
				require.Equal(w, map[school.State]int{school.Success: 200}, w.outbox.states("A"))
				require.Equal(w, 1, n.recipients[0].Attempts, "only what was handed over is an attempt")
				require.Equal(w, max(200, tc.counted), w.arbiter.state("A").Attempted)
				require.Zero(w, w.outbox.unsettled("A"))
				require.Empty(w, w.arbiter.heldBy("A"))
				require.Zero(w, r.Working())
				failed := w.log.events("turn_failed")
				if tc.reason == "" {
					require.Empty(w, failed)
				} else {
					require.NotEmpty(w, failed)
					require.Contains(w, failed[0]["error"], tc.reason)
					require.Equal(w, "A", failed[0]["school"])
				}
			})
		})
	}
}

// answers lets the arbiter answer the first n reservations with g.
func (a *arbiter) answers(n int, g school.Grant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answer = func(i int) *school.Grant {
		if i <= n {
			return &g
		}
		return nil
	}
}

// losesTheLease gives school A's lock to another for 10 s at the n-th call.
func (w *world) losesTheLease(n int) fault {
	return func(_ context.Context, i int) error {
		if i == n {
			w.arbiter.lose("A", 10*time.Second)
		}
		return nil
	}
}

func TestInterleaving16AStoreThatDoesNotAnswerTakesNoLock(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("due", at(1, errAway))
		w.script.onCall("ping", at(1, errAway))
		r := w.start("r1")
		w.outbox.accept("A", 1)
		r.Wake("A")
		w.pass(400 * time.Millisecond)
		require.Equal(w, []string{"peek"}, w.script.of("A"))
		w.pass(time.Minute)
		require.Equal(w, []int{1}, w.sizes("A"))
	})
}

func TestInterleaving04AClockThatWentBackIsCuredFromTheLedger(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", limit) // rests by the ledger and by the arbiter
		w.pass(time.Hour)
		s := w.arbiter.state("A")
		s.Next += (10 * time.Hour).Milliseconds() // as it looks when the clock has gone back 10 h
		w.arbiter.set("A", s)
		w.outbox.accept("A", 200)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, steps(begins, "ensure", "reserve:200", "open", "bind", "rebuild", "reserve:200", batchOf(200)[2:], "page", "release"), w.script.of("A"))
		require.Equal(w, batches(1), w.sizes("A"), "the rest was over by the ledger")
		require.EqualValues(w, 3, w.receiver.of("A")[0].fence, "a fresh term")
	})
}

func TestInterleaving01ALoweredLimitRestsBeforeTheNextAttempt(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.used(r, "A", 150)
		lower := 100
		w.outbox.put(school.School{ID: "A", Limit: &lower})
		w.outbox.accept("A", 10)
		r.Wake("A")
		w.pass(time.Second)
		require.Equal(w, steps(begins, "ensure", "reserve:10", "release"), w.script.of("A"))
		w.pass(time.Hour)
		require.Equal(w, []int{10}, w.sizes("A"))
	})
}

func TestInterleaving15APausedSchoolSendsNothing(t *testing.T) {
	t.Parallel()
	t.Run("paused between the page and the claim", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.script.onCall("claim", func(_ context.Context, n int) error {
				if n == 1 {
					w.outbox.put(school.School{ID: "A", Paused: true})
				}
				return nil
			})
			r := w.start("r1")
			w.outbox.accept("A", 200)
			r.Wake("A")
			w.pass(time.Hour)
			require.Equal(w, steps(begins, "ensure", "reserve:200", "check", "claim:200", "settle:0", "release"), w.script.of("A"), "and it is not looked at until it is resumed")
			require.Zero(w, w.arbiter.state("A").Attempted)
			w.outbox.put(school.School{ID: "A"})
			r.Wake("A")
			w.pass(time.Second)
			require.Equal(w, batches(1), w.sizes("A"))
		})
	})
	t.Run("paused before", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.outbox.put(school.School{ID: "A", Paused: true})
			r := w.start("r1")
			w.outbox.accept("A", 200)
			r.Wake("A")
			w.pass(time.Hour)
			require.Equal(w, []string{"peek", "work in"}, w.script.of("A"))
		})
	})
	t.Run("paused with a dead owner's batch", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.outbox.accept("A", 250)
			w.orphan("A", 200, 10*time.Second)
			w.outbox.put(school.School{ID: "A", Paused: true})
			w.start("r1").Wake("A")
			w.pass(time.Hour)
			require.Equal(w, map[school.State]int{school.RetryPending: 200, school.Pending: 50}, w.outbox.states("A"), "what it left is known")
			require.Empty(w, w.sizes("A"), "and nothing more is claimed")
			require.NotContains(w, w.script.of("A"), "page")
			require.Len(w, w.script.of("A"), 10, "nor looked at without need: %v", w.script.of("A"))
		})
	})
	t.Run("paused before a page without anybody to send to", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.script.onCall("skip", at(1, school.ErrPaused))
			r := w.start("r1")
			n := w.outbox.accept("A", 1)
			n.recipients[0].disabled = true
			r.Wake("A")
			w.pass(time.Hour)
			require.Equal(w, steps(begins, "skip:1", "release"), w.script.of("A"))
			require.Empty(w, w.log.events("turn_failed"))
		})
	})
}

func TestAPageThatIsAlwaysStaleEndsTheTurn(t *testing.T) {
	t.Parallel()
	for _, disabled := range []bool{false, true} {
		t.Run(fmt.Sprintf("disabled=%v", disabled), func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				stale := func(context.Context, int) error { return school.ErrStalePage }
				w.script.onCall("claim", stale)
				w.script.onCall("skip", stale)
				r := w.start("r1")
				n := w.outbox.accept("A", 1)
				n.recipients[0].disabled = disabled
				r.Wake("A")
				w.pass(400 * time.Millisecond) // no loop without a wait
				require.Equal(w, 4, w.script.count("page"))
				require.NotEmpty(w, w.log.events("turn_failed"))
				require.Empty(w, w.sizes("A"))
				require.Empty(w, w.arbiter.heldBy("A"))
				w.script.onCall("claim", nil)
				w.script.onCall("skip", nil)
				w.pass(time.Minute)
				require.Zero(w, w.outbox.states("A")[school.Pending])
			})
		})
	}
}

func TestAHintOfASchoolThatIsNotThereCostsNothingMore(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		r.Hear("nobody")
		w.pass(time.Hour)
		require.Equal(w, []string{"peek", "work in"}, w.script.of("nobody"))
		require.Empty(w, w.log.events("turn_failed"))
	})
}
