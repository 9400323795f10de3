package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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

	atLeastOnce = "at_least_once"
	atMostOnce  = "at_most_once"
)

type options struct {
	replicas, schools, recipients, limit int
	rest, length                         time.Duration
	faults, redis                        string
	seed                                 int64
	unavailable                          float64
	delivery                             string
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

// mutation is a defect on purpose, and the run in which it shows: what is not
// given on the command line is taken from here.
type mutation struct {
	name, what string
	faults     string
	flags      map[string]string // of further flags
}

func mutations() []mutation {
	// Each batch fills a cycle, and the rest outlasts a lease: whoever finds a full
	// cycle without a rest is seen to go on too early.
	full := map[string]string{"limit": "200", "rest": "12s", "schools": "40", "recipients": "32000"}
	brisk := map[string]string{"recipients": "60000"}
	// Nobody else moves on what is to be claimed.
	alone := map[string]string{"recipients": "30000", "replicas": "1"}
	// Redis loses nothing, so that it is the settlement that is found and not the
	// ledger's absence. Always in the middle of a cycle, where there is something to
	// give back, and with a rest that outlasts a fault, which would pass for one.
	middle := map[string]string{"recipients": "60000", "schools": "5", "limit": "6000", "rest": "25s", "replicas": "1"}
	return []mutation{
		{"no-provisional-rest", "a batch that fills the cycle sets no rest before it is settled", "redis-flush,redis-restart,kill", full},
		{"no-ledger-floors", "what Redis lost is not learnt from the ledger", "redis-flush,redis-restart", brisk},
		{"lease-end-after-call", "a lease counts from the answer that renewed it, and nothing else looks at it", "redis-flush/all", brisk},
		{"settle-twice", "a settlement that comes twice gives back twice, and no ledger corrects it", "partition-db/late-twice", middle},
		{"claim-unfenced", "a claim does not look at the fence", "partition-db/late", alone},
	}
}

func mutationNames() string {
	var names []string
	for _, m := range mutations() {
		names = append(names, m.name)
	}
	return strings.Join(names, ", ")
}

// flagSet is what mutated needs of the command line.
type flagSet interface {
	Changed(name string) bool
	Set(name, value string) error
}

// mutated takes what was not given on the command line from the defect that was
// asked for.
func mutated(name string, flags flagSet) error {
	if name == "" {
		return nil
	}
	i := slices.IndexFunc(mutations(), func(m mutation) bool { return m.name == name })
	if i < 0 {
		return usagef("--mutate is %q: one of %s", name, mutationNames())
	}
	m := mutations()[i]
	values := maps.Clone(m.flags)
	values["faults"] = m.faults
	for flag, value := range values {
		if flags.Changed(flag) {
			continue
		}
		if err := flags.Set(flag, value); err != nil {
			return fmt.Errorf("--mutate %s: --%s: %w", name, flag, err)
		}
	}
	return nil
}

// config checks the command line.
func (o options) config() (cfg storm.Config, err error) {
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
	if !(o.unavailable >= 0 && o.unavailable <= 1) {
		return cfg, usagef("--unavailable is %v: from 0 to 1", o.unavailable)
	}
	if o.output != outputText && o.output != outputJSON {
		return cfg, usagef("--output is %q: text or json", o.output)
	}
	if o.delivery != atLeastOnce && o.delivery != atMostOnce {
		return cfg, usagef("--delivery is %q: %s or %s", o.delivery, atLeastOnce, atMostOnce)
	}
	kinds, err := plan.Parse(o.faults)
	if err != nil {
		return cfg, usageError{fmt.Errorf("--faults: %w", err)}
	}
	failover := plan.Has(kinds, plan.RedisFailover)
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
	if plan.Has(kinds, plan.Clock) {
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
		Mutation: o.mutate, Unavailable: o.unavailable, AtMostOnce: o.delivery == atMostOnce, Clocks: plan.Has(kinds, plan.Clock),
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

func (o options) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	cfg, err := o.config()
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
