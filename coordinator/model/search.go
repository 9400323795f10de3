package model

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"
)

// Result says how much was searched and what was found.
type Result struct {
	States, Moves, Depth int
	Took                 time.Duration
	Violation            *Violation // nil: every promise holds in every state
}

// Violation is a broken promise with the shortest way to it.
type Violation struct {
	Invariant string // as DESIGN.md names it
	What      string
	Trace     []string // a line each move
}

func (v *Violation) String() string {
	return fmt.Sprintf("%s: %s\n%s", v.Invariant, v.What, strings.Join(v.Trace, "\n"))
}

// node is how a state was reached first.
type node struct {
	parent uint32
	choice uint16 // which of the parent's moves
	depth  uint16
}

type key [2]uint64

// Search looks at every state within the bounds, nearest first, until a promise
// is broken; and then whether from each of them, without another fault, all
// recipients can still be reached. most bounds the states; more are an error,
// since a search that breaks off proves nothing.
func Search(b Bounds, most int) (Result, error) {
	if err := b.check(); err != nil {
		return Result{}, err
	}
	began := time.Now()
	s := newSearch(b)
	first := begin(b)
	first.tidy(b)
	s.add(&first, node{})
	var res Result
	for at := uint32(0); s.found == nil; at++ {
		w := s.queue.pop()
		if w == nil || len(s.nodes) > most {
			break
		}
		from := node{parent: at, depth: s.nodes[at].depth + 1}
		g := generator{b: b, emit: func(n *world, _ move) {
			res.Moves++
			n.tidy(b)
			n.judge(b)
			to := s.add(n, from)
			if n.faults == w.faults && to != at {
				s.edges = append(s.edges, edge{at, to})
			}
			from.choice++
		}}
		g.next(w)
	}
	if s.found == nil && len(s.nodes) <= most {
		s.stuck()
	}
	res.States, res.Depth, res.Took = len(s.nodes), int(s.nodes[len(s.nodes)-1].depth), time.Since(began)
	switch {
	case s.found != nil:
		res.Violation = s.trace()
	case len(s.nodes) > most:
		return res, fmt.Errorf("model: more than %d states", most)
	}
	return res, nil
}

type search struct {
	b     Bounds
	seeds [2]maphash.Seed
	known map[key]uint32
	nodes []node // in the order in which they were found, which is the queue's
	queue queue
	edges []edge   // moves that need no fault
	ended []uint32 // states in which nothing waits

	found   *breach
	foundAt uint32
	bufs    [2][]byte
}

func newSearch(b Bounds) *search {
	return &search{b: b, known: map[key]uint32{}, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}}
}

type edge struct{ from, to uint32 }

// add keeps a world that is new, and returns its number.
func (s *search) add(w *world, from node) uint32 {
	if s.found != nil {
		return 0
	}
	w.overlook(s.b)
	k := s.key(w)
	if old, ok := s.known[k]; ok && w.violation == nil {
		return old
	}
	n := uint32(len(s.nodes))
	s.known[k] = n
	s.nodes = append(s.nodes, from)
	s.queue.push(w)
	if count(w.store.done) == s.b.Recipients {
		s.ended = append(s.ended, n)
	}
	s.found, s.foundAt = w.violation, n
	return n
}

// stuck looks for a state from which no way without a fault leads to an end. It
// goes all ways backwards.
func (s *search) stuck() {
	start := make([]uint32, len(s.nodes)+1) // of the edges to each state
	for _, e := range s.edges {
		start[e.to+1]++
	}
	for i := range s.nodes {
		start[i+1] += start[i]
	}
	into := make([]uint32, len(s.edges))
	at := slices.Clone(start)
	for _, e := range s.edges {
		into[at[e.to]] = e.from
		at[e.to]++
	}
	ends := make([]bool, len(s.nodes))
	todo := s.ended
	for _, n := range todo {
		ends[n] = true
	}
	for len(todo) > 0 {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, from := range into[start[n]:start[n+1]] {
			if !ends[from] {
				ends[from] = true
				todo = append(todo, from)
			}
		}
	}
	if i := slices.Index(ends, false); i >= 0 {
		s.found, s.foundAt = &breach{"I2", "from here no way leads to the end of what waits"}, uint32(i)
	}
}

