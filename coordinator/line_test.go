package coordinator_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
	"schoolbell/sender/redisrate/ratetest"
)

// limited gives the senders of a world a rate.
func (w *world) limited(limits map[string]sender.Limit) {
	w.rates = ratetest.NewMemory(time.Now, limits)
}

// gone is what the receiver got, for a judge.
func (w *world) gone() []ratetest.Gone {
	var all []ratetest.Gone
	for _, a := range w.receiver.of("") {
		all = append(all, ratetest.Gone{At: a.start.UnixMilli(), School: a.school, Size: len(a.ids)})
	}
	return all
}

func TestInterleaving18WaitingForTheRateHoldsNoSlotLeaseOrClaim(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.limited(map[string]sender.Limit{"fcm": {PerMinute: 12_000, Batch: 200}}) // a batch a second
		reg := prometheus.NewRegistry()
		r1 := w.start("r1", slots(2), func(_ *coordinator.Config, d *coordinator.Deps) { d.Registerer = reg })
		replicas := []*replica{r1, w.start("r2", slots(2)), w.start("r3", slots(2))}
		const schools = 12
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1200)
			replicas[i%3].Wake(id)
		}
		idle := 0
		w.pass(500 * time.Millisecond)
		for range 60 {
			w.pass(time.Second)
			held := 0
			for i := range schools {
				id := fmt.Sprintf("school-%d", i)
				if w.arbiter.heldBy(id) != "" {
					held++
				}
				require.LessOrEqual(w, w.outbox.unsettled(id), held)
			}
			require.LessOrEqual(w, held, 1, "one batch a second is on the wire, and all others wait with nothing")
			if held == 0 && r1.Working() == 0 {
				idle++
			}
		}
		require.Greater(w, idle, 20)
		gone := w.gone()
		require.Empty(w, ratetest.Judge(gone, 12_000, 200))
		share, sum := map[string]int{}, 0
		for _, g := range gone {
			share[g.School] += g.Size
			sum += g.Size
		}
		require.Greater(w, sum, 11_000, "the rate is used")
		for name, n := range share {
			require.InDelta(w, sum/schools, n, 200, name)
		}
		require.Less(w, w.script.count("hold"), 2*len(gone)+10, "a place is looked up before a lock is taken")
		require.Positive(w, testutil.ToFloat64(waited(w, reg)))
		state := r1.Lanes()[0].Shared
		require.Equal(w, 12_000, state.PerMinute)
		require.InDelta(w, 12_000, state.Used, 1_500)
		require.InDelta(w, schools, state.Waiting, 1)

		w.halt(replicas[1]) // what it was told is told to the others
		w.halt(replicas[2])
		w.tick(r1, 10*time.Second)
		w.pass(time.Minute)
		for i := range schools {
			require.Equal(w, map[school.State]int{school.Success: 1200}, w.outbox.states(fmt.Sprintf("school-%d", i)))
		}
	})
}

// waited finds the counter of told waits.
func waited(w *world, reg *prometheus.Registry) prometheus.Collector {
	families, err := reg.Gather()
	require.NoError(w, err)
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "found"})
	for _, f := range families {
		if f.GetName() == "schoolbell_sender_rate_wait_seconds_total" {
			c.Add(f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	return c
}

func TestABatchIsNotCutByWhatTheCycleHasLeft(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.limited(map[string]sender.Limit{"fcm": {PerMinute: 600_000, Batch: 200}})
		r := w.start("r1", func(c *coordinator.Config, _ *coordinator.Deps) { c.Limit = 500 })
		w.pass(10 * time.Second)
		w.outbox.accept("A", 1000)
		r.Wake("A")
		w.pass(10 * time.Minute)
		require.Equal(w, []int{200, 200, 100, 200, 200, 100}, w.sizes("A"))
		wants := 0
		for _, k := range w.rates.Takes() {
			wants += k.Want
		}
		require.Equal(w, 1000, wants, "nothing of the rate was wasted")
	})
}

