package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"schoolbell/coordinator/node"
	"schoolbell/coordinator/node/settings"
	"schoolbell/sender/simulator/verdict"
)

// cluster is the replicas, each in a place of its own that is filled anew after
// a kill.
type cluster struct {
	cfg      Config
	stores   *node.Embedded
	endpoint string // of the receiver

	life sync.WaitGroup // every replica that was ever started
	stopping
	mu     sync.Mutex
	places []*place
	turn   int
	faults []verdict.Fault
	errs   []error // of replicas that ended by themselves
	moved  bool
}

// stopping tells the replicas to stop gracefully.
type stopping struct {
	ctx context.Context
	end context.CancelFunc
}

// place is where one replica after the other lives.
type place struct {
	number int
	starts int
	listen string
	alive  *replica // nil: none
}

// replica is one that runs.
type replica struct {
	name string // instance id
	url  string
	kill context.CancelFunc
}

func newCluster(cfg Config, stores *node.Embedded, endpoint string) *cluster {
	c := &cluster{cfg: cfg, stores: stores, endpoint: endpoint}
	c.stopping.ctx, c.stopping.end = context.WithCancel(context.Background())
	for i := range cfg.Replicas {
		listen := "127.0.0.1:0"
		if i == 0 {
			listen = loopback(cfg.Listen)
		}
		c.places = append(c.places, &place{number: i + 1, listen: listen})
	}
	return c
}

// loopback is an address without a host on this machine only.
func loopback(address string) string {
	if host, port, err := net.SplitHostPort(address); err == nil && host == "" {
		return net.JoinHostPort("127.0.0.1", port)
	}
	return address
}

