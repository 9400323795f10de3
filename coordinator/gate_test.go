package coordinator_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/sender"
)

// A sender that hands messages over one by one must stop when the lease is lost.
func TestTheGateOfABatchIsItsLease(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var held, lost error
		asked := false
		w.receiver.answer = func(_ int, b sender.Batch) []sender.Result {
			asked, held = true, b.Gate()
			w.arbiter.lose("A", time.Hour)
			lost = b.Gate()
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		}
		r := w.start("r1")
		w.outbox.accept("A", 10)
		r.Wake("A")
		w.pass(time.Second)
		require.True(w, asked)
		require.NoError(w, held)
		require.Error(w, lost)
	})
}

// stalling is a log whose line lasts: what a turn writes between its last look
// at the clock and the call.
type stalling struct {
	slog.Handler
	message string
	lasts   time.Duration
}

func (s stalling) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == s.message {
		time.Sleep(s.lasts)
	}
	return s.Handler.Handle(ctx, r)
}

func (s stalling) WithAttrs(attrs []slog.Attr) slog.Handler {
	s.Handler = s.Handler.WithAttrs(attrs)
	return s
}

// A batch's reservation and claim count as ended at its end, whatever its process
// did meanwhile. Nothing leaves later.
func TestACallEndsWithItsBatch(t *testing.T) {
	t.Parallel()
	const claimTime, callTime = 4 * time.Second, 15 * time.Second
	one := func(w *world, change ...func(*coordinator.Config, *coordinator.Deps)) {
		r := w.start("r1", change...)
		w.outbox.accept("A", 10)
		r.Wake("A")
	}
	t.Run("the gate", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			var within, after error
			w.receiver.takes(0)
			w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
				time.Sleep(claimTime + callTime - time.Millisecond)
				within = b.Gate()
				time.Sleep(time.Millisecond)
				after = b.Gate()
				return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			})
			one(w)
			w.pass(time.Minute)
			require.NoError(w, within)
			require.ErrorContains(w, after, "the batch's time is over")
		})
	})
	t.Run("the call", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.receiver.takes(time.Hour)
			one(w, func(_ *coordinator.Config, d *coordinator.Deps) {
				d.Log = slog.New(stalling{d.Log.Handler(), "batch goes out", 10 * time.Second})
			})
			w.pass(time.Minute)
			calls := w.receiver.of("A")
			require.NotEmpty(w, calls)
			require.Equal(w, claimTime+callTime-10*time.Second, calls[0].end.Sub(calls[0].start))
		})
	})
	t.Run("a look at the lease that lasts", func(t *testing.T) {
		t.Parallel()
		inWorld(t, func(w *world) {
			w.script.onCall("check", slow(2, claimTime+time.Millisecond))
			one(w)
			w.pass(claimTime + time.Second/2)
			require.Empty(w, w.receiver.of("A"), "the claim's time is used up")
			require.Contains(w, w.script.of("A"), "withdraw")
		})
	})
}
