package watchdogtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
)

// Server is a lock server under test, with the means to break the way to it and
// to look behind it.
type Server interface {
	watchdog.Backend
	// Lock returns what the server knows of the lock, past any fault.
	Lock(name string) (Lock, bool)
	// Steal gives the lock to another owner.
	Steal(name, owner string, lease time.Duration)
	// Forget drops everything the server knows.
	Forget()
	// LoseReply makes the answers to the next n calls of op vanish after the
	// server has executed them.
	LoseReply(op Op, n int)
	// Cut makes every call vanish until Restore.
	Cut()
	Restore()
}

// TestBackend runs the suite. etc is the expected time to complete of its locks,
// long enough that a call on this machine takes much less than a tenth of it. run
// calls test with a fresh server, in a bubble where the server can be in one.
func TestBackend(t *testing.T, etc time.Duration, run func(t *testing.T, test func(t *testing.T, s Server))) {
	for _, c := range []struct {
		name string
		test func(s suite)
	}{
		{"acquire", suite.acquire},
		{"acquire too late", suite.acquireTooLate},
		{"bind", suite.bind},
		{"extend", suite.extend},
		{"release", suite.release},
		{"refuse a lease of nothing", suite.refuseNothing},
		{"end with the lease", suite.endWithLease},
		{"hold and give back", suite.holdAndGiveBack},
		{"lost reply of acquire", suite.lostReplyOfAcquire},
		{"lost reply of extend", suite.lostReplyOfExtend},
		{"lost reply of release", suite.lostReplyOfRelease},
		{"lock forgotten", suite.forgotten},
		{"lock stolen", suite.stolen},
		{"cut off", suite.cutOff},
		{"cut off and back", suite.cutOffAndBack},
		{"release after the context has ended", suite.releaseAfterCancel},
		{"one owner at a time", suite.oneOwner},
	} {
		t.Run(c.name, func(t *testing.T) {
			run(t, func(t *testing.T, s Server) { c.test(suite{T: t, Server: s, etc: etc}) })
		})
	}
}

type suite struct {
	*testing.T
	Server
	etc time.Duration
}

func (s suite) request(acquisition string) watchdog.Request {
	return watchdog.Request{
		Name: "A", Owner: "owner-of-" + acquisition, Acquisition: acquisition,
		Lease: watchdog.LeaseFor(s.etc), ETC: s.etc, Patience: s.etc,
	}
}

func (s suite) keeper(owner string) *watchdog.Keeper {
	k, err := watchdog.New(watchdog.Config{ProgressWithin: time.Hour}, owner, s.Server, slog.New(slog.DiscardHandler), nil)
	require.NoError(s, err)
	return k
}

// trust is how long a lease may be trusted after the call that gave it began.
func (s suite) trust() time.Duration {
	lease := watchdog.LeaseFor(s.etc)
	return lease - watchdog.Margin(lease)
}

// eventually waits until condition holds, for two leases at most.
func (s suite) eventually(what string, condition func() bool) {
	s.Helper()
	for deadline := time.Now().Add(2 * watchdog.LeaseFor(s.etc)); !condition(); time.Sleep(s.etc / 200) {
		if time.Now().After(deadline) {
			require.Fail(s, "did not come: "+what)
		}
	}
}

func (s suite) held() Lock {
	s.Helper()
	held, ok := s.Lock("A")
	require.True(s, ok, "the lock is free")
	return held
}

func (s suite) requireFree() {
	s.Helper()
	held, ok := s.Lock("A")
	require.False(s, ok, "the lock is held: %+v", held)
}

func (s suite) acquire() {
	ctx := s.Context()
	require.NoError(s, s.Acquire(ctx, s.request("a")))
	first := s.held()
	require.Equal(s, "owner-of-a", first.Owner)
	require.Equal(s, "a", first.Acquisition)
	require.Zero(s, first.Fence)
	require.InDelta(s, watchdog.LeaseFor(s.etc), first.TTL, float64(s.etc/4))

	s.eventually("the TTL runs", func() bool { return s.held().TTL < first.TTL-s.etc/20 })
	require.NoError(s, s.Acquire(ctx, s.request("a")), "the same acquisition gets the same answer")
	require.Less(s, s.held().TTL, first.TTL-s.etc/20, "a repeat lengthened the lease")

	var busy *watchdog.BusyError
	require.ErrorAs(s, s.Acquire(ctx, s.request("b")), &busy)
	require.Equal(s, "owner-of-a", busy.Owner)
	require.Positive(s, busy.Remaining)
	require.LessOrEqual(s, busy.Remaining, watchdog.LeaseFor(s.etc))
	require.Equal(s, "a", s.held().Acquisition)

	require.NoError(s, s.Release(ctx, "A", "a"))
	require.NoError(s, s.Acquire(ctx, s.request("b")))
	require.Equal(s, "b", s.held().Acquisition)
	other := s.request("c")
	other.Name = "B"
	require.NoError(s, s.Acquire(ctx, other), "locks know nothing of one another")
}

