package settings

import (
	"time"

	"schoolbell/watchdog"
)

// Durations that are part of the design, not settings.
const (
	// RecordGrace is G: what recording a batch's results may take after its call
	// has ended, before the batch counts as orphaned.
	RecordGrace = 2 * time.Second
	// StopReserve is what a graceful stop needs beyond its last batch: releasing
	// locks, leaving the membership list, closing connections.
	StopReserve = 5 * time.Second
)

// BatchTime is B = W + C: the longest that a batch of the sender can take from
// before its reservation to the end of its call.
func (s Settings) BatchTime(sender string) time.Duration {
	return s.Dispatch.ClaimTimeout + s.Senders[sender].CallTimeout
}

// Lease is how long a lock lives without being extended, for this ETC (R11).
func Lease(etc time.Duration) time.Duration { return watchdog.LeaseFor(etc) }

// Margin is m: what the local end of a lease lies before its end in Redis.
func Margin(etc time.Duration) time.Duration { return watchdog.Margin(Lease(etc)) }

// LeastETC is the shortest ETC, in whole milliseconds, whose lease still fits a
// batch of b when it is due to be extended: ETC ≥ b + Margin(ETC).
func LeastETC(b time.Duration) time.Duration { return watchdog.LeastETC(b) }

// ComfortableETC is the shortest ETC, in whole milliseconds, with which sending
// goes on through one missed extend: ETC ≥ 2 (b + Margin(ETC)).
func ComfortableETC(b time.Duration) time.Duration {
	// Margin grows by at most 16.5 % of etc, so this closes in from below.
	etc := 2 * b
	for {
		need := 2 * (b + Margin(etc))
		if rest := need % time.Millisecond; rest > 0 {
			need += time.Millisecond - rest
		}
		if need <= etc {
			return etc
		}
		etc = need
	}
}

// ETCBounds are what the learned ETC of a school with this sender is clamped
// to: at least what fits a batch, at least what survives one missed extend
// unless lock.etc asks for less, at most lock.etc_max.
func (s Settings) ETCBounds(sender string) (least, most time.Duration) {
	b := s.BatchTime(sender)
	return max(LeastETC(b), min(ComfortableETC(b), s.Lock.ETC)), s.Lock.ETCMax
}
