package watchdog

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config holds the limits of a Hold; a zero field stands for its default.
type Config struct {
	// ProgressWithin is how long work may go without calling Lease.Progress
	// before its lease is no longer renewed; never less than one tick. It should
	// be at least twice the longest call to a receiver. Default 30 s.
	ProgressWithin time.Duration
	// MaxHold is how long one Hold may keep its lock; then the work's context
	// ends and the lease is no longer renewed. Default 20 times the etc of the
	// Hold; else at least the lease.
	MaxHold time.Duration
	// ReleaseWithin is how long giving a lock back is tried, at most the lease.
	// Default 2 s.
	ReleaseWithin time.Duration
	// Now is the system's clock, with its monotonic reading; nil: time.Now. What
	// its wall reading can do is end a lease early.
	Now func() time.Time
}

// Keeper takes locks in the name of one replica. It is safe for concurrent use.
type Keeper struct {
	cfg     Config
	owner   string
	backend Backend
	log     *slog.Logger
	metrics *metrics
	now     func() instant
	held    atomic.Int64
}

// New returns a Keeper that takes locks as owner, the instance id. reg may be
// nil: then nothing is registered.
func New(cfg Config, owner string, backend Backend, log *slog.Logger, reg prometheus.Registerer) (*Keeper, error) {
	if owner == "" {
		return nil, errors.New("watchdog: owner must not be empty")
	}
	if backend == nil || log == nil {
		return nil, errors.New("watchdog: backend and log must not be nil")
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"ProgressWithin", cfg.ProgressWithin}, {"MaxHold", cfg.MaxHold}, {"ReleaseWithin", cfg.ReleaseWithin}} {
		if d.value < 0 {
			return nil, fmt.Errorf("watchdog: %s %s: must not be negative", d.name, d.value)
		}
	}
	if cfg.ProgressWithin == 0 {
		cfg.ProgressWithin = 30 * time.Second
	}
	if cfg.ReleaseWithin == 0 {
		cfg.ReleaseWithin = 2 * time.Second
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	m, err := newMetrics(reg)
	if err != nil {
		return nil, fmt.Errorf("watchdog: register metrics: %w", err)
	}
	return &Keeper{cfg: cfg, owner: owner, backend: backend, log: log, metrics: m, now: systemClock(cfg.Now)}, nil
}

// Held returns how many locks this Keeper holds now.
func (k *Keeper) Held() int { return int(k.held.Load()) }

// Hold takes the lock name, keeps its lease with a watchdog goroutine and runs
// fn; it does not wait for a lock that another holds. etc is how long the work in
// hand, one batch from reserve to recorded, is expected to take; the lease is
// LeaseFor(etc). It must leave more trust than one tick, which 200 ms do.
//
// fn's context ends with ctx, and with the lease: its cause is then ErrLeaseLost,
// ErrLeaseExpired, ErrNoProgress or ErrMaxHold, and no new work may begin. fn may
// go on after that, under contexts of its own, to record what it has sent; Hold
// waits for it. When ctx ends, the lease is renewed until fn has returned, so that
// a batch that was begun ends under its lock.
//
// Hold returns after fn and the watchdog have ended and the lock was given back
// (unless it was lost), also when fn panics. It returns fn's error; where fn
// returned nil, why the lease ended early, if it did; and joined to it that
// giving back failed: then the lock frees itself when its lease runs out. A
// *BusyError says that another holds the lock; after any other error of taking
// it, fn was not run and what may have been taken was given back as well as
// possible.
func (k *Keeper) Hold(ctx context.Context, name string, etc time.Duration, fn func(ctx context.Context, l *Lease) error) (err error) {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("take lock %s: %w", name, context.Cause(ctx))
	}
	l, err := k.take(ctx, name, etc)
	if err != nil {
		return err
	}
	workCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l.open(cancel)

	watchCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	var watchdog sync.WaitGroup
	watchdog.Go(func() { l.watch(watchCtx) })
	k.held.Add(1)
	k.metrics.held.Inc()

	defer func() { // also when fn panics or ends its goroutine: the school must not stay taken
		stop()
		watchdog.Wait()
		err = l.finish(ctx, err)
		k.held.Add(-1)
		k.metrics.held.Dec()
	}()
	return fn(workCtx, l)
}

