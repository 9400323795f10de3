// Package storm is one chaos run: a production of real processes, applications
// that hand in notices, faults as they were planned, and a judgement from
// outside. Everything that it starts ends with it.
//
// It decides nothing about faults (package plan does), breaks nothing itself
// (package arena does) and knows nothing of a command line.
package storm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"schoolbell/cmd/chaos/arena"
	"schoolbell/cmd/chaos/plan"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// Config says what a run is.
type Config struct {
	Program    string // path of the schoolbell binary
	Clocks     bool   // the binary's clock can be stepped (built with failpoints)
	Redis      arena.Topology
	Replicas   int
	Schools    int
	Recipients int // of all schools together
	Limit      int
	Rest       time.Duration
	For        time.Duration // notices come in and things break
	Settle     time.Duration // for the work to end after that; 0: from the others
	Kinds      []plan.Choice
	Seed       int64
	Mutation   string // name of a defect that the binary was built to have

	// Unavailable is the share of messages that the receiver refuses for now, so
	// that they have to be sent again.
	Unavailable float64

	AtMostOnce bool // the notices ask for at most once, else at least once

	Log io.Writer   // of the replicas; nil: thrown away
	Say func(Event) // told of what happens, by one goroutine at a time; nil: nobody
}

// Event is something that happened, in words.
type Event struct {
	At   time.Duration // after the run's begin
	What string
}

// Result is how a run ended.
type Result struct {
	Verdict  verdict.Verdict
	Timeline []Event
	Around   map[string][]string // by the text of a violation: what happened around it
	Lease    time.Duration
}

// The times that make rests, leases and takeovers happen within a run: W = 1 s,
// C = 2 s, so B = 3 s, and a lease of 1.5 × 4 s.
const (
	claimTimeout = time.Second
	callTimeout  = 2 * time.Second
	etc          = 4 * time.Second
	lease        = etc * 3 / 2
)

// Lease is how long a replica holds a school without renewing.
func Lease() time.Duration { return lease }

func settings() map[string]string {
	return map[string]string{
		"SCHOOLBELL_DISPATCH_CLAIM_TIMEOUT":     claimTimeout.String(),
		"SCHOOLBELL_SENDERS_RELAY_CALL_TIMEOUT": callTimeout.String(),
		"SCHOOLBELL_LOCK_ETC":                   etc.String(),
		"SCHOOLBELL_LOCK_ETC_MAX":               etc.String(),
		"SCHOOLBELL_STOP_TIMEOUT":               "15s",
		"SCHOOLBELL_RETRY_BASE":                 "1s",
	}
}

// Plan is what the run will break.
func (c Config) Plan() []plan.Fault {
	var without []plan.Way
	if !c.Clocks {
		without = []plan.Way{plan.ReplicaForth, plan.ReplicaBack}
	}
	return plan.New(plan.Config{
		Seed: c.Seed, For: c.For, Kinds: c.Kinds, Replicas: c.Replicas, Schools: c.Schools, Lease: lease, Without: without,
	})
}

// settle bounds how long the work may go on after the last fault: as long as it
// would take from nothing, with room for what the faults left behind.
func (c Config) settle() time.Duration {
	if c.Settle > 0 {
		return c.Settle
	}
	cycles := c.Recipients/c.Schools/c.Limit + 2
	return time.Minute + 4*lease + time.Duration(cycles)*(c.Rest+2*time.Second)
}

type run struct {
	Config
	arena *arena.Arena
	began time.Time

	mu       sync.Mutex
	timeline []Event
	broken   map[*arena.Replica]bool // suffering: the next fault takes another
}

