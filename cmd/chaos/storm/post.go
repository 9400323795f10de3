package storm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// hand is one notice that an application hands in.
type hand struct {
	at     time.Duration // after the run's begin
	school string
	n      int
}

// School is the id of the i-th school of a run.
func School(i int) string { return fmt.Sprintf("S%02d", i) }

// schedule spreads the recipients over the schools, and each school's over the
// run: a quarter at once and the rest in notices of random size at random
// moments until shortly before its end, so that there is always work and always
// somebody who hands in more.
func schedule(cfg Config) []hand {
	rnd := rand.New(rand.NewPCG(uint64(cfg.Seed), 0x9057))
	var hands []hand
	for s := range cfg.Schools {
		left := cfg.Recipients / cfg.Schools
		if s < cfg.Recipients%cfg.Schools {
			left++
		}
		first := max(1, left/4)
		pieces := max(1, int(cfg.For/(8*time.Second)))
		each := max(1, (left-first)/pieces)
		for at := time.Duration(0); left > 0; {
			n := first
			if at > 0 {
				n = 1 + rnd.IntN(2*each)
			}
			n = min(n, left)
			hands = append(hands, hand{at, School(s), n})
			left -= n
			at = time.Duration(rnd.Int64N(int64(cfg.For*95/100) + 1))
		}
	}
	slices.SortStableFunc(hands, func(a, b hand) int { return int(a.at - b.at) })
	return hands
}

// applications is how many notices are handed in at a time: a load balancer's
// replicas take two long uploads each.
const applications = 6

// post hands in everything. What cannot be handed in before ctx ends is told.
func (r *run) post(ctx context.Context) error {
	var wg sync.WaitGroup
	room := make(chan struct{}, applications)
	var mu sync.Mutex
	var errs []error
	for _, h := range schedule(r.Config) {
		r.until(ctx, h.at)
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			wg.Wait()
			return errors.Join(append(errs, context.Cause(ctx))...)
		}
		wg.Go(func() {
			defer func() { <-room }()
			post := r.arena.Post
			if r.AtMostOnce {
				post = r.arena.PostOnce
			}
			if _, err := post(ctx, h.school, h.n); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