// queue holds worlds in pieces, since they are big and there are many.
type queue struct {
	pieces [][]world
	at     int // in the first piece
}

const piece = 256

func (q *queue) push(w *world) {
	if n := len(q.pieces); n == 0 || len(q.pieces[n-1]) == piece {
		q.pieces = append(q.pieces, make([]world, 0, piece))
	}
	last := &q.pieces[len(q.pieces)-1]
	*last = append(*last, *w)
}

// pop returns the oldest, good until the next pop, or nil.
func (q *queue) pop() *world {
	if len(q.pieces) > 0 && q.at == piece {
		q.pieces, q.at = q.pieces[1:], 0
	}
	if len(q.pieces) == 0 || q.at == len(q.pieces[0]) {
		return nil
	}
	q.at++
	return &q.pieces[0][q.at-1]
}

// key is the same for worlds that differ only in which replica is which.
func (s *search) key(w *world) key {
	for i := range s.bufs {
		s.bufs[i] = w.encode(s.bufs[i][:0], i)
	}
	least := s.bufs[0]
	if bytes.Compare(s.bufs[1], least) < 0 {
		least = s.bufs[1]
	}
	return key{maphash.Bytes(s.seeds[0], least), maphash.Bytes(s.seeds[1], least)}
}

// trace goes the way to the last state again and writes it down.
func (s *search) trace() *Violation {
	var way []uint16
	for at := s.foundAt; at > 0; at = s.nodes[at].parent {
		way = append(way, s.nodes[at].choice)
	}
	w := begin(s.b)
	w.tidy(s.b)
	v := &Violation{Invariant: s.found.invariant, What: s.found.what, Trace: []string{w.line(0, move{nobody, "the school has work", ""})}}
	clock := 0
	for i := len(way) - 1; i >= 0; i-- {
		choice := uint16(0)
		var next world
		var did move
		g := generator{b: s.b, emit: func(n *world, m move) {
			if choice == way[i] {
				next, did = *n, m
				next.tidy(s.b)
			}
			choice++
		}}
		g.next(&w)
		if did.what == "time passes" {
			clock++
		}
		w = next
		v.Trace = append(v.Trace, w.line(clock, did))
	}
	return v
}

// line is one move and the world after it.
func (w *world) line(clock int, m move) string {
	who := "      "
	if m.who != nobody {
		who = fmt.Sprintf("  %c:  ", 'A'+m.who)
	}
	what := m.what
	if m.how != "" {
		what += ": " + m.how
	}
	return fmt.Sprintf("%3d%s%-72s| %s | %s | %d since the last rest", clock, who, what, w.redis.String(), w.store.String(), w.receiver.attempts)
}

func (r *redis) String() string {
	text := "free"
	if r.lock.acquisition != 0 {
		text = fmt.Sprintf("held, fence %d, %d left", r.lock.fence, r.lock.until-now)
	}
	q := &r.quota
	if !q.Known {
		return text + "; no quota"
	}
	text += fmt.Sprintf("; cycle %d: %d of %d", q.Cycle, q.Attempted, q.Limit)
	if q.Next > 0 {
		text += fmt.Sprintf(", rests %d", q.Next-now)
	}
	for _, o := range q.Open {
		text += fmt.Sprintf(", open %d until +%d", o.Size, o.Deadline-now)
	}
	return text
}

func (s *store) String() string {
	text := fmt.Sprintf("fence %d; ledger cycle %d: %d", s.fence, s.ledger.cycle, s.ledger.attempted)
	if s.ledger.next > 0 {
		text += fmt.Sprintf(", rests %d", s.ledger.next-now)
	}
	for i := range s.batches {
		if o := &s.batches[i]; o.state == open {
			text += fmt.Sprintf(", batch of fence %d until +%d", o.fence, o.deadline-now)
		}
	}
	return text + fmt.Sprintf("; waiting %d, done %d", count(s.pending|s.due), count(s.done))
}
