// Package watchdogtest holds a lock server in memory that can be cut off,
// slowed, made to forget and made to lose answers, and the suite that every
// watchdog.Backend and watchdog.Registry has to pass.
package watchdogtest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"schoolbell/watchdog"
)

// Op names one call of a watchdog.Backend.
type Op string

const (
	Acquire Op = "acquire"
	Bind    Op = "bind"
	Extend  Op = "extend"
	Release Op = "release"
)

// Lock is what the server knows of a lock.
type Lock struct {
	Owner       string
	Acquisition string
	Fence       int64
	Renewals    int64
	TTL         time.Duration
}

type entry struct {
	owner, acquisition string
	etc                time.Duration
	fence, renewals    int64
	ends               time.Time
}

// Memory is a lock server in this process, by the clock of package time, so that
// it also runs in a synctest bubble. The zero value is not ready; see NewMemory.
type Memory struct {
	mu       sync.Mutex
	locks    map[string]entry
	members  map[string]member
	cut      bool
	there    time.Duration
	back     time.Duration
	lose     map[Op]int
	fail     map[Op][]error
	begun    map[Op]int
	executed []Event
	packets  sync.WaitGroup
}

// Event is one step that the server executed.
type Event struct {
	At          time.Time
	Op          Op
	Name        string
	Acquisition string
	Done        bool // it had an effect or confirmed one: taken, bound, extended, released
}

var _ watchdog.Backend = (*Memory)(nil)

// NewMemory returns a server without locks.
func NewMemory() *Memory {
	return &Memory{
		locks: map[string]entry{}, members: map[string]member{},
		lose: map[Op]int{}, fail: map[Op][]error{}, begun: map[Op]int{},
	}
}

// Wait returns when every packet under way has arrived.
func (m *Memory) Wait() { m.packets.Wait() }

// Cut makes every call from now on vanish until Restore: the caller waits until
// its context ends, the server sees nothing.
func (m *Memory) Cut() { m.with(func() { m.cut = true }) }

// Restore ends Cut.
func (m *Memory) Restore() { m.with(func() { m.cut = false }) }

// Slow makes requests take there to arrive and answers back to return. A request
// arrives also when its caller has given up.
func (m *Memory) Slow(there, back time.Duration) { m.with(func() { m.there, m.back = there, back }) }

// LoseReply makes the answers to the next n calls of op vanish after the server
// has executed them.
func (m *Memory) LoseReply(op Op, n int) { m.with(func() { m.lose[op] = n }) }

// Fail makes the next calls of op fail at once with these errors, not executed.
func (m *Memory) Fail(op Op, errs ...error) { m.with(func() { m.fail[op] = errs }) }

// Forget drops everything the server knows, as a flush or a restart without data.
func (m *Memory) Forget() {
	m.with(func() { clear(m.locks); clear(m.members) })
}

// Steal gives the lock to another owner, as a failover that lost the lock does
// when somebody else takes it at once.
func (m *Memory) Steal(name, owner string, lease time.Duration) {
	m.with(func() {
		m.locks[name] = entry{owner: owner, acquisition: "stolen-by-" + owner, ends: time.Now().Add(lease)}
	})
}

// Lock returns what the server knows of the lock; false when it is free.
func (m *Memory) Lock(name string) (Lock, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.live(name, time.Now())
	return Lock{Owner: e.owner, Acquisition: e.acquisition, Fence: e.fence, Renewals: e.renewals, TTL: time.Until(e.ends)}, ok
}

// Names lists the locks that are held.
func (m *Memory) Names() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	names := slices.Sorted(maps.Keys(m.locks))
	return slices.DeleteFunc(names, func(n string) bool { _, ok := m.live(n, time.Now()); return !ok })
}

// Calls counts the calls of op that callers began.
func (m *Memory) Calls(op Op) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.begun[op]
}

// Events returns the steps that the server executed so far, in order.
func (m *Memory) Events() []Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.executed)
}

