package watchdog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Lease is a lock while it is held. Its methods are safe for concurrent use and
// stay so after Hold has returned; the gate is closed then.
type Lease struct {
	keeper      *Keeper
	name        string
	acquisition string
	etc         time.Duration
	length      time.Duration // the lease, as the backend counts it
	timeout     time.Duration // of one call to the backend
	began       time.Time
	advanced    atomic.Int64 // time from began to the last Progress, ns

	calls chan struct{} // one place: one extension at a time, so that its start times grow
	kick  chan struct{} // wakes the watchdog: an extension outside of it failed
	ended chan struct{} // closed when the gate closes

	mu       sync.Mutex // never held during a call
	cancel   context.CancelCauseFunc
	trust    window
	due      time.Time // when the watchdog means to be awake next
	renewals int64
	cause    error // why the gate is closed; nil while it is open
	retired  error // why renewing ended while the gate stays open until the local end
	gone     bool  // the backend said that the lock is not ours
	fence    int64

	expiry   *time.Timer // closes the gate at the local end, even while a call hangs
	expiring sync.WaitGroup
}

func newLease(k *Keeper, name, acquisition string, etc, length time.Duration) *Lease {
	return &Lease{
		keeper: k, name: name, acquisition: acquisition,
		etc: etc, length: length, timeout: callTimeout(etc), began: k.now().at,
		calls: make(chan struct{}, 1), kick: make(chan struct{}, 1), ended: make(chan struct{}),
	}
}

// open starts the clock that ends the work's context at the local end.
func (l *Lease) open(cancel context.CancelCauseFunc) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel = cancel
	l.due = l.trust.from.at.Add(l.tick())
	l.arm(l.trust.remaining(l.keeper.now()))
}

// Acquisition is the id of this Hold, a UUID that no other Hold has or had.
func (l *Lease) Acquisition() string { return l.acquisition }

// Left returns for how long the lease may still be trusted, by the clock that
// leaves least; 0 when the gate is closed.
func (l *Lease) Left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return 0
	}
	return l.trust.remaining(l.keeper.now())
}

// Progress tells the watchdog that the work advances: it is to be called at
// every step, at least once within Config.ProgressWithin.
func (l *Lease) Progress() { l.advanced.Store(int64(l.keeper.now().at.Sub(l.began))) }

// Check is the gate before every send: nil when a send may start now, else
// ErrLeaseLost, ErrLeaseExpired, ErrNoProgress or ErrReleased, always the same
// once it was closed. It looks at the lease alone, not at the context given to
// Hold, and not at ErrMaxHold: a batch that was begun may end while its lease is
// good.
//
// It looks at clocks and does not call the backend, with one exception: where the
// clocks or the watchdog's lateness show that the process stood still, Check
// first has the lease confirmed, which takes until the backend answers, at most
// until the local end.
func (l *Lease) Check() error {
	for failures := 0; ; {
		renewals, paused, err := l.look()
		if err != nil || !paused {
			return err
		}
		if err := l.renew(context.Background(), renewals); err != nil {
			failures++
			select {
			case <-l.ended:
			case <-time.After(l.backoff(failures, err)):
			}
		}
	}
}

// look returns how often the lease was renewed so far, whether the process seems
// to have stood still since the watchdog last ran, and why the gate is closed,
// closing it where the trust has run out.
func (l *Lease) look() (renewals int64, paused bool, err error) {
	now := l.keeper.now()
	l.mu.Lock()
	cause, left, renewals := l.cause, l.trust.remaining(now), l.renewals
	if l.retired == nil {
		paused = now.at.Sub(l.due) > TickFor(l.etc)/2 || l.trust.slept(now)
	}
	if paused && cause == nil && left > 0 {
		l.arm(left) // timers stood still too
	}
	l.mu.Unlock()
	switch {
	case cause != nil:
		return 0, false, cause
	case left <= 0:
		return 0, false, l.end(ErrLeaseExpired)
	}
	return renewals, paused, nil
}

// Ensure sees to it that at least d is left before the local end: if less is
// left it extends the lease at once. It returns an error where that does not
// give d, or no answer came; then nothing that takes d may be begun.
func (l *Lease) Ensure(ctx context.Context, d time.Duration) error {
	renewals, paused, err := l.look()
	if err != nil {
		return err
	}
	if !paused && l.Left() >= d {
		return nil
	}
	return l.extend(ctx, d, renewals)
}

