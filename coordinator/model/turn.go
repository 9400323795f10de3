package model

// move says what happened, in words.
type move struct {
	who       int // replica; nobody: neither
	what, how string
}

const nobody = -1

// generator makes every world that can come next.
type generator struct {
	b    Bounds
	emit func(*world, move)
}

// next emits every world that one move leads to. Where a replica is about to do
// what nobody else can see or change, nobody else's moves are tried before it:
// they give the same after it.
func (g *generator) next(w *world) {
	for i := range w.replicas {
		if r := &w.replicas[i]; !r.paused && r.alone() {
			g.step(w, i)
			g.replicaFaults(w, i)
			return
		}
	}
	for i := range w.replicas {
		if !w.replicas[i].paused {
			g.step(w, i)
			g.watchdog(w, i)
		}
		g.replicaFaults(w, i)
	}
	if mayTick(w) {
		n := *w
		n.tick(g.b)
		g.emit(&n, move{nobody, "time passes", ""})
	}
	g.redisFaults(w)
	if w.late.kind != askNothing {
		n := *w
		q := n.late
		n.late = request{}
		n.execute(g.b, &q)
		if g.written(w, &n) {
			g.emit(&n, move{nobody, arrives[q.kind], ""})
		}
	}
	if w.version == 1 && g.b.Lowered > 0 {
		n := *w
		n.version = 2
		g.emit(&n, move{nobody, "an operator lowers the limit", ""})
	}
}

// alone reports whether the replica's next step looks at nothing but what it
// knows itself, and shows nothing.
func (r *replica) alone() bool {
	switch r.step {
	case hearing, checkingClaimed, checkingTime, calling:
		return true
	}
	return false
}

// mayTick: a step takes no time, but for the call to the receiver, which takes
// any time up to its end. What is slower was stopped.
func mayTick(w *world) bool {
	for i := range w.replicas {
		r := &w.replicas[i]
		if r.paused || r.step == idle || r.step == sending && r.handed != 0 && now < r.callEnd {
			continue
		}
		return false
	}
	return true
}

// written notes a write to Redis, and that its replica is as far behind as a
// failover may find it; false: further, so that this way need not be followed.
func (g *generator) written(before, after *world) bool {
	if !after.copied || same(&before.redis, &after.redis) {
		return true
	}
	after.behind++
	return after.behind <= lostWrites
}

// lostWrites is how many writes one failover loses at most.
const lostWrites = 2

// call makes a request and every way in which it can go: answered, executed
// without an answer, not executed, and executed later. done takes the answer;
// fail goes on without one. A caller that asks again does so with the same ids.
func (g *generator) call(w *world, i int, words string, q request, done func(w *world, r *replica, a answer), fail func(r *replica)) {
	answered := *w
	a := answered.execute(g.b, &q)
	executed := answered
	done(&answered, &answered.replicas[i], a)
	out := func(n *world, m move) {
		if g.written(w, n) {
			g.emit(n, m)
		}
	}
	plain := answered // what is emitted is changed
	out(&plain, move{i, words, answers[a.verdict]})

	if w.may(w.left.Failover) && !w.copied && !same(&w.redis, &answered.redis) {
		n := answered
		n.spend(&n.left.Failover)
		n.copied, n.copy, n.behind = true, w.redis, 1
		g.emit(&n, move{i, words, "done, but the replica of Redis has stopped following"})
	}
	if w.may(w.left.LostReply) {
		n := executed
		if q.kind < askOpen || q.kind == askRecord { // a transaction is not repeated, but for the record
			n.spend(&n.left.LostReply)
			out(&n, move{i, words, "done, the answer is lost, asks again"})
		}
		n = executed
		n.spend(&n.left.LostReply)
		fail(&n.replicas[i])
		out(&n, move{i, words, "done, the answer is lost, gives up"})
		n = *w
		n.spend(&n.left.LostReply)
		fail(&n.replicas[i])
		g.emit(&n, move{i, words, "the request is lost, gives up"})
	}
	if w.may(w.left.Late) && w.late.kind == askNothing {
		n := answered
		n.spend(&n.left.Late)
		n.late = q
		out(&n, move{i, words, "answered; a repeat is under way"})
		n = *w
		n.spend(&n.left.Late)
		fail(&n.replicas[i])
		n.late = q
		g.emit(&n, move{i, words, "the request is under way, gives up"})
	}
}

var answers = [...]string{"", "done", "another has it", "too late", "not its own any more", "the school rests",
	"the lease is too short", "Redis has lost something", "the settings have changed", "refused"}

