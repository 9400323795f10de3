package storm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"schoolbell/cmd/chaos/arena"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// Scenario is one exact story, played instead of planned faults.
type Scenario struct {
	Name string
	What string // for people
	Run  func(ctx context.Context, cfg Config) (Result, error)
}

// Scenarios lists them.
func Scenarios() []Scenario {
	return []Scenario{
		{"pause", "the owner is stopped (SIGSTOP) for two leases in the middle of a batch of 200 FCM messages; what is late after SIGCONT is counted", Stopped},
		{"takeover", "of 100 schools, the replica that holds 40 is killed; each sends again within one lease and a second", TakenOver},
	}
}

// perhaps bounds how long a scenario waits for its moment.
const perhaps = time.Minute

// play starts an arena, plays the story in it, waits until the work has ended
// and judges.
func (r *run) play(ctx context.Context, cfg arena.Config, story func(ctx context.Context) error, also func(ctx context.Context, v *verdict.Verdict) error) (res Result, err error) {
	r.began = time.Now()
	cfg.Program, cfg.Log, cfg.Seed, cfg.Fast = r.Program, r.Log, r.Seed, true
	a, err := arena.New(ctx, cfg)
	if err != nil {
		return res, err
	}
	r.arena = a
	defer func() { err = errors.Join(err, a.Close()) }()
	r.began = a.Begin()
	if err := story(ctx); err != nil {
		return res, err
	}
	ending, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("the time for it is over"))
	defer cancel()
	if err := a.WaitEnded(ending); err != nil {
		if ctx.Err() != nil {
			return res, context.Cause(ctx)
		}
		r.say("%v", err)
	}
	v, err := r.judge(ctx)
	if err != nil {
		return res, err
	}
	if err := also(ctx, &v); err != nil {
		return res, err
	}
	return r.result(ctx, v)
}

// Stopped is the scenario "pause". The residue that no lease removes: what had
// passed the last look at the clock, or was on the wire, when the process was
// stopped. The verdict counts it and bounds it by the batch.
func Stopped(ctx context.Context, cfg Config) (Result, error) {
	const batch = 200
	r := &run{Config: cfg, broken: map[*arena.Replica]bool{}}
	vars := settings()
	delete(vars, "SCHOOLBELL_SENDERS_RELAY_CALL_TIMEOUT")
	vars["SCHOOLBELL_SENDERS_FCM_CALL_TIMEOUT"] = callTimeout.String()
	vars["SCHOOLBELL_DISPATCH_BATCH"] = fmt.Sprint(batch)
	got := 0 // of the batch, when its owner stood still
	story := func(ctx context.Context) error {
		if _, err := r.arena.Post(ctx, School(0), 50*batch); err != nil {
			return err
		}
		late := time.Now().Add(perhaps)
		for time.Now().Before(late) && ctx.Err() == nil {
			at, err := r.stopWithin(ctx, batch, late)
			if err != nil || at > 0 {
				got = at
				return err
			}
		}
		return errors.New("the process was never caught in the middle of a batch")
	}
	return r.play(ctx, arena.Config{
		Replicas: 2, Limit: 100 * batch, Rest: cfg.Rest, FCM: true, Settings: vars,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 300 * time.Millisecond, Spread: 200 * time.Millisecond}},
	}, story, func(_ context.Context, v *verdict.Verdict) error {
		r.say("stopped when %d of %d messages had arrived; after it went on %d were late, of at most %d; %d came twice, of at most %d",
			got, batch, v.LateByPause, v.LateBound, v.Repeated, v.RepeatBound)
		return nil
	})
}

// stopWithin waits for the next batch to begin and stops its owner. It returns
// how much of it had arrived when the owner stood still, after two leases; 0
// where that was all of it, and the owner went on at once.
func (r *run) stopWithin(ctx context.Context, batch int, late time.Time) (int, error) {
	a := r.arena
	before := a.Receiver.Counts().Arrivals
	if before%int64(batch) != 0 {
		return 0, errors.New("a batch is not whole, though nobody was stopped in it")
	}
	ranking := a.Ranking(ctx)
	for a.Receiver.Counts().Arrivals < before+int64(batch)/4 {
		if ranking[0].Batches == 0 {
			ranking = a.Ranking(ctx) // until its claim is there, which is before the first message
		}
		if time.Now().After(late) || ctx.Err() != nil {
			return 0, errors.Join(errors.New("no batch began"), context.Cause(ctx))
		}
	}
	owner := ranking[0]
	if owner.Batches == 0 {
		owner = a.Ranking(ctx)[0]
	}
	resume, err := owner.Pause()
	if err != nil {
		return 0, err
	}
	// What it had written lies in this machine's buffers, and arrives.
	settle(ctx, func() int64 { return a.Receiver.Counts().Arrivals })
	if n := int(a.Receiver.Counts().Arrivals - before); n < batch {
		r.say("%s stands still, %d of %d messages have arrived", owner.Name, n, batch)
		sleep(ctx, 2*lease)
		r.say("%s goes on", owner.Name)
		return n, resume()
	}
	return 0, resume()
}

