package coordinator

import (
	"sync"
	"time"
)

// learnedETC learns, per school, how long one batch takes from its reservation to its
// record, and gives the expected time to complete (ETC) that the lease is made
// of (R11). It is a hint of this process: a wrong ETC costs time, never a wrong
// send.
type learnedETC struct {
	start, least, most time.Duration

	mu   sync.Mutex
	avgs map[string]time.Duration
}

// maxLearned bounds the memory: beyond it an arbitrary school is learned anew.
const maxLearned = 20_000

// batchesAhead is how many average batches an ETC spans. One would leave a
// lease that a batch of twice the usual length outlives; the bounds do the rest.
const batchesAhead = 2

func newLearnedETC(start, least, most time.Duration) *learnedETC {
	return &learnedETC{start: start, least: least, most: most, avgs: map[string]time.Duration{}}
}

// of returns the school's ETC within the bounds.
func (l *learnedETC) of(schoolID string) time.Duration {
	l.mu.Lock()
	avg, known := l.avgs[schoolID]
	l.mu.Unlock()
	if !known {
		return min(max(l.start, l.least), l.most)
	}
	return min(max(avg*batchesAhead, l.least), l.most)
}

// took feeds one batch into the moving average (weight 1/4).
func (l *learnedETC) took(schoolID string, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	avg, known := l.avgs[schoolID]
	if !known {
		if len(l.avgs) >= maxLearned {
			for other := range l.avgs {
				delete(l.avgs, other)
				break
			}
		}
		l.avgs[schoolID] = d
		return
	}
	l.avgs[schoolID] = avg + (d-avg)/4
}