var arrives = [...]string{"", "a late acquire arrives", "a late bind arrives", "a late extend arrives", "a late release arrives",
	"a late reconcile arrives", "a late reserve arrives", "a late settle arrives", "a late open term arrives",
	"a late takeover arrives", "a late claim arrives", "a late record arrives", "a late withdraw arrives"}

func (w *world) may(left int) bool { return left > 0 && w.faults > 0 }

func (w *world) spend(left *int) { *left--; w.faults-- }

// leave ends the turn: the lock is given back.
func leave(r *replica) { r.step = releasing }

// stay asks again.
func stay(*replica) {}

// gate is Lease.Check. Where it lets something pass although the server's
// promise has run out, the local end is wrong.
func (w *world) gate(r *replica) bool {
	if r.lost || now >= r.end {
		return false
	}
	if now >= r.promised {
		w.breaks("I4", "the gate is open although the lease has ended at the server")
	}
	return true
}

// step takes the next step of replica i: coordinator/turn.go and batch.go.
func (g *generator) step(w *world, i int) {
	b := g.b
	r := &w.replicas[i]
	local := func(words string, change func(w *world, r *replica)) {
		n := *w
		change(&n, &n.replicas[i])
		g.emit(&n, move{i, words, ""})
	}
	ask := func(words string, q request, done func(*world, *replica, answer), fail func(*replica)) {
		q.replica, q.acquisition = i, r.acquisition
		if q.fence == 0 {
			q.fence = r.fence
		}
		g.call(w, i, words, q, done, fail)
	}
	known := r.floor
	if b.Broken.NoLedgerFloors {
		known = floor{}
	}

	switch r.step {
	case idle: // peek, then look for work
		if w.redis.lock.acquisition != 0 || w.rests() || !w.hasWork() {
			return
		}
		n := *w
		n.replicas[i] = replica{step: hearing, acquisition: fresh(w.usedAcquisition), began: now}
		g.call(&n, i, "takes the lock", request{kind: askAcquire, replica: i, acquisition: n.replicas[i].acquisition, notAfter: now + b.Patience},
			func(_ *world, r *replica, a answer) {
				if a.verdict != ok {
					*r = replica{}
				}
			}, leave)
	case hearing:
		if b.Broken.LeaseEndAfterCall {
			local("hears that it has the lock", func(_ *world, r *replica) { r.step, r.end = opening, now+b.Lease })
			return
		}
		local("hears that it has the lock", func(_ *world, r *replica) {
			r.end = r.began + b.Lease
			if r.step = opening; now >= r.end {
				r.step = releasing
			}
		})
	case opening:
		ask("opens the term", request{kind: askOpen}, func(_ *world, r *replica, a answer) {
			r.step, r.fence, r.floor, r.rule, r.waits = binding, a.fence, a.floor, a.rule, a.more
		}, leave)
	case binding:
		if !w.gateQuietly(r) {
			local("finds its lease gone before the bind", func(_ *world, r *replica) { leave(r) })
			return
		}
		ask("binds its fence", request{kind: askBind}, func(w *world, r *replica, a answer) {
			switch {
			case a.verdict != ok:
				*r = replica{} // the lock is another's: there is nothing to give back
			case r.waits:
				r.step = draining
			default:
				r.step = reconciling
			}
		}, leave)
	case draining:
		ask("takes over", request{kind: askTakeover}, func(_ *world, r *replica, a answer) {
			r.orphans, r.waits = a.orphans, a.more && !b.Broken.NoDrain
			if r.drained(); a.verdict != ok {
				r.step = releasing
			}
		}, leave)
	case settlingOrphans:
		o := r.orphans[0]
		ask("settles an orphan", request{kind: askSettle, batch: o.id, size: count(o.covers), grant: grant{size: count(o.covers), cycle: o.cycle}},
			func(_ *world, r *replica, _ answer) { r.orphans = r.orphans[1:]; r.drained() }, leave)
	case reconciling:
		ask("reconciles", request{kind: askReconcile, floor: known, rule: r.rule}, func(_ *world, r *replica, _ answer) {
			if r.step = paging; r.floor.resting > 0 {
				r.step = releasing
			}
		}, leave)
	case paging:
		work := w.store.pending | w.store.due
		switch {
		case work == 0:
			local("finds nothing to send", func(_ *world, r *replica) { leave(r) })
		case !w.gateQuietly(r):
			local("finds its lease gone", func(_ *world, r *replica) { leave(r) })
		case r.end-now < b.longest():
			g.extend(w, i, "extends before a batch", paging, leave)
		default:
			n := *w
			r := &n.replicas[i]
			r.step, r.began, r.batch, r.want = reserving, now, fresh(w.usedBatch), min(b.Batch, count(work))
			g.step(&n, i)
		}
	case reserving:
		if now > r.began+b.Claim {
			local("has no time left to reserve", func(_ *world, r *replica) { leave(r) })
			return
		}
		ask("reserves", request{kind: askReserve, batch: r.batch, want: r.want, longest: b.longest(), floor: known, rule: r.rule},
			func(_ *world, r *replica, a answer) {
				switch a.verdict {
				case ok:
					r.step, r.grant = claiming, a.grant
				case leaseShort, lost:
					if r.tries++; r.tries > 2 {
						r.step = releasing
						return
					}
					if r.step = rebuilding; a.verdict == leaseShort {
						r.step = extending
					}
				default:
					r.step = releasing
				}
			}, leave)
	case extending:
		g.extend(w, i, "extends before the reservation", reserving, leave)
	case rebuilding:
		ask("reconciles", request{kind: askReconcile, floor: known, rule: r.rule}, func(_ *world, r *replica, _ answer) {
			r.step = reserving
		}, leave)
	case claiming:
		if now > r.began+b.Claim {
			local("has no time left to claim", func(_ *world, r *replica) { r.step = resolving })
			return
		}
		if !w.gate(r) {
			local("finds the gate closed before the claim", func(_ *world, r *replica) { r.step = refunding })
			return
		}
		covers := first(w.store.due, r.grant.size)
		covers |= first(w.store.pending, r.grant.size-count(covers))
		if covers == 0 {
			local("finds the page stale", func(_ *world, r *replica) { r.step = refunding })
			return
		}
		ask("claims", request{kind: askClaim, batch: r.batch, grant: r.grant, covers: covers, longest: b.longest() - (now - r.began)},
			func(_ *world, r *replica, a answer) {
				switch a.verdict {
				case ok:
					r.step = checkingClaimed
				case conflict:
					r.step = resolving
					return
				default:
					r.step = refunding
					return
				}
				r.covers = covers
				attempted := r.grant.attempted
				if r.floor.cycle == r.grant.cycle {
					attempted = max(attempted, r.floor.attempted)
				}
				r.floor = floor{cycle: r.grant.cycle, attempted: attempted, filled: r.grant.filled, version: r.grant.version, limit: r.grant.limit}
			}, func(r *replica) { r.step = resolving })
	case checkingClaimed:
		local("looks at the gate before the call", func(w *world, r *replica) {
			if r.step = checkingTime; !w.gate(r) {
				r.step = withdrawing
			}
		})
	case checkingTime:
		local("looks at the time that the claim took", func(_ *world, r *replica) {
			if r.step = calling; now-r.began > b.Claim {
				r.step = withdrawing
			}
		})
	case calling:
		local("begins the call", func(w *world, r *replica) {
			r.step, r.callEnd = sending, now+b.Call
			if !b.Broken.CallBeyondBatch {
				r.callEnd = min(r.callEnd, r.began+b.longest())
			}
		})
	case sending:
		g.send(w, i, local)
	case writing:
		local("hands a message over", func(w *world, r *replica) {
			r.step = sending
			w.arrive(g.b, i)
		})
	case recording:
		ask("records", request{kind: askRecord, batch: r.batch, grant: r.grant, covers: r.covers, handed: r.handed, unknown: r.unknown},
			func(w *world, r *replica, a answer) {
				if r.step = settling; a.verdict != ok {
					r.step = releasing
				}
			}, stay)
	case settling:
		ask("settles", request{kind: askSettle, batch: r.batch, size: count(r.covers), grant: r.grant}, func(_ *world, r *replica, _ answer) {
			filled := r.grant.filled
			r.batchDone()
			if r.step = paging; filled {
				r.step = releasing
			}
		}, leave)
	case refunding:
		ask("gives the attempts back", request{kind: askSettle, batch: r.batch, grant: r.grant}, func(_ *world, r *replica, _ answer) { leave(r) }, leave)
	case resolving:
		ask("opens a term to settle the claim's fate", request{kind: askOpen}, func(_ *world, r *replica, a answer) {
			r.step, r.fence = withdrawing, a.fence
		}, leave)
	case withdrawing:
		ask("withdraws the claim", request{kind: askWithdraw, batch: r.batch}, func(_ *world, r *replica, a answer) {
			if r.step = refunding; a.verdict != ok {
				r.step = releasing
			}
		}, leave)
	case releasing:
		ask("gives the lock back", request{kind: askRelease}, func(_ *world, r *replica, _ answer) { *r = replica{} }, func(r *replica) { *r = replica{} })
	}
}

