package watchdog_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"regexp"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The times of these tests: lease 60 s, local end 58.8 s after the call, a
// renewal at the latest every 20 s, a call at most 1 s.
const (
	etc   = 40 * time.Second
	lease = 60 * time.Second
	trust = 58800 * time.Millisecond
)

// bubble runs a test against a lock server in memory, in a bubble with its own time.
func bubble(t *testing.T, cfg watchdog.Config, test func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := watchdogtest.NewMemory()
		test(t, m, newKeeper(t, cfg, "one", m))
		m.Wait()
	})
}

func newKeeper(t *testing.T, cfg watchdog.Config, owner string, b watchdog.Backend) *watchdog.Keeper {
	t.Helper()
	k, err := watchdog.New(cfg, owner, b, slog.New(slog.DiscardHandler), nil)
	require.NoError(t, err)
	return k
}

// busyFor calls Progress for d, or until ctx ends, as a worker does.
func busyFor(ctx context.Context, l *watchdog.Lease, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; {
		select {
		case <-ctx.Done():
		case <-time.After(min(5*time.Second, time.Until(end))):
		}
		l.Progress()
	}
}

func TestHoldRenewsEveryTickAndGivesBack(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		start := time.Now()
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			require.Equal(t, 1, k.Held())
			held, ok := m.Lock("A")
			require.True(t, ok)
			require.Equal(t, "one", held.Owner)
			require.Equal(t, l.Acquisition(), held.Acquisition)
			busyFor(ctx, l, 10*time.Minute)
			require.NoError(t, ctx.Err())
			require.NoError(t, l.Check())
			return nil
		}))
		require.Zero(t, k.Held())
		require.Empty(t, m.Names())
		require.Equal(t, 10*time.Minute, time.Since(start))

		last := start
		for _, e := range m.Events() {
			if e.Op != watchdogtest.Extend {
				continue
			}
			require.True(t, e.Done)
			require.LessOrEqual(t, e.At.Sub(last), 20*time.Second, "later than a tick")
			require.GreaterOrEqual(t, e.At.Sub(last), 18*time.Second, "more than 10 %% earlier than a tick")
			last = e.At
		}
		require.GreaterOrEqual(t, m.Calls(watchdogtest.Extend), 30)
	})
}

