package model

import (
	"fmt"
	"slices"
	"time"

	"schoolbell/school"
	"schoolbell/school/quota"
)

// ask names a request to one of the two stores.
type ask uint8

const (
	askNothing ask = iota
	// Scripts.
	askAcquire
	askBind
	askExtend
	askRelease
	askReconcile
	askReserve
	askSettle
	// Transactions.
	askOpen
	askTakeover
	askClaim
	askRecord
	askWithdraw
)

// request holds everything that its execution depends on besides the store, so
// that it can be executed when its caller is long gone.
type request struct {
	kind        ask
	replica     int // for the owner check of the record
	acquisition int
	fence       int
	notAfter    int
	batch       int
	want        int
	longest     int
	size        int // settle: attempted
	floor       floor
	grant       grant
	rule        rule
	covers      uint8
	handed      uint8
	unknown     bool
}

type verdict uint8

const (
	ok verdict = iota + 1
	busy
	stale
	notMine // the lock, the fence or the batch is another's, or gone
	resting
	leaseShort
	lost // the arbiter lost data
	changed
	conflict
)

type answer struct {
	verdict verdict
	until   int // of the lock
	grant   grant
	floor   floor
	fence   int
	rule    rule
	orphans []batch
	more    bool // batches of older fences remain
}

func ms(ticks int) time.Duration { return time.Duration(ticks) * time.Millisecond }

// execute does on the store what q asks for, in one atomic step, as the script
// or the transaction of the same name does.
func (w *world) execute(b Bounds, q *request) answer {
	switch q.kind {
	case askAcquire, askBind, askExtend, askRelease:
		return w.executeLock(b, q)
	case askReconcile:
		s, _, err := w.redis.quota.Reconcile(now, ledgerOf(q.floor, b), ruleOf(q.rule, b))
		must(err)
		w.redis.quota = s
		return answer{verdict: ok}
	case askReserve:
		return w.reserve(b, q)
	case askSettle:
		s := w.redis.quota
		if b.Broken.SettleTwice {
			s = reopened(s, q)
		}
		s, _, err := s.Settle(now, school.Settlement{Batch: name(q.batch), Cycle: int64(q.grant.cycle), Attempted: q.size})
		must(err)
		w.redis.quota = provisional(b, s)
		return answer{verdict: ok}
	case askOpen:
		return w.openTerm(b, q)
	case askTakeover:
		return w.takeover(q)
	case askClaim:
		return w.claim(b, q)
	case askRecord:
		return w.record(b, q)
	case askWithdraw:
		return w.withdraw(q)
	}
	panic(fmt.Sprintf("model: no such request: %d", q.kind))
}

// must: the model asks nothing that the rule refuses.
func must(err error) {
	if err != nil {
		panic("model: " + err.Error())
	}
}

// executeLock: acquire.lua, bind.lua, extend.lua, release.lua.
func (w *world) executeLock(b Bounds, q *request) answer {
	l := &w.redis.lock
	mine := l.acquisition == q.acquisition
	switch q.kind {
	case askAcquire:
		switch {
		case now > q.notAfter:
			return answer{verdict: stale}
		case mine:
			return answer{verdict: ok, until: l.until}
		case l.acquisition != 0:
			return answer{verdict: busy}
		}
		for i := range w.replicas {
			if r := &w.replicas[i]; !w.lossy && r.acquisition != q.acquisition && r.step != idle && r.step != releasing && now < r.promised {
				w.breaks("R10", "a lock is taken that another holds, although nothing was lost")
			}
		}
		*l = lock{acquisition: q.acquisition, until: now + b.Lease}
		w.promise(q.acquisition, l.until)
		return answer{verdict: ok, until: l.until}
	case askExtend:
		if !mine {
			return answer{verdict: notMine}
		}
		l.until = max(l.until, now+b.Lease)
		w.promise(q.acquisition, l.until)
		return answer{verdict: ok, until: l.until}
	case askBind:
		if !mine {
			return answer{verdict: notMine}
		}
		l.fence = max(l.fence, q.fence)
		return answer{verdict: ok}
	}
	if mine || b.Broken.ReleaseByAnybody {
		*l = lock{}
	}
	return answer{verdict: ok}
}