// Extend extends the lease at once, however much is left before the local end,
// and sees to it that that is at least d then. It is for a holder that was told
// by the server that less is left there than is believed here: it lost the last
// extensions in a failover, or somebody shortened the lock by hand. Errors as
// Ensure.
func (l *Lease) Extend(ctx context.Context, d time.Duration) error {
	renewals, _, err := l.look()
	if err != nil {
		return err
	}
	return l.extend(ctx, d, renewals)
}

func (l *Lease) extend(ctx context.Context, d time.Duration, renewals int64) error {
	if err := l.renew(ctx, renewals); err != nil {
		l.wake()
		return fmt.Errorf("extend lock %s to %s: %w", l.name, d, err)
	}
	if left := l.Left(); left < d {
		return fmt.Errorf("extend lock %s: %s left of a lease of %s, less than %s", l.name, left, l.length, d)
	}
	return nil
}

// Bind writes fence, above 0, on the lock, so that reserve and people see which
// term holds it. ErrLeaseLost where the lock is another's or gone: the gate is
// closed then. After any other error the fence may or may not be there; Bind may
// be called again.
func (l *Lease) Bind(ctx context.Context, fence int64) error {
	if err := l.Check(); err != nil {
		return err
	}
	var err error
	for range 2 { // once more where the connection was found dead
		callCtx, cancel := context.WithTimeout(ctx, min(l.timeout, l.Left()))
		err = l.keeper.backend.Bind(callCtx, l.name, l.acquisition, fence)
		cancel()
		if !errors.Is(err, ErrServerChanged) {
			break
		}
	}
	switch {
	case err == nil:
		l.mu.Lock()
		l.fence = fence
		l.mu.Unlock()
		l.event(ctx, slog.LevelInfo, "lock acquired", "lock_acquired", slog.Int64("etc_ms", l.etc.Milliseconds()), slog.Int64("lease_ms", l.length.Milliseconds()))
		return nil
	case errors.Is(err, ErrLeaseLost):
		l.lose(err)
	case errors.Is(err, ErrServerChanged):
		l.wake()
	}
	return fmt.Errorf("bind fence %d to lock %s: %w", fence, l.name, err)
}

