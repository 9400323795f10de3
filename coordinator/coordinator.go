// Package coordinator is the scheduler of one replica: it decides which school
// is looked at next, runs a school's turn under its lock, and sees to it that
// every recipient of a claimed batch gets its outcome recorded.
//
// It holds no truth. What is to be sent and what became of it is the store's
// (Queue); who may work on a school and how much it may send is the arbiter's
// (Holder, Budget); a replica that dies at any instruction leaves nothing that
// another cannot finish. It knows nothing of SQL, Redis or HTTP and reaches
// them through the interfaces in ports.go.
//
// Invariants kept here: nothing is handed to a sender before its claim has
// committed; no send starts after the lease's local end or the batch's own; a
// school's next batch is not claimed before the last one is recorded; a resting
// or waiting school holds no goroutine, lock, connection or slot. DESIGN.md
// tells the order of one turn and why it is that order.
package coordinator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/school"
)

// ErrStopping is the cause with which turns end when the replica stops.
var ErrStopping = errors.New("replica is stopping")

// errPanicked says that a call ended by a panic, which was logged.
var errPanicked = errors.New("panicked")

// errGivenUp says that results were not recorded: it is logged even at the stop.
var errGivenUp = errors.New("results given up")

// Config is what an operator may tune. Zero fields take the defaults named.
type Config struct {
	Instance string // this replica's id; required

	Page  int // recipients read at once (1000)
	Batch int // messages a send at most (200)
	Slots int // schools worked on at once (64)

	Limit    int           // attempts a cycle where the school has no limit of its own (5000)
	Rest     time.Duration // rest where the school has none of its own (180 s)
	Headroom int           // kept below every limit (0)

	ClaimTimeout time.Duration // W: from before the reservation until the claim has committed (4 s)
	RecordGrace  time.Duration // G: on top of the batch's end, before a successor may take it over (2 s)
	ETC          time.Duration // first expectation of a batch's time, and bounds of what is learned
	ETCLeast     time.Duration
	ETCMost      time.Duration

	Pace        time.Duration // wait between a school's batches (0)
	Horizon     time.Duration // how far ahead the tick looks for work that is not due yet (20 s)
	StopTimeout time.Duration // from the stop until results that cannot be recorded are given up (45 s)
	Retry       school.RetryPolicy
	Brake       school.Brake // when unregistered devices are not believed to be gone; zero: always believed

	DefaultSender string // of schools that name none; required
}

const (
	yieldBatches   = 5               // a turn gives its slot up after so many batches
	yieldAfter     = 2 * time.Second // or after so long, when another school waits
	preferredLead  = 30 * time.Millisecond
	doubtedLead    = gatherMost
	storeFresh     = 2 * time.Second // a school is taken only while the store answered within it
	backoffFirst   = 500 * time.Millisecond
	backoffMost    = 30 * time.Second
	failedHold     = 2 * time.Second // a wake-up brings a failed school back no sooner
	staleMost      = 3               // stale pages in a row before a turn gives up
	storeTimeout   = 5 * time.Second // of one call to the store outside a claim
	arbiterTimeout = 3 * time.Second // of one call to the arbiter outside a claim
	expireSteps    = 200             // notices closed in one step
	expireFor      = 2 * time.Second // of one tick
	wakeBuffer     = 1024
)