// promise notes until when the server has promised the lock, whatever becomes
// of the server.
func (w *world) promise(acquisition, until int) {
	for i := range w.replicas {
		if r := &w.replicas[i]; r.acquisition == acquisition {
			r.promised = max(r.promised, until)
		}
	}
}

// reserve: reserve.lua, which is the rule and the look at the lock before it.
func (w *world) reserve(b Bounds, q *request) answer {
	l, s := &w.redis.lock, w.redis.quota
	if l.acquisition != q.acquisition || l.fence != q.fence {
		return answer{verdict: notMine}
	}
	known := slices.ContainsFunc(s.Settled, func(d quota.Settled) bool { return d.Batch == name(q.batch) }) ||
		slices.ContainsFunc(s.Open, func(o quota.Open) bool { return o.Batch == name(q.batch) })
	if !known && l.until-now < q.longest {
		return answer{verdict: leaseShort}
	}
	if b.Broken.RollOver && s.Known && s.Next == 0 && s.Attempted >= min(s.Limit, q.rule.limit) {
		s.Next = now
	}
	s, g, err := s.Reserve(now, school.Reservation{
		Batch: name(q.batch), Want: q.want, Longest: ms(q.longest), Floor: ledgerOf(q.floor, b), Rule: ruleOf(q.rule, b),
	})
	must(err)
	w.redis.quota = provisional(b, s)
	switch g.Kind {
	case school.Granted:
		return answer{verdict: ok, grant: grant{size: g.Size, cycle: int(g.Cycle), attempted: g.Attempted, filled: g.Filled,
			limit: g.Rule.Limit, version: int(g.Rule.Version)}}
	case school.Resting:
		return answer{verdict: resting}
	case school.NeedRebuild:
		return answer{verdict: lost}
	}
	return answer{verdict: changed} // settled already
}

// provisional takes the rest away that a reservation in flight has set, where
// the protocol is broken so.
func provisional(b Bounds, s quota.State) quota.State {
	if b.Broken.NoProvisionalRest && slices.ContainsFunc(s.Open, func(o quota.Open) bool { return o.Cycle == s.Cycle && o.Filled }) {
		s.Next, s.Span = 0, 0
	}
	return s
}

// reopened makes a settled reservation one that can be settled again.
func reopened(s quota.State, q *request) quota.State {
	i := slices.IndexFunc(s.Settled, func(d quota.Settled) bool { return d.Batch == name(q.batch) })
	if i < 0 || q.grant.size == 0 {
		return s
	}
	s.Settled = slices.Delete(slices.Clone(s.Settled), i, i+1)
	s.Open = append(slices.Clone(s.Open), quota.Open{Batch: name(q.batch), Size: q.grant.size, Cycle: int64(q.grant.cycle), Deadline: now + 1, Longest: 1})
	return s
}

// openTerm: schoolbell_open_term.
func (w *world) openTerm(b Bounds, q *request) answer {
	s := &w.store
	s.fence++
	s.acquisition = q.acquisition
	l := s.ledger
	a := answer{verdict: ok, fence: s.fence, rule: rule{b.Limit, w.version}, floor: floor{
		cycle: l.cycle, attempted: l.attempted, filled: l.next != 0, version: l.version, limit: l.limit,
	}}
	if w.version > 1 {
		a.rule.limit = b.Lowered
	}
	if l.next != 0 {
		a.floor.resting = max(0, l.next-now)
	}
	a.more = slices.ContainsFunc(s.batches, func(o batch) bool { return o.state == open })
	return a
}

// holds is the guard of every transaction of a term.
func (s *store) holds(q *request) bool { return s.fence == q.fence && s.acquisition == q.acquisition }

// takeover: schoolbell_takeover, with the wait that it answers as more.
func (w *world) takeover(q *request) answer {
	s := &w.store
	if !s.holds(q) {
		return answer{verdict: notMine}
	}
	a := answer{verdict: ok}
	s.batches = slices.Clone(s.batches)
	for i := range s.batches {
		o := &s.batches[i]
		switch {
		case o.state != open || o.fence >= q.fence:
		case o.deadline <= now:
			o.state = takenOver
			s.due |= o.covers
			a.orphans = append(a.orphans, *o)
		default:
			a.more = true
		}
	}
	return a
}

