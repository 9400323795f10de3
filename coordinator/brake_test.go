package coordinator_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// TestBrakeIsAskedForOfEachBatch: of 200 messages 60 unregistered ones are
// believed and 61 are not, each batch by itself; who is not believed is FAIL all
// the same.
func TestBrakeIsAskedForOfEachBatch(t *testing.T) {
	t.Parallel()
	gone := []int{60, 61, 0, 200}
	inWorld(t, func(w *world) {
		e := &ear{}
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			results := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			for i := range gone[n-1] {
				results[i] = sender.Result{ID: results[i].ID, Class: sender.Gone, Code: "UNREGISTERED"}
			}
			return results
		})
		w.outbox.accept("A", 800)
		r := w.start("r1", func(c *coordinator.Config, d *coordinator.Deps) {
			d.Events, c.Brake = e, school.Brake{Percent: 30, Count: 20}
		})
		w.tick(r, 10*time.Second)
		w.pass(time.Minute)
		require.Equal(t, map[school.State]int{school.Success: 479, school.Fail: 321}, w.outbox.states("A"))
		require.Equal(t, []bool{false, true, false, true}, w.outbox.braked())
		require.Equal(t, []any{
			coordinator.BrakeTripped{Sender: "fcm", School: "A", Unregistered: 61, Size: 200},
			coordinator.BrakeTripped{Sender: "fcm", School: "A", Unregistered: 200, Size: 200},
		}, e.heard())
	})
}
