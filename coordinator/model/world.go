package model

import (
	"slices"

	"schoolbell/school"
	"schoolbell/school/quota"
)

// now is the moment of every world. Time passes by moving every moment one tick
// back, so that worlds that differ by nothing but when they are look the same.
const now = 1000

// world is one state of everything. It is copied by assignment: what its slices
// hold is never changed in place.
type world struct {
	redis    redis
	store    store
	replicas [2]replica
	late     request // a request that is still under way; its caller is not waiting for it
	receiver receiver

	copied    bool // the replica of Redis has stopped following:
	copy      redis
	behind    int  // writes since then
	lossy     bool // Redis has lost something at some time
	left      Faults
	faults    int // that may still happen, of all kinds
	version   int // of the school's settings
	violation *breach
}

// redis is what Redis holds of the school.
type redis struct {
	lock  lock
	quota quota.State
}

// lock is the lock hash; acquisition 0: there is none.
type lock struct {
	acquisition int
	fence       int
	until       int
}

// store is what PostgreSQL holds of the school. It loses nothing.
type store struct {
	fence       int
	acquisition int
	ledger      ledger
	batches     []batch // those that somebody may still ask for
	claimed     int     // of the ledger's cycle, by a count that nobody but the judge has
	// Recipients, a bit each. One that is in none of these is in an open batch.
	pending, due, done uint8
}

type ledger struct {
	cycle     int
	attempted int
	next      int // end of the rest that was set for the cycle; 0: none was
	version   int // of the settings that it was last written under
	limit     int
}

type batch struct {
	id       int
	fence    int
	cycle    int
	covers   uint8
	filled   bool
	deadline int // send_deadline: before it nobody takes the batch over
	state    batchState
}

type batchState uint8

const (
	open batchState = iota
	recorded
	withdrawn
	takenOver
)

// step is where a replica is in its turn: what it does next.
type step uint8

const (
	idle    step = iota
	hearing      // the lock's answer is under way
	opening
	binding
	draining
	settlingOrphans
	reconciling
	paging
	reserving
	extending
	rebuilding
	claiming
	checkingClaimed
	checkingTime // is W used up?
	calling
	sending // before the gate of the next message
	writing // between the gate and the wire
	recording
	settling
	refunding
	resolving
	withdrawing
	releasing
)

// replica is what one process knows; all of it is lost with it.
type replica struct {
	step    step
	paused  bool
	stopped bool // between the gate and the wire

	acquisition int
	began       int // before the call that took the lock, then before the reservation
	end         int // local end of the lease: nothing is sent at it or later
	promised    int // the server's end of it, which the replica cannot know
	lost        bool
	fence       int
	rule        rule
	floor       floor
	orphans     []batch
	waits       bool // a call of an older fence may be running: the turn ends

	batch   int // id; 0: none
	want    int
	tries   int
	grant   grant
	covers  uint8
	handed  uint8 // handed over to the wire
	flying  bool  // some of them in time
	callEnd int
	unknown bool // what became of them
}

type rule struct{ limit, version int }

type floor struct {
	cycle, attempted, resting int
	filled                    bool
	version, limit            int
}

type grant struct {
	size, cycle, attempted int
	filled                 bool
	limit, version         int
}

// receiver sees what arrives, and judges it.
type receiver struct {
	attempts int   // since the last silence
	lastEnd  int   // of any attempt
	arrived  uint8 // recipients that got it
	excused  uint8 // of them, whose batch met a fault that may repeat it
}

// begin is the world before anything has happened.
func begin(b Bounds) world {
	all := uint8(1<<b.Recipients - 1)
	w := world{
		store:    store{pending: all, ledger: ledger{}},
		receiver: receiver{lastEnd: now - b.Rest},
		left:     b.Faults,
		faults:   b.Faults.All,
		version:  1,
	}
	return w
}

// usedBatch reports whether anything still knows a batch of that id.
func (w *world) usedBatch(n int) bool {
	for i := range w.replicas {
		if r := &w.replicas[i]; r.batch == n || has(r.orphans, n) {
			return true
		}
	}
	return w.late.batch == n || has(w.store.batches, n) || inQuota(&w.redis.quota, n) || w.copied && inQuota(&w.copy.quota, n)
}

func has(list []batch, id int) bool {
	return slices.ContainsFunc(list, func(b batch) bool { return b.id == id })
}

func inQuota(s *quota.State, id int) bool {
	return slices.ContainsFunc(s.Open, func(o quota.Open) bool { return o.Batch == name(id) }) ||
		slices.ContainsFunc(s.Settled, func(d quota.Settled) bool { return d.Batch == name(id) })
}

