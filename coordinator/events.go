package coordinator

import (
	"maps"
	"slices"
	"time"

	"schoolbell/school"
	"schoolbell/sender"
)

// Events is told what a person should hear of, beyond the log (R32, R42). Each
// method is called within a turn, between a batch's call and the next: it returns at once,
// calls nothing that may wait, and may be called by several turns at once. That
// it panics harms nobody. Without Events nobody is told.
type Events interface {
	// SenderStopped: the receiver does not let this sender in (credentials, project,
	// URL); no school is sent to by it until it is let in again.
	SenderStopped(SenderStopped)
	// SenderResumed: the receiver took a probe of a sender that was stopped.
	SenderResumed(SenderResumed)
	// SenderMisfit: messages of a batch were refused for how the sender is set up
	// for the device or its platform. The sender goes on. Once a batch and code.
	SenderMisfit(SenderMisfit)
	// BrakeTripped: an unusual share of a batch came back as unregistered, so that
	// no device of it is retired. Once a batch that did, after its record, also
	// where an earlier one had engaged the brake.
	BrakeTripped(BrakeTripped)
}

// SenderStopped says that a sender has stopped for all its schools.
type SenderStopped struct {
	Sender  string
	School  string // whose batch found it out
	Code    string // the receiver's error code, or ours; never empty
	ProbeIn time.Duration
}

// SenderResumed says that a stopped sender goes on.
type SenderResumed struct {
	Sender  string
	Stopped time.Duration // how long it was; 0 where that is not known
}

// SenderMisfit counts the messages of one batch that were refused with Code:
// SENDER_ID_MISMATCH, THIRD_PARTY_AUTH_ERROR.
type SenderMisfit struct {
	Sender, School, Code string
	Count                int // above 0
}

// BrakeTripped counts the messages of one batch that came back as unregistered.
type BrakeTripped struct {
	Sender, School string
	Unregistered   int
	Size           int // messages of the batch
}

// emit tells the events; a panic of theirs is logged and goes no further, since
// the batch's results are still to be recorded.
func (c *Coordinator) emit(tell func(Events)) {
	if c.events == nil {
		return
	}
	_ = c.guard("tell an event", func() error { tell(c.events); return nil })
}

// emitMisfits tells of results that a person has to look at.
func (t *turn) emitMisfits(results []sender.Result) {
	var counts map[string]int
	for i := range results {
		if r := &results[i]; r.Class == sender.Mismatch {
			if counts == nil {
				counts = map[string]int{}
			}
			counts[r.Code]++
		}
	}
	for _, code := range slices.Sorted(maps.Keys(counts)) {
		t.c.emit(func(e Events) {
			e.SenderMisfit(SenderMisfit{Sender: t.lane.name, School: t.school, Code: code, Count: counts[code]})
		})
	}
}

// emitBrake tells of a recorded batch whose unregistered devices are not believed.
func (t *turn) emitBrake(r school.BatchRecord) {
	if !r.Brake {
		return
	}
	b := BrakeTripped{Sender: t.lane.name, School: t.school, Size: len(r.Results)}
	for i := range r.Results {
		if r.Results[i].Change.Retire {
			b.Unregistered++
		}
	}
	t.c.emit(func(e Events) { e.BrakeTripped(b) })
}
