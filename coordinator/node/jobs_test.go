package node

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/redis/go-redis/v9"
	"github.com/robfig/cron/v3"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/node/settings"
	"schoolbell/deploy/local/localtest"
	"schoolbell/watchdog/redislease"
)

// lockers are those of three replicas on one Redis.
func lockers(t *testing.T, change func(*settings.Settings)) ([]*slotLocker, *redis.Client) {
	t.Helper()
	server := localtest.Redis(t)
	var all []*slotLocker
	for i := range 3 {
		s := settings.Default()
		s.InstanceID = fmt.Sprintf("r%d", i)
		change(&s)
		c := redis.NewClient(&redis.Options{Addr: server.Addr()})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		l, err := newSlotLocker(s, c, redislease.NewSlots(c, testKeys(t), s.InstanceID))
		require.NoError(t, err)
		all = append(all, l)
	}
	look := redis.NewClient(&redis.Options{Addr: server.Addr()})
	t.Cleanup(func() { require.NoError(t, look.Close()) })
	return all, look
}

// TestInterleaving20ASlotIsTakenOnce: of three replicas that come at once, or a moment later,
// one runs the job of a cron slot, and the slot is named by its time (R16).
func TestInterleaving20ASlotIsTakenOnce(t *testing.T) {
	t.Parallel()
	all, look := lockers(t, func(*settings.Settings) {})
	now, err := look.Time(t.Context()).Result()
	require.NoError(t, err)
	for _, l := range all {
		l.crons[jobSweep] = daily(now.Truncate(time.Second))
	}
	var taken atomic.Int32
	for range 3 { // the first round takes it; unlocking gives nothing back
		var wg sync.WaitGroup
		for _, l := range all {
			wg.Go(func() {
				held, err := l.Lock(t.Context(), jobSweep)
				if err != nil {
					if err != errSlotTaken {
						t.Error(err)
					}
					return
				}
				taken.Add(1)
				if err := held.Unlock(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, 1, taken.Load())
	}
	keys, err := look.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.Len(t, keys, 1)
	var slot time.Time
	_, err = fmt.Sscanf(keys[0], "schoolbell:job:sweep:%s", (*stamp)(&slot))
	require.NoError(t, err)
	require.Equal(t, now.Unix(), slot.Unix())
	ttl, err := look.TTL(t.Context(), keys[0]).Result()
	require.NoError(t, err)
	require.InDelta(t, 48*time.Hour, ttl, float64(time.Minute), "it is remembered for two periods")

	_, err = all[0].Lock(t.Context(), "unknown")
	require.ErrorContains(t, err, "unknown")
}

// daily has a slot a day, the first at its time.
type daily time.Time

func (d daily) Next(t time.Time) time.Time {
	slot := time.Time(d)
	for !slot.After(t) {
		slot = slot.AddDate(0, 0, 1)
	}
	return slot
}

// stamp reads a time from a key.
type stamp time.Time

func (s *stamp) Scan(state fmt.ScanState, _ rune) error {
	word, err := state.Token(true, nil)
	if err != nil {
		return err
	}
	at, err := time.Parse(time.RFC3339, string(word))
	*s = stamp(at)
	return err
}

// TestASlotComesByTheServersClock: what a replica believes of the time of day
// plays no part in when a job is due.
func TestASlotComesByTheServersClock(t *testing.T) {
	t.Parallel()
	seoul := time.FixedZone("KST", 9*60*60)
	schedule, err := cron.ParseStandard("CRON_TZ=Asia/Seoul */5 9-21 * * MON-FRI")
	require.NoError(t, err)
	at := func(clock string) time.Time {
		moment, err := time.ParseInLocation("2006-01-02 15:04:05", "2026-03-02 "+clock, seoul) // a Monday
		require.NoError(t, err)
		return moment.UTC()
	}
	for _, c := range []struct{ now, slot string }{
		{"08:59:59", ""}, {"09:00:00", "09:00:00"}, {"09:00:16", "09:00:00"}, {"09:01:00", ""}, {"09:04:59", ""},
		{"09:05:00", "09:05:00"}, {"21:55:10", "21:55:00"}, {"22:00:00", ""},
	} {
		slot, ok := slotAt(schedule, at(c.now))
		require.Equal(t, c.slot != "", ok, c.now)
		if ok {
			require.True(t, slot.Equal(at(c.slot)), "%s: %s", c.now, slot)
		}
	}
	require.LessOrEqual(t, 2*slotLook, slotLate, "no replica looks past a slot")
}

// idleLocker has no slot for anybody.
type idleLocker struct{}

func (idleLocker) Lock(context.Context, string) (gocron.Lock, error) { return nil, errNoSlot }

// counted are schedules that count.
type counted struct{ ticks, sweeps, purges, digests atomic.Int64 }

func (c *counted) Tick(context.Context) error  { c.ticks.Add(1); return nil }
func (c *counted) Sweep(context.Context) error { c.sweeps.Add(1); return nil }

// TestInterleaving20NoStepOfTheClockStopsTheTick: gocron by the wall clock would run nothing
// for an hour on a clock that was set back by one.
func TestInterleaving20NoStepOfTheClockStopsTheTick(t *testing.T) {
	t.Parallel()
	var off atomic.Int64
	now := func() time.Time { return time.Now().Round(0).Add(time.Duration(off.Load())) }
	s := settings.Default()
	s.Dispatch.FirstTick, s.Dispatch.Tick = 10*time.Millisecond, 10*time.Millisecond
	c := new(counted)
	sched, err := jobs(t.Context(), s, c, func(context.Context) error { c.purges.Add(1); return nil }, nil, idleLocker{}, now, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	sched.Start()
	for _, step := range []time.Duration{0, -time.Hour, time.Hour, 0} {
		off.Store(int64(step))
		seen := c.ticks.Load()
		eventually(t, "the tick goes on", func() bool { return c.ticks.Load() >= seen+5 })
	}
	require.NoError(t, sched.Shutdown())
	require.Zero(t, c.sweeps.Load(), "and nothing runs without a slot")
	require.Zero(t, c.purges.Load())
}

// openLocker has a slot for everybody.
type openLocker struct{}

func (openLocker) Lock(context.Context, string) (gocron.Lock, error) { return keptSlot{}, nil }

// TestEachJobRunsWhatItIsNamedFor: the cluster-wide ones with a slot, and each has
// a schedule to take slots of.
func TestEachJobRunsWhatItIsNamedFor(t *testing.T) {
	t.Parallel()
	c := new(counted)
	s := settings.Default()
	s.Dispatch.FirstTick, s.Dispatch.Tick = time.Hour, time.Hour
	sched, err := jobs(t.Context(), s, c, func(context.Context) error { c.purges.Add(1); return nil },
		func(context.Context) error { c.digests.Add(1); return nil }, openLocker{}, time.Now, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	sched.Start()
	names := map[string]*atomic.Int64{jobTick: &c.ticks, jobSweep: &c.sweeps, jobRetention: &c.purges, jobDigest: &c.digests}
	require.Len(t, sched.Jobs(), len(names))
	for _, j := range sched.Jobs() {
		require.NoError(t, j.RunNow())
		eventually(t, j.Name()+" runs", func() bool { return names[j.Name()].Load() > 0 })
	}
	require.NoError(t, sched.Shutdown())
	all, _ := lockers(t, func(s *settings.Settings) {
		s.Retention.Cron, s.Sweep.Cron, s.Alerts.DigestCron = "0 0 29 2 *", "0 0 29 2 *", "0 0 29 2 *"
	})
	for _, job := range []string{jobSweep, jobRetention, jobDigest} {
		_, err := all[0].Lock(t.Context(), job)
		require.ErrorIs(t, err, errNoSlot, job)
	}
}

// TestThreeSchedulersRunAJobOnce lets gocron itself do it: three schedulers whose
// clocks agree run a job of every second once a second together.
func TestThreeSchedulersRunAJobOnce(t *testing.T) {
	t.Parallel()
	all, look := lockers(t, func(*settings.Settings) {})
	var ran atomic.Int32
	var scheds []gocron.Scheduler
	for _, l := range all {
		l.crons[jobSweep] = cron.Every(time.Second)
		s, err := gocron.NewScheduler(gocron.WithDistributedLocker(l))
		require.NoError(t, err)
		_, err = s.NewJob(gocron.CronJob("* * * * * *", true), gocron.NewTask(func() { ran.Add(1) }), gocron.WithName(jobSweep))
		require.NoError(t, err)
		scheds = append(scheds, s)
	}
	for _, s := range scheds {
		s.Start()
	}
	eventually(t, "four slots have run", func() bool { return ran.Load() >= 4 })
	for _, s := range scheds {
		require.NoError(t, s.Shutdown())
	}
	total := ran.Load()
	slots := map[string]bool{}
	keys, err := look.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	for _, k := range keys {
		slots[k] = true
	}
	require.NotEmpty(t, slots, "slots are remembered")
	require.LessOrEqual(t, len(slots), 4, "and forgotten after two periods")
	require.LessOrEqual(t, total, int32(6), "three schedulers without a locker run it three times a second")
}