func (c *Config) complete() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	defInt := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	defInt(&c.Page, 1000)
	defInt(&c.Batch, 200)
	defInt(&c.Slots, 64)
	defInt(&c.Limit, 5000)
	def(&c.Rest, 180*time.Second)
	def(&c.ClaimTimeout, 4*time.Second)
	def(&c.RecordGrace, 2*time.Second)
	def(&c.ETC, 40*time.Second)
	def(&c.ETCMost, 60*time.Second)
	def(&c.ETCLeast, min(c.ETC, c.ETCMost))
	def(&c.Horizon, 20*time.Second)
	def(&c.StopTimeout, 45*time.Second)
	if c.Retry == (school.RetryPolicy{}) {
		c.Retry = school.RetryPolicy{Max: 3, Base: time.Minute}
	}
	switch {
	case c.Instance == "":
		return errors.New("coordinator: instance id is empty")
	case c.DefaultSender == "":
		return errors.New("coordinator: no default sender")
	case c.Batch < 1 || c.Page < c.Batch:
		return fmt.Errorf("coordinator: batch %d and page %d: need 1 ≤ batch ≤ page", c.Batch, c.Page)
	case c.Slots < 1:
		return fmt.Errorf("coordinator: %d slots: need at least 1", c.Slots)
	case c.Headroom < 0 || c.Headroom >= c.Limit:
		return fmt.Errorf("coordinator: headroom %d of limit %d: need 0 ≤ headroom < limit", c.Headroom, c.Limit)
	case c.Rest < time.Millisecond:
		return fmt.Errorf("coordinator: rest %s: need at least 1 ms", c.Rest)
	case min(c.ClaimTimeout, c.RecordGrace, c.ETC, c.ETCLeast, c.Pace, c.Horizon, c.StopTimeout) < 0:
		return errors.New("coordinator: a duration is negative")
	case c.ETCLeast > c.ETCMost:
		return fmt.Errorf("coordinator: least ETC %s above the most, %s", c.ETCLeast, c.ETCMost)
	case c.Retry.Base <= 0 || c.Retry.Max < 0:
		return fmt.Errorf("coordinator: retry policy %+v: need base > 0 and max ≥ 0", c.Retry)
	}
	return nil
}

