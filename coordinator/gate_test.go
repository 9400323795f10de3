package coordinator_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
