package quotatest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// Case is one input of the sending rule in virtual time and its only right
// answer. Times are ms from 0.
type Case struct {
	Name      string
	Why       string
	Limit     int
	RestMS    int64 `json:"rest_ms"`
	Batch     int
	CallMS    int64 `json:"call_ms"`
	MaxCallMS int64 `json:"max_call_ms"` // the longest a call can take; matters where a process dies
	LimitWas  int   `json:"limit_was"`   // the setting under which the state at 0 came about
	RestWasMS int64 `json:"rest_was_ms"`
	Start     struct {
		Attempted int
		LastEndMS *int64 `json:"last_end_ms"`
	}
	Waiting []struct {
		AtMS     int64 `json:"at_ms"`
		N        int
		Disabled int    // of N, spread evenly
		Reserved int    // what was reserved before the claim found only N
		Replica  string // who runs it
	}
	Ends []struct {
		Call    int
		AfterMS int64 `json:"after_ms"`
		How     string
	}
	Batches [][2]int64
	State   struct {
		Attempted       int
		CycleDelta      int64  `json:"cycle_delta"`
		SkippedDisabled *int   `json:"skipped_disabled"`
		Success         *int   `json:"success"`
		NextEligibleMS  *int64 `json:"next_eligible_ms"`
	}
}

// RunCases checks every case of the file against a fresh subject.
func RunCases(t *testing.T, path string, fresh func(testing.TB) Subject) {
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	var cases []Case
	require.NoError(t, json.Unmarshal(raw, &cases))
	require.GreaterOrEqual(t, len(cases), 20)
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			runCase(t, c, fresh(t))
		})
	}
}

// run is a school's owners working through one case.
type run struct {
	t       *testing.T
	c       Case
	s       Subject
	now     int64 // ms from 0
	rule    school.Rule
	highest int // limit that a rule had
	longest time.Duration
	ledger  Ledger
	fence   int64
	acq     string
	batch   int

	queue    []bool // waiting recipients in order: true is enabled
	reserved int    // what the next reservation asks for, where the claim gets fewer
	arrived  int
	replica  string

	batches [][2]int64
	sent    []Sent
	skipped int
	success int
}

func runCase(t *testing.T, c Case, s Subject) {
	r := &run{t: t, c: c, s: s, longest: 15 * time.Second, replica: "a"}
	if c.MaxCallMS > 0 {
		r.longest = time.Duration(c.MaxCallMS) * time.Millisecond
	}
	r.before()
	start, err := s.Peek()
	require.NoError(t, err)

	for r.now = 0; ; {
		r.arrive()
		if !slices.Contains(r.queue, true) {
			r.skipped += len(r.queue)
			r.queue = nil
			if r.arrived == len(c.Waiting) {
				break
			}
			r.now = c.Waiting[r.arrived].AtMS
			continue
		}
		r.term()
	}

	require.Equal(t, c.Batches, r.batches)
	s.At(Epoch + r.now)
	end, err := s.Peek()
	require.NoError(t, err)
	require.Equal(t, c.State.Attempted, end.Attempted)
	require.Equal(t, c.State.CycleDelta, end.Cycle-start.Cycle)
	if c.State.NextEligibleMS != nil {
		require.Equal(t, *c.State.NextEligibleMS, r.now+end.Resting.Milliseconds())
	}
	if c.State.SkippedDisabled != nil {
		require.Equal(t, *c.State.SkippedDisabled, r.skipped)
	}
	if c.State.Success != nil {
		require.Equal(t, *c.State.Success, r.success)
	}
	require.Empty(t, Judge(r.sent, r.highest, min(c.RestMS, cmp.Or(c.RestWasMS, c.RestMS))))
}

// before brings about the state at 0.
func (r *run) before() {
	c := r.c
	rest := cmp.Or(c.RestWasMS, c.RestMS)
	r.rule = school.Rule{Limit: c.Limit, Rest: time.Duration(rest) * time.Millisecond, Version: 1}
	switch {
	case c.LimitWas >= c.Start.Attempted && c.LimitWas > 0:
		r.rule.Limit = c.LimitWas
	case c.Limit < c.Start.Attempted:
		r.rule.Limit = c.Start.Attempted + 1 // not full, so that no rest was set
	}
	r.highest = max(r.rule.Limit, c.Limit)
	end := int64(-time.Hour / time.Millisecond)
	if c.Start.LastEndMS != nil {
		end = *c.Start.LastEndMS
	}
	r.now = end - 100
	r.ledger = Ledger{rule: r.rule}
	r.begin()
	if c.Start.Attempted > 0 {
		g := r.reserve(c.Start.Attempted)
		require.Equal(r.t, c.Start.Attempted, g.Size)
		r.finish(g, g.Size, 100)
		r.batches, r.success = nil, 0
	}
	if c.LimitWas > 0 && c.LimitWas < c.Start.Attempted {
		r.rule.Limit, r.rule.Version = c.LimitWas, r.rule.Version+1
		require.NoError(r.t, r.s.Reconcile(r.ledger.At(r.now), r.rule))
	}
	want := school.Rule{Limit: c.Limit, Rest: time.Duration(c.RestMS) * time.Millisecond, Version: r.rule.Version}
	if want != r.rule {
		want.Version++
		r.rule = want
	}
}