// Run runs it. An error is something that kept it from being judged; broken
// promises are in the result's verdict.
func Run(ctx context.Context, cfg Config) (res Result, err error) {
	faults := cfg.Plan()
	vars := settings()
	if cfg.Mutation != "" {
		vars["SCHOOLBELL_MUTATE"] = cfg.Mutation
	}
	r := &run{Config: cfg, began: time.Now(), broken: map[*arena.Replica]bool{}}
	a, err := arena.New(ctx, arena.Config{
		Program: cfg.Program, Replicas: cfg.Replicas, Limit: cfg.Limit, Rest: cfg.Rest, Seed: cfg.Seed,
		Topology: cfg.Redis, Ways: true, Clocks: plan.Has(cfg.Kinds, plan.Clock), Wall: cfg.Clocks, Fast: true,
		Settings: vars, Log: cfg.Log,
		Behaviour: simulator.Behaviour{Outcomes: map[string]float64{"UNAVAILABLE": cfg.Unavailable}, Latency: simulator.Latency{Base: 400 * time.Millisecond, Spread: 300 * time.Millisecond}},
	})
	if err != nil {
		return res, err
	}
	r.arena = a
	defer func() { err = errors.Join(err, a.Close()) }()
	r.say("%d replicas are up; %d faults are planned with seed %d", cfg.Replicas, len(faults), cfg.Seed)
	r.began = a.Begin()

	if err := r.work(ctx, faults); err != nil {
		return res, err
	}
	if ctx.Err() != nil {
		return res, context.Cause(ctx)
	}
	v, err := r.judge(ctx)
	if err != nil {
		return res, err
	}
	return r.result(ctx, v)
}

// result is the verdict with what happened around what was broken.
func (r *run) result(ctx context.Context, v verdict.Verdict) (Result, error) {
	res := Result{Verdict: v, Around: map[string][]string{}, Lease: lease}
	for _, d := range v.Details {
		lines, err := r.arena.Around(ctx, d, 2*lease)
		if err != nil {
			return res, err
		}
		res.Around[d.Text] = lines
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	res.Timeline = slices.Clone(r.timeline)
	return res, nil
}

// work hands in the notices, breaks things, and waits until everything has ended
// or the time for that is over.
func (r *run) work(ctx context.Context, faults []plan.Fault) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	settled, cancel := context.WithTimeoutCause(ctx, r.For+r.settle(), errors.New("the time for it is over"))
	defer cancel()

	var reporting sync.WaitGroup
	reports, stopReports := context.WithCancel(ctx)
	reporting.Go(func() { r.report(reports) })
	defer reporting.Wait()
	defer stopReports()

	var posting, breaking sync.WaitGroup
	posting.Go(func() {
		if err := r.post(settled); err != nil {
			r.say("%v", err)
		}
	})
	for _, f := range faults {
		breaking.Go(func() { r.inject(ctx, f) })
	}
	r.until(ctx, r.For)
	breaking.Wait()
	r.say("nothing is broken any more")
	posting.Wait()
	r.revive(settled)
	if err := r.arena.WaitEnded(settled); err != nil && ctx.Err() == nil {
		r.say("%v", err) // the verdict tells each
	}
	return nil
}

// until waits until that long after the begin.
func (r *run) until(ctx context.Context, at time.Duration) {
	t := time.NewTimer(time.Until(r.began.Add(at)))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// judge asks again where the connection was one that a fault had ended.
func (r *run) judge(ctx context.Context) (v verdict.Verdict, err error) {
	r.say("judging")
	r.arena.DB.Reset()
	if n, err := r.arena.Unknown(ctx); err == nil && r.AtMostOnce {
		r.say("%d recipients may have arrived and are not sent again (OUTCOME_UNKNOWN)", n)
	}
	for range 3 {
		if v, err = r.arena.Verdict(ctx); err == nil {
			return v, nil
		}
	}
	return v, fmt.Errorf("judge: %w", err)
}

func (r *run) say(format string, args ...any) {
	e := Event{At: time.Since(r.began), What: fmt.Sprintf(format, args...)}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timeline = append(r.timeline, e)
	if r.Say != nil {
		r.Say(e)
	}
}

const reportEvery = 10 * time.Second

// report says now and then how far it is.
func (r *run) report(ctx context.Context) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			counts := r.arena.Receiver.Counts()
			posted := 0
			for _, p := range r.arena.Accepted() {
				posted += p.Total
			}
			states := ""
			if got, err := r.arena.States(ctx); err == nil {
				for _, name := range slices.Sorted(maps.Keys(got)) {
					states += fmt.Sprintf(", %d %s", got[name], name)
				}
			}
			r.say("%d handed in, %d arrived%s", posted, counts.Distinct, states)
		case <-ctx.Done():
			return
		}
	}
}