func (w *world) usedAcquisition(n int) bool {
	return w.redis.lock.acquisition == n || w.copied && w.copy.lock.acquisition == n ||
		w.store.acquisition == n || w.late.acquisition == n ||
		w.replicas[0].acquisition == n || w.replicas[1].acquisition == n
}

// fresh is the smallest number that is not used, so that ids do not grow.
func fresh(used func(int) bool) int {
	n := 1
	for used(n) {
		n++
	}
	return n
}

var names = [...]string{"", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"}

func name(id int) string { return names[id] }

func number(name string) int { return slices.Index(names[:], name) }

// tidy brings what nobody can tell apart to one form: times that have passed,
// ids that nobody can name any more, numbers of which only the order counts.
func (w *world) tidy(b Bounds) {
	w.times(b, func(at *int, least int) { *at = max(*at, least) })
	w.forget()
	if b.Broken == (Broken{}) && w.inert() {
		w.late = request{}
	}
	w.fences()
	w.cycles()
}

// tick lets time pass.
func (w *world) tick(b Bounds) {
	w.times(b, func(at *int, least int) { *at = max(*at-1, least) })
}

// times visits every moment, with the one before which it makes no difference.
func (w *world) times(b Bounds, visit func(at *int, least int)) {
	w.redis.times(b, visit)
	if w.copied {
		w.copy.times(b, visit)
	}
	if w.store.ledger.next != 0 {
		visit(&w.store.ledger.next, now)
	}
	w.store.batches = slices.Clone(w.store.batches)
	for i := range w.store.batches {
		visit(&w.store.batches[i].deadline, now)
	}
	for i := range w.replicas {
		r := &w.replicas[i]
		if r.step == idle {
			continue
		}
		visit(&r.began, now-b.longest()-1)
		visit(&r.end, now)
		visit(&r.promised, now)
		visit(&r.callEnd, now-b.Rest)
	}
	if w.late.kind == askAcquire {
		visit(&w.late.notAfter, now-1)
	}
	visit(&w.receiver.lastEnd, now-b.Rest)
}

func (r *redis) times(b Bounds, visit func(at *int, least int)) {
	if r.lock.acquisition != 0 {
		visit(&r.lock.until, now)
		if r.lock.until <= now {
			r.lock = lock{}
		}
	}
	moment := func(ms *int64, least int) {
		if *ms != 0 {
			at := int(*ms)
			visit(&at, least)
			*ms = int64(at)
		}
	}
	q := &r.quota
	q.Since, q.Span = 0, 0 // the one is for people, the other for a clock that jumped
	moment(&q.Next, now)
	moment(&q.FloorNext, now)
	moment(&q.LastEnd, now-b.Rest)
	q.Open = slices.Clone(q.Open)
	for i := range q.Open {
		q.Open[i].Rested = -1 // for people
		moment(&q.Open[i].Deadline, now-b.Rest)
	}
}

// forget drops settled batches that nobody can ask for any more.
func (w *world) forget() {
	asked := func(id int) bool {
		return id != 0 && (w.late.batch == id || w.replicas[0].batch == id || w.replicas[1].batch == id ||
			has(w.replicas[0].orphans, id) || has(w.replicas[1].orphans, id))
	}
	w.store.batches = slices.DeleteFunc(slices.Clone(w.store.batches), func(b batch) bool { return b.state != open && !asked(b.id) })
	for _, q := range []*quota.State{&w.redis.quota, &w.copy.quota} {
		q.Settled = slices.DeleteFunc(slices.Clone(q.Settled), func(d quota.Settled) bool {
			return !asked(number(d.Batch)) && !has(w.store.batches, number(d.Batch))
		})
	}
}

// inert reports whether the request under way can change nothing any more,
// whenever it arrives.
func (w *world) inert() bool {
	q := &w.late
	holds := func(acquisition int) bool {
		return w.redis.lock.acquisition == acquisition || w.copied && w.copy.lock.acquisition == acquisition ||
			w.replicas[0].acquisition == acquisition || w.replicas[1].acquisition == acquisition
	}
	switch q.kind {
	case askAcquire:
		return q.notAfter < now
	case askBind, askExtend, askRelease, askReserve:
		return !holds(q.acquisition)
	case askSettle:
		return !isOpen(&w.redis.quota, q.batch) && !(w.copied && isOpen(&w.copy.quota, q.batch))
	case askReconcile:
		return w.redis.quota.Known && w.redis.quota.Cycle > int64(q.floor.cycle) && !w.copied && !w.may(w.left.Flush) && !w.may(w.left.Failover)
	case askTakeover, askClaim, askWithdraw:
		return q.fence < w.store.fence
	case askRecord:
		return !slices.ContainsFunc(w.store.batches, func(o batch) bool { return o.id == q.batch && o.state == open })
	}
	return false
}

func isOpen(s *quota.State, id int) bool {
	return slices.ContainsFunc(s.Open, func(o quota.Open) bool { return o.Batch == name(id) })
}

// fences renumbers fences: only which is the greater counts.
func (w *world) fences() {
	var at [24]*int
	n := 0
	add := func(f *int) {
		if *f != 0 {
			at[n] = f
			n++
		}
	}
	add(&w.store.fence)
	add(&w.redis.lock.fence)
	add(&w.copy.lock.fence)
	add(&w.late.fence)
	for i := range w.replicas {
		add(&w.replicas[i].fence)
		if len(w.replicas[i].orphans) > 0 {
			w.replicas[i].orphans = slices.Clone(w.replicas[i].orphans)
			for j := range w.replicas[i].orphans {
				w.replicas[i].orphans[j].fence = 0
			}
		}
	}
	for i := range w.store.batches {
		add(&w.store.batches[i].fence)
	}
	slices.SortFunc(at[:n], func(a, b *int) int { return *a - *b })
	last, rank := 0, 0
	for _, f := range at[:n] {
		if *f != last {
			last = *f
			rank++
		}
		*f = rank
	}
}

// cycles lets what is of a cycle before all that a store is in count as of the
// one before those, and shifts all down: only their differences count.
func (w *world) cycles() {
	oldest := w.store.ledger.cycle
	for _, q := range []*quota.State{&w.redis.quota, &w.copy.quota} {
		if q.Known {
			oldest = min(oldest, int(q.Cycle))
		}
	}
	if oldest <= 1 {
		return
	}
	w.eachCycle(func(c *int) { *c = max(*c, oldest-1) - (oldest - 1) + 1 })
}

func (w *world) eachCycle(visit func(*int)) {
	visit(&w.store.ledger.cycle)
	for i := range w.store.batches {
		visit(&w.store.batches[i].cycle)
	}
	for _, q := range []*quota.State{&w.redis.quota, &w.copy.quota} {
		if !q.Known {
			continue
		}
		wide := func(c *int64) {
			n := int(*c)
			visit(&n)
			*c = int64(n)
		}
		wide(&q.Cycle)
		for i := range q.Open {
			wide(&q.Open[i].Cycle)
		}
	}
	for i := range w.replicas {
		r := &w.replicas[i]
		if r.step >= binding {
			visit(&r.floor.cycle)
		}
		if r.grant.size > 0 {
			visit(&r.grant.cycle)
		}
		for j := range r.orphans {
			visit(&r.orphans[j].cycle)
		}
	}
	switch w.late.kind {
	case askReconcile, askReserve:
		visit(&w.late.floor.cycle)
	case askSettle, askClaim, askRecord:
		visit(&w.late.grant.cycle)
	}
}

// encode appends the world to buf so that two worlds that behave alike give the
// same bytes; first says which replica is written first.
func (w *world) encode(buf []byte, first int) []byte {
	e := encoder{buf: buf}
	e.redis(&w.redis)
	e.flag(w.copied)
	if w.copied {
		e.redis(&w.copy)
		e.num(w.behind)
	}
	s := &w.store
	e.num(s.fence)
	e.acquisition(s.acquisition)
	e.num(s.ledger.cycle)
	e.num(s.ledger.attempted)
	e.time(s.ledger.next)
	e.num(s.ledger.version)
	e.num(s.ledger.limit)
	e.buf = append(e.buf, s.pending, s.due, s.done)
	e.num(s.claimed)
	e.num(len(s.batches))
	for i := range s.batches {
		e.batch(&s.batches[i])
	}
	for _, i := range [2]int{first, 1 - first} {
		e.replica(&w.replicas[i])
	}
	e.request(&w.late, first)
	v := &w.receiver
	e.num(v.attempts)
	e.time(v.lastEnd)
	e.buf = append(e.buf, v.arrived, v.excused)
	e.flag(w.lossy)
	l := &w.left
	for _, n := range [...]int{l.Kill, l.Pause, l.LostReply, l.Late, l.Flush, l.Failover, l.Unknown, w.faults, w.version} {
		e.num(n)
	}
	return e.buf
}

// encoder writes a world and numbers the ids in the order of their appearance.
type encoder struct {
	buf          []byte
	acquisitions [16]byte
	batches      [16]byte
	nAcq, nBatch byte
}

func (e *encoder) num(n int) { e.buf = append(e.buf, byte(n)) }

func (e *encoder) flag(b bool) {
	if b {
		e.num(1)
	} else {
		e.num(0)
	}
}

func (e *encoder) time(at int) {
	if at == 0 {
		e.num(0)
	} else {
		e.num(at - now + 100)
	}
}

func (e *encoder) acquisition(id int) {
	if id != 0 && e.acquisitions[id] == 0 {
		e.nAcq++
		e.acquisitions[id] = e.nAcq
	}
	e.buf = append(e.buf, e.acquisitions[id])
}

func (e *encoder) id(id int) {
	if id != 0 && e.batches[id] == 0 {
		e.nBatch++
		e.batches[id] = e.nBatch
	}
	e.buf = append(e.buf, e.batches[id])
}

func (e *encoder) redis(r *redis) {
	e.acquisition(r.lock.acquisition)
	if r.lock.acquisition != 0 {
		e.num(r.lock.fence)
		e.time(r.lock.until)
	}
	q := &r.quota
	e.flag(q.Known)
	if !q.Known {
		return
	}
	for _, n := range [...]int64{q.Cycle, int64(q.Attempted), int64(q.Limit), int64(q.Setting.Limit), q.Setting.Version, int64(q.FloorAttempted)} {
		e.num(int(n))
	}
	e.time(int(q.Next))
	e.time(int(q.LastEnd))
	e.time(int(q.FloorNext))
	e.num(len(q.Open))
	for _, o := range q.Open {
		e.id(number(o.Batch))
		e.num(o.Size)
		e.num(int(o.Cycle))
		e.time(int(o.Deadline))
		e.num(o.Attempted)
		e.flag(o.Filled)
	}
	e.num(len(q.Settled))
	for _, d := range q.Settled {
		e.id(number(d.Batch))
	}
}

func (e *encoder) batch(b *batch) {
	e.id(b.id)
	e.num(b.fence)
	e.num(b.cycle)
	e.buf = append(e.buf, b.covers, byte(b.state))
	e.flag(b.filled)
	e.time(b.deadline)
}

func (e *encoder) grant(g *grant) {
	for _, n := range [...]int{g.size, g.cycle, g.attempted, g.limit, g.version} {
		e.num(n)
	}
	e.flag(g.filled)
}

func (e *encoder) floor(f *floor) {
	for _, n := range [...]int{f.cycle, f.attempted, f.resting, f.version, f.limit} {
		e.num(n)
	}
	e.flag(f.filled)
}

func (e *encoder) replica(r *replica) {
	e.num(int(r.step))
	e.flag(r.paused)
	if r.step == idle {
		return
	}
	e.flag(r.stopped)
	e.acquisition(r.acquisition)
	e.time(r.began)
	e.time(r.end)
	e.time(r.promised)
	e.flag(r.lost)
	e.num(r.fence)
	e.num(r.rule.limit)
	e.num(r.rule.version)
	e.floor(&r.floor)
	e.num(len(r.orphans))
	for i := range r.orphans {
		e.batch(&r.orphans[i])
	}
	e.id(r.batch)
	e.num(r.want)
	e.num(r.tries)
	e.grant(&r.grant)
	e.buf = append(e.buf, r.covers, r.handed)
	e.flag(r.flying)
	e.flag(r.waits)
	e.time(r.callEnd)
	e.flag(r.unknown)
}

func (e *encoder) request(q *request, first int) {
	e.num(int(q.kind))
	if q.kind == 0 {
		return
	}
	e.num((q.replica + first) % 2)
	e.acquisition(q.acquisition)
	e.num(q.fence)
	e.time(q.notAfter)
	e.id(q.batch)
	e.num(q.want)
	e.num(q.longest)
	e.num(q.size)
	e.floor(&q.floor)
	e.grant(&q.grant)
	e.num(q.rule.limit)
	e.num(q.rule.version)
	e.buf = append(e.buf, q.covers, q.handed)
	e.flag(q.unknown)
}

// ledgerOf is a floor as the rule takes it.
func ledgerOf(f floor, b Bounds) school.Ledger {
	l := school.Ledger{Cycle: int64(f.cycle), Attempted: f.attempted, Filled: f.filled, Resting: ms(f.resting)}
	if f.version > 0 {
		l.Rule = ruleOf(rule{f.limit, f.version}, b)
	}
	return l
}

func ruleOf(r rule, b Bounds) school.Rule {
	return school.Rule{Limit: r.limit, Rest: ms(b.Rest), Version: int64(r.version)}
}

// same reports whether nothing was written to Redis.
func same(a, b *redis) bool {
	p, q := a.quota, b.quota
	open := slices.Equal(p.Open, q.Open)
	settled := slices.Equal(p.Settled, q.Settled)
	p.Open, q.Open, p.Settled, q.Settled = nil, nil, nil, nil
	return a.lock == b.lock && open && settled && equal(p, q)
}

func equal(p, q quota.State) bool {
	return p.Known == q.Known && p.Cycle == q.Cycle && p.Attempted == q.Attempted && p.Limit == q.Limit && p.Rest == q.Rest &&
		p.Setting == q.Setting && p.Next == q.Next && p.LastEnd == q.LastEnd && p.FloorAttempted == q.FloorAttempted && p.FloorNext == q.FloorNext
}
