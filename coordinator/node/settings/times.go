package settings

import "time"

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
func Lease(etc time.Duration) time.Duration { return etc * 3 / 2 }

// Margin is m: what the local end of a lease lies before its end in Redis. 1 %
// of the lease for clocks that run at different speeds, a tenth of the lease
// but at most 500 ms for a clock that steps, 100 ms for the process itself.
func Margin(etc time.Duration) time.Duration {
	lease := Lease(etc)
	return lease/100 + min(500*time.Millisecond, lease/10) + 100*time.Millisecond
}

// LeastETC is the shortest ETC, in whole milliseconds, whose lease still fits a
// batch of b when it is due to be extended: ETC ≥ b + Margin(ETC).
func LeastETC(b time.Duration) time.Duration { return solveETC(1, b) }

// ComfortableETC is the shortest ETC, in whole milliseconds, with which sending
// goes on through one missed extend: ETC ≥ 2 (b + Margin(ETC)).
func ComfortableETC(b time.Duration) time.Duration { return solveETC(2, b) }

// solveETC finds the least x with x ≥ n (b + Margin(x)), n being 1 or 2. Margin
// is the lesser of two straight lines in x (0.015 x + 600 ms and
// 0.165 x + 100 ms), so the answer is the lesser of the two lines' answers. The
// quotients are whole numbers of thousandths, rounded down, and then lifted to
// the first millisecond that satisfies the condition itself.
func solveETC(n int64, b time.Duration) time.Duration {
	steep := time.Duration(n) * (b + 100*time.Millisecond) * 1000 / time.Duration(1000-165*n)
	flat := time.Duration(n) * (b + 600*time.Millisecond) * 1000 / time.Duration(1000-15*n)
	x := min(steep, flat).Truncate(time.Millisecond)
	for x < time.Duration(n)*(b+Margin(x)) {
		x += time.Millisecond
	}
	return x
}

// ETCBounds are what the learned ETC of a school with this sender is clamped
// to: at least what fits a batch, at least what survives one missed extend
// unless lock.etc asks for less, at most lock.etc_max.
func (s Settings) ETCBounds(sender string) (least, most time.Duration) {
	b := s.BatchTime(sender)
	return max(LeastETC(b), min(ComfortableETC(b), s.Lock.ETC)), s.Lock.ETCMax
}