// Deps are the parts that a Coordinator joins. All but Events and Registerer are
// required.
type Deps struct {
	Queue      Queue
	Budget     Budget
	Rates      Rates
	Holder     Holder
	Members    Members
	Peers      Peers
	Lanes      []Lane
	Events     Events
	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// Coordinator runs the schools' turns of one replica.
type Coordinator struct {
	cfg     Config
	queue   Queue
	budget  Budget
	rates   Rates
	holder  Holder
	members Members
	peers   Peers
	lanes   map[string]*lane
	etc     *learnedETC
	events  Events
	log     *slog.Logger
	metrics *metrics

	hints chan string   // schools to tell the peers about
	kick  chan struct{} // the agenda changed
	turns sync.WaitGroup

	givenUp atomic.Int64  // batches whose results were not recorded before the stop ended
	gaveUp  chan struct{} // closed StopTimeout after the stop: results not recorded by then are left to a successor

	mu      sync.Mutex
	agenda  *agenda
	storeOK time.Time // last answer of the store
}

// New joins the parts. Nothing runs before Run.
func New(cfg Config, d Deps) (*Coordinator, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if d.Queue == nil || d.Budget == nil || d.Rates == nil || d.Holder == nil || d.Members == nil || d.Peers == nil || d.Log == nil {
		return nil, errors.New("coordinator: a part is missing")
	}
	c := &Coordinator{
		cfg: cfg, queue: d.Queue, budget: d.Budget, rates: d.Rates, holder: d.Holder, members: d.Members, peers: d.Peers,
		lanes:   map[string]*lane{},
		etc:     newLearnedETC(cfg.ETC, cfg.ETCLeast, cfg.ETCMost),
		events:  d.Events,
		log:     d.Log.With("component", "coordinator"),
		metrics: newMetrics(d.Registerer),
		hints:   make(chan string, wakeBuffer),
		kick:    make(chan struct{}, 1),
		gaveUp:  make(chan struct{}),
		agenda:  newAgenda(cfg.Slots),
	}
	for _, l := range d.Lanes {
		made, err := newLane(l)
		if err != nil {
			return nil, err
		}
		if c.lanes[l.Name] != nil {
			return nil, fmt.Errorf("coordinator: two senders named %q", l.Name)
		}
		c.lanes[l.Name] = made
		watchLane(d.Registerer, made, d.Members)
		if !l.Local {
			c.metrics.rateWait.WithLabelValues(l.Name) // from 0 on
		}
	}
	if c.lanes[cfg.DefaultSender] == nil {
		return nil, fmt.Errorf("coordinator: default sender %q is not one of the senders", cfg.DefaultSender)
	}
	return c, nil
}

// Run works until ctx ends, then lets the turns end: no new batch starts, calls
// in flight end by their own deadlines, their results are recorded, locks are
// released. It returns when nothing of it runs any more, at most StopTimeout
// plus one call to the store and one release after ctx ended.
func (c *Coordinator) Run(ctx context.Context) error {
	soft, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(ErrStopping)
	defer context.AfterFunc(ctx, func() { stop(ErrStopping) })()
	var helpers sync.WaitGroup
	helpers.Go(func() { c.tellPeers(soft) })
	helpers.Go(func() { c.watchSenders(soft) })
	helpers.Go(func() {
		if err := c.Tick(soft); err != nil && soft.Err() == nil {
			c.log.Warn("the agenda could not be filled at start; the dispatch tick tries again", "event", "tick_failed", "error", err)
		}
	})

	timer := time.NewTimer(0)
	defer timer.Stop()
	for soft.Err() == nil {
		now := time.Now()
		c.mu.Lock()
		for _, e := range c.agenda.start(now) {
			id, senderName := e.school, e.sender // a wake-up may change the entry
			c.turns.Go(func() { c.runTurn(soft, id, senderName) })
		}
		next, scheduled := c.agenda.next()
		c.mu.Unlock()
		wait := time.Hour
		if scheduled {
			wait = max(0, next.Sub(now))
		}
		timer.Reset(wait)
		select {
		case <-soft.Done():
		case <-c.kick:
		case <-timer.C:
		}
	}
	stop(ErrStopping)
	giveUp := time.AfterFunc(c.cfg.StopTimeout, func() { close(c.gaveUp) })
	defer giveUp.Stop()
	c.turns.Wait()
	helpers.Wait()
	c.tellLast(ctx)
	for _, l := range c.lanes {
		l.dropAll()
	}
	if n := c.givenUp.Load(); n > 0 {
		return fmt.Errorf("coordinator: %w of %d batches: what took them over may send them again", errGivenUp, n)
	}
	return nil
}

// runTurn runs one school's turn on its slot and gives the agenda what follows.
// Whatever happens inside concerns this school alone (R8).
func (c *Coordinator) runTurn(ctx context.Context, schoolID, senderName string) {
	v, t := c.guardedTurn(ctx, schoolID, senderName)
	now := time.Now()
	c.mu.Lock()
	e := c.agenda.entries[schoolID]
	if t.lane != nil {
		e.sender = t.lane.name
	}
	switch v.kind {
	case verdictFailed:
		e.failures++
		v.look, v.wait = true, backoff(e.failures)
		v.hold = min(v.wait, failedHold)
		// Once: a school that fails everywhere is not passed round and round.
		v.tell = v.tell || t.lease != nil && e.failures == 1
	default:
		e.failures = 0
	}
	switch v.kind {
	case verdictRest, verdictDrain:
		if v.look {
			lead := c.lead(schoolID, t.lane, now)
			v.wait, v.hold = v.wait+lead, v.hold+lead
		}
	case verdictIdle, verdictLater: // the lane may open onto nothing yet
		if v.look { // the turn may have ended before it knew its lane
			v.wait += c.doubt(c.lanes[cmp.Or(e.sender, c.cfg.DefaultSender)], now)
		}
	}
	next, notFrom := time.Time{}, time.Time{}
	if v.look {
		next = now.Add(v.wait)
	}
	if v.hold > 0 {
		notFrom = now.Add(v.hold)
	}
	c.agenda.done(schoolID, next, notFrom, now)
	c.mu.Unlock()
	c.doorbell()
	if v.tell || t.tell || ctx.Err() != nil {
		c.hint(schoolID)
	}
	if v.kind == verdictLine {
		// Waiting for room holds a place in line and nothing else.
		l := t.lane
		c.turns.Go(func() {
			if l.await(ctx, schoolID, c.cfg.Batch) && !c.look(schoolID, l.name, 0, 0) {
				l.drop(schoolID) // it cannot send now: the next in line can
			}
		})
	}
}

func (c *Coordinator) guardedTurn(ctx context.Context, schoolID, senderName string) (v verdict, t *turn) {
	t = &turn{c: c, school: schoolID}
	defer func() {
		for _, l := range c.lanes {
			l.drop(schoolID) // a ticket that the turn did not use, however it ended
			c.lookAt(l.name, l.stepBack(schoolID))
		}
	}()
	defer t.putBack(ctx)
	defer func() {
		if r := recover(); r != nil {
			c.logPanic("a turn panicked", "turn_panicked", r, "school", schoolID)
			v = verdict{kind: verdictFailed}
		}
	}()
	// What the agenda believes of the sender spares the lock of a school that
	// could not send; the term tells what it really is.
	if l := c.lanes[senderName]; l != nil {
		if wait, ok := l.open(schoolID, time.Now()); !ok {
			return verdict{kind: verdictLater, look: true, wait: wait}, t
		}
		if v, ok := t.inLine(ctx, l); ok {
			return v, t
		}
	}
	v, err := t.run(ctx)
	if err != nil && (ctx.Err() == nil || errors.Is(err, errGivenUp)) {
		c.log.Warn("a turn failed and is tried again", "event", "turn_failed", "school", schoolID, "fence", t.term.Fence, "error", err)
	}
	return v, t
}

// backoff is the wait after n failed turns in a row, with jitter so that
// schools that failed together do not come back together.
func backoff(n int) time.Duration {
	d := backoffMost
	if n < 8 {
		d = min(backoffFirst<<(n-1), backoffMost)
	}
	return d + time.Duration(rand.Int64N(int64(d)/4+1))
}

// Wake says that schools were given work here: they are looked at at once, and
// the peers are told. It never blocks.
func (c *Coordinator) Wake(schools ...string) {
	for _, id := range schools {
		c.look(id, "", 0, 0)
		c.hint(id)
	}
}

// Hear says that a peer gave schools work. It never blocks.
func (c *Coordinator) Hear(schools ...string) {
	for _, id := range schools {
		c.look(id, "", 0, 0)
	}
}

// look puts a school on the agenda, and reports whether it is looked at as soon
// as that: not where nothing can be sent until later. The replica that its hash
// prefers goes first; the others a moment later, when it is not there or has no
// slot; and last one that doubts its way to the receiver.
func (c *Coordinator) look(schoolID, senderName string, in, dueFor time.Duration) bool {
	if !school.ValidID(schoolID) {
		return false // a hint from outside is not trusted
	}
	now := time.Now()
	c.mu.Lock()
	if e := c.agenda.entries[schoolID]; e != nil {
		senderName = cmp.Or(senderName, e.sender)
	}
	at := now.Add(in + c.lead(schoolID, c.lanes[cmp.Or(senderName, c.cfg.DefaultSender)], now))
	soon := !c.agenda.wake(schoolID, senderName, at, at.Add(-dueFor)).After(at)
	c.mu.Unlock()
	c.doorbell()
	return soon
}

// lookAt looks at schools that waited for the lane.
func (c *Coordinator) lookAt(laneName string, schools []string) {
	for _, id := range schools {
		c.look(id, laneName, 0, 0)
	}
}

// lead is by how much the others may go first with the school, which sends by l.
func (c *Coordinator) lead(schoolID string, l *lane, now time.Time) time.Duration {
	lead := c.doubt(l, now)
	if !preferred(c.cfg.Instance, schoolID, c.members.Live()) {
		lead += preferredLead
	}
	return lead
}

// doubt is by how much any other may go first, whom the way to the receiver may
// not be lost to. Alone there is nobody to wait for.
func (c *Coordinator) doubt(l *lane, now time.Time) time.Duration {
	if l == nil || !l.doubted(now) || len(c.members.Live()) < 2 {
		return 0
	}
	return doubtedLead
}

func (c *Coordinator) doorbell() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// hint queues a school for tellPeers; a full queue drops it, which the peers'
// tick makes good.
func (c *Coordinator) hint(schoolID string) {
	select {
	case c.hints <- schoolID:
	default:
	}
}

// tellPeers publishes hints, several at once where they pile up.
func (c *Coordinator) tellPeers(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-c.hints:
			call, cancel := context.WithTimeout(ctx, arbiterTimeout)
			c.publish(call, append(c.queuedHints(), id))
			cancel()
		}
	}
}