// TestAStopIsForAllReplicasAndOneSender: what one replica learns of wrong
// credentials is true for all, and for this sender alone.
func TestAStopIsForAllReplicasAndOneSender(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var refused atomic.Bool
		relay := newReceiver(newScript())
		w.receiver.takes(300 * time.Millisecond)
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			if refused.Load() {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured, Code: "UNAUTHENTICATED"})
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		e := &ear{}
		two := func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes = append(d.Lanes, coordinator.Lane{Name: "relay", Sender: relay})
			d.Events = e
		}
		replicas := []*replica{w.start("r1", two), w.start("r2", two), w.start("r3", two)}
		for _, r := range replicas {
			w.tick(r, 10*time.Second)
		}
		const schools = 9
		for i := range schools {
			id := fmt.Sprintf("fcm-%d", i)
			w.outbox.accept(id, 2000)
			replicas[i%3].Wake(id)
			w.outbox.put(school.School{ID: fmt.Sprintf("relay-%d", i), Sender: "relay"})
			w.outbox.accept(fmt.Sprintf("relay-%d", i), 2000)
			replicas[i%3].Wake(fmt.Sprintf("relay-%d", i))
		}
		w.pass(time.Second)
		before := len(w.receiver.of(""))
		require.Greater(w, before, schools)
		refused.Store(true)
		at := time.Now()
		w.pass(3 * time.Second)
		late := w.receiver.of("")[before:]
		for _, a := range late {
			require.Less(w, a.start.Sub(at), 400*time.Millisecond, "after the first answer nothing more goes out")
		}
		require.LessOrEqual(w, len(late), 2*schools, "each school at most what was on the wire and one more")
		for _, r := range replicas {
			state := r.Lanes()[0]
			require.True(w, state.Stopped, r.name)
			require.Equal(w, "UNAUTHENTICATED", state.Code)
			require.InDelta(w, 3, state.StoppedFor.Seconds(), .5)
			require.False(w, r.Lanes()[1].Stopped)
		}
		stood := len(w.receiver.of(""))
		w.pass(75 * time.Second) // 5, 10, 20, 40 s: four probes
		probes := w.receiver.of("")[stood:]
		require.Len(w, probes, 4)
		for _, a := range probes {
			require.Len(w, a.ids, 1)
		}
		require.Len(w, w.log.events("sender_stopped"), 1)
		require.Len(w, e.heard(), 1)
		require.Len(w, relay.of(""), schools*10, "the other sender's schools go on")

		refused.Store(false)
		w.pass(10 * time.Minute)
		require.Len(w, w.log.events("sender_resumed"), 1)
		require.Len(w, e.heard(), 2)
		require.InDelta(w, 155, e.heard()[1].(coordinator.SenderResumed).Stopped.Seconds(), 6)
		for i := range schools {
			id := fmt.Sprintf("fcm-%d", i)
			require.Equal(w, map[school.State]int{school.Success: 2000}, w.outbox.states(id))
			for _, n := range w.outbox.schools[id].notices {
				for _, r := range n.recipients {
					require.Zero(w, r.Retries, "nobody's retries are used")
				}
			}
		}
		for _, r := range replicas {
			require.False(w, r.Lanes()[0].Stopped, r.name)
		}
	})
}

// TestAllGoOnWhenTheProbeIsLetIn: also the schools of the other replicas, at once.
func TestAllGoOnWhenTheProbeIsLetIn(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var refused atomic.Bool
		refused.Store(true)
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			if refused.Load() {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured})
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		replicas := []*replica{w.start("r1", slots(4)), w.start("r2", slots(4)), w.start("r3", slots(4))}
		for i := range 12 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 200)
			replicas[i%3].Wake(id)
		}
		w.pass(5*time.Second + 10*time.Second + 20*time.Second + 5*time.Second)
		require.Equal(w, "MISCONFIGURED", replicas[0].Lanes()[0].Code, "a refusal without a code")
		refused.Store(false)
		before := len(w.receiver.of(""))
		w.pass(40 * time.Second)
		for i := range 12 {
			require.Equal(w, map[school.State]int{school.Success: 200}, w.outbox.states(fmt.Sprintf("school-%d", i)), "school-%d", i)
		}
		after := w.receiver.of("")[before:]
		require.Len(w, after[0].ids, 1)
		require.Less(w, after[len(after)-1].start.Sub(after[0].start), 2*time.Second, "all of them at once")
		for _, r := range replicas {
			require.False(w, r.Lanes()[0].Stopped, "%s, which has nothing to send by now, knows as well", r.name)
		}
	})
}

// TestAProbeThatIsNotUsedIsFreeForTheNext: in the cluster, at once.
func TestAProbeThatIsNotUsedIsFreeForTheNext(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"ensure", "reserve", "claim"} {
		inWorld(t, func(w *world) {
			w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured})
			})
			r := w.start("r1")
			w.outbox.accept("A", 1000)
			r.Wake("A")
			w.pass(time.Second)
			w.script.onCall(op, func(context.Context, int) error { return errAway })
			w.pass(5 * time.Second)
			state, err := w.rates.Look(w.Context(), sender.Look{Sender: "fcm"})
			require.NoError(w, err)
			require.True(w, state.Stopped && state.ProbeIn == 0, op)
			require.False(w, state.Probing, op)
			w.script.onCall(op, nil)
		})
	}
}

func TestALostStopCostsOneMessage(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			return sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured, Code: "PERMISSION_DENIED"})
		})
		r1, r2 := w.start("r1"), w.start("r2")
		for i := range 6 {
			w.outbox.accept(fmt.Sprintf("school-%d", i), 1000)
		}
		for _, r := range []*replica{r1, r2} {
			w.tick(r, 10*time.Second)
		}
		w.pass(12 * time.Second)
		before := len(w.receiver.of(""))
		w.rates.Forget()
		w.pass(30 * time.Second)
		for _, a := range w.receiver.of("")[before:] {
			require.Len(w, a.ids, 1)
		}
		require.Len(w, w.log.events("sender_stopped"), 1)
	})
}

