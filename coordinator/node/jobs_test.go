package node

import (
	"fmt"
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

// TestASlotIsTakenOnce: of three replicas that come at once, or a moment later,
// one runs the job of a cron slot, and the slot is named by its time (R16).
func TestASlotIsTakenOnce(t *testing.T) {
	t.Parallel()
	all, look := lockers(t, func(s *settings.Settings) { s.Sweep.Cron, s.Timezone = "30 4 * * *", "Asia/Seoul" })
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
	require.Equal(t, "04:30", slot.In(time.FixedZone("", 9*60*60)).Format("15:04"), "half past four in Seoul")
	ttl, err := look.TTL(t.Context(), keys[0]).Result()
	require.NoError(t, err)
	require.InDelta(t, 48*time.Hour, ttl, float64(time.Minute), "it is remembered for two periods")

	_, err = all[0].Lock(t.Context(), "unknown")
	require.ErrorContains(t, err, "unknown")
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
