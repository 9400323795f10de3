// Package node is the composition root of one replica: it builds the parts from
// the settings, joins them, runs them and stops them in order. It is the one
// package that knows every adapter, and it holds no logic of its own beyond
// that.
package node

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"schoolbell/coordinator"
	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/settings"
	"schoolbell/coordinator/web"
	"schoolbell/school"
	"schoolbell/school/quota/redisquota"
	"schoolbell/scripts"
	"schoolbell/sender/redisrate"
	"schoolbell/watchdog"
	"schoolbell/watchdog/redislease"
)

// The adapters fit what their callers declare; nobody else sees both sides.
var (
	_ coordinator.Budget  = (*redisquota.Budget)(nil)
	_ coordinator.Rates   = (*redisrate.Rates)(nil)
	_ coordinator.Members = (*watchdog.Roster)(nil)
	_ coordinator.Peers   = (*redislease.Wakes)(nil)
	_ web.Arbiter         = (*redisquota.Budget)(nil)
	_ web.Waker           = (*coordinator.Coordinator)(nil)
)

// Deps are what a node is given besides its settings.
type Deps struct {
	Log     *slog.Logger // required
	Version api.Version

	// Embedded are stores that the replica shares with others of this process and
	// that outlive it; nil: it opens what the settings say, and closes it.
	Embedded *Embedded
	// Life makes the replica one that can be killed without its process: when it
	// ends, every connection of the replica breaks at once, and Run returns
	// ErrKilled when its goroutines have ended. nil: it cannot.
	Life context.Context
	// Budget stands before the arbiter of the sending rule; nil: nothing does.
	// Tests use it to break the rule and see that this is noticed.
	Budget func(coordinator.Budget) coordinator.Budget
}

// Node is one replica. New builds it and binds its address; Run works until its
// context ends and then stops gracefully.
type Node struct {
	conf     settings.Settings
	log      *slog.Logger
	listener net.Listener
	web      *web.Server
	coord    *coordinator.Coordinator
	keeper   *watchdog.Keeper
	roster   *watchdog.Roster
	wakes    *redislease.Wakes
	outbox   outbox
	gauges   *gauges
	line     *lifeline
	pumps    []func(ctx context.Context)     // what posts to webhooks, until its context ends
	digest   func(ctx context.Context) error // tells of new failures; nil: nobody is told
	jobs     func(ctx context.Context) (gocron.Scheduler, error)
	cleanup  cleanup
}