// drained goes on after an orphan was settled.
func (r *replica) drained() {
	switch {
	case len(r.orphans) > 0:
		r.step = settlingOrphans
	case r.waits: // without the lock
		r.step = releasing
	default:
		r.step = reconciling
	}
}

// batchDone forgets the batch.
func (r *replica) batchDone() {
	r.batch, r.want, r.tries, r.grant, r.covers, r.handed, r.flying, r.unknown = 0, 0, 0, grant{}, 0, 0, false, false
}

// gateQuietly is the gate where nothing is sent or claimed behind it.
func (w *world) gateQuietly(r *replica) bool { return !r.lost && now < r.end }

// send is what a sender does with a batch: it asks the gate before each message,
// hands it over, and returns at any time until the call's end. What its gate, or
// its deadline, let nothing of leave is not sent.
func (g *generator) send(w *world, i int, local func(string, func(*world, *replica))) {
	r := &w.replicas[i]
	returns := func(words string, unknown bool) {
		local(words, func(w *world, r *replica) {
			w.callEnded(r)
			r.step, r.unknown = recording, unknown
			if unknown {
				w.spend(&w.left.Unknown)
				w.receiver.excused |= r.handed
			}
		})
	}
	left := r.covers &^ r.handed
	switch {
	case now >= r.callEnd:
		returns("the call has reached its end", false)
	case left == 0:
		returns("the call returns", false)
	case !w.gateQuietly(r):
		returns("the gate is closed: the rest is not sent", false)
	default:
		local("looks at the gate before a message", func(w *world, r *replica) {
			if w.gate(r) {
				r.step = writing
			}
		})
	}
	if r.handed != 0 && w.may(w.left.Unknown) {
		returns("the call fails: nobody knows what became of it", true)
	}
}

