package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/robfig/cron/v3"

	"schoolbell/coordinator/node/settings"
	"schoolbell/watchdog/redislease"
)

// Names of the scheduled jobs: part of the keys in Redis.
const (
	jobTick      = "tick"
	jobSweep     = "sweep"
	jobDigest    = "digest"
	jobRetention = "retention"
)

const (
	sweepTimeout  = 4 * time.Minute
	digestTimeout = 4 * time.Minute
)

// retentionTimeout ends a run before the next slot of the default schedule, which
// goes on where it stopped, whichever replica takes that.
const retentionTimeout = 9 * time.Minute

// slotLook is how often a replica asks whether a slot of a cluster-wide job has
// come, and so how late a job begins at most.
const slotLook = 15 * time.Second

// steadyClock is what gocron goes by: the clock at the start, and from there on
// the monotonic one. gocron sets a timer for a time of day; on a clock that is
// set back by an hour nothing would run for that hour, the dispatch tick
// included.
type steadyClock struct {
	clockwork.Clock
	wall, began time.Time // one moment: by the wall clock, and to count from
}

func newSteadyClock(now func() time.Time) steadyClock {
	return steadyClock{Clock: clockwork.NewRealClock(), wall: now(), began: time.Now()}
}

// Now differs from the wall clock by what that was set by since the start: no
// schedule here names a time of day by it.
func (c steadyClock) Now() time.Time { return c.wall.Add(time.Since(c.began)) }

// ticker is what the schedules call.
type ticker interface {
	Tick(ctx context.Context) error
	Sweep(ctx context.Context) error
}

// jobs builds the schedules of one replica. The dispatch tick runs in every
// replica; the recovery sweep, purge, and the digest, which is nil where nobody is
// told, once per slot in the whole cluster (R16). When a slot comes is for the
// locker to say, which has Redis's clock: this one only asks.
func jobs(ctx context.Context, s settings.Settings, c ticker, purge, digest func(context.Context) error, locker gocron.Locker, now func() time.Time, log *slog.Logger) (gocron.Scheduler, error) {
	log = log.With("component", "jobs")
	clock := newSteadyClock(now)
	sched, err := gocron.NewScheduler(
		gocron.WithClock(clock),
		gocron.WithLocation(s.Location()),
		gocron.WithDistributedLocker(locker),
		gocron.WithStopTimeout(s.StopTimeout),
	)
	if err != nil {
		return nil, fmt.Errorf("make the scheduler of jobs: %w", err)
	}
	run := func(name string, timeout time.Duration, job func(context.Context) error) gocron.Task {
		return gocron.NewTask(func() {
			call, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			if err := job(call); err != nil && ctx.Err() == nil {
				log.Warn("a scheduled job failed; its next slot does what it left", "event", "job_failed", "job", name, "error", err)
			}
		})
	}
	_, err = sched.NewJob(gocron.DurationJob(s.Dispatch.Tick), run(jobTick, max(s.Dispatch.Tick, 10*time.Second), c.Tick),
		gocron.WithName(jobTick), gocron.WithDisabledDistributedJobLocker(true),
		gocron.WithSingletonMode(gocron.LimitModeReschedule),
		gocron.WithStartAt(gocron.WithStartDateTime(clock.Now().Add(s.Dispatch.FirstTick))))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("schedule the dispatch tick: %w", err), sched.Shutdown())
	}
	_, err = sched.NewJob(gocron.DurationJob(slotLook), run(jobSweep, sweepTimeout, c.Sweep),
		gocron.WithName(jobSweep), gocron.WithSingletonMode(gocron.LimitModeReschedule))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("schedule the recovery sweep: %w", err), sched.Shutdown())
	}
	_, err = sched.NewJob(gocron.DurationJob(slotLook), run(jobRetention, retentionTimeout, purge),
		gocron.WithName(jobRetention), gocron.WithSingletonMode(gocron.LimitModeReschedule))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("schedule the retention: %w", err), sched.Shutdown())
	}
	if digest != nil {
		_, err = sched.NewJob(gocron.DurationJob(slotLook), run(jobDigest, digestTimeout, digest),
			gocron.WithName(jobDigest), gocron.WithSingletonMode(gocron.LimitModeReschedule))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("schedule the digest: %w", err), sched.Shutdown())
		}
	}
	return sched, nil
}

// slotLocker is gocron's locker on slots in Redis. A slot is taken once and
// never given back: gocron's own way, a lock around the run, lets a replica
// that comes a moment later run the job again.
type slotLocker struct {
	client redis.UniversalClient
	slots  *redislease.Slots
	crons  map[string]cron.Schedule
}

var (
	errSlotTaken = errors.New("slot is taken by another replica")
	errNoSlot    = errors.New("no slot has come")
)

// slotLate is how long after its time a slot is still taken, by the first
// replica that comes to it: through a short absence of Redis, and no longer, since
// the next slot does what this one left. A cron of five fields has a minute at
// least, so a slot that is remembered for two periods is remembered long enough.
const slotLate = time.Minute

func newSlotLocker(s settings.Settings, client redis.UniversalClient, slots *redislease.Slots) (*slotLocker, error) {
	crons := map[string]cron.Schedule{}
	for _, c := range []struct{ job, setting, text string }{
		{jobSweep, "sweep.cron", s.Sweep.Cron}, {jobRetention, "retention.cron", s.Retention.Cron}, {jobDigest, "alerts.digest_cron", s.Alerts.DigestCron},
	} {
		schedule, err := cron.ParseStandard("CRON_TZ=" + s.Timezone + " " + c.text)
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", c.setting, c.text, err)
		}
		crons[c.job] = schedule
	}
	return &slotLocker{client: client, slots: slots, crons: crons}, nil
}

// Lock takes the slot that the job is due for by Redis's clock.
func (l *slotLocker) Lock(ctx context.Context, job string) (gocron.Lock, error) {
	schedule := l.crons[job]
	if schedule == nil {
		return nil, fmt.Errorf("job %s has no schedule to take a slot of", job)
	}
	now, err := l.client.Time(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("take slot of job %s: read the server's time: %w", job, err)
	}
	slot, ok := slotAt(schedule, now)
	if !ok {
		return nil, errNoSlot
	}
	period := schedule.Next(slot).Sub(slot)
	taken, err := l.slots.TakeAt(ctx, job, slot.UTC().Format(time.RFC3339), 2*period)
	if err != nil {
		return nil, err
	}
	if !taken {
		return nil, errSlotTaken
	}
	return keptSlot{}, nil
}

// slotAt is the latest slot of the schedule that has come by now, and is not
// older than slotLate.
func slotAt(schedule cron.Schedule, now time.Time) (slot time.Time, ok bool) {
	for next := schedule.Next(now.Add(-slotLate)); !next.After(now); next = schedule.Next(next) {
		slot, ok = next, true
	}
	return slot, ok
}

// keptSlot is never unlocked.
type keptSlot struct{}

func (keptSlot) Unlock(context.Context) error { return nil }