// tellLast publishes, after the stop, what ending turns left to the peers.
func (c *Coordinator) tellLast(ctx context.Context) {
	call, cancel := detached(ctx, time.Second)
	defer cancel()
	for left := c.queuedHints(); len(left) > 0; left = c.queuedHints() {
		c.publish(call, left)
	}
}

func (c *Coordinator) publish(ctx context.Context, schools []string) {
	if err := c.guard("wake peers", func() error { return c.peers.Wake(ctx, schools...) }); err != nil {
		c.log.Debug("peers could not be told of work; their tick finds it", "event", "wake_failed", "error", err)
	}
}

// queuedHints takes up to a hundred schools that wait to be told.
func (c *Coordinator) queuedHints() []string {
	var ids []string
	for len(ids) < 100 {
		select {
		case id := <-c.hints:
			ids = append(ids, id)
		default:
			return ids
		}
	}
	return ids
}

// Tick is the dispatch tick: it asks the store which schools have work and puts
// them on the agenda, and closes notices that have expired (R22). Every replica
// runs it.
func (c *Coordinator) Tick(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	var due []school.Due
	if err := c.guard("look for due schools", func() (err error) {
		due, err = c.queue.Due(call, c.cfg.Horizon)
		return err
	}); err != nil {
		return fmt.Errorf("dispatch tick: %w", err)
	}
	c.storeAnswered()
	for _, d := range due {
		c.look(d.School, d.Sender, d.In, d.Since)
	}
	// A notice of a million takes a hundred steps; they may take some of the tick.
	for began := time.Now(); time.Since(began) < expireFor; {
		n := 0
		err := c.guard("expire notices", func() (err error) {
			n, err = c.queue.Expire(call, expireSteps)
			return err
		})
		switch {
		case err != nil:
			return fmt.Errorf("dispatch tick: expire notices: %w", err)
		case n == 0:
			return nil
		}
	}
	return nil
}

