package coordinator_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// asked is a receiver that can be asked what became of a message.
type asked struct {
	*receiver

	mu      sync.Mutex
	answers map[string]sender.Status
	err     error
	calls   [][]string
}

func (a *asked) Ask(_ context.Context, ids []string) (map[string]sender.Status, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, ids)
	return a.answers, a.err
}

// loses makes the receiver lose the answer to its first call.
func (a *asked) loses() {
	a.receiver.answers(func(n int, b sender.Batch) []sender.Result {
		if n > 1 {
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		}
		return sender.Fill(b.Messages, sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer})
	})
}

func askable(a *asked) func(*coordinator.Config, *coordinator.Deps) {
	return func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes[0].Sender = a }
}

// repeated are the messages that came in after the first batch.
func repeated(w *world, schoolID string) (ids []string) {
	for _, a := range w.receiver.of(schoolID)[1:] {
		ids = append(ids, a.ids...)
	}
	return ids
}

func TestUnknownMessagesAreAskedAboutBeforeTheyAreRepeated(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		a := &asked{receiver: w.receiver, answers: map[string]sender.Status{
			"1.1": sender.StatusAccepted, "1.2": sender.StatusNotAccepted, "1.3": sender.StatusUnknown, "1.4": sender.StatusAccepted,
		}}
		a.loses()
		r := w.start("r1", askable(a))
		w.tick(r, 10*time.Second)
		w.outbox.accept("A", 4)
		r.Wake("A")
		w.pass(5 * time.Minute)
		require.ElementsMatch(w, []string{"1.1", "1.2", "1.3", "1.4"}, slices.Concat(a.calls...), "once, and only what is unknown")
		require.ElementsMatch(w, []string{"1.2", "1.3"}, repeated(w, "A"), "what was taken is not repeated")
		require.Equal(w, map[school.State]int{school.Success: 4}, w.outbox.states("A"))
		require.Equal(w, 6, w.outbox.ledger("A").Attempted, "asking is no attempt")
	})
}

func TestAReceiverThatCannotAnswerChangesNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		a := &asked{receiver: w.receiver, err: errors.New("away")}
		a.loses()
		r := w.start("r1", askable(a))
		w.tick(r, 10*time.Second)
		w.outbox.accept("A", 3)
		r.Wake("A")
		w.pass(5 * time.Minute)
		require.ElementsMatch(w, []string{"1.1", "1.2", "1.3"}, repeated(w, "A"), "sent again")
		require.Equal(w, map[school.State]int{school.Success: 3}, w.outbox.states("A"))
	})
}

func TestConfirmationsOfALostTermAreRefused(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		a := &asked{receiver: w.receiver, answers: map[string]sender.Status{"1.1": sender.StatusAccepted}}
		a.loses()
		w.script.onCall("confirm", at(1, school.ErrFenced))
		r := w.start("r1", askable(a))
		w.tick(r, 10*time.Second)
		w.outbox.accept("A", 1)
		r.Wake("A")
		w.pass(5 * time.Minute)
		require.Len(w, a.calls, 2, "the next term asks again")
		require.Len(w, w.receiver.of("A"), 1, "and nothing is repeated")
		require.Equal(w, map[school.State]int{school.Success: 1}, w.outbox.states("A"))
	})
}

// What was taken leaves the page. The batch that goes out then is filled from
// what waits beyond it (R3).
func TestConfirmationsMakeNoBatchSmall(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		a := &asked{receiver: w.receiver, answers: map[string]sender.Status{}}
		for i := range 150 {
			a.answers[school.MessageID(1, i+1)] = sender.StatusAccepted
		}
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			if n > 3 {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			}
			// One of them has an answer, so that the lane stays open.
			return append(sender.Fill(b.Messages[1:], sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer}),
				sender.Result{Class: sender.Accepted})
		})
		page := func(cfg *coordinator.Config, _ *coordinator.Deps) { cfg.Page = 300 }
		r1 := w.start("r1", askable(a), page)
		w.outbox.accept("A", 600)
		r1.Wake("A")
		w.pass(time.Second)
		w.halt(r1)
		require.Equal(w, []int{200, 200, 200}, w.sizes("A"))
		w.pass(5 * time.Minute) // all are due at once
		w.start("r2", askable(a), page)
		w.pass(time.Minute)
		require.Equal(w, []int{200, 200, 200, 200, 200, 47}, w.sizes("A"), "3 were accepted at once, 150 were confirmed")
		require.Equal(w, map[school.State]int{school.Success: 600}, w.outbox.states("A"))
	})
}

func TestNoReplicaTakesALockForNothing(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.start("r1")
		w.start("r2")
		r3 := w.start("r3")
		w.outbox.accept("A", 10)
		for _, r := range w.replicas {
			r.Hear("A")
		}
		r3.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 10}, w.outbox.states("A"))
		require.EqualValues(w, 1, w.outbox.fence("A"), "one term was enough")
	})
}