// settle waits until a number has stopped changing.
func settle(ctx context.Context, number func() int64) {
	for last := int64(-1); ctx.Err() == nil; {
		now := number()
		if now == last {
			return
		}
		last = now
		sleep(ctx, 50*time.Millisecond)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// TakenOver is the scenario "takeover".
func TakenOver(ctx context.Context, cfg Config) (Result, error) {
	const schools, held, each = 100, 40, 600
	r := &run{Config: cfg, broken: map[*arena.Replica]bool{}}
	vars := settings()
	// A small batch that takes a second: a school always has one in flight.
	vars["SCHOOLBELL_DISPATCH_BATCH"] = "20"
	vars["SCHOOLBELL_DISPATCH_SLOTS"] = fmt.Sprint(held)
	names := make([]string, schools)
	for i := range names {
		names[i] = School(i)
	}
	var victim []string // the schools of the killed one
	var killed time.Time
	// holding waits until the first replica holds so many schools and the others
	// at least so many.
	holding := func(ctx context.Context, first, others int) error {
		for late := time.Now().Add(perhaps); ; {
			owners, err := r.arena.Owners(ctx, names)
			if err != nil {
				return err
			}
			all := len(owners)
			maps.DeleteFunc(owners, func(_, owner string) bool { return owner != r.arena.Replicas()[0].Name })
			victim = slices.Sorted(maps.Keys(owners))
			if len(victim) == first && all-first >= others {
				return nil
			}
			if time.Now().After(late) || ctx.Err() != nil {
				return errors.Join(fmt.Errorf("the first replica was to hold %d schools and the others %d: it holds %d and they %d", first, others, len(victim), all-len(victim)), context.Cause(ctx))
			}
			sleep(ctx, 10*time.Millisecond)
		}
	}
	story := func(ctx context.Context) error {
		for _, name := range names {
			if _, err := r.arena.Post(ctx, name, each); err != nil {
				return err
			}
		}
		// Alone it fills its slots; beside others it would get the schools that
		// prefer it, which are a third.
		if err := holding(ctx, held, 0); err != nil {
			return err
		}
		for range 2 {
			// With slots for all: nobody waits for a slot that death took.
			if _, err := r.arena.StartReplica(ctx, map[string]string{"SCHOOLBELL_DISPATCH_SLOTS": fmt.Sprint(schools)}); err != nil {
				return err
			}
		}
		if err := holding(ctx, held, schools-held); err != nil {
			return err
		}
		killed = time.Now()
		r.say("%s is killed, which holds %d of %d schools", r.arena.Replicas()[0].Name, len(victim), schools)
		return r.arena.Replicas()[0].Kill()
	}
	return r.play(ctx, arena.Config{
		Replicas: 1, Limit: 10 * each, Rest: cfg.Rest, Settings: vars,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: time.Second, Spread: 200 * time.Millisecond}},
	}, story, func(_ context.Context, v *verdict.Verdict) error {
		took := takenOver(r.arena.Receiver.Arrivals(), victim, killed)
		all := slices.Sorted(maps.Values(took))
		for _, name := range victim {
			switch d, ok := took[name]; {
			case !ok:
				broke(v, name, killed, "takeover: school %s was held by the killed replica and sent no more", name)
			case d > lease+time.Second:
				broke(v, name, killed, "takeover: school %s sent again %s after the kill, and a lease is %s", name, d.Round(time.Millisecond), lease)
			}
		}
		r.say("%d schools sent again under another owner: %s (a lease is %s)", len(all), distribution(all), lease)
		return nil
	})
}

// takenOver is how long after the kill each of the schools sent under a higher
// fence than before.
func takenOver(arrivals []simulator.Arrival, schools []string, killed time.Time) map[string]time.Duration {
	before, took := map[string]int64{}, map[string]time.Duration{}
	slices.SortStableFunc(arrivals, func(x, y simulator.Arrival) int { return int(x.T - y.T) })
	for _, x := range arrivals {
		_, done := took[x.School]
		switch {
		case done || !slices.Contains(schools, x.School):
		case x.T <= killed.UnixNano():
			before[x.School] = max(before[x.School], x.Fence)
		case x.Fence > before[x.School]:
			took[x.School] = time.Duration(x.T - killed.UnixNano())
		}
	}
	return took
}

// distribution shows sorted durations by tenths.
func distribution(sorted []time.Duration) string {
	if len(sorted) == 0 {
		return "none"
	}
	var parts []string
	for _, p := range []int{0, 10, 50, 90, 99, 100} {
		i := max((len(sorted)*p+99)/100-1, 0)
		parts = append(parts, fmt.Sprintf("p%d %s", p, sorted[i].Round(time.Millisecond)))
	}
	return strings.Join(parts, ", ")
}

func broke(v *verdict.Verdict, school string, at time.Time, format string, args ...any) {
	d := verdict.Violation{Text: fmt.Sprintf(format, args...), School: school, At: at}
	v.OK = false
	v.Violations = append(v.Violations, d.Text)
	v.Details = append(v.Details, d)
}
