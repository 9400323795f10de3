package model

import "math/bits"

// breach is a promise that was broken.
type breach struct{ invariant, what string }

func (w *world) breaks(invariant, what string) {
	if w.violation == nil {
		w.violation = &breach{invariant, what}
	}
}

// overlook forgets a breach that is not asked for.
func (w *world) overlook(b Bounds) {
	if w.violation != nil && b.Only != "" && b.Only != w.violation.invariant {
		w.violation = nil
	}
}

// arrive hands the next message of replica i's batch to the receiver.
func (w *world) arrive(b Bounds, i int) {
	r, v := &w.replicas[i], &w.receiver
	one := first(r.covers&^r.handed, 1)
	r.handed |= one
	late := r.stopped
	r.stopped = false
	if v.arrived&one != 0 && v.excused&one == 0 && !late {
		w.breaks("I3", "a message arrives again without a fault that could repeat it")
	}
	v.arrived |= one
	if late {
		return // what a process does that was stopped between the gate and the wire
	}
	v.excused &^= one

	if v.lastEnd > now || w.flying(1-i) {
		w.breaks("I4", "a message is sent while a call of a former owner may be running")
	}
	if !w.flying(i) && now-v.lastEnd >= b.Rest {
		v.attempts = 0
	}
	r.flying = true
	if v.attempts++; v.attempts > b.Limit {
		w.breaks("I1", "more attempts than the limit without a rest between them")
	}
}

// flying reports whether a call of replica i has messages at the receiver.
func (w *world) flying(i int) bool {
	r := &w.replicas[i]
	return r.flying && (r.step == sending || r.step == writing) && now < r.callEnd
}

// callEnded notes when the attempts of a call ended.
func (w *world) callEnded(r *replica) {
	if r.flying {
		w.receiver.lastEnd = max(w.receiver.lastEnd, min(now, r.callEnd))
	}
}

// died notes that r dies: its call counts as ended at the latest moment at which
// it could have ended (R4), and may be repeated.
func (w *world) died(r *replica) {
	switch r.step {
	case sending, writing:
		if r.flying {
			w.receiver.lastEnd = max(w.receiver.lastEnd, r.callEnd)
		}
		fallthrough
	case recording:
		w.receiver.excused |= r.handed
	}
}

// judge checks what holds in every state.
func (w *world) judge(b Bounds) {
	s := &w.store
	seen := s.pending ^ s.due ^ s.done
	n := bits.OnesCount8(s.pending) + bits.OnesCount8(s.due) + bits.OnesCount8(s.done)
	for i := range s.batches {
		if o := &s.batches[i]; o.state == open {
			seen ^= o.covers
			n += bits.OnesCount8(o.covers)
		}
	}
	if n != b.Recipients || seen != uint8(1<<b.Recipients-1) {
		w.breaks("I2", "a recipient is lost, or waits twice")
	}
	if s.done&^w.receiver.arrived != 0 {
		w.breaks("I2", "a recipient counts as reached that never was")
	}
	q := &w.redis.quota
	if !w.lossy && q.Known && (int(q.Cycle) < s.ledger.cycle || int(q.Cycle) == s.ledger.cycle && q.Attempted < s.claimed) {
		w.breaks("I6", "the arbiter counts less than was claimed although it lost nothing")
	}
	if s.claimed >= b.Limit && s.ledger.next == 0 && (!q.Known || int(q.Cycle) <= s.ledger.cycle && q.Next == 0) {
		w.breaks("R4", "a cycle is full and no store knows of a rest")
	}
}
