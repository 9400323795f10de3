package coordinator

import "time"

// rateSeconds is over how long a lane's rate is measured.
const rateSeconds = 10

// rate counts messages by the second and tells how many a second went out
// lately. The zero value is ready.
type rate struct {
	counts [rateSeconds + 1]int
	began  time.Time // seconds are counted from here, by the monotonic clock
	last   int64     // second of the newest count
}

func (r *rate) add(now time.Time, n int) { r.counts[r.advance(now)] += n }

// perSecond is the mean over the last whole seconds, the running one left out.
func (r *rate) perSecond(now time.Time) float64 {
	running := r.advance(now)
	sum := 0
	for i, n := range r.counts {
		if i != running {
			sum += n
		}
	}
	return float64(sum) / rateSeconds
}

// advance empties the seconds between the last count and now, and returns the
// place of the running one.
func (r *rate) advance(now time.Time) int {
	if r.began.IsZero() {
		r.began = now
	}
	second := int64(now.Sub(r.began) / time.Second)
	for s := max(r.last+1, second-int64(len(r.counts))+1); s <= second; s++ {
		r.counts[s%int64(len(r.counts))] = 0
	}
	r.last = max(r.last, second)
	return int(second % int64(len(r.counts)))
}