// Sweep is the recovery sweep, once per slot in the whole cluster (R22).
func (c *Coordinator) Sweep(ctx context.Context) error {
	stranded := 0
	err := c.guard("sweep", func() (err error) {
		stranded, err = c.queue.Sweep(ctx)
		return err
	})
	if err != nil {
		return fmt.Errorf("recovery sweep: %w", err)
	}
	if stranded > 0 {
		c.log.Error("recipients were stranded and are put back", "event", "stranded_recovered", "recipients", stranded)
	}
	return c.Tick(ctx)
}

// guard makes an error of a panic in what f asks of a store, so that one row that
// nobody thought of does not end every replica in turn. It is for calls outside a
// turn, and for those alone: where a panic would leave a lock of this package
// taken, the process had better end.
func (c *Coordinator) guard(what string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			c.logPanic("a call panicked", "call_panicked", r, "call", what)
			err = fmt.Errorf("%s: %w", what, errPanicked)
		}
	}()
	return f()
}

// logPanic says where. The value may hold anything, message text included: its
// type and the stack are enough.
func (c *Coordinator) logPanic(msg, event string, value any, args ...any) {
	c.log.Error(msg, append(args, "event", event, "kind", fmt.Sprintf("%T", value), "stack", string(debug.Stack()))...)
}

// Lanes tells the state of each sender as this replica sees it.
func (c *Coordinator) Lanes() []LaneState {
	now := time.Now()
	states := make([]LaneState, 0, len(c.lanes))
	for _, l := range c.lanes {
		states = append(states, l.state(now))
	}
	slices.SortFunc(states, func(a, b LaneState) int { return cmp.Compare(a.Name, b.Name) })
	return states
}

// Working is how many schools have a turn running here.
func (c *Coordinator) Working() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.agenda.taken
}

func (c *Coordinator) storeAnswered() {
	c.mu.Lock()
	c.storeOK = time.Now()
	c.mu.Unlock()
}

// storeLives makes sure that the store answered within the last two seconds: a
// replica that lost its database must not take schools from those that have it.
func (c *Coordinator) storeLives(ctx context.Context) error {
	c.mu.Lock()
	fresh := time.Since(c.storeOK) < storeFresh
	c.mu.Unlock()
	if fresh {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	err := c.queue.Ping(call)
	point(Pinged, false)
	if err != nil {
		return fmt.Errorf("store does not answer: %w", err)
	}
	c.storeAnswered()
	return nil
}

// Able reports whether this replica could work on a school now: whether its
// store answers.
func (c *Coordinator) Able(ctx context.Context) bool { return c.storeLives(ctx) == nil }

func (c *Coordinator) othersWait() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.agenda.othersWait(time.Now())
}

// rule is the sending rule of a school: its own numbers or the deployment's,
// less the headroom.
func (c *Coordinator) rule(s school.School) school.Rule {
	r := school.Rule{Limit: c.cfg.Limit, Rest: c.cfg.Rest, Version: s.SettingsVersion}
	if s.Limit != nil {
		r.Limit = *s.Limit
	}
	if s.Rest != nil {
		r.Rest = *s.Rest
	}
	r.Limit = max(1, r.Limit-c.cfg.Headroom)
	return r
}