// Acquire implements watchdog.Backend.
func (m *Memory) Acquire(ctx context.Context, r watchdog.Request) error {
	notAfter := time.Now().Add(r.Patience)
	return m.call(ctx, Acquire, r.Name, r.Acquisition, func(now time.Time) error {
		if r.Lease < time.Millisecond || r.Owner == "" || r.Acquisition == "" {
			return fmt.Errorf("acquire: invalid request")
		}
		if now.After(notAfter) {
			return watchdog.ErrStale
		}
		if e, ok := m.live(r.Name, now); ok {
			if e.acquisition == r.Acquisition {
				return nil
			}
			return &watchdog.BusyError{Owner: e.owner, Remaining: e.ends.Sub(now)}
		}
		m.locks[r.Name] = entry{owner: r.Owner, acquisition: r.Acquisition, etc: r.ETC, ends: now.Add(r.Lease)}
		return nil
	})
}

// Bind implements watchdog.Backend.
func (m *Memory) Bind(ctx context.Context, name, acquisition string, fence int64) error {
	return m.own(ctx, Bind, name, acquisition, watchdog.ErrLeaseLost, func(_ time.Time, e *entry) {
		e.fence = max(e.fence, fence)
	})
}

// Extend implements watchdog.Backend.
func (m *Memory) Extend(ctx context.Context, name, acquisition string, lease time.Duration, renewal int64) error {
	if lease < time.Millisecond {
		return fmt.Errorf("extend: lease %s is not above 0", lease)
	}
	return m.own(ctx, Extend, name, acquisition, watchdog.ErrLeaseLost, func(now time.Time, e *entry) {
		e.renewals = max(e.renewals, renewal)
		if ends := now.Add(lease); ends.After(e.ends) {
			e.ends = ends
		}
	})
}

// Release implements watchdog.Backend.
func (m *Memory) Release(ctx context.Context, name, acquisition string) error {
	return m.own(ctx, Release, name, acquisition, watchdog.ErrNotHeld, func(now time.Time, e *entry) { e.ends = now })
}

// own runs change on the lock if acquisition holds it.
func (m *Memory) own(ctx context.Context, op Op, name, acquisition string, otherwise error, change func(time.Time, *entry)) error {
	return m.call(ctx, op, name, acquisition, func(now time.Time) error {
		e, ok := m.live(name, now)
		switch {
		case !ok:
			return otherwise
		case e.acquisition != acquisition:
			return fmt.Errorf("held by %q: %w", e.owner, otherwise)
		}
		change(now, &e)
		m.locks[name] = e
		return nil
	})
}

// call carries one request to the server and its answer back, through whatever
// is broken at the moment.
func (m *Memory) call(ctx context.Context, op Op, name, acquisition string, step func(now time.Time) error) error {
	m.mu.Lock()
	m.begun[op]++
	cut, there, back := m.cut, m.there, m.back
	var refusal error
	if errs := m.fail[op]; len(errs) > 0 && !cut {
		refusal, m.fail[op] = errs[0], errs[1:]
	}
	lost := m.lose[op] > 0 && !cut && refusal == nil
	if lost {
		m.lose[op]--
	}
	m.mu.Unlock()

	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case cut:
		<-ctx.Done()
		return fmt.Errorf("%s: %w", op, ctx.Err())
	case refusal != nil:
		return refusal
	}

	answer := make(chan error, 1)
	execute := func() {
		m.mu.Lock()
		now := time.Now()
		err := step(now)
		m.executed = append(m.executed, Event{At: now, Op: op, Name: name, Acquisition: acquisition, Done: err == nil})
		m.mu.Unlock()
		answer <- err
	}
	if there > 0 {
		m.packets.Go(func() {
			time.Sleep(there) // the packet's way, not a synchronisation
			execute()
		})
	} else {
		execute()
	}
	if lost {
		<-ctx.Done()
		return fmt.Errorf("%s: %w", op, ctx.Err())
	}
	var err error
	select {
	case err = <-answer:
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", op, ctx.Err())
	}
	if back > 0 {
		timer := time.NewTimer(back)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", op, ctx.Err())
		}
	}
	return err
}

// live returns the lock if it is held at now. m.mu is held.
func (m *Memory) live(name string, now time.Time) (entry, bool) {
	e, ok := m.locks[name]
	if !ok || !now.Before(e.ends) {
		return entry{}, false
	}
	return e, true
}

func (m *Memory) with(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}
