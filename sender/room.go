package sender

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// Room bounds the messages that one sender has in flight in this process. It is
// weighted by the size of the batch and first come first served: a large batch
// that waits is not overtaken by small ones. Who waits for room holds no lease,
// no slot and no claim (R9).
type Room struct {
	size  int64
	inUse atomic.Int64
	sem   *semaphore.Weighted
}

// NewRoom returns an empty room for size messages, at least 1.
func NewRoom(size int) (*Room, error) {
	if size < 1 {
		return nil, fmt.Errorf("room for %d messages in flight: must be at least 1", size)
	}
	return &Room{size: int64(size), sem: semaphore.NewWeighted(int64(size))}, nil
}

// Enter waits until n messages fit, behind all who came earlier, and returns
// the way out, which may be called more than once. It fails when ctx ends
// first, and at once where n is below 1 or can never fit.
func (r *Room) Enter(ctx context.Context, n int) (leave func(), err error) {
	if err := r.fits(n); err != nil {
		return nil, err
	}
	if err := r.sem.Acquire(ctx, int64(n)); err != nil {
		return nil, fmt.Errorf("wait for room for %d messages: %w", n, context.Cause(ctx))
	}
	return r.entered(n), nil
}

// TryEnter is Enter without the wait: ok is false where n messages do not fit
// now, or others wait already.
func (r *Room) TryEnter(n int) (leave func(), ok bool) {
	if r.fits(n) != nil || !r.sem.TryAcquire(int64(n)) {
		return nil, false
	}
	return r.entered(n), true
}

// Size is how many messages fit.
func (r *Room) Size() int { return int(r.size) }

// InUse is how many are in flight now.
func (r *Room) InUse() int { return int(r.inUse.Load()) }

func (r *Room) fits(n int) error {
	if n < 1 || int64(n) > r.size {
		return fmt.Errorf("room for %d messages: must be 1 to %d", n, r.size)
	}
	return nil
}

func (r *Room) entered(n int) func() {
	r.inUse.Add(int64(n))
	return sync.OnceFunc(func() {
		r.inUse.Add(-int64(n))
		r.sem.Release(int64(n))
	})
}