func (s suite) acquireTooLate() {
	late := s.request("a")
	late.Patience = -s.etc
	require.ErrorIs(s, s.Acquire(s.Context(), late), watchdog.ErrStale)
	s.requireFree()
}

func (s suite) bind() {
	ctx := s.Context()
	require.ErrorIs(s, s.Bind(ctx, "A", "a", 7), watchdog.ErrLeaseLost)
	s.requireFree()
	require.NoError(s, s.Acquire(ctx, s.request("a")))
	ttl := s.held().TTL
	for _, fence := range []int64{7, 7, 6} {
		require.NoError(s, s.Bind(ctx, "A", "a", fence))
		require.EqualValues(s, 7, s.held().Fence)
	}
	require.NoError(s, s.Bind(ctx, "A", "a", 1<<52))
	require.EqualValues(s, 1<<52, s.held().Fence)
	require.ErrorIs(s, s.Bind(ctx, "A", "b", 1<<52+1), watchdog.ErrLeaseLost)
	require.EqualValues(s, 1<<52, s.held().Fence)
	require.LessOrEqual(s, s.held().TTL, ttl)
}

func (s suite) extend() {
	ctx, lease := s.Context(), watchdog.LeaseFor(s.etc)
	require.ErrorIs(s, s.Extend(ctx, "A", "a", lease, 1), watchdog.ErrLeaseLost)
	s.requireFree()

	require.NoError(s, s.Acquire(ctx, s.request("a")))
	require.NoError(s, s.Extend(ctx, "A", "a", 2*lease, 1))
	require.Greater(s, s.held().TTL, lease)
	require.NoError(s, s.Extend(ctx, "A", "a", lease, 2))
	require.Greater(s, s.held().TTL, lease, "a late, smaller lease shortened the TTL")
	require.NoError(s, s.Extend(ctx, "A", "a", lease, 1))
	require.EqualValues(s, 2, s.held().Renewals)

	ttl := s.held().TTL
	require.ErrorIs(s, s.Extend(ctx, "A", "b", 3*lease, 9), watchdog.ErrLeaseLost)
	require.LessOrEqual(s, s.held().TTL, ttl)
	require.EqualValues(s, 2, s.held().Renewals)
}

func (s suite) release() {
	ctx := s.Context()
	require.ErrorIs(s, s.Release(ctx, "A", "a"), watchdog.ErrNotHeld)
	require.NoError(s, s.Acquire(ctx, s.request("a")))
	require.ErrorIs(s, s.Release(ctx, "A", "b"), watchdog.ErrNotHeld)
	require.Equal(s, "a", s.held().Acquisition, "released by another than its owner")
	require.NoError(s, s.Release(ctx, "A", "a"))
	s.requireFree()
	require.ErrorIs(s, s.Release(ctx, "A", "a"), watchdog.ErrNotHeld)
	require.NoError(s, s.Acquire(ctx, s.request("b")))
	require.ErrorIs(s, s.Release(ctx, "A", "a"), watchdog.ErrNotHeld, "a repeat freed the next owner's lock")
	require.Equal(s, "b", s.held().Acquisition)
}

func (s suite) refuseNothing() {
	ctx := s.Context()
	none := s.request("a")
	none.Lease = 0
	require.Error(s, s.Acquire(ctx, none))
	s.requireFree()
	require.NoError(s, s.Acquire(ctx, s.request("a")))
	require.Error(s, s.Extend(ctx, "A", "a", 0, 1), "a lease of 0 would delete the lock and call it success")
	require.Error(s, s.Extend(ctx, "A", "a", -time.Second, 1))
	require.Equal(s, "a", s.held().Acquisition)
}

func (s suite) endWithLease() {
	ctx := s.Context()
	short := s.request("a")
	short.Lease = s.etc / 10
	require.NoError(s, s.Acquire(ctx, short))
	s.eventually("the lease ends", func() bool { _, ok := s.Lock("A"); return !ok })
	require.ErrorIs(s, s.Extend(ctx, "A", "a", s.etc, 1), watchdog.ErrLeaseLost)
	require.NoError(s, s.Acquire(ctx, s.request("b")))
}

func (s suite) holdAndGiveBack() {
	require.NoError(s, s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		require.NoError(s, l.Bind(ctx, 41))
		held := s.held()
		require.Equal(s, "one", held.Owner)
		require.Equal(s, l.Acquisition(), held.Acquisition)
		require.EqualValues(s, 41, held.Fence)
		s.eventually("three renewals", func() bool { return s.held().Renewals >= 3 })
		require.Greater(s, s.held().TTL, s.etc/2)
		require.NoError(s, l.Check())
		require.NoError(s, l.Ensure(ctx, s.trust()*9/10))
		require.Greater(s, l.Left(), s.trust()*8/10)
		require.Less(s, l.Left(), s.held().TTL, "trusted for longer than the server keeps the lock")
		return nil
	}))
	s.requireFree()
}

