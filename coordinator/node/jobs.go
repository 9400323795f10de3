package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/redis/go-redis/v9"
	"github.com/robfig/cron/v3"

	"schoolbell/coordinator"
	"schoolbell/coordinator/node/settings"
	"schoolbell/watchdog/redislease"
)

// Names of the scheduled jobs: part of the keys in Redis.
const (
	jobTick  = "tick"
	jobSweep = "sweep"
)

const sweepTimeout = 4 * time.Minute

// jobs builds the schedules of one replica. The dispatch tick runs in every
// replica; the recovery sweep once per slot in the whole cluster (R16).
func jobs(ctx context.Context, s settings.Settings, c *coordinator.Coordinator, locker gocron.Locker, log *slog.Logger) (gocron.Scheduler, error) {
	log = log.With("component", "jobs")
	sched, err := gocron.NewScheduler(
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
		gocron.WithStartAt(gocron.WithStartDateTime(time.Now().Add(s.Dispatch.FirstTick))))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("schedule the dispatch tick: %w", err), sched.Shutdown())
	}
	_, err = sched.NewJob(gocron.CronJob(s.Sweep.Cron, false), run(jobSweep, sweepTimeout, c.Sweep),
		gocron.WithName(jobSweep), gocron.WithSingletonMode(gocron.LimitModeReschedule))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("schedule the recovery sweep %q: %w", s.Sweep.Cron, err), sched.Shutdown())
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

var errSlotTaken = errors.New("slot is taken by another replica")

// slotSkew is how far apart a replica's clock and Redis's may be for both to
// mean the same slot. A cron of five fields has a minute at least.
const slotSkew = 30 * time.Second

func newSlotLocker(s settings.Settings, client redis.UniversalClient, slots *redislease.Slots) (*slotLocker, error) {
	sweep, err := cron.ParseStandard("CRON_TZ=" + s.Timezone + " " + s.Sweep.Cron)
	if err != nil {
		return nil, fmt.Errorf("sweep.cron %q: %w", s.Sweep.Cron, err)
	}
	return &slotLocker{client: client, slots: slots, crons: map[string]cron.Schedule{jobSweep: sweep}}, nil
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
	slot := schedule.Next(now.Add(-slotSkew))
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

// keptSlot is never unlocked.
type keptSlot struct{}

func (keptSlot) Unlock(context.Context) error { return nil }
