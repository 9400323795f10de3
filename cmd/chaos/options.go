package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"schoolbell/cmd/chaos/arena"
	"schoolbell/cmd/chaos/plan"
	"schoolbell/cmd/chaos/storm"
	"schoolbell/deploy/local"
)

const (
	outputText = "text"
	outputJSON = "json"
)

type options struct {
	replicas, schools, recipients, limit int
	rest, length                         time.Duration
	faults, redis                        string
	seed                                 int64
	scenario, mutate, output, log        string
	list                                 bool
}

// usageError is a wrong command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// errBroken says that a promise was broken: the verdict has been printed.
var errBroken = errors.New("a promise was broken")

func exitCode(err error) int {
	if _, ok := errors.AsType[usageError](err); ok {
		return 2
	}
	return 1
}

// mutation is a defect on purpose, and the run in which it shows.
type mutation struct {
	name, what string
	faults     string
	set        func(*options)
}

func mutations() []mutation {
	return []mutation{
		{"no-provisional-rest", "a cycle that is full sets no rest until it is settled", "kill", nil},
		{"no-ledger-floors", "what Redis lost is not learnt from the ledger", "redis-flush,redis-restart", nil},
		{"lease-end-after-call", "the lease is counted from after the call that renewed it", "pause,partition-redis", nil},
		{"settle-twice", "a settlement that comes twice gives back twice", "partition-redis,redis-pause", nil},
		{"claim-unfenced", "a claim does not look at the fence", "pause", nil},
	}
}

func mutationNames() string {
	var names []string
	for _, m := range mutations() {
		names = append(names, m.name)
	}
	return strings.Join(names, ", ")
}

// config checks the command line. changed tells whether a flag was given.
func (o options) config(changed func(flag string) bool) (cfg storm.Config, err error) {
	for _, n := range []struct {
		flag  string
		value int
		most  int
	}{{"replicas", o.replicas, 20}, {"schools", o.schools, 1000}, {"recipients", o.recipients, 5_000_000}, {"limit", o.limit, 1_000_000}} {
		if n.value < 1 || n.value > n.most {
			return cfg, usagef("--%s is %d: from 1 to %d", n.flag, n.value, n.most)
		}
	}
	if o.recipients < o.schools {
		return cfg, usagef("--recipients is %d: at least one for each of the %d schools", o.recipients, o.schools)
	}
	for _, d := range []struct {
		flag        string
		value       time.Duration
		least, most time.Duration
	}{{"rest", o.rest, 100 * time.Millisecond, time.Hour}, {"for", o.length, 5 * time.Second, 24 * time.Hour}} {
		if d.value < d.least || d.value > d.most {
			return cfg, usagef("--%s is %s: from %s to %s", d.flag, d.value, d.least, d.most)
		}
	}
	if o.output != outputText && o.output != outputJSON {
		return cfg, usagef("--output is %q: text or json", o.output)
	}
	if o.mutate != "" {
		i := slices.IndexFunc(mutations(), func(m mutation) bool { return m.name == o.mutate })
		if i < 0 {
			return cfg, usagef("--mutate is %q: one of %s", o.mutate, mutationNames())
		}
		m := mutations()[i]
		if !changed("faults") {
			o.faults = m.faults
		}
		if m.set != nil {
			m.set(&o)
		}
	}
	kinds, err := plan.Parse(o.faults)
	if err != nil {
		return cfg, usageError{fmt.Errorf("--faults: %w", err)}
	}
	failover := slices.Contains(kinds, plan.RedisFailover)
	topology := arena.Single
	switch {
	case o.redis == "sentinel", o.redis == "" && failover:
		topology = arena.Sentinel
	case o.redis == "cluster":
		topology = arena.Cluster
	case o.redis != "" && o.redis != "single":
		return cfg, usagef("--redis is %q: single, sentinel or cluster", o.redis)
	}
	if failover && topology != arena.Sentinel {
		return cfg, usagef("--redis is %q: redis-failover needs sentinel", o.redis)
	}
	if slices.Contains(kinds, plan.Clock) {
		if _, err := (local.FakeClock{}).Env(); err != nil {
			return cfg, fmt.Errorf("--faults clock: %w", err)
		}
	}
	if o.scenario != "" && !slices.ContainsFunc(storm.Scenarios(), func(s storm.Scenario) bool { return s.Name == o.scenario }) {
		return cfg, usagef("--scenario is %q: one of %s", o.scenario, scenarioNames())
	}
	return storm.Config{
		Redis: topology, Replicas: o.replicas, Schools: o.schools, Recipients: o.recipients,
		Limit: o.limit, Rest: o.rest, For: o.length, Kinds: kinds, Seed: o.seed,
		Mutation: o.mutate, Clocks: slices.Contains(kinds, plan.Clock),
	}, nil
}

// tags are those that the program is built with: only what the run needs, so that
// what is tried is what is released wherever it can be.
func tags(cfg storm.Config) (tags []string) {
	if cfg.Clocks {
		tags = append(tags, "failpoints")
	}
	if cfg.Mutation != "" {
		tags = append(tags, "mutations")
	}
	return tags
}

func (o options) run(ctx context.Context, changed func(string) bool, stdout, stderr io.Writer) (err error) {
	cfg, err := o.config(changed)
	if err != nil {
		return err
	}
	if o.log != "" {
		file, err := os.Create(o.log)
		if err != nil {
			return fmt.Errorf("open the log: %w", err)
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		cfg.Log = file
	}
	builder, err := local.NewBuilder(false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, builder.Close()) }()
	fmt.Fprintln(stderr, "building schoolbell")
	if cfg.Program, err = builder.Build(ctx, "schoolbell/cmd/schoolbell", tags(cfg)...); err != nil {
		return err
	}
	cfg.Say = func(e storm.Event) { fmt.Fprintf(stderr, "%7.1fs  %s\n", e.At.Seconds(), e.What) }
	res, err := o.play(ctx, cfg)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("ended before there was anything to judge: %w", err)
		}
		return err
	}
	return o.show(res, stdout)
}

// play runs the scenario that was asked for, or the planned faults.
func (o options) play(ctx context.Context, cfg storm.Config) (storm.Result, error) {
	for _, s := range storm.Scenarios() {
		if s.Name == o.scenario {
			return s.Run(ctx, cfg)
		}
	}
	return storm.Run(ctx, cfg)
}