func (s suite) lostReplyOfAcquire() {
	s.LoseReply(Acquire, 1)
	err := s.keeper("one").Hold(s.Context(), "A", s.etc, func(context.Context, *watchdog.Lease) error {
		s.Error("work ran though nobody knew whether the lock was taken")
		return nil
	})
	require.Error(s, err)
	var busy *watchdog.BusyError
	require.False(s, errors.As(err, &busy))
	s.requireFree()
}

func (s suite) lostReplyOfExtend() {
	require.NoError(s, s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		s.LoseReply(Extend, 1)
		s.eventually("a renewal after the lost one", func() bool { return s.held().Renewals >= 2 })
		require.NoError(s, ctx.Err())
		require.NoError(s, l.Check())
		return nil
	}))
	s.requireFree()
}

func (s suite) lostReplyOfRelease() {
	require.NoError(s, s.keeper("one").Hold(s.Context(), "A", s.etc, func(context.Context, *watchdog.Lease) error {
		s.LoseReply(Release, 1)
		return nil
	}), "NOT_HELD after a try without an answer is that try's work")
	s.requireFree()
}

func (s suite) forgotten() {
	var since time.Time
	err := s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		since = time.Now()
		s.Forget()
		<-ctx.Done()
		require.ErrorIs(s, context.Cause(ctx), watchdog.ErrLeaseLost)
		require.ErrorIs(s, l.Check(), watchdog.ErrLeaseLost)
		s.requireFree()
		return nil
	})
	require.ErrorIs(s, err, watchdog.ErrLeaseLost)
	require.Less(s, time.Since(since), s.trust(), "found out by the local end, not by the next renewal")
	s.requireFree()
}

func (s suite) stolen() {
	err := s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		s.Steal("A", "two", time.Hour)
		<-ctx.Done()
		require.ErrorIs(s, context.Cause(ctx), watchdog.ErrLeaseLost)
		require.ErrorIs(s, l.Check(), watchdog.ErrLeaseLost)
		return nil
	})
	require.ErrorIs(s, err, watchdog.ErrLeaseLost)
	require.Equal(s, "two", s.held().Owner)
	require.Greater(s, s.held().TTL, time.Hour/2)
}

func (s suite) cutOff() {
	err := s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		s.Cut()
		require.NoError(s, l.Check(), "unknown is not lost")
		<-ctx.Done()
		require.ErrorIs(s, context.Cause(ctx), watchdog.ErrLeaseExpired)
		require.Equal(s, l.Acquisition(), s.held().Acquisition, "the server freed the lock before its owner stopped")
		require.Error(s, l.Ensure(ctx, 0))

		s.Restore()
		require.ErrorIs(s, l.Check(), watchdog.ErrLeaseExpired, "an expired lease came back")
		require.Zero(s, l.Left())
		return nil
	})
	require.ErrorIs(s, err, watchdog.ErrLeaseExpired)
	s.eventually("the lock is free", func() bool { _, ok := s.Lock("A"); return !ok })
}

func (s suite) cutOffAndBack() {
	require.NoError(s, s.keeper("one").Hold(s.Context(), "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		s.Cut()
		s.eventually("half of the trust is gone", func() bool { return l.Left() < s.trust()/2 })
		s.Restore()
		s.eventually("the lease is renewed", func() bool { return l.Left() > s.trust()*3/4 })
		require.NoError(s, ctx.Err())
		require.NoError(s, l.Check())
		return nil
	}))
	s.requireFree()
}

func (s suite) releaseAfterCancel() {
	ctx, cancel := context.WithCancel(s.Context())
	require.NoError(s, s.keeper("one").Hold(ctx, "A", s.etc, func(ctx context.Context, l *watchdog.Lease) error {
		cancel()
		require.ErrorIs(s, ctx.Err(), context.Canceled)
		s.eventually("the lease is renewed while the work ends", func() bool { return s.held().Renewals >= 1 })
		require.NoError(s, l.Check())
		return nil
	}))
	s.requireFree()
}

// oneOwner lets replicas race and looks at every gate while one is open.
func (s suite) oneOwner() {
	const replicas = 4
	ctx, cancel := context.WithTimeout(s.Context(), 2*s.etc)
	defer cancel()
	var inside, holds atomic.Int64
	var racing sync.WaitGroup
	for i := range replicas {
		k := s.keeper(fmt.Sprint("replica-", i))
		racing.Go(func() {
			for ctx.Err() == nil {
				err := k.Hold(ctx, "A", s.etc, func(_ context.Context, l *watchdog.Lease) error {
					if n := inside.Add(1); n != 1 {
						s.Errorf("%d owners at once", n)
					}
					defer inside.Add(-1)
					holds.Add(1)
					time.Sleep(rand.N(s.etc / 20))
					if held, ok := s.Lock("A"); !ok || held.Acquisition != l.Acquisition() {
						s.Errorf("inside with the lock of %+v", held)
					}
					return l.Check()
				})
				var busy *watchdog.BusyError
				if err != nil && !errors.As(err, &busy) && ctx.Err() == nil {
					s.Errorf("hold: %v", err)
				}
				time.Sleep(rand.N(s.etc / 100))
			}
		})
	}
	racing.Wait()
	require.Greater(s, holds.Load(), int64(20))
	s.requireFree()
}