// renew extends the lease by one call and counts the new trust from before it.
// It does nothing where somebody else has renewed since the caller saw renewals.
func (l *Lease) renew(ctx context.Context, renewals int64) error {
	select {
	case l.calls <- struct{}{}:
		defer func() { <-l.calls }()
	case <-l.ended:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	before := l.keeper.now()
	l.mu.Lock()
	switch {
	case l.cause != nil:
		defer l.mu.Unlock()
		return l.cause
	case l.retired != nil:
		defer l.mu.Unlock()
		return l.retired
	case l.renewals > renewals:
		l.mu.Unlock()
		return nil
	}
	left := l.trust.remaining(before)
	l.mu.Unlock()

	// An answer after the local end is worth nothing, so the call does not wait for it.
	callCtx, cancel := context.WithTimeout(ctx, min(l.timeout, left))
	err := l.keeper.backend.Extend(callCtx, l.name, l.acquisition, l.length, renewals+1)
	cancel()
	after := l.keeper.now()

	extended := l.keeper.metrics.extend
	if errors.Is(err, ErrLeaseLost) {
		extended.WithLabelValues("lost").Inc()
		return l.lose(err)
	}
	l.mu.Lock()
	cause, left := l.cause, l.trust.remaining(after)
	before, left = trusted(before, after, left)
	if cause == nil && left > 0 && err == nil {
		l.trust = newWindow(before, l.length)
		l.renewals = renewals + 1
		l.due = before.at.Add(l.tick())
		l.arm(l.trust.remaining(after))
	}
	l.mu.Unlock()

	switch {
	case cause != nil:
		extended.WithLabelValues("late").Inc()
		return cause
	case left <= 0: // what has ended stays ended, whatever the answer says
		extended.WithLabelValues("late").Inc()
		return l.end(ErrLeaseExpired)
	case err != nil:
		extended.WithLabelValues("error").Inc()
		return err
	}
	extended.WithLabelValues("ok").Inc()
	l.keeper.metrics.remaining.Observe(left.Seconds())
	l.event(ctx, slog.LevelDebug, "lease extended", "lease_extended", slog.Int64("renewals", renewals+1), slog.Int64("left_ms", left.Milliseconds()))
	return nil
}

// lose closes the gate because the backend said that the lock is not ours, and
// returns why the gate is closed.
func (l *Lease) lose(err error) error {
	l.mu.Lock()
	l.gone = true
	l.mu.Unlock()
	return l.end(err)
}

// end closes the gate for cause unless it is closed, and returns why it is.
func (l *Lease) end(cause error) error {
	l.mu.Lock()
	if l.cause != nil {
		defer l.mu.Unlock()
		return l.cause
	}
	l.cause = cause
	l.cancel(cause)
	close(l.ended)
	l.mu.Unlock()
	if cause != ErrReleased {
		l.report(cause)
	}
	return cause
}

// retire ends renewing and asks the work to end; the gate stays open until the
// local end.
func (l *Lease) retire(cause error) {
	l.mu.Lock()
	l.retired = cause
	l.cancel(cause)
	l.mu.Unlock()
	l.report(cause)
}

// arm sets the timer of the local end. l.mu is held.
func (l *Lease) arm(d time.Duration) {
	switch {
	case l.expiry == nil:
		l.expiring.Add(1)
		l.expiry = time.AfterFunc(d, l.expire)
	case !l.expiry.Reset(d): // the former run has begun and counts itself out
		l.expiring.Add(1)
	}
}

// expire runs when the timer of the local end fires. The trust may have been
// renewed in the meantime.
func (l *Lease) expire() {
	defer l.expiring.Done()
	l.mu.Lock()
	left := l.trust.remaining(l.keeper.now())
	if l.cause == nil && left > 0 {
		l.arm(left)
	}
	l.mu.Unlock()
	if left <= 0 {
		_ = l.end(ErrLeaseExpired)
	}
}

// finish closes the gate, gives the lock back and says how the Hold ended. The
// work and the watchdog have ended.
func (l *Lease) finish(ctx context.Context, err error) error {
	cause := l.end(ErrReleased)
	l.mu.Lock()
	gone := l.gone
	if cause == ErrReleased {
		cause = l.retired
	}
	if l.expiry.Stop() {
		l.expiring.Done()
	}
	l.mu.Unlock()
	l.expiring.Wait()

	if err == nil {
		err = cause
	}
	if gone {
		return err
	}
	gone, releaseErr := l.keeper.release(ctx, l)
	if gone && cause == nil {
		// Lost since the last renewal, and found out only now.
		l.report(ErrLeaseLost)
	}
	return errors.Join(err, releaseErr)
}

// report counts and logs why the lease ended before its work.
func (l *Lease) report(cause error) {
	l.keeper.metrics.lost.WithLabelValues(causeLabel(cause)).Inc()
	l.event(context.Background(), slog.LevelWarn, "lease lost", "lease_lost",
		slog.String("cause", causeLabel(cause)), slog.Any("error", cause))
}

// event writes one line about this lock.
func (l *Lease) event(ctx context.Context, level slog.Level, msg, event string, attrs ...slog.Attr) {
	if !l.keeper.log.Enabled(ctx, level) {
		return
	}
	l.mu.Lock()
	fence := l.fence
	l.mu.Unlock()
	l.keeper.log.LogAttrs(ctx, level, msg, append([]slog.Attr{
		slog.String("event", event), slog.String("school", l.name), slog.Int64("fence", fence),
		slog.String("acquisition", l.acquisition),
	}, attrs...)...)
}

// wake has the watchdog try an extension at once.
func (l *Lease) wake() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// tick returns the time from one renewal to the next: up to 10 % earlier than
// TickFor, so that locks taken together do not stay together, and never later.
func (l *Lease) tick() time.Duration {
	tick := TickFor(l.etc)
	return tick - rand.N(tick/10+1)
}

// backoff returns the wait after the n-th failure in a row: 200 ms, doubled up to
// 2 s, less for short leases, less up to a quarter at random; none after the
// first where the server has just changed.
func (l *Lease) backoff(n int, err error) time.Duration {
	if n == 1 && errors.Is(err, ErrServerChanged) {
		return 0
	}
	wait := min(200*time.Millisecond, l.length/20) << min(n-1, 4)
	wait = min(wait, 2*time.Second, l.length/8)
	return wait - rand.N(wait/4+1)
}