func TestEachHoldIsAnAcquisitionOfItsOwn(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		seen := map[string]bool{}
		for range 3 {
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(_ context.Context, l *watchdog.Lease) error {
				require.Regexp(t, regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`), l.Acquisition())
				seen[l.Acquisition()] = true
				return nil
			}))
		}
		require.Len(t, seen, 3)
	})
}

func TestTrustCountsFromBeforeTheCall(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		m.Slow(0, 800*time.Millisecond)
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			require.Equal(t, trust-800*time.Millisecond, l.Left(), "a slow answer to acquire must not lengthen the trust")

			time.Sleep(10 * time.Second)
			m.Slow(0, 900*time.Millisecond)
			require.NoError(t, l.Ensure(ctx, 57*time.Second))
			require.Equal(t, trust-900*time.Millisecond, l.Left(), "a slow answer to extend must not lengthen the trust")
			return nil
		}))
	})
}

func TestBusyLockIsNotWaitedFor(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		other := newKeeper(t, watchdog.Config{}, "two", m)
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			time.Sleep(5 * time.Second)
			before := time.Now()
			err := other.Hold(ctx, "A", etc, func(context.Context, *watchdog.Lease) error {
				t.Error("work ran without the lock")
				return nil
			})
			var busy *watchdog.BusyError
			require.ErrorAs(t, err, &busy)
			require.Equal(t, watchdog.BusyError{Owner: "one", Remaining: 55 * time.Second}, *busy)
			require.Zero(t, time.Since(before))
			return nil
		}))
		require.Equal(t, 1, m.Calls(watchdogtest.Release), "the other released what it never had")
	})
}

func TestForgottenLockIsLostAtTheNextTickAndNotReleased(t *testing.T) {
	for name, lose := range map[string]func(m *watchdogtest.Memory){
		"gone":      func(m *watchdogtest.Memory) { m.Forget() },
		"another's": func(m *watchdogtest.Memory) { m.Steal("A", "two", time.Hour) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
				start := time.Now()
				err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
					lose(m)
					<-ctx.Done()
					require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseLost)
					require.ErrorIs(t, l.Check(), watchdog.ErrLeaseLost)
					require.Zero(t, l.Left())
					require.LessOrEqual(t, time.Since(start), 20*time.Second)
					// What is on the wire goes on and is recorded; Hold waits for it.
					time.Sleep(15 * time.Second)
					return nil
				})
				require.ErrorIs(t, err, watchdog.ErrLeaseLost)
				require.Greater(t, time.Since(start), 15*time.Second)
				require.Zero(t, m.Calls(watchdogtest.Release))
				if name == "another's" {
					held, ok := m.Lock("A")
					require.True(t, ok)
					require.Equal(t, "two", held.Owner)
				}
			})
		})
	}
}

func TestCutOffOwnerStopsBeforeTheServerFreesTheLock(t *testing.T) {
	bubble(t, watchdog.Config{ProgressWithin: time.Hour}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		start := time.Now()
		err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			m.Cut()
			time.Sleep(trust - time.Millisecond)
			synctest.Wait()
			require.NoError(t, l.Check(), "a failed renewal is unknown: the trust lasts")
			require.NoError(t, ctx.Err())

			<-ctx.Done()
			require.Equal(t, trust, time.Since(start))
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseExpired)
			held, ok := m.Lock("A")
			require.True(t, ok, "the server freed the lock before its owner stopped")
			require.Equal(t, watchdog.Margin(lease), held.TTL)
			require.Greater(t, m.Calls(watchdogtest.Extend), 10, "a failed renewal is tried again soon")

			m.Restore()
			require.ErrorIs(t, l.Ensure(ctx, time.Second), watchdog.ErrLeaseExpired)
			require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired, "an expired lease came back")
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
		require.Empty(t, m.Names(), "an expired lock is still given back")
	})
}

// deaf is a backend whose extensions do not heed their context: they are answered
// when the test says so.
type deaf struct {
	*watchdogtest.Memory
	answer chan struct{}
}

func (d deaf) Extend(_ context.Context, name, acquisition string, lease time.Duration, renewal int64) error {
	err := d.Memory.Extend(context.Background(), name, acquisition, lease, renewal)
	<-d.answer
	return err
}

func TestLateAnswerDoesNotReviveTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := deaf{watchdogtest.NewMemory(), make(chan struct{})}
		k := newKeeper(t, watchdog.Config{}, "one", d)
		start := time.Now()
		err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			<-ctx.Done()
			require.Equal(t, trust, time.Since(start), "the gate must close at the local end though the call hangs")
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseExpired)
			close(d.answer) // OK, and at the server the lock is ours for a minute more
			synctest.Wait()
			require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired)
			require.Zero(t, l.Left())
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
	})
}

// An answer that comes after the local end finds the gate closed even where
// neither the timer nor a look at the gate was there first: the clocks decide.
func TestLateAnswerIsJudgedByTheClocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asleep atomic.Int64 // the machine slept: boot time went on, timers did not
		start := time.Now()
		d := deaf{watchdogtest.NewMemory(), make(chan struct{})}
		k := newKeeper(t, watchdog.Config{}, "one", d)
		k.SetClocks(func() watchdog.Clocks {
			return watchdog.Clocks{Mono: time.Now(), Wall: time.Now(), Boot: time.Hour + time.Since(start) + time.Duration(asleep.Load())}
		})
		err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			time.Sleep(20 * time.Second)          // the watchdog's call is on its way now
			asleep.Store(int64(45 * time.Second)) // past the old local end; from this call on it would not be
			close(d.answer)
			synctest.Wait()
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseExpired)
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
	})
}

func TestLostRepliesDoNotHurt(t *testing.T) {
	t.Run("extend", func(t *testing.T) {
		bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
			m.LoseReply(watchdogtest.Extend, 1)
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				for m.Calls(watchdogtest.Extend) == 0 {
					time.Sleep(time.Millisecond)
				}
				time.Sleep(1300 * time.Millisecond) // the call's second and the first retry
				require.Equal(t, 2, m.Calls(watchdogtest.Extend))
				require.NoError(t, l.Check())
				require.Greater(t, l.Left(), 57*time.Second)
				return nil
			}))
			require.Empty(t, m.Names())
		})
	})
	t.Run("acquire", func(t *testing.T) {
		bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
			m.LoseReply(watchdogtest.Acquire, 1)
			err := k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error {
				t.Error("work ran though nobody knew whether the lock was taken")
				return nil
			})
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Empty(t, m.Names(), "what the lost call took must be given back")
		})
	})
	t.Run("release", func(t *testing.T) {
		bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
			m.LoseReply(watchdogtest.Release, 1)
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error { return nil }))
			require.Empty(t, m.Names())
			require.Equal(t, 2, m.Calls(watchdogtest.Release))
		})
	})
}

func TestDelayedAcquireIsRefused(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		m.Slow(5*time.Second, 0)
		err := k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error { return nil })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		m.Wait()
		require.Empty(t, m.Names(), "a packet that came late took the lock for nobody")
	})
}

func TestEndOfContextKeepsTheLockUntilTheWorkHasEnded(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		ctx, cancel := context.WithCancelCause(t.Context())
		stopping := errors.New("stopping")
		require.NoError(t, k.Hold(ctx, "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			cancel(stopping)
			require.ErrorIs(t, context.Cause(ctx), stopping)
			busyFor(context.WithoutCancel(ctx), l, 2*time.Minute)
			require.NoError(t, l.Check(), "the batch that was begun must end under its lock")
			require.Equal(t, []string{"A"}, m.Names())
			return nil
		}))
		require.Empty(t, m.Names(), "a cancelled context must not keep the lock from being released")

		require.ErrorIs(t, k.Hold(ctx, "A", etc, nil), stopping)
		require.Equal(t, 1, m.Calls(watchdogtest.Acquire))
	})
}

func TestPanicFreesTheLock(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		require.PanicsWithValue(t, "boom", func() {
			_ = k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error { panic("boom") })
		})
		require.Empty(t, m.Names())
		require.Zero(t, k.Held())
	})
}

func TestWorksErrorIsReturned(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		mine := errors.New("mine")
		require.ErrorIs(t, k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error { return mine }), mine)

		m.Fail(watchdogtest.Release, slicesRepeat(errors.New("no room"), 100)...)
		err := k.Hold(t.Context(), "A", etc, func(context.Context, *watchdog.Lease) error { return mine })
		require.ErrorIs(t, err, mine)
		require.ErrorContains(t, err, "release lock A: no room")
	})
}

func slicesRepeat(err error, n int) []error {
	all := make([]error, n)
	for i := range all {
		all[i] = err
	}
	return all
}

// overlap notes when a release begins while an extension of the watchdog is
// still on its way.
type overlap struct {
	*watchdogtest.Memory
	extending atomic.Int64
	seen      atomic.Bool
}

func (o *overlap) Extend(ctx context.Context, name, acquisition string, lease time.Duration, renewal int64) error {
	o.extending.Add(1)
	defer o.extending.Add(-1)
	time.Sleep(500 * time.Millisecond) // the call's way; it does not end with its context
	return o.Memory.Extend(context.WithoutCancel(ctx), name, acquisition, lease, renewal)
}

func (o *overlap) Release(ctx context.Context, name, acquisition string) error {
	if o.extending.Load() > 0 {
		o.seen.Store(true)
	}
	return o.Memory.Release(ctx, name, acquisition)
}

func TestWatchdogHasEndedBeforeTheRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &overlap{Memory: watchdogtest.NewMemory()}
		k := newKeeper(t, watchdog.Config{}, "one", o)
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			for o.extending.Load() == 0 {
				time.Sleep(100 * time.Millisecond)
			}
			return nil
		}))
		require.False(t, o.seen.Load(), "released while an extension was on its way")
		events := o.Events()
		require.Equal(t, watchdogtest.Release, events[len(events)-1].Op)
	})
}

func TestInterleaving16WorkWithoutProgressLosesItsLease(t *testing.T) {
	bubble(t, watchdog.Config{ProgressWithin: time.Minute}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		start := time.Now()
		err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			busyFor(ctx, l, 5*time.Minute)
			require.NoError(t, ctx.Err())
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrNoProgress)
			require.ErrorIs(t, l.Check(), watchdog.ErrNoProgress)
			require.InDelta(t, 6*time.Minute+10*time.Second, time.Since(start), float64(10*time.Second))
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrNoProgress)
		require.Empty(t, m.Names())
	})
}

func TestLongestHoldAsksTheWorkToEndAndLetsTheBatchEnd(t *testing.T) {
	bubble(t, watchdog.Config{MaxHold: 5 * time.Minute}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		start := time.Now()
		err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			busyFor(ctx, l, time.Hour)
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrMaxHold)
			require.InDelta(t, 5*time.Minute+10*time.Second, time.Since(start), float64(10*time.Second))
			require.NoError(t, l.Check())
			require.Greater(t, l.Left(), 38*time.Second, "less than a tick's rest is left for the batch in hand")
			require.ErrorIs(t, l.Ensure(ctx, lease-2*time.Second), watchdog.ErrMaxHold)
			time.Sleep(l.Left())
			require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired)
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
	})
}

func TestEnsure(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			time.Sleep(10 * time.Second)
			require.NoError(t, l.Ensure(ctx, 40*time.Second))
			require.Zero(t, m.Calls(watchdogtest.Extend), "enough was left")
			require.NoError(t, l.Ensure(ctx, 50*time.Second))
			require.Equal(t, 1, m.Calls(watchdogtest.Extend))
			require.InDelta(t, trust, l.Left(), float64(time.Second), "the boot-time clock is not the bubble's")

			require.Error(t, l.Ensure(ctx, 59*time.Second), "more than a lease can give")
			require.NoError(t, l.Check())

			time.Sleep(10 * time.Second)
			m.Cut()
			before := time.Now()
			require.ErrorIs(t, l.Ensure(ctx, 50*time.Second), context.DeadlineExceeded)
			require.Equal(t, time.Second, time.Since(before))
			require.NoError(t, l.Check())

			m.Restore()
			time.Sleep(2 * time.Second)
			require.Greater(t, l.Left(), 56*time.Second, "the watchdog must try again soon after a failed Ensure, not at its tick")
			return nil
		}))
	})
}

// A lease may have less left at the server than is believed here, after a
// failover that lost the last extension. Who was told so has it extended, whatever
// the local end says.
func TestExtendDoesNotAskTheLocalEnd(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		require.ErrorIs(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			time.Sleep(time.Second)
			require.NoError(t, l.Ensure(ctx, 20*time.Second))
			require.Zero(t, m.Calls(watchdogtest.Extend), "enough is left here")
			require.NoError(t, l.Extend(ctx, 20*time.Second))
			require.Equal(t, 1, m.Calls(watchdogtest.Extend))
			held, ok := m.Lock("A")
			require.True(t, ok)
			require.Equal(t, lease, held.TTL)
			require.Error(t, l.Extend(ctx, lease), "more than a lease can give")
			m.Steal("A", "other", time.Hour)
			require.ErrorIs(t, l.Extend(ctx, time.Second), watchdog.ErrLeaseLost)
			require.ErrorIs(t, l.Extend(ctx, time.Second), watchdog.ErrLeaseLost, "what has ended stays ended")
			return nil
		}), watchdog.ErrLeaseLost)
	})
}

func TestChangedServerIsAskedAgainAtOnce(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		readonly := errors.Join(errors.New("READONLY"), watchdog.ErrServerChanged)
		m.Fail(watchdogtest.Extend, readonly)
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			for m.Calls(watchdogtest.Extend) == 0 {
				time.Sleep(time.Millisecond)
			}
			require.Equal(t, 2, m.Calls(watchdogtest.Extend))
			require.Greater(t, l.Left(), trust-time.Second)

			m.Fail(watchdogtest.Bind, readonly)
			require.NoError(t, l.Bind(ctx, 7))
			return nil
		}))
	})
}

func TestBind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		m := watchdogtest.NewMemory()
		reg := prometheus.NewPedanticRegistry()
		k, err := watchdog.New(watchdog.Config{}, "one", m, slog.New(slog.NewTextHandler(&out, nil)), reg)
		require.NoError(t, err)
		err = k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
			require.NoError(t, l.Bind(ctx, 1187))
			held, _ := m.Lock("A")
			require.EqualValues(t, 1187, held.Fence)
			require.Contains(t, out.String(), "event=lock_acquired school=A fence=1187 ")

			m.LoseReply(watchdogtest.Bind, 1)
			require.ErrorIs(t, l.Bind(ctx, 1188), context.DeadlineExceeded)
			require.NoError(t, l.Check(), "unknown is not lost")

			m.Steal("A", "two", time.Hour)
			require.ErrorIs(t, l.Bind(ctx, 1189), watchdog.ErrLeaseLost)
			require.ErrorIs(t, l.Check(), watchdog.ErrLeaseLost)
			require.ErrorIs(t, context.Cause(ctx), watchdog.ErrLeaseLost)
			return nil
		})
		require.ErrorIs(t, err, watchdog.ErrLeaseLost)
		require.Contains(t, out.String(), "event=lease_lost school=A fence=1187 ")
		require.Contains(t, out.String(), "cause=lost")
	})
}

func TestLeaseIsClosedAfterHold(t *testing.T) {
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		var kept *watchdog.Lease
		require.NoError(t, k.Hold(t.Context(), "A", etc, func(_ context.Context, l *watchdog.Lease) error {
			kept = l
			return nil
		}))
		require.ErrorIs(t, kept.Check(), watchdog.ErrReleased)
		require.ErrorIs(t, kept.Bind(t.Context(), 1), watchdog.ErrReleased)
		require.ErrorIs(t, kept.Ensure(t.Context(), time.Second), watchdog.ErrReleased)
		require.Zero(t, kept.Left())
		require.Zero(t, m.Calls(watchdogtest.Extend))
	})
}

func TestSettingsAreChecked(t *testing.T) {
	m, log := watchdogtest.NewMemory(), slog.New(slog.DiscardHandler)
	_, err := watchdog.New(watchdog.Config{}, "", m, log, nil)
	require.ErrorContains(t, err, "owner")
	_, err = watchdog.New(watchdog.Config{MaxHold: -1}, "one", m, log, nil)
	require.ErrorContains(t, err, "MaxHold")
	_, err = watchdog.New(watchdog.Config{}, "one", nil, log, nil)
	require.ErrorContains(t, err, "backend")

	k := newKeeper(t, watchdog.Config{MaxHold: time.Second}, "one", m)
	require.ErrorContains(t, k.Hold(t.Context(), "A", 100*time.Millisecond, nil), "too short")
	require.ErrorContains(t, k.Hold(t.Context(), "A", 0, nil), "too short")
	require.ErrorContains(t, k.Hold(t.Context(), "A", etc, nil), "longest hold")
	require.Zero(t, m.Calls(watchdogtest.Acquire))
}

func TestTenThousandHoldsNeedNoThreadsOfTheirOwn(t *testing.T) {
	const holds = 10_000
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		done := make(chan error, holds)
		ctx, cancel := context.WithCancel(t.Context())
		for i := range holds {
			go func() {
				done <- k.Hold(ctx, strconv.Itoa(i), etc, func(ctx context.Context, l *watchdog.Lease) error {
					<-ctx.Done()
					return nil
				})
			}()
		}
		time.Sleep(25 * time.Second) // each was extended once
		synctest.Wait()
		require.Equal(t, holds, k.Held())
		require.Equal(t, holds, m.Calls(watchdogtest.Extend))
		require.Less(t, threads(t), 40)
		cancel()
		for range holds {
			require.NoError(t, <-done)
		}
		require.Zero(t, k.Held())
		require.Empty(t, m.Names())
	})
	goleak.VerifyNone(t)
}

// threads returns how many threads this process has.
func threads(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	found := regexp.MustCompile(`(?m)^Threads:\s+(\d+)$`).FindSubmatch(status)
	require.NotNil(t, found)
	n, err := strconv.Atoi(string(found[1]))
	require.NoError(t, err)
	return n
}