// extend is Lease.Ensure and the watchdog's renewal; the new local end counts
// from before the call, which takes no time here: where it does, the end is
// earlier still.
func (g *generator) extend(w *world, i int, words string, then step, fail func(*replica)) {
	q := request{kind: askExtend, replica: i, acquisition: w.replicas[i].acquisition, fence: w.replicas[i].fence}
	g.call(w, i, words, q, func(_ *world, r *replica, a answer) {
		if r.lost = a.verdict != ok; !r.lost {
			r.end, r.step = now+g.b.Lease, then
		} else if r.step == extending {
			r.step = releasing
		}
	}, fail)
}

// watchdog renews when a third of the lease has passed, or does not: that it
// does in time is no matter of safety.
func (g *generator) watchdog(w *world, i int) {
	r := &w.replicas[i]
	switch r.step {
	case paging, claiming, sending: // at the other steps it gives the same a step later
		if r.lost || now >= r.end || r.end-now > g.b.Lease*2/3 {
			return
		}
	default:
		return
	}
	g.extend(w, i, "the watchdog extends", r.step, stay)
}

// replicaFaults: a process dies, stands still, goes on.
func (g *generator) replicaFaults(w *world, i int) {
	r := &w.replicas[i]
	if r.step == idle {
		return
	}
	if w.may(w.left.Kill) {
		n := *w
		n.spend(&n.left.Kill)
		n.died(&n.replicas[i])
		n.replicas[i] = replica{}
		g.emit(&n, move{i, "dies", ""})
	}
	if r.paused {
		n := *w
		n.replicas[i].paused = false
		g.emit(&n, move{i, "goes on", ""})
		return
	}
	if w.may(w.left.Pause) {
		n := *w
		n.spend(&n.left.Pause)
		n.replicas[i].paused = true
		n.replicas[i].stopped = r.step == writing
		n.receiver.excused |= r.covers
		g.emit(&n, move{i, "stands still", ""})
	}
}

// redisFaults: a flush, and a failover to a replica that was behind.
func (g *generator) redisFaults(w *world) {
	if w.may(w.left.Flush) {
		n := *w
		n.spend(&n.left.Flush)
		n.redis, n.lossy = redis{}, true
		if g.written(w, &n) {
			g.emit(&n, move{nobody, "Redis loses everything", ""})
		}
	}
	if w.copied {
		n := *w
		n.redis, n.copy, n.copied, n.behind, n.lossy = w.copy, redis{}, false, 0, true
		g.emit(&n, move{nobody, "Redis fails over", ""})
	}
}

// rests is what a peek says: nothing can be sent, and nobody's batch waits for
// a successor.
func (w *world) rests() bool {
	p := w.redis.quota.Peek(now)
	return p.Resting > 0 && !p.Orphaned
}

// hasWork is the store's answer to the question for work.
func (w *world) hasWork() bool {
	if w.store.pending|w.store.due != 0 {
		return true
	}
	for i := range w.store.batches {
		if o := &w.store.batches[i]; o.state == open && o.deadline <= now {
			return true
		}
	}
	return false
}
