package coordinator_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/school/quota"
)

// arbiter is the locks and the quotas of the cluster: the pure rule with a lock
// before it. It may be made to forget at any time.
type arbiter struct {
	script *script

	mu     sync.Mutex
	locks  map[string]*lock
	quotas map[string]quota.State
	taken  int
	answer func(n int) *school.Grant // instead of the rule's answer, where not nil
	asked  int
}

type lock struct {
	owner, acquisition string
	fence              int64
	expires            time.Time
	lease              *lease // of whoever holds it here
}

func newArbiter(s *script) *arbiter {
	return &arbiter{script: s, locks: map[string]*lock{}, quotas: map[string]quota.State{}}
}

// state is the quota as it stands.
func (a *arbiter) state(schoolID string) quota.State {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.quotas[schoolID]
}

// set replaces the quota.
func (a *arbiter) set(schoolID string, s quota.State) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.quotas[schoolID] = s
}

// flush forgets everything.
func (a *arbiter) flush() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.locks)
	clear(a.quotas)
}

// lock puts a lock of another owner on the school, for d.
func (a *arbiter) lock(schoolID, owner string, d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.locks[schoolID] = &lock{owner: owner, acquisition: "foreign", expires: time.Now().Add(d)}
}

// held returns the lock of the school while it lasts.
func (a *arbiter) held(schoolID string) *lock {
	if l := a.locks[schoolID]; l != nil && l.expires.After(time.Now()) {
		return l
	}
	return nil
}

// lockCount counts the locks that are there.
func (a *arbiter) lockCount() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.locks)
}

// heldBy is the lock's owner, empty without one.
func (a *arbiter) heldBy(schoolID string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.held(schoolID); l != nil {
		return l.owner
	}
	return ""
}

func (a *arbiter) Peek(ctx context.Context, schoolID string) (school.Peek, error) {
	if err := a.script.enter(ctx, "peek", schoolID, ""); err != nil {
		return school.Peek{}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	state := a.quotas[schoolID]
	p := state.Peek(now.UnixMilli())
	for _, o := range state.Open {
		p.Orphaned = p.Orphaned || o.Deadline <= now.UnixMilli()
	}
	if l := a.held(schoolID); l != nil {
		p.Held, p.Owner, p.Fence, p.LeaseLeft = true, l.owner, l.fence, l.expires.Sub(now)
	}
	return p, nil
}

func (a *arbiter) Reconcile(ctx context.Context, schoolID string, ledger school.Ledger, rule school.Rule) error {
	if err := a.script.enter(ctx, "reconcile", schoolID, ""); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s, _, err := a.quotas[schoolID].Reconcile(time.Now().UnixMilli(), ledger, rule)
	a.quotas[schoolID] = s
	return err
}

func (a *arbiter) Rebuild(ctx context.Context, schoolID, acquisition string, fence int64, ledger school.Ledger, rule school.Rule) error {
	if err := a.script.enter(ctx, "rebuild", schoolID, ""); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.held(schoolID); l == nil || l.acquisition != acquisition || l.fence != fence {
		return errors.New("rebuild: not the owner")
	}
	s, _, err := a.quotas[schoolID].Rebuild(time.Now().UnixMilli(), ledger, rule)
	a.quotas[schoolID] = s
	return err
}

func (a *arbiter) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	if err := a.script.enter(ctx, "reserve", r.School, fmt.Sprint(r.Want)); err != nil {
		return school.Grant{}, err
	}
	g, err := a.reserve(r)
	if err != nil {
		return g, err
	}
	return g, a.script.leave(ctx, "reserve")
}

func (a *arbiter) reserve(r school.Reservation) (school.Grant, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.asked++
	if a.answer != nil {
		if g := a.answer(a.asked); g != nil {
			return *g, nil
		}
	}
	switch l := a.held(r.School); {
	case l == nil || l.acquisition != r.Acquisition || l.fence != r.Fence:
		return school.Grant{Kind: school.NotOwner}, nil
	case l.expires.Sub(now) < r.Longest+r.Margin:
		return school.Grant{Kind: school.LeaseShort}, nil
	}
	s, g, err := a.quotas[r.School].Reserve(now.UnixMilli(), r)
	a.quotas[r.School] = s
	return g, err
}

func (a *arbiter) Settle(ctx context.Context, x school.Settlement) error {
	if err := a.script.enter(ctx, "settle", x.School, fmt.Sprint(x.Attempted)); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s, outcome, err := a.quotas[x.School].Settle(time.Now().UnixMilli(), x)
	a.quotas[x.School] = s
	if err == nil && outcome == quota.Unknown {
		err = school.ErrReservationUnknown
	}
	return err
}

var (
	errLost    = errors.New("fake: lease lost")
	errExpired = errors.New("fake: lease expired")
	errMaxHold = errors.New("fake: held for its maximum time")

	errNoProgress = errors.New("fake: no progress")
)

// progressWithin is how long a lease is extended while the work goes nowhere.
const progressWithin = 30 * time.Second

// holder takes the locks of one replica and extends them while work runs.
type holder struct {
	a        *arbiter
	instance string
	lease    time.Duration // 0: 1.5 times the etc
}

