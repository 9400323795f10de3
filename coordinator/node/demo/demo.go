// Package demo is a small production inside one process: several replicas on
// one SQLite file and one in-memory Redis, a simulated FCM as the receiver, and
// applications that hand in notices over HTTP. Replicas can be killed while it
// runs. At the end it is judged from the receiver's arrival log what was kept of
// what the program promises.
//
// The replicas are those of `schoolbell serve`, each with an HTTP API of its own;
// only the stores and the receiver are small. What a kill leaves out is named in
// package node (Deps.Life). Nothing stays behind: files are temporary, and when
// Run returns every goroutine has ended.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"schoolbell/coordinator"
	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// Config is how large the production is and what it goes through.
type Config struct {
	Schools    int           // at least 1
	Recipients int           // of all schools together; at least one each
	Replicas   int           // at least 1
	Limit      int           // attempts per school and cycle
	Rest       time.Duration // after a full cycle
	KillEvery  time.Duration // a replica is killed and started anew; 0: none is
	Duration   time.Duration // notices are handed in for so long; 0: Recipients and no more

	// GiveUpAfter ends a run that takes longer: the machine is too slow for it, or
	// too busy. 0: ten times what it should take.
	GiveUpAfter time.Duration

	// Listen is where the first replica's API listens; where it is taken, a free
	// port of the same host is. A loopback address, since no key is asked for.
	Listen string

	Latency simulator.Latency // of the receiver

	Log     *slog.Logger // the replicas' log; nil: discarded
	Version api.Version
	Watch   func(Progress) // called now and then by one goroutine; nil: nobody looks

	// Budget stands before every replica's arbiter. A test breaks the rule with
	// it, to see that the verdict says so.
	Budget func(coordinator.Budget) coordinator.Budget
}

// Progress is how far a run is.
type Progress struct {
	Elapsed   time.Duration
	Accepted  int // recipients of notices that were accepted so far
	Planned   int // recipients that will be; with Duration as many as were so far
	Arrived   int // different messages that the receiver took
	PerSecond float64
	Schools   map[api.SchoolState]int // empty while no replica could be asked
	Alive     int                     // replicas
	Replicas  int
	Kills     int
	Address   string // of the first replica's API
	Moved     bool   // Address is not the one asked for, which is taken
}

func (c *Config) validate() error {
	switch {
	case c.Schools < 1 || c.Schools > 10_000:
		return fmt.Errorf("%d schools: give 1 to 10000", c.Schools)
	case c.Recipients < c.Schools || c.Recipients > 10_000_000:
		return fmt.Errorf("%d recipients for %d schools: give at least one each, and 10000000 at most", c.Recipients, c.Schools)
	case c.Replicas < 1 || c.Replicas > 50:
		return fmt.Errorf("%d replicas: give 1 to 50", c.Replicas)
	case c.Limit < 1 || c.Limit > 1_000_000:
		return fmt.Errorf("limit %d: give 1 to 1000000", c.Limit)
	case c.Rest < time.Millisecond || c.Rest > 168*time.Hour:
		return fmt.Errorf("rest %v: give 1ms to 168h", c.Rest)
	case c.KillEvery != 0 && c.KillEvery < 500*time.Millisecond:
		return fmt.Errorf("a kill every %v: give 0 or at least 500ms, in which a replica can start", c.KillEvery)
	case c.GiveUpAfter < 0:
		return fmt.Errorf("give up after %v: it is negative", c.GiveUpAfter)
	case c.Duration < 0:
		return fmt.Errorf("duration %v is negative", c.Duration)
	}
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("address %q: give host:port or :port", c.Listen)
	}
	if ip := net.ParseIP(host); host != "" && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("address %q: the demonstration asks for no key, so only this machine may reach it; give 127.0.0.1:port or :port", c.Listen)
	}
	return nil
}

// ConfigError says that a Config cannot be run.
type ConfigError struct{ err error }

func (e *ConfigError) Error() string { return "demo: " + e.err.Error() }

// OverdueError says that a run was ended before its work was, since it took too
// long. What was kept until then stands in the verdict.
type OverdueError struct{ After time.Duration }

