package verdict

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

const (
	limit = 500
	batch = 200
	rest  = 5 * time.Second
	call  = 80 * time.Millisecond
)

var start = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)

// run is everything that is known of one run; defects change it.
type run struct {
	arrivals []simulator.Arrival
	notices  []Notice
	states   map[string]State
	batches  []Batch
	faults   []Fault
	terms    []Term
	counts   []NoticeCounts
}

// clean is a run of two schools as it should be: one notice of 1,300 each, in
// batches of at most 200, cut at 500, a rest after each 500, and of recipient 7
// a first attempt that failed and a retry.
func clean() *run {
	r := &run{states: map[string]State{}}
	for s, school := range []string{"A", "B"} {
		notice := fmt.Sprint("n", school)
		r.notices = append(r.notices, Notice{ID: notice, School: school, Total: 1300, At: start})
		now := start.Add(time.Duration(s) * 3 * time.Millisecond)
		queue := make([]int, 1300)
		for i := range queue {
			queue[i] = i + 1
			r.states[fmt.Sprintf("%s.%d", notice, i+1)] = Success
		}
		attempts := map[int]int{}
		inCycle, number := 0, 0
		for len(queue) > 0 {
			n := min(batch, len(queue), limit-inCycle)
			id := fmt.Sprintf("%s-b%d", school, number)
			number++
			r.batches = append(r.batches, Batch{
				ID: id, School: school, Owner: "replica-1", Fence: 1, Size: n,
				ClaimedAt: now.Add(-time.Millisecond), SendDeadline: now.Add(2 * time.Second), SettledAt: now.Add(call + time.Millisecond),
			})
			for _, seq := range queue[:n] {
				attempts[seq]++
				a := simulator.Arrival{
					T: now.UnixNano(), Kind: "relay", School: school, Notice: notice, Message: fmt.Sprintf("%s.%d", notice, seq),
					Batch: id, Fence: 1, Attempt: attempts[seq], Answer: "200", Ended: now.Add(call).UnixNano(),
				}
				if seq == 7 && attempts[seq] == 1 {
					a.Answer = "UNAVAILABLE"
					queue = append(queue, seq)
				}
				r.arrivals = append(r.arrivals, a)
			}
			queue = queue[n:]
			inCycle += n
			now = now.Add(call + 2*time.Millisecond)
			if inCycle == limit {
				inCycle = 0
				now = now.Add(rest)
			}
		}
		r.counts = append(r.counts, NoticeCounts{Notice: notice, Total: 1300, Success: 1299, RetrySuccess: 1})
	}
	return r
}

// of gives the arrivals of a school, which share memory with the run's.
func (r *run) of(school string) []*simulator.Arrival {
	var all []*simulator.Arrival
	for i := range r.arrivals {
		if r.arrivals[i].School == school {
			all = append(all, &r.arrivals[i])
		}
	}
	return all
}

// cycle is the i-th cycle of a clean school's arrivals.
func (r *run) cycle(school string, i int) []*simulator.Arrival {
	all := r.of(school)
	return all[i*limit : min((i+1)*limit, len(all))]
}

func shift(arrivals []*simulator.Arrival, d time.Duration) {
	for _, a := range arrivals {
		a.T += int64(d)
		a.Ended += int64(d)
	}
}

func (r *run) without(drop func(a simulator.Arrival) bool) {
	r.arrivals = slices.DeleteFunc(r.arrivals, drop)
}

// log writes the run as the receiver does, answers mixed in among arrivals.
func (r *run) log() *bytes.Buffer {
	slices.SortStableFunc(r.arrivals, func(a, b simulator.Arrival) int { return int(a.T - b.T) })
	type line struct {
		at int64
		a  simulator.Arrival
	}
	var lines []line
	for i := range r.arrivals {
		a := &r.arrivals[i]
		a.N = int64(i + 1)
		begun := *a
		begun.Answer, begun.Ended, begun.Lost, begun.Repeat = "", 0, false, false
		lines = append(lines, line{a.T, begun})
		if a.Answer != "" {
			lines = append(lines, line{max(a.Ended, a.T), *a})
		}
	}
	slices.SortStableFunc(lines, func(a, b line) int { return int(a.at - b.at) })
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	for _, l := range lines {
		if err := encoder.Encode(l.a); err != nil {
			panic(err)
		}
	}
	return &out
}

func (r *run) judge(t *testing.T) Verdict {
	t.Helper()
	return r.judgeBy(t, func(j *Judge) {
		for _, a := range r.arrivals {
			j.Arrival(a)
		}
	})
}

// judgeBy lets tell say what arrived.
func (r *run) judgeBy(t *testing.T, tell func(j *Judge)) Verdict {
	t.Helper()
	j, err := New(Config{Rule: Rule{Limit: limit, Rest: rest}, Start: start, Seed: 1, Replicas: 3})
	require.NoError(t, err)
	tell(j)
	for _, n := range r.notices {
		require.NoError(t, j.AcceptNotice(n))
	}
	for id, s := range r.states {
		j.FinalState(id, s)
	}
	for _, b := range r.batches {
		require.NoError(t, j.Batch(b))
	}
	for _, t := range r.terms {
		j.Term(t)
	}
	for _, f := range r.faults {
		j.Fault(f)
	}
	for _, c := range r.counts {
		j.NoticeCounts(c)
	}
	v := j.Verdict()
	require.Equal(t, v, j.Verdict(), "judging changes nothing")
	return v
}

// moveAfter moves a school's arrivals after a moment, and forgets deadlines
// that they would miss.
func moveAfter(r *run, school string, t int64, d time.Duration) {
	for _, a := range r.of(school) {
		if a.T > t {
			a.T += int64(d)
			a.Ended += int64(d)
		}
	}
	late(r)
}

// late forgets the batches, where their times are not what a case is about.
func late(r *run) { r.batches = nil }