func (h *holder) Hold(ctx context.Context, schoolID string, etc time.Duration, fn func(ctx context.Context, l coordinator.Lease) error) (err error) {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if err := h.a.script.enter(ctx, "hold", schoolID, ""); err != nil {
		return err
	}
	length := h.lease
	if length == 0 {
		length = etc * 3 / 2
	}
	l := &lease{a: h.a, school: schoolID, length: length, end: time.Now().Add(length), advanced: time.Now()}
	if err := h.a.acquire(l, h.instance); err != nil {
		return err
	}
	workCtx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l.cancel = cancel
	stop := make(chan struct{})
	var watchdog sync.WaitGroup
	watchdog.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(etc / 2):
				if l.idle() > progressWithin {
					l.close(errNoProgress)
					return
				}
				if l.extend(context.WithoutCancel(ctx)) != nil {
					return
				}
			}
		}
	})
	defer func() {
		close(stop)
		watchdog.Wait()
		if l.look() == nil {
			err = errors.Join(err, h.a.release(context.WithoutCancel(ctx), l))
		}
	}()
	h.a.watch(schoolID, l)
	return fn(workCtx, l)
}

func (a *arbiter) acquire(l *lease, instance string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other := a.held(l.school); other != nil {
		return fmt.Errorf("take lock: %w", &coordinator.BusyError{Owner: other.owner, Remaining: time.Until(other.expires)})
	}
	a.taken++
	l.acquisition = fmt.Sprintf("acq-%d", a.taken)
	a.locks[l.school] = &lock{owner: instance, acquisition: l.acquisition, expires: time.Now().Add(l.length)}
	return nil
}

func (a *arbiter) release(ctx context.Context, l *lease) error {
	if err := a.script.enter(ctx, "release", l.school, ""); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if held := a.held(l.school); held != nil && held.acquisition == l.acquisition {
		delete(a.locks, l.school)
	}
	return nil
}

// watch lets a fault at "holding" take the lease of this hold away.
func (a *arbiter) watch(schoolID string, l *lease) {
	a.mu.Lock()
	a.locks[schoolID].lease = l
	a.mu.Unlock()
}

// lose gives the school's lock to another for d and tells its holder.
func (a *arbiter) lose(schoolID string, d time.Duration) {
	a.mu.Lock()
	l := a.locks[schoolID].lease
	a.locks[schoolID] = &lock{owner: "other", acquisition: "foreign", fence: 1 << 40, expires: time.Now().Add(d)}
	a.mu.Unlock()
	l.close(errLost)
}

// shorten makes the arbiter know of less than the lease's holder believes, as
// after a failover that lost the last extension.
func (a *arbiter) shorten(schoolID string, left time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.locks[schoolID].expires = time.Now().Add(left)
}

// retire ends the work's context while the lease stays good.
func (a *arbiter) retire(schoolID string) {
	a.mu.Lock()
	l := a.locks[schoolID].lease
	a.mu.Unlock()
	l.cancel(errMaxHold)
}

type lease struct {
	a           *arbiter
	school      string
	acquisition string
	length      time.Duration
	cancel      context.CancelCauseFunc

	mu    sync.Mutex
	end   time.Time
	cause error
	steps int

	advanced time.Time
}

// idle is for how long the work has not got on.
func (l *lease) idle() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(l.advanced)
}

func (l *lease) Acquisition() string { return l.acquisition }

func (l *lease) Bind(ctx context.Context, fence int64) error {
	if err := l.a.script.enter(ctx, "bind", l.school, ""); err != nil {
		return err
	}
	l.a.mu.Lock()
	defer l.a.mu.Unlock()
	held := l.a.held(l.school)
	if held == nil || held.acquisition != l.acquisition {
		return errLost
	}
	held.fence = max(held.fence, fence)
	return nil
}

func (l *lease) Ensure(ctx context.Context, d time.Duration) error {
	if err := l.a.script.enter(ctx, "ensure", l.school, ""); err != nil {
		return err
	}
	if err := l.look(); err != nil {
		return err
	}
	l.mu.Lock()
	left := time.Until(l.end)
	l.mu.Unlock()
	if left >= d {
		return nil
	}
	return l.extendTo(ctx, d)
}

func (l *lease) Extend(ctx context.Context, d time.Duration) error {
	if err := l.a.script.enter(ctx, "extend now", l.school, ""); err != nil {
		return err
	}
	if err := l.look(); err != nil {
		return err
	}
	return l.extendTo(ctx, d)
}

func (l *lease) extendTo(ctx context.Context, d time.Duration) error {
	if err := l.extend(ctx); err != nil {
		return err
	}
	if l.length < d {
		return fmt.Errorf("fake: lease of %s is shorter than %s", l.length, d)
	}
	return nil
}

func (l *lease) Check() error {
	if err := l.a.script.enter(context.Background(), "check", l.school, ""); err != nil {
		l.close(err)
		return err
	}
	return l.look()
}

func (l *lease) look() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil && !time.Now().Before(l.end) {
		l.cause = errExpired
		l.cancel(errExpired)
	}
	return l.cause
}

func (l *lease) Progress() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.steps++
	l.advanced = time.Now()
}

func (l *lease) close(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil {
		l.cause = cause
		l.cancel(cause)
	}
}

func (l *lease) extend(ctx context.Context) error {
	if err := l.a.script.enter(ctx, "extend", "", ""); err != nil {
		return err
	}
	before := time.Now()
	l.a.mu.Lock()
	held := l.a.held(l.school)
	mine := held != nil && held.acquisition == l.acquisition
	if mine {
		held.expires = before.Add(l.length)
	}
	l.a.mu.Unlock()
	if !mine {
		l.close(errLost)
		return errLost
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil {
		l.end = before.Add(l.length)
	}
	return l.cause
}
