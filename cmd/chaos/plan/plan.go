package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Config is what a plan depends on.
type Config struct {
	Seed     int64
	For      time.Duration // the run, while notices come in
	Kinds    []Choice
	Replicas int
	Schools  int
	Lease    time.Duration // how long a replica holds a school without renewing

	// Without leaves ways out that the run has no means for.
	Without []Way
}

// Fault is one fault that is to happen.
type Fault struct {
	At   time.Duration // after the run's begin
	Hold time.Duration // until it is mended; of a failover: the time in which writes are lost
	Kind Kind
	Way  Way

	// Rank says which replica: 0 is the one that holds the most work at that
	// moment, 1 the next. School says which school, where one alone is meant.
	Rank   int
	School int
}

func (f Fault) String() string {
	return fmt.Sprintf("%s %s/%s rank %d school %d for %s", f.At, f.Kind, f.Way, f.Rank, f.School, f.Hold)
}

// The spacing of faults: wide enough that work goes on in between, narrow enough
// that one fault meets what the last one left.
const (
	closest  = 1500 * time.Millisecond
	farthest = 4 * time.Second
)

// New plans the faults, in the order of their moments. The first comes when work
// has begun, the last early enough to be felt before the end. Each kind comes
// once before one comes twice, where there is time; no part suffers two faults at
// a time, and of several replicas one is always left alone.
func New(cfg Config) []Fault {
	// Two streams of one seed: the second number is any constant.
	rnd := rand.New(rand.NewPCG(uint64(cfg.Seed), 0x5c4001be11))
	begin, end := cfg.For/12, cfg.For*9/10
	if len(cfg.Kinds) == 0 || end <= begin {
		return nil
	}
	gap := min(max((end-begin)/time.Duration(2*len(cfg.Kinds)), closest), farthest)
	p := planner{cfg: cfg, rnd: rnd, replicas: make([]time.Duration, max(1, cfg.Replicas-1)), ways: map[Kind][]Way{}}
	for at := begin; at < end; at += gap/2 + time.Duration(rnd.Int64N(int64(gap))) {
		p.place(at)
	}
	return p.faults
}

type planner struct {
	cfg      Config
	rnd      *rand.Rand
	bag      []Choice       // kinds that are still to come in this round
	ways     map[Kind][]Way // ways that are still to come in this round
	replicas []time.Duration
	redis    time.Duration // until when it suffers
	database time.Duration
	faults   []Fault
}

// place puts the first kind of the bag whose part is free at that moment.
func (p *planner) place(at time.Duration) {
	if len(p.bag) == 0 {
		p.bag = slices.Clone(p.cfg.Kinds)
		p.rnd.Shuffle(len(p.bag), func(i, j int) { p.bag[i], p.bag[j] = p.bag[j], p.bag[i] })
	}
	for i, choice := range p.bag {
		kind := choice.Kind
		way, ok := p.way(choice)
		if !ok {
			continue
		}
		e, _ := entry(kind)
		busy := p.busy(e.touches(way), at)
		if busy == nil {
			continue
		}
		least, most := holds(kind, way, p.cfg.Lease)
		f := Fault{At: at, Kind: kind, Way: way, Hold: least}
		if most > least {
			f.Hold += time.Duration(p.rnd.Int64N(int64(most - least)))
		}
		f.Hold = f.Hold.Round(time.Millisecond)
		f.At = f.At.Round(time.Millisecond)
		// Mostly the one that holds the most: there is the most to lose.
		if n := len(p.replicas); e.touches(way) == aReplica && n > 1 && p.rnd.IntN(3) == 0 {
			f.Rank = 1 + p.rnd.IntN(n-1)
		}
		if way == DropLock || way == DropQuota {
			f.School = p.rnd.IntN(max(1, p.cfg.Schools))
		}
		*busy = at + f.Hold + aftermath(kind)
		p.faults = append(p.faults, f)
		p.bag = slices.Delete(p.bag, i, i+1)
		p.ways[kind] = p.ways[kind][1:]
		return
	}
}

// way is how the kind is to happen next; false where there is none.
func (p *planner) way(c Choice) (Way, bool) {
	kind := c.Kind
	if len(p.ways[kind]) == 0 {
		left := slices.DeleteFunc(slices.Clone(c.Ways), func(w Way) bool { return slices.Contains(p.cfg.Without, w) })
		if len(left) == 0 {
			return "", false
		}
		// In each round another order, and all of them before one comes again.
		p.rnd.Shuffle(len(left), func(i, j int) { left[i], left[j] = left[j], left[i] })
		p.ways[kind] = left
	}
	return p.ways[kind][0], true
}

// busy is where the part's time is kept, if it is free at that moment.
func (p *planner) busy(what part, at time.Duration) *time.Duration {
	switch what {
	case theRedis:
		if p.redis <= at {
			return &p.redis
		}
	case theDatabase:
		if p.database <= at {
			return &p.database
		}
	default:
		for i := range p.replicas {
			if p.replicas[i] <= at {
				return &p.replicas[i]
			}
		}
	}
	return nil
}
