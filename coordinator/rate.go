package coordinator

import "time"

// rateSeconds is over how long a lane's rate is measured.
const rateSeconds = 10

// rate counts messages by the second and tells how many a second went out
// lately. The zero value is ready.
type rate struct {
	counts [rateSeconds + 1]int
	last   int64 // unix second of the newest count
}

func (r *rate) add(now time.Time, n int) {
	r.advance(now.Unix())
	r.counts[now.Unix()%int64(len(r.counts))] += n
}

// perSecond is the mean over the last whole seconds, the running one left out.
func (r *rate) perSecond(now time.Time) float64 {
	r.advance(now.Unix())
	sum := 0
	for i, n := range r.counts {
		if int64(i) != now.Unix()%int64(len(r.counts)) {
			sum += n
		}
	}
	return float64(sum) / rateSeconds
}

// advance empties the seconds between the last count and now.
func (r *rate) advance(second int64) {
	for s := max(r.last+1, second-int64(len(r.counts))+1); s <= second; s++ {
		r.counts[s%int64(len(r.counts))] = 0
	}
	r.last = max(r.last, second)
}