func TestWithoutTheArbiterOfRatesNothingIsSent(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var away atomic.Bool
		away.Store(true)
		w.rates.Fail(func(string) error {
			if away.Load() {
				return errors.New("fake: away")
			}
			return nil
		})
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes = append(d.Lanes, coordinator.Lane{Name: "log", Sender: newReceiver(newScript()), Local: true})
		})
		w.outbox.accept("A", 400)
		w.outbox.put(school.School{ID: "L", Sender: "log"})
		w.outbox.accept("L", 400)
		r.Wake("A", "L")
		w.pass(10 * time.Second)
		require.Empty(w, w.receiver.of(""))
		require.Zero(w, w.outbox.ledger("A").Attempted, "and nothing was reserved or claimed")
		require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("L"), "a sender that has no rate needs none")
		away.Store(false)
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 400}, w.outbox.states("A"))
	})
}

func TestThrottlingLowersTheRateOfAll(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.limited(map[string]sender.Limit{"fcm": {PerMinute: 60_000, Batch: 200}})
		share := 10 // of 200: a device or two
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			results := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			if n <= 2 {
				for i := range share {
					results[i].Class, results[i].Code, results[i].RetryAfter = sender.Throttled, "QUOTA_EXCEEDED", 30*time.Second
				}
				share = 20
			}
			return results
		})
		r1, r2 := w.start("r1"), w.start("r2")
		w.pass(10 * time.Second)
		w.outbox.accept("A", 200)
		r1.Wake("A")
		w.pass(2 * time.Second)
		require.Empty(w, w.log.events("sender_rate_lowered"))
		w.outbox.accept("B", 200)
		r1.Wake("B")
		w.pass(5 * time.Second) // who has nothing to do looks so often
		require.Len(w, w.log.events("sender_rate_lowered"), 1)
		state := r2.Lanes()[0].Shared
		require.True(w, state.Lowered)
		require.Equal(w, 30_000, state.PerMinute)
		w.pass(10 * time.Minute)
		require.Equal(w, 60_000, r2.Lanes()[0].Shared.PerMinute)
		require.Equal(w, map[school.State]int{school.Success: 200}, w.outbox.states("B"))
	})
}

// TestAQuotaBelowTheRateIsFound: a receiver takes less than the sender was told. Its
// 429s lower the rate, which grows again until they come back; so most of what it
// takes is used, and few messages are refused.
func TestAQuotaBelowTheRateIsFound(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		const quota = 24_000 // in any minute
		w.limited(map[string]sender.Limit{"fcm": {PerMinute: 60_000, Batch: 200}})
		var mu sync.Mutex
		type took struct {
			at time.Time
			n  int
		}
		var window []took
		accepted, refused, tail := 0, 0, 0
		began := time.Now()
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			mu.Lock()
			defer mu.Unlock()
			now, sum := time.Now(), 0
			for len(window) > 0 && now.Sub(window[0].at) >= time.Minute {
				window = window[1:]
			}
			for _, one := range window {
				sum += one.n
			}
			if sum+len(b.Messages) > quota {
				if refused += len(b.Messages); now.Sub(began) > 3*time.Minute {
					tail += len(b.Messages)
				}
				wait := time.Minute - now.Sub(window[0].at)
				return sender.Fill(b.Messages, sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: wait})
			}
			window = append(window, took{now, len(b.Messages)})
			accepted += len(b.Messages)
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		large := func(c *coordinator.Config, _ *coordinator.Deps) { c.Limit = 1_000_000 }
		replicas := []*replica{w.start("r1", large), w.start("r2", large)}
		const schools, devices, minutes = 6, 25_000, 6
		for i := range schools {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, devices)
			replicas[i%2].Wake(id)
		}
		w.pass(minutes * time.Minute)
		require.Greater(w, accepted, minutes*quota*6/10, "most of what the receiver takes is used")
		require.Less(w, refused, accepted/5, "and little is refused")
		require.Less(w, tail, accepted/20, "least where it has been found")
		low := w.log.events("sender_rate_lowered")
		require.NotEmpty(w, low)
		require.Less(w, len(low), 10, "once for what was on the way together")
	})
}

func TestNoLineSaysWhoWaits(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.limited(map[string]sender.Limit{"fcm": {PerMinute: 6_000, Batch: 200}})
		r := w.start("r1")
		w.outbox.accept("A", 600)
		w.outbox.accept("B", 600)
		r.Wake("A", "B")
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 600}, w.outbox.states("B"))
		require.False(w, slices.ContainsFunc(strings.Split(w.log.String(), "\n"), func(line string) bool {
			return strings.Contains(line, `"level":"WARN"`)
		}), "waiting is nothing to warn of")
	})
}