// New opens the stores, binds the address and joins the parts. Nothing is sent
// and no request is answered before Run. The settings must have been validated.
// When it fails, what it opened is closed again.
func New(ctx context.Context, s settings.Settings, d Deps) (_ *Node, err error) {
	if d.Log == nil {
		return nil, errors.New("node: no logger")
	}
	if (s.DatabaseURL == "") != (s.Redis.URL == "") {
		return nil, errors.New("node: database_url and redis.url go together: both, or none of them for the embedded stores")
	}
	line := newLifeline(d.Life)
	n := &Node{conf: s, line: line, log: slog.New(line.handler(d.Log.Handler())).With("instance", s.InstanceID)}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.cleanup.run(n.log))
		}
	}()
	now := wallClock()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	if d.Embedded == nil && s.Embedded() {
		// The file before the address: a second replica in the same directory is told
		// that there is one, not only that its port is taken.
		if d.Embedded, err = OpenEmbedded(ctx, EmbeddedConfig{File: embeddedFile, Log: n.log, Registerer: reg}); err != nil {
			return nil, err
		}
		n.cleanup.add("embedded stores", func() error { d.Embedded.Close(); return nil })
		defer func() {
			if err == nil {
				n.tellEmbedded(d.Embedded)
			}
		}()
	}
	// The address before the servers: a port that is taken should stop the start before anything else is touched.
	if n.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", s.HTTP.Listen); err != nil {
		return nil, listenError(s, err)
	}
	n.cleanup.add("listener", func() error {
		if err := n.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	})

	n.listener = line.listener(n.listener)
	keys, err := scripts.NewKeys(s.Redis.Prefix)
	if err != nil {
		return nil, err
	}
	where, err := n.openStores(ctx, d.Embedded, now, reg)
	if err != nil {
		return nil, err
	}
	// Two clients: the watchdog's own, which load on the other cannot starve.
	locks := redislease.NewClient(where)
	n.cleanup.add("redis (locks)", locks.Close)
	client := newRedis(where)
	n.cleanup.add("redis", client.Close)
	fit := &redisCheck{client: client, every: redisCheckEvery}
	health := fit.health
	if d.Embedded != nil { // ours, and it has no settings
		health = func(ctx context.Context) error { return client.Ping(ctx).Err() }
	} else if err := fit.start(ctx, n.log); err != nil {
		return nil, err
	}

	n.keeper, err = watchdog.New(watchdog.Config{ProgressWithin: max(30*time.Second, 2*longestBatch(s)), Now: now},
		s.InstanceID, pointed(redislease.NewLocks(locks, keys)), n.log, reg)
	if err != nil {
		return nil, err
	}
	self := watchdog.Member{Instance: s.InstanceID, Version: d.Version.Version, Address: n.Addr()}
	if n.roster, err = watchdog.NewRoster(watchdog.RosterConfig{}, self, redislease.NewRegistry(client, keys), n.load, n.log); err != nil {
		return nil, err
	}
	n.wakes = redislease.NewWakes(client, keys, n.log)
	budget, err := redisquota.New(client, keys, reg)
	if err != nil {
		return nil, err
	}

	only, err := readAllowed(s)
	if err != nil {
		return nil, err
	}
	senders, stopSenders, err := lanes(s, only, n.log, reg)
	if err != nil {
		return nil, err
	}
	tellTrials(s, only, n.log)
	n.cleanup.add("senders", stopSenders)
	for i := range senders {
		senders[i].Sender = line.sender(senders[i].Sender)
	}
	rates, err := redisrate.New(client, keys, limits(s))
	if err != nil {
		return nil, err
	}
	queue, rule := mutated(n.outbox, budget)
	if queue, err = n.fallbacks(queue, reg); err != nil {
		return nil, err
	}
	events, err := n.alerts(ctx, reg)
	if err != nil {
		return nil, err
	}
	if d.Budget != nil {
		rule = d.Budget(rule)
	}
	least, most := etcBounds(s)
	n.coord, err = coordinator.New(coordinator.Config{
		Instance: s.InstanceID, Page: s.Dispatch.Page, Batch: s.Dispatch.Batch, Slots: s.Dispatch.Slots,
		Limit: s.Quota.Limit, Rest: s.Quota.Rest, Headroom: s.Quota.Headroom,
		ClaimTimeout: s.Dispatch.ClaimTimeout, RecordGrace: settings.RecordGrace,
		ETC: s.Lock.ETC, ETCLeast: least, ETCMost: most,
		Pace: s.Dispatch.Pace, Horizon: 2 * s.Dispatch.Tick, StopTimeout: s.StopTimeout,
		Retry:         school.RetryPolicy{Max: s.Retry.Max, Base: s.Retry.Base},
		Brake:         school.Brake{Percent: s.Brake.Percent, Count: s.Brake.Count},
		DefaultSender: s.DefaultSender,
	}, coordinator.Deps{
		Queue: queue, Budget: rule, Rates: rates, Holder: holder{n.keeper}, Members: n.roster, Peers: n.wakes,
		Lanes: senders, Events: events, Log: n.log, Registerer: reg,
	})
	if err != nil {
		return nil, err
	}

	locker, err := newSlotLocker(s, client, redislease.NewSlots(client, keys, s.InstanceID))
	if err != nil {
		return nil, err
	}
	purge := func(ctx context.Context) error {
		_, err := n.outbox.Purge(ctx, s.Retention.Recipients)
		return err
	}
	n.jobs = func(ctx context.Context) (gocron.Scheduler, error) {
		return jobs(ctx, s, n.coord, purge, n.digest, locker, now, n.log)
	}
	n.gauges = newGauges(reg, n.outbox, budget, n.log)

	names := make([]string, 0, len(s.Senders))
	for name := range s.Senders {
		names = append(names, name)
	}
	checks := senderChecks(n.coord, n.roster, names)
	checks["redis"] = health
	checks["brakes"] = brakesOff(n.outbox)
	auth := web.Everyone()
	if s.HTTP.Auth == settings.AuthKeys {
		auth = web.AdminKey(string(s.HTTP.AdminKey))
	}
	n.web, err = web.New(web.Config{
		Rule:    school.Rule{Limit: max(1, s.Quota.Limit-s.Quota.Headroom), Rest: s.Quota.Rest},
		Senders: names, DefaultSender: s.DefaultSender, Version: d.Version, StopTimeout: s.StopTimeout, Fallback: s.Fallback.URL != "",
	}, web.Deps{
		Notices: n.outbox, Schools: n.outbox, Database: n.outbox, Arbiter: budget, Waker: n.coord,
		Cluster: cluster{self: s.InstanceID, roster: n.roster, coord: n.coord, conf: s, only: only}, Auth: auth,
		Devices: n.outbox, Brakes: n.outbox,
		Checks:     checks,
		Registerer: reg, Gatherer: reg, Log: n.log, Now: now,
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}

// Addr is the address that the HTTP API is bound to, host:port.
func (n *Node) Addr() string { return n.listener.Addr().String() }

// Run works until ctx ends or a part that cannot be done without fails, then
// stops: not ready but still accepting for stop_delay; no new batch, calls in
// flight end and are recorded, locks are released; requests under way are
// answered; the replica leaves the roster (R15). A nil error means that nothing
// was cut off.
func (n *Node) Run(ctx context.Context) error {
	// The parts outlive ctx: each is stopped in its place.
	root := context.WithoutCancel(ctx)
	run, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	var serving, working, listening sync.WaitGroup
	serveCtx, stopServing := context.WithCancel(root)
	defer stopServing()
	workCtx, stopWorking := context.WithCancelCause(root)
	defer stopWorking(nil)
	listenCtx, stopListening := context.WithCancel(root)
	defer stopListening()

	var serveErr, workErr error
	serving.Go(func() {
		if serveErr = n.web.Serve(serveCtx, n.listener); serveErr != nil {
			fail(serveErr)
		}
	})
	working.Go(func() {
		if workErr = n.coord.Run(workCtx); workErr != nil {
			fail(workErr)
		}
	})
	ask := func() {
		// What was said while nobody listened is lost: the store knows.
		if err := n.coord.Tick(listenCtx); err != nil && listenCtx.Err() == nil {
			n.log.Warn("work could not be looked up; the dispatch tick tries again", "event", "tick_failed", "error", err)
		}
	}
	hear := func(schoolID string) { n.coord.Hear(schoolID) }
	listening.Go(func() { _ = n.wakes.Subscribe(listenCtx, ask, hear) })
	listening.Go(func() { _ = n.outbox.Listen(listenCtx, ask, hear) })
	listening.Go(func() { n.gauges.run(listenCtx) })
	// Behind the schools: what their last records make is still posted.
	pumpCtx, stopPumps := context.WithCancel(root)
	defer stopPumps()
	var pumping sync.WaitGroup
	for _, pump := range n.pumps {
		pumping.Go(func() { pump(pumpCtx) })
	}
	rosterCtx, leaveRoster := context.WithCancel(root)
	defer leaveRoster()
	var member sync.WaitGroup
	member.Go(func() {
		if err := n.roster.Run(rosterCtx); err != nil {
			n.log.Warn("the roster entry is left to run out", "event", "roster_leave_failed", "error", err)
		}
	})

	schedule, err := n.jobs(workCtx)
	if err == nil {
		schedule.Start()
		n.log.Info("replica is up", "event", "replica_started", "address", n.Addr(), "go", runtime.Version())
		select {
		case <-run.Done():
		case <-n.line.killed():
			fail(ErrKilled)
		}
	}
	if cause := context.Cause(run); err == nil && ctx.Err() == nil {
		err = cause
	}

	n.log.Info("replica stops: not ready for stop_delay, in which it goes on; then no new batch begins, what is in flight ends and is recorded; a second signal ends it at once",
		"event", "replica_stopping", "stop_delay", n.conf.StopDelay.String(), "stop_timeout", n.conf.StopTimeout.String())
	n.web.Drain()
	if ctx.Err() != nil && n.conf.StopDelay > 0 {
		// A load balancer needs a moment to look away; until then requests are
		// taken and sending goes on.
		select {
		case <-time.After(n.conf.StopDelay):
		case <-n.line.killed():
		case <-serveCtx.Done():
		}
	}
	if n.line.dead() { // there is nothing that an order would be good for
		stopServing()
		stopListening()
		stopPumps()
		leaveRoster()
	}
	stopWorking(coordinator.ErrStopping)
	if schedule != nil {
		err = errors.Join(err, schedule.Shutdown())
	}
	working.Wait()
	stopServing()
	serving.Wait()
	stopListening()
	listening.Wait()
	stopPumps()
	pumping.Wait()
	leaveRoster()
	member.Wait()
	err = errors.Join(err, workErr)
	if ctx.Err() != nil {
		err = errors.Join(err, serveErr)
	}
	err = errors.Join(err, n.cleanup.run(n.log))
	if n.line.dead() {
		return ErrKilled // what it met on its way out is what being killed is like
	}
	n.log.Info("replica has stopped", "event", "replica_stopped")
	return err
}

// load is what the roster shows of this replica.
func (n *Node) load(ctx context.Context) watchdog.Load {
	load := watchdog.Load{SchoolsHeld: n.keeper.Held(), Unable: !n.coord.Able(ctx)}
	for _, l := range n.coord.Lanes() {
		load.Rate += l.Rate
		if l.Broken {
			load.Unanswered = append(load.Unanswered, l.Name)
		}
	}
	return load
}

// longestBatch is B of the slowest sender.
func longestBatch(s settings.Settings) time.Duration {
	var longest time.Duration
	for name := range s.Senders {
		longest = max(longest, s.BatchTime(name))
	}
	return longest
}

// etcBounds are bounds that fit every sender: a school's sender is known only
// after its lock is taken.
func etcBounds(s settings.Settings) (least, most time.Duration) {
	for name := range s.Senders {
		l, m := s.ETCBounds(name)
		least, most = max(least, l), max(most, m)
	}
	return least, most
}