// take acquires the lock. The trust counts from before the call.
func (k *Keeper) take(ctx context.Context, name string, etc time.Duration) (*Lease, error) {
	lease := LeaseFor(etc).Truncate(time.Millisecond)
	if lease-Margin(lease) <= TickFor(etc) {
		return nil, fmt.Errorf("take lock %s: etc %s is too short: the lease of %s less its margin of %s ends before the first renewal at %s",
			name, etc, lease, Margin(lease), TickFor(etc))
	}
	if k.cfg.MaxHold > 0 && k.cfg.MaxHold < lease {
		return nil, fmt.Errorf("take lock %s: the longest hold of %s is shorter than the lease of %s", name, k.cfg.MaxHold, lease)
	}
	timeout := callTimeout(etc)
	l := newLease(k, name, newAcquisition(k.now().wall), etc, lease)

	before := k.now()
	callCtx, cancel := context.WithTimeout(ctx, timeout)
	err := k.backend.Acquire(callCtx, Request{
		Name: name, Owner: k.owner, Acquisition: l.acquisition, Lease: lease, ETC: etc, Patience: timeout,
	})
	cancel()

	var busy *BusyError
	switch {
	case err == nil:
		k.metrics.acquire.WithLabelValues("ok").Inc()
	case errors.As(err, &busy):
		k.metrics.acquire.WithLabelValues("busy").Inc()
		return nil, fmt.Errorf("take lock %s: %w", name, err)
	case errors.Is(err, ErrStale):
		k.metrics.acquire.WithLabelValues("stale").Inc()
		return nil, fmt.Errorf("take lock %s: %w", name, err)
	default:
		// Unknown: it may have been taken. One try to give it back, since a lock
		// server that is away has nothing to free and would only be waited for.
		k.metrics.acquire.WithLabelValues("error").Inc()
		_ = k.tryRelease(context.WithoutCancel(ctx), l)
		return nil, fmt.Errorf("take lock %s: %w", name, err)
	}

	before, _ = trusted(before, k.now(), lease)
	l.trust = newWindow(before, lease)
	if l.trust.remaining(k.now()) <= 0 {
		_ = k.tryRelease(context.WithoutCancel(ctx), l)
		return nil, fmt.Errorf("take lock %s: answered too late: %w", name, ErrLeaseExpired)
	}
	return l, nil
}

// tryRelease makes one attempt to give the lock back.
func (k *Keeper) tryRelease(ctx context.Context, l *Lease) error {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	return k.backend.Release(ctx, l.name, l.acquisition)
}

// release gives the lock back, trying again for a while, whatever became of ctx.
// gone says that the lock turned out not to have been held any more.
func (k *Keeper) release(ctx context.Context, l *Lease) (gone bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(k.cfg.ReleaseWithin, l.length))
	defer cancel()
	for failures := 0; ; {
		err = k.tryRelease(ctx, l)
		switch {
		case err == nil:
			return false, nil
		case errors.Is(err, ErrNotHeld):
			// After a try without an answer this is most likely that try's work.
			return failures == 0, nil
		}
		failures++
		select {
		case <-ctx.Done():
			return false, fmt.Errorf("release lock %s: %w", l.name, err)
		case <-time.After(l.backoff(failures, err)):
		}
	}
}

// newAcquisition returns a UUID of version 7: new for every call, and sorted by time.
func newAcquisition(now time.Time) string {
	var u [16]byte
	rand.Read(u[6:]) // never fails
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(now.UnixMilli()))
	copy(u[:6], ms[2:])
	u[6] = u[6]&0x0f | 0x70
	u[8] = u[8]&0x3f | 0x80
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