// claim: schoolbell_claim.
func (w *world) claim(b Bounds, q *request) answer {
	s := &w.store
	l := s.ledger
	switch {
	case !s.holds(q) && !b.Broken.ClaimUnfenced:
		return answer{verdict: notMine}
	case q.grant.cycle < l.cycle, has(s.batches, q.batch):
		return answer{verdict: conflict}
	case q.covers&^(s.pending|s.due) != 0:
		return answer{verdict: stale}
	case w.version > q.grant.version:
		return answer{verdict: changed}
	}
	if q.fence < s.fence {
		w.breaks("I4", "a claim commits under an older fence")
	}
	size := count(q.covers)
	attempted, filled := q.grant.attempted-(q.grant.size-size), q.grant.filled && size == q.grant.size
	if q.grant.cycle > l.cycle {
		l.cycle, l.attempted, l.next = q.grant.cycle, 0, 0
		s.claimed = 0
	}
	s.claimed += size
	l.attempted = max(l.attempted, attempted)
	if filled && !b.Broken.NoProvisionalRest {
		l.next = now + q.longest + b.Rest
	}
	if q.grant.version >= l.version {
		l.version, l.limit = q.grant.version, q.grant.limit
	}
	s.ledger = l
	s.batches = append(slices.Clone(s.batches), batch{
		id: q.batch, fence: q.fence, cycle: q.grant.cycle, covers: q.covers, filled: filled,
		deadline: now + q.longest + b.Record,
	})
	s.pending &^= q.covers
	s.due &^= q.covers
	return answer{verdict: ok}
}

// record: schoolbell_record. What was not handed over, and what nobody knows
// of, waits for a retry, which is due at once: nothing waits shorter.
func (w *world) record(b Bounds, q *request) answer {
	s := &w.store
	i := slices.IndexFunc(s.batches, func(o batch) bool { return o.id == q.batch })
	if i < 0 {
		panic("model: a batch is recorded that was never claimed")
	}
	o := s.batches[i]
	switch {
	case o.state == recorded:
		return answer{verdict: ok}
	case o.state == open && o.fence == q.fence:
	case o.state == takenOver && b.Broken.RecordOverTakeover:
	default:
		return answer{verdict: notMine}
	}
	s.batches = slices.Clone(s.batches)
	s.batches[i].state = recorded
	if q.unknown {
		s.due |= q.covers
	} else {
		s.due |= q.covers &^ q.handed
		s.done |= q.handed
	}
	if q.grant.filled && s.ledger.cycle == o.cycle {
		s.ledger.next = now + b.Rest
	}
	return answer{verdict: ok}
}

// withdraw: schoolbell_withdraw.
func (w *world) withdraw(q *request) answer {
	s := &w.store
	if !s.holds(q) {
		return answer{verdict: notMine}
	}
	i := slices.IndexFunc(s.batches, func(o batch) bool { return o.id == q.batch })
	if i < 0 || s.batches[i].state == withdrawn {
		return answer{verdict: ok}
	}
	o := s.batches[i]
	if o.state != open {
		return answer{verdict: notMine}
	}
	s.batches = slices.Clone(s.batches)
	s.batches[i].state = withdrawn
	if s.ledger.cycle == o.cycle {
		s.claimed -= count(o.covers)
		s.ledger.attempted = max(0, s.ledger.attempted-count(o.covers))
		if o.filled {
			s.ledger.next = 0
		}
	}
	s.due |= o.covers
	return answer{verdict: ok}
}

func count(set uint8) int {
	n := 0
	for ; set != 0; set &= set - 1 {
		n++
	}
	return n
}

// first returns the first n of set.
func first(set uint8, n int) uint8 {
	var out uint8
	for ; n > 0 && set != 0; n-- {
		bit := set & -set
		out |= bit
		set &^= bit
	}
	return out
}
