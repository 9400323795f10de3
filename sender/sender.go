package sender

import (
	"context"
	"fmt"
	"time"
)

// Sender hands a batch to a receiver. Implementations may be called from many
// goroutines at once.
type Sender interface {
	// Send returns one result a message, in the order of the messages, and
	// returns by ctx's deadline at the latest. Each message leaves at most
	// once: there is no repeat inside, of the call or of a part of it.
	// Failures are results, never an error or a panic. When ctx has ended
	// before anything left, everything is NotSent.
	Send(ctx context.Context, batch Batch) []Result

	// Longest is how long after its start one Send may still let a message
	// leave, whatever ctx allows: what a batch's deadline and the least lease
	// are worked out from.
	Longest() time.Duration
}

// Status is a receiver's answer to the question what became of a message.
type Status int

// The answers. The zero value is StatusUnknown, so that a missing answer is one.
const (
	StatusUnknown     Status = iota // it cannot or will not say: as unknown as before
	StatusAccepted                  // it took the message: not to be sent again
	StatusNotAccepted               // it did not and will not from an earlier call: may be sent again
)

// String returns the answer as the relay protocol writes it.
func (s Status) String() string {
	switch s {
	case StatusUnknown:
		return "unknown"
	case StatusAccepted:
		return "accepted"
	case StatusNotAccepted:
		return "not_accepted"
	}
	return fmt.Sprintf("status(%d)", int(s))
}

// StatusAsker is a sender whose receiver can be asked what became of messages
// whose outcome is unknown, before they are sent again. Asking is no attempt.
type StatusAsker interface {
	// Ask returns an entry for each id. A requeued message shares its id with
	// the one before it and must not be asked about. An error means that
	// nothing was learnt.
	Ask(ctx context.Context, ids []string) (map[string]Status, error)
}

// Ask asks s where it can be asked, and otherwise answers StatusUnknown for
// each id without an error.
func Ask(ctx context.Context, s Sender, ids []string) (map[string]Status, error) {
	if asker, ok := s.(StatusAsker); ok {
		return asker.Ask(ctx, ids)
	}
	answers := make(map[string]Status, len(ids))
	for _, id := range ids {
		answers[id] = StatusUnknown
	}
	return answers, nil
}