// start fills all places.
func (c *cluster) start(ctx context.Context) error {
	for i, p := range c.places {
		err := c.fill(ctx, p)
		if i == 0 && isTaken(err) {
			host, _, _ := net.SplitHostPort(p.listen)
			c.mu.Lock()
			p.listen, c.moved = net.JoinHostPort(host, "0"), true
			c.mu.Unlock()
			err = c.fill(ctx, p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isTaken reports whether a replica could not have its port.
func isTaken(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "listen"
}

// fill starts a replica in an empty place. Its instance id is new each time, as
// that of a restarted process is.
func (c *cluster) fill(ctx context.Context, p *place) error {
	p.starts++
	name := "replica-" + strconv.Itoa(p.number)
	if p.starts > 1 {
		name += "." + strconv.Itoa(p.starts)
	}
	s := c.settings(name, p.listen)
	if err := s.Validate(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	life, kill := context.WithCancel(context.Background())
	n, err := node.New(ctx, s, node.Deps{Log: c.cfg.Log, Version: c.cfg.Version, Embedded: c.stores, Life: life, Budget: c.cfg.Budget})
	if err != nil {
		kill()
		return fmt.Errorf("start %s: %w", name, err)
	}
	r := &replica{name: name, url: "http://" + n.Addr(), kill: kill}
	c.mu.Lock()
	p.listen = n.Addr() // the next one in this place is found there, too
	p.alive = r
	c.mu.Unlock()
	c.life.Go(func() {
		defer kill()
		err := n.Run(c.stopping.ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		if p.alive == r {
			p.alive = nil
		}
		if err != nil && !errors.Is(err, node.ErrKilled) {
			c.errs = append(c.errs, fmt.Errorf("%s: %w", name, err))
		}
	})
	return nil
}

// settings of a replica: what a real one has, but for less in flight. Where
// replicas are killed its times are short, so that a takeover fits into a few
// seconds.
func (c *cluster) settings(name, listen string) settings.Settings {
	s := settings.Default()
	s.InstanceID, s.HTTP.Listen = name, listen
	s.Quota.Limit, s.Quota.Rest = c.cfg.Limit, c.cfg.Rest
	s.Dispatch.Batch = batch
	s.Dispatch.FirstTick, s.Dispatch.Tick = time.Second, time.Second
	s.Retry.Base = time.Second
	s.StopDelay = 0
	fcm := settings.NewSender(settings.KindFCM)
	fcm.Project, fcm.Endpoint, fcm.InFlight = "demo", c.endpoint, inFlight
	fcm.RatePerMinute = 0
	if c.cfg.KillEvery > 0 {
		s.Dispatch.ClaimTimeout, fcm.CallTimeout = claimTimeout, callTimeout
		s.Lock.ETC, s.Lock.ETCMax = etc, etc
		s.StopTimeout = 10 * time.Second
	}
	s.Senders = map[string]settings.Sender{settings.KindFCM: fcm}
	s.DefaultSender = settings.KindFCM
	return s
}

// Where replicas are killed. Everything shares the cores of one machine: these
// are as short as lets a kill be recovered from in a few seconds, and long enough
// that a call which is merely slow is not given up and made again, since the
// receiver would have taken the message twice.
const (
	claimTimeout = time.Second
	callTimeout  = 2 * time.Second
	etc          = 4 * time.Second // the lease is 6 s
)

// batch bounds what one school has with the receiver, and inFlight what one
// replica has: a plain endpoint takes a connection a message, both ends of which
// are files of this process.
const (
	batch    = 100
	inFlight = 100
)

// next is the living replica whose turn it is to be called; nil: none lives.
func (c *cluster) next() *replica {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range c.places {
		p := c.places[c.turn%len(c.places)]
		c.turn++
		if p.alive != nil {
			return p.alive
		}
	}
	return nil
}

// state is how many replicas live, how many were killed, and where the first
// one is found.
func (c *cluster) state() (alive, kills int, address string, moved bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.places {
		if p.alive != nil {
			alive++
		}
	}
	return alive, len(c.faults), c.places[0].listen, c.moved
}

// breakdowns kills the replicas in turn, one each time that every has passed, and
// starts another in the dead one's place a moment later. A kill waits a little
// for its replica to have a batch in its hands: a replica that does nothing is
// no great loss. And it waits for as long as the last one took to be overcome,
// until its successor was there and what it left was taken over: on a machine
// that is slow enough kills would otherwise go on outpacing the work.
func (c *cluster) breakdowns(ctx context.Context, every time.Duration, busy func(ctx context.Context, instance string) bool) error {
	dead := min(every/3, time.Second) // about what a process takes to be there again
	next := time.Now().Add(every)
	for turn := 0; ; turn++ {
		if !pause(ctx, time.Until(next)) {
			return nil
		}
		p := c.places[turn%len(c.places)]
		for end := next.Add(every / 3); time.Now().Before(end) && !busy(ctx, c.at(p)); {
			if !pause(ctx, 5*time.Millisecond) {
				return nil
			}
		}
		struck, name := time.Now(), c.at(p)
		c.strike(p)
		if !pause(ctx, dead) {
			return nil
		}
		if err := c.refill(ctx, p); err != nil {
			return err
		}
		for busy(ctx, name) {
			if !pause(ctx, 50*time.Millisecond) {
				return nil
			}
		}
		next = latest(next.Add(every), time.Now().Add(time.Since(struck)-every))
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// at is the name of the replica in a place; empty: none lives there.
func (c *cluster) at(p *place) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.alive == nil {
		return ""
	}
	return p.alive.name
}

// strike kills the replica in a place.
func (c *cluster) strike(p *place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.alive == nil {
		return
	}
	c.faults = append(c.faults, verdict.Fault{At: time.Now(), Kind: verdict.Kill, Target: p.alive.name})
	p.alive.kill()
	p.alive = nil
}

// refill starts a replica where one was killed, which may take a moment to let
// its port go.
func (c *cluster) refill(ctx context.Context, p *place) error {
	for {
		err := c.fill(ctx, p)
		if !isTaken(err) {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if !pause(ctx, 50*time.Millisecond) {
			return nil
		}
	}
}

// pause waits; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// stop stops all replicas gracefully and returns when nothing of any of them,
// the killed ones included, runs any more.
func (c *cluster) stop() error {
	c.stopping.end()
	c.life.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.errs...)
}