func (e *OverdueError) Error() string {
	return fmt.Sprintf("demo: ended after %s, with work left: this machine is too slow or too busy for it", e.After)
}

var errOverdue = errors.New("the run took too long")

// expected is what a run takes on a machine that has time for it.
func (c *Config) expected() time.Duration {
	share := (c.Recipients + c.Schools - 1) / c.Schools
	return c.Duration + time.Duration((share-1)/c.Limit)*c.Rest + time.Duration(c.Recipients)*time.Millisecond + 5*time.Second
}

// quiet is how long nothing may arrive, beyond the rest, before a run is given
// up: retries, leases and takeovers all come around in less.
const quiet = 30 * time.Second

var errStalled = errors.New("nothing arrives any more")

// Run runs the production until all that was handed in is sent, and judges it.
// When ctx ends sooner, the replicas stop gracefully and what happened so far is
// judged; so it is when the run takes too long, with an *OverdueError. Any other
// error says that the run itself failed, a promise that was broken
// stands in the verdict. A *ConfigError says that nothing was begun.
func Run(ctx context.Context, cfg Config) (v verdict.Verdict, err error) {
	if err := cfg.validate(); err != nil {
		return v, &ConfigError{err}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	r := &run{cfg: cfg, began: time.Now()}
	dir, err := os.MkdirTemp("", "schoolbell-demo-")
	if err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if r.receiver, err = newReceiver(cfg.Latency); err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, r.receiver.close()) }()
	file := filepath.Join(dir, "demo.db")
	stores, err := node.OpenEmbedded(context.WithoutCancel(ctx), node.EmbeddedConfig{File: file, Throwaway: true, Log: cfg.Log})
	if err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	defer stores.Close()
	if r.eyes, err = openEyes(file); err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, r.eyes.close()) }()
	r.cluster = newCluster(cfg, stores, r.receiver.endpoint())
	if r.meter, err = newMeter(); err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	longest := cmp.Or(cfg.GiveUpAfter, 10*cfg.expected())
	within, end := context.WithTimeoutCause(ctx, longest, errOverdue)
	defer end()
	err = r.work(within)
	overdue := errors.Is(context.Cause(within), errOverdue)
	r.stalls = r.meter.close()
	if err != nil {
		return v, fmt.Errorf("demo: %w", err)
	}
	v, err = r.judge(context.WithoutCancel(ctx), within.Err() != nil)
	if err == nil && overdue {
		err = &OverdueError{longest}
	}
	return v, err
}

// run is one run of the production.
type run struct {
	cfg      Config
	began    time.Time
	receiver *receiver
	cluster  *cluster
	eyes     eyes
	client   applications
	waiting  waiting // what each school still has to send
	accepted atomic.Int64
	meter    *meter
	stalls   []verdict.Fault

	mu     sync.Mutex
	posted []posted
}

// work hands in, breaks and watches until everything is sent or ctx ends, and
// stops the replicas. A run that stalls ends, too: the verdict tells what is
// missing.
func (r *run) work(ctx context.Context) (err error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	r.client = newApplications(r.cluster)
	defer r.client.close()
	defer func() { err = errors.Join(err, r.cluster.stop()) }()
	if err := r.cluster.start(ctx); err != nil {
		return interrupted(ctx, err)
	}
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop(nil) // before the parts are waited for
	parts.Go(func() { r.watch(ctx) })
	breaking, heal := context.WithCancel(ctx)
	defer heal()
	if r.cfg.KillEvery > 0 {
		parts.Go(func() {
			if err := r.cluster.breakdowns(breaking, r.cfg.KillEvery, r.eyes.busy); err != nil {
				stop(err)
			}
		})
	}
	if err := r.post(ctx); err != nil {
		return interrupted(ctx, err)
	}
	return interrupted(ctx, r.await(ctx))
}

// interrupted is the error of a part that ended because the run was to end.
func interrupted(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	switch {
	case err == nil, errors.Is(cause, context.Canceled), errors.Is(cause, context.DeadlineExceeded):
		return nil
	case errors.Is(cause, errOverdue):
		return nil // Run says so
	case cause != nil:
		return cause
	case errors.Is(err, errStalled):
		return nil // the verdict says what is missing
	}
	return err
}