func (r *run) arrive() {
	for r.arrived < len(r.c.Waiting) && r.c.Waiting[r.arrived].AtMS <= r.now {
		w := r.c.Waiting[r.arrived]
		for i := range w.N {
			// Every stretch of N/disabled recipients holds one that is off.
			off := w.Disabled > 0 && (i+1)*w.Disabled/w.N > i*w.Disabled/w.N
			r.queue = append(r.queue, !off)
		}
		r.reserved = w.Reserved
		if w.Replica != "" {
			r.replica = w.Replica
		}
		r.arrived++
	}
}

// begin opens a term: a new acquisition and fence, then the ledger's floors.
func (r *run) begin() {
	r.fence++
	r.acq = fmt.Sprintf("%s-%d", r.replica, r.fence)
	r.s.At(Epoch + r.now)
	r.s.Own(r.acq, r.fence)
	require.NoError(r.t, r.s.Reconcile(r.ledger.At(r.now), r.rule))
}

// term works until nothing is waiting, or until the school rests, which it
// sleeps through without owning anything, or until its process dies.
func (r *run) term() {
	r.begin()
	for {
		r.arrive()
		_, n := r.page()
		if n == 0 {
			return
		}
		g := r.reserve(max(n, r.reserved))
		r.reserved = 0
		if g.Kind == school.Resting {
			require.Positive(r.t, g.Wait)
			r.now += g.Wait.Milliseconds()
			return
		}
		skip, n := r.take(min(g.Size, n))
		r.skipped += skip
		took, how := r.c.CallMS, ""
		for _, e := range r.c.Ends {
			if e.Call == len(r.batches) {
				took, how = e.AfterMS, e.How
			}
		}
		if how == "killed" {
			r.die(g, n, took)
			return
		}
		r.finish(g, n, took)
	}
}

// page counts the enabled recipients at the head of the queue, up to a batch.
func (r *run) page() (skip, n int) {
	for _, on := range r.queue {
		if n == r.c.Batch {
			break
		}
		if on {
			n++
		} else {
			skip++
		}
	}
	return skip, n
}

// take removes n enabled recipients from the head of the queue and what is
// between them.
func (r *run) take(n int) (skip, taken int) {
	i := 0
	for ; taken < n; i++ {
		if r.queue[i] {
			taken++
		} else {
			skip++
		}
	}
	r.queue = r.queue[i:]
	return skip, taken
}

func (r *run) reserve(want int) school.Grant {
	r.batch++
	r.s.At(Epoch + r.now)
	g, err := r.s.Reserve(school.Reservation{
		School: "A", Acquisition: r.acq, Fence: r.fence, Batch: fmt.Sprintf("b%d", r.batch), Want: want,
		Longest: r.longest, Margin: time.Second, Floor: r.ledger.At(r.now), Rule: r.rule,
	})
	require.NoError(r.t, err)
	require.Contains(r.t, []school.GrantKind{school.Granted, school.Resting}, g.Kind)
	return g
}

// finish is a call that comes back, well or not, and is recorded and settled.
func (r *run) finish(g school.Grant, n int, took int64) {
	r.call(g, n, took)
	r.now += took
	r.success += n
	r.ledger.Record(r.now, g)
	r.settle(g, n)
}

// die is a call whose process ends with it: nobody records or settles, and the
// next owner waits until the call has ended for certain.
func (r *run) die(g school.Grant, n int, took int64) {
	r.call(g, n, took)
	r.now += r.longest.Milliseconds()
	r.settle(g, n) // the next owner, for the batch that it took over
}

func (r *run) call(g school.Grant, n int, took int64) {
	r.ledger.Claim(r.now, g, n, r.longest)
	r.batches = append(r.batches, [2]int64{r.now, int64(n)})
	r.sent = append(r.sent, Sent{Start: r.now, End: r.now + took, Size: n})
}

func (r *run) settle(g school.Grant, n int) {
	r.s.At(Epoch + r.now)
	require.NoError(r.t, r.s.Settle(school.Settlement{
		School: "A", Batch: fmt.Sprintf("b%d", r.batch), Cycle: g.Cycle, Attempted: n,
	}))
}
