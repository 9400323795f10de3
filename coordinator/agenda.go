package coordinator

import (
	"cmp"
	"container/heap"
	"slices"
	"time"
)

// agenda knows which school is looked at next: a heap of those whose time has
// not come, a list of those that are due and wait for a slot, and those whose
// turn runs. It is plain data without locks and without a clock; the
// coordinator guards it and tells it the time.
//
// It holds at most one entry a school. What it forgets, the dispatch tick
// brings back from the store.
type agenda struct {
	entries map[string]*entry
	later   laterHeap
	ready   []*entry // sorted by since: oldest waiting first
	running map[string]int
	slots   int
	taken   int
}

type place int

const (
	placeLater place = iota
	placeReady
	placeRunning
)

type entry struct {
	school   string
	sender   string // as far as known; the term tells what it is
	slotOf   string // placeRunning: the sender its slot is counted for
	place    place
	at       time.Time // placeLater: when it is due
	since    time.Time // since when it has had due work: the order of the ready list
	again    bool      // placeRunning: woken meanwhile, look again at againAt
	againAt  time.Time
	notFrom  time.Time // not looked at before it, whoever wakes it: nothing can be sent
	failures int       // failed turns in a row
	index    int       // in the heap
}

func newAgenda(slots int) *agenda {
	return &agenda{entries: map[string]*entry{}, running: map[string]int{}, slots: slots}
}

// wake notes that the school is to be looked at, no later than at, unless it is
// held off until later; it returns which. since is when its work became due; it
// only ever moves back.
func (a *agenda) wake(school, sender string, at, since time.Time) time.Time {
	e := a.entries[school]
	if e == nil {
		e = &entry{school: school, sender: sender, since: since}
		a.entries[school] = e
		a.push(e, at)
		return at
	}
	if sender != "" {
		e.sender = sender
	}
	if at.Before(e.notFrom) {
		at = e.notFrom
	}
	switch e.place {
	case placeRunning:
		if !e.again || at.Before(e.againAt) {
			e.again, e.againAt = true, at
		}
	case placeLater:
		if since.Before(e.since) {
			e.since = since
		}
		if at.Before(e.at) {
			e.at = at
			heap.Fix(&a.later, e.index)
		}
	case placeReady:
	}
	return at
}

func (a *agenda) push(e *entry, at time.Time) {
	e.place, e.at = placeLater, at
	heap.Push(&a.later, e)
}

// start moves what is due to the ready list and takes as many schools from it
// as there are free slots, oldest waiting first. A sender that already has half
// the slots is passed over while a school of another sender waits.
func (a *agenda) start(now time.Time) []*entry {
	for len(a.later) > 0 && !a.later[0].at.After(now) {
		e := heap.Pop(&a.later).(*entry)
		e.place = placeReady
		if e.since.IsZero() || e.since.After(e.at) {
			e.since = e.at
		}
		i, _ := slices.BinarySearchFunc(a.ready, e, func(x, y *entry) int {
			return cmp.Or(x.since.Compare(y.since), cmp.Compare(x.school, y.school))
		})
		a.ready = slices.Insert(a.ready, i, e)
	}
	var started []*entry
	for a.taken < a.slots && len(a.ready) > 0 {
		i := a.pick()
		e := a.ready[i]
		a.ready = slices.Delete(a.ready, i, i+1)
		e.place, e.again, e.slotOf = placeRunning, false, e.sender
		a.running[e.slotOf]++
		a.taken++
		started = append(started, e)
	}
	return started
}

// pick returns the index of the oldest ready school whose sender has room among
// the slots; the oldest of all where no other sender waits.
func (a *agenda) pick() int {
	half := max(1, a.slots/2)
	for i, e := range a.ready {
		if a.running[e.sender] < half {
			return i
		}
	}
	return 0
}

// done takes the school's turn off its slot. next is when to look again, zero
// for not before it is woken. notFrom holds wake-ups off until then: nothing
// could be sent, whoever wakes the school.
func (a *agenda) done(school string, next, notFrom, now time.Time) {
	e := a.entries[school]
	if e == nil || e.place != placeRunning {
		return
	}
	a.taken--
	if a.running[e.slotOf]--; a.running[e.slotOf] == 0 {
		delete(a.running, e.slotOf)
	}
	e.notFrom = notFrom
	if e.again {
		again := e.againAt
		if again.Before(notFrom) {
			again = notFrom
		}
		if next.IsZero() || again.Before(next) {
			next = again
		}
		e.again = false
	}
	if next.IsZero() {
		delete(a.entries, school)
		return
	}
	e.since = next
	if next.Before(now) {
		e.since = now
	}
	a.push(e, next)
}

// next is when the agenda has something to do by itself; false where it has
// not, or only what waits for a slot.
func (a *agenda) next() (time.Time, bool) {
	if len(a.later) == 0 {
		return time.Time{}, false
	}
	return a.later[0].at, true
}

// othersWait reports whether a school is due and finds no slot.
func (a *agenda) othersWait(now time.Time) bool {
	return len(a.ready) > 0 || a.taken >= a.slots && len(a.later) > 0 && !a.later[0].at.After(now)
}

// laterHeap orders entries by time.
type laterHeap []*entry

func (h laterHeap) Len() int           { return len(h) }
func (h laterHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h laterHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *laterHeap) Push(x any) {
	e := x.(*entry)
	e.index = len(*h)
	*h = append(*h, e)
}
func (h *laterHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}
