package watchdog_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

// clocks are three clocks that a test can set apart.
type clocks struct {
	mu         sync.Mutex
	start      time.Time
	asleep     time.Duration // passed for boot time and wall clock only: a suspended machine
	wallAhead  time.Duration // the wall clock was set
	noBootTime bool
}

func (c *clocks) now() watchdog.Clocks {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := watchdog.Clocks{Mono: time.Now(), Wall: time.Now().Add(c.asleep + c.wallAhead)}
	if !c.noBootTime {
		now.Boot = time.Hour + time.Since(c.start) + c.asleep
	}
	return now
}

func (c *clocks) set(change func(c *clocks)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(c)
}

func withClocks(t *testing.T, test func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks)) {
	t.Helper()
	bubble(t, watchdog.Config{}, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper) {
		c := &clocks{start: time.Now()}
		k.SetClocks(c.now)
		test(t, m, k, c)
	})
}

func TestSleepOfTheMachineEndsTheTrust(t *testing.T) {
	for name, noBootTime := range map[string]bool{"boot-time clock": false, "wall clock alone": true} {
		t.Run(name, func(t *testing.T) {
			withClocks(t, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks) {
				c.set(func(c *clocks) { c.noBootTime = noBootTime })
				err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
					time.Sleep(time.Second)
					c.set(func(c *clocks) { c.asleep = 2 * time.Minute }) // no timer fired in it
					require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired, "the first look after the sleep must see it")
					require.Zero(t, m.Calls(watchdogtest.Extend))
					return nil
				})
				require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
			})
		})
	}
}

func TestCheckAfterAPauseConfirmsTheLease(t *testing.T) {
	t.Run("still ours", func(t *testing.T) {
		withClocks(t, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks) {
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				time.Sleep(time.Second)
				require.NoError(t, l.Check())
				require.Zero(t, m.Calls(watchdogtest.Extend), "no pause, no call")

				c.set(func(c *clocks) { c.asleep = 30 * time.Second })
				var checks sync.WaitGroup
				for range 50 { // many senders look at the gate; one call is enough for all
					checks.Go(func() {
						if err := l.Check(); err != nil {
							t.Errorf("check: %v", err)
						}
					})
				}
				checks.Wait()
				require.Equal(t, 1, m.Calls(watchdogtest.Extend))
				require.Equal(t, trust, l.Left())
				return nil
			}))
		})
	})
	t.Run("lost in the meantime", func(t *testing.T) {
		withClocks(t, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks) {
			err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				m.Steal("A", "two", time.Hour)
				require.NoError(t, l.Check())
				c.set(func(c *clocks) { c.wallAhead = 2 * time.Second })
				require.ErrorIs(t, l.Check(), watchdog.ErrLeaseLost)
				return nil
			})
			require.ErrorIs(t, err, watchdog.ErrLeaseLost)
		})
	})
	t.Run("no answer", func(t *testing.T) {
		withClocks(t, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks) {
			err := k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				m.Cut()
				c.set(func(c *clocks) { c.asleep = 30 * time.Second })
				before := time.Now()
				require.ErrorIs(t, l.Check(), watchdog.ErrLeaseExpired)
				require.Equal(t, trust-30*time.Second, time.Since(before), "waits for an answer, until the local end and no longer")
				m.Restore()
				return nil
			})
			require.ErrorIs(t, err, watchdog.ErrLeaseExpired)
		})
	})
	t.Run("answer comes at the second try", func(t *testing.T) {
		withClocks(t, func(t *testing.T, m *watchdogtest.Memory, k *watchdog.Keeper, c *clocks) {
			require.NoError(t, k.Hold(t.Context(), "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
				m.LoseReply(watchdogtest.Extend, 1)
				c.set(func(c *clocks) { c.asleep = 30 * time.Second })
				before := time.Now()
				require.NoError(t, l.Check())
				require.LessOrEqual(t, time.Since(before), 1200*time.Millisecond)
				return nil
			}))
		})
	})
}

// Several replicas race for one lock while answers are late and get lost. As
// long as the server forgets nothing, at no moment do two of them find their
// gate open.
func TestNeverTwoOpenGates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const replicas, enoughHolds, enoughLost = 4, 80, 20
		m := watchdogtest.NewMemory()
		ctx, cancel := context.WithTimeout(t.Context(), 7*24*time.Hour)
		defer cancel()

		var mu sync.Mutex
		open := map[string]*watchdog.Lease{}
		holds, lost := 0, 0
		look := func() {
			mu.Lock()
			defer mu.Unlock()
			owners := 0
			for _, l := range open {
				if l.Left() > 0 { // what Check goes by, without the call after a pause
					owners++
				}
			}
			if owners > 1 {
				t.Errorf("%d open gates at %s", owners, time.Now())
			}
		}

		var running sync.WaitGroup
		for i := range replicas {
			owner := strconv.Itoa(i)
			k := newKeeper(t, watchdog.Config{ProgressWithin: time.Hour}, owner, m)
			running.Go(func() {
				for ctx.Err() == nil {
					err := k.Hold(ctx, "A", etc, func(ctx context.Context, l *watchdog.Lease) error {
						mu.Lock()
						open[owner] = l
						holds++
						mu.Unlock()
						look()
						time.Sleep(rand.N(3 * time.Minute))
						look()
						return nil
					})
					mu.Lock()
					delete(open, owner)
					if err != nil && ctx.Err() == nil {
						lost++
					}
					if holds >= enoughHolds && lost >= enoughLost {
						cancel()
					}
					mu.Unlock()
					time.Sleep(rand.N(5 * time.Second))
				}
			})
		}
		running.Go(func() {
			for ctx.Err() == nil {
				m.Slow(rand.N(1200*time.Millisecond), rand.N(1200*time.Millisecond))
				m.LoseReply([]watchdogtest.Op{watchdogtest.Acquire, watchdogtest.Extend, watchdogtest.Release}[rand.IntN(3)], rand.IntN(4))
				if rand.IntN(4) == 0 {
					m.Cut()
				}
				time.Sleep(rand.N(90 * time.Second))
				m.Restore()
				look()
				time.Sleep(rand.N(10 * time.Second))
				look()
			}
		})
		running.Wait()
		m.Wait()
		require.GreaterOrEqual(t, holds, enoughHolds)
		require.GreaterOrEqual(t, lost, enoughLost, "nothing went wrong: the faults do not reach")
		requireOneOwner(t, m.Events())
	})
}

// requireOneOwner replays the server's history: a lock is taken only when the
// last owner's lease has ended or was given back.
func requireOneOwner(t *testing.T, events []watchdogtest.Event) {
	t.Helper()
	owner, until := "", time.Time{}
	for _, e := range events {
		if !e.Done {
			continue
		}
		switch e.Op {
		case watchdogtest.Acquire:
			if e.Acquisition != owner {
				require.False(t, e.At.Before(until), "taken by %s at %s while %s had it until %s", e.Acquisition, e.At, owner, until)
				owner, until = e.Acquisition, e.At.Add(lease)
			}
		case watchdogtest.Extend:
			require.Equal(t, owner, e.Acquisition)
			require.True(t, e.At.Before(until), "an ended lease was extended")
			until = e.At.Add(lease)
		case watchdogtest.Release:
			require.Equal(t, owner, e.Acquisition)
			until = e.At
		}
	}
}
