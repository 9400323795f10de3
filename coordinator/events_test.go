package coordinator_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// ear keeps what was told. With faint it panics each time.
type ear struct {
	faint bool

	mu   sync.Mutex
	told []any
}

func (e *ear) add(v any) {
	e.mu.Lock()
	e.told = append(e.told, v)
	e.mu.Unlock()
	if e.faint {
		panic(v)
	}
}

func (e *ear) SenderStopped(v coordinator.SenderStopped) { e.add(v) }
func (e *ear) SenderResumed(v coordinator.SenderResumed) { e.add(v) }
func (e *ear) SenderMisfit(v coordinator.SenderMisfit)   { e.add(v) }
func (e *ear) BrakeTripped(v coordinator.BrakeTripped)   { e.add(v) }

func (e *ear) heard() []any {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]any{}, e.told...)
}

// TestEventsAreTold: a misfit once a batch and code, a stop and a resumption once
// each; and a listener that panics costs no batch its results.
func TestEventsAreTold(t *testing.T) {
	t.Parallel()
	for _, faint := range []bool{false, true} {
		inWorld(t, func(w *world) {
			e := &ear{faint: faint}
			w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
				results := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
				switch n {
				case 1:
					results[0].Class, results[0].Code = sender.Mismatch, "SENDER_ID_MISMATCH"
					results[1].Class, results[1].Code = sender.Mismatch, "THIRD_PARTY_AUTH_ERROR"
					results[2].Class, results[2].Code = sender.Mismatch, "SENDER_ID_MISMATCH"
				case 2, 3:
					results = sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured, Code: "UNAUTHENTICATED"})
				}
				return results
			})
			w.outbox.accept("A", 500)
			r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Events = e })
			w.tick(r, 10*time.Second)
			w.pass(2 * time.Minute)
			require.Equal(t, map[school.State]int{school.Success: 497, school.PermanentFail: 3}, w.outbox.states("A"))
			told := e.heard()
			require.Len(t, told, 4)
			require.Equal(t, coordinator.SenderMisfit{Sender: "fcm", School: "A", Code: "SENDER_ID_MISMATCH", Count: 2}, told[0])
			require.Equal(t, coordinator.SenderMisfit{Sender: "fcm", School: "A", Code: "THIRD_PARTY_AUTH_ERROR", Count: 1}, told[1])
			require.Equal(t, coordinator.SenderStopped{Sender: "fcm", School: "A", Code: "UNAUTHENTICATED", ProbeIn: 5 * time.Second}, told[2])
			require.Equal(t, "fcm", told[3].(coordinator.SenderResumed).Sender)
		})
	}
}
