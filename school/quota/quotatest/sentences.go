package quotatest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// RunSentences checks the rule sentence by sentence: 5,000 attempts, then
// 180 s, in batches of 200 whose call takes 100 ms. fresh makes schools of one
// deployment: two of them share what schools share.
func RunSentences(t *testing.T, fresh func(testing.TB) Subject) {
	for name, sentence := range map[string]func(*testing.T){
		"4,800 attempted, then 500: 200, rest, 200, 100": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4800)
			require.Equal(t, "200, rest 3m0s, 200, 100", d.send(500))
		},
		"4,950 attempted, then 250: 50, rest, 200": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4950)
			require.Equal(t, "50, rest 3m0s, 200", d.send(250))
		},
		"while school A rests, school B goes on at once": func(t *testing.T) {
			a, b := newDesk(t, fresh(t)), newDesk(t, fresh(t))
			a.send(5000)
			b.now = a.now
			require.Equal(t, "200, 50", b.send(250))
			require.Equal(t, "rest 3m0s, 1", a.send(1))
		},
		"the call that fills the cycle fails: the count stays and the rest is kept": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4800)
			d.begin()
			d.finish(d.reserve(200), 200, 7000) // after 7 s it fails, which is an end like any other
			require.Equal(t, 5000, d.attempted())
			require.Equal(t, "rest 3m0s, 1", d.send(1))
		},
		"interleaving 3: the process that makes the filling call dies: the rest runs from the call's latest end": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4800)
			d.begin()
			d.call(d.reserve(200), 200, 40)
			require.Equal(t, "rest 3m15s, 1", d.send(1))
		},
		"a call below the limit fails: nothing is given back": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(1000)
			require.Equal(t, 1000, d.attempted())
			d.begin()
			d.call(d.reserve(200), 200, 40) // nobody settles
			d.now += d.longest.Milliseconds()
			d.begin()
			require.Equal(t, 1200, d.attempted())
			require.NotContains(t, d.send(3800), "rest")
			require.Equal(t, "rest 3m0s, 1", d.send(1))
		},
		"75 s into the rest 105 s are left, after 180 s none": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(5000)
			d.now += 75_000
			require.Equal(t, "rest 1m45s, 1", d.send(1))
			d.send(4999)
			d.now += 180_000
			require.Equal(t, "1", d.send(1))
		},
		"stopped while it rests: the rest survives, also without Redis's data": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(5000)
			d.now += 100_000
			d.replica = "b"
			d.s.Load(nil)
			require.Equal(t, "rest 1m20s, 1", d.send(1))
		},
		"3,000 in one replica's run and 2,000 in another's fill the cycle": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			require.NotContains(t, d.send(3000), "rest")
			d.replica = "b"
			d.now += 86_400_000
			require.NotContains(t, d.send(2000), "rest")
			require.Equal(t, "rest 3m0s, 1", d.send(1))
		},
		"the limit is reached with the last recipient: the rest is recorded and nobody waits": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			require.NotContains(t, d.send(5000), "rest")
			p, err := d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, 3*time.Minute, p.Resting)
			require.Equal(t, 5000, p.Attempted)
		},
		"1,000 of 6,000 are off: 5,000 attempts and no second cycle": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			before, err := d.s.Peek()
			require.NoError(t, err)
			require.NotContains(t, d.send(6000-1000), "rest") // the others are never reserved
			after, err := d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, before.Cycle, after.Cycle)
			require.Equal(t, 5000, after.Attempted)
		},
		"the rest is set before the filling call has ended": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4800)
			d.begin()
			require.True(t, d.reserve(200).Filled)
			p, err := d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, d.longest+d.rule.Rest, p.Resting)
		},
		"interleaving 1: a full cycle without a rest set rests, and never rolls over": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(300)
			d.rule.Limit, d.rule.Version = 200, 2 // so it is full, and nobody set a rest
			d.now += 1000
			d.begin()
			require.Equal(t, "rest 2m59s, 200, rest 3m0s, 50", d.send(250), "from the end of the last attempt")

			d = newDesk(t, fresh(t))
			d.send(300)
			d.rule.Limit, d.rule.Version = 200, 2
			d.now += 86_400_000
			d.begin()
			before, err := d.s.Peek()
			require.NoError(t, err)
			g := d.ask(1)
			require.Equal(t, school.Resting, g.Kind, "also where a rest would be over: it has to be set before it can pass")
			after, err := d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, before.Cycle, after.Cycle)
			require.Equal(t, before.Cycle+1, d.ask(1).Cycle)
		},
		"interleaving 1: a settlement takes a rest away only where it gives something back": func(t *testing.T) {
			// The limit falls below what a call under way has reserved: a rest is set,
			// and the settlement leaves the count above the limit.
			d := newDesk(t, fresh(t))
			d.begin()
			g := d.reserve(200)
			d.ledger.Claim(d.now, g, 200, d.longest)
			d.rule.Limit, d.rule.Version = 100, 2
			require.Equal(t, school.Resting, d.ask(1).Kind)
			d.settleOf(g, "b1", 200)
			require.Equal(t, d.rule.Rest, d.ask(1).Wait, "nothing came back")

			// A repeated settlement gives nothing back a second time.
			d = newDesk(t, fresh(t))
			d.send(4800)
			d.begin()
			g = d.reserve(200)
			require.True(t, g.Filled)
			filling := fmt.Sprintf("b%d", d.batch)
			d.ledger.Claim(d.now, g, 150, d.longest)
			d.settleOf(g, filling, 150)
			p, err := d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, []any{4950, time.Duration(0)}, []any{p.Attempted, p.Resting}, "50 came back, so the cycle is not full")
			last := d.reserve(50)
			require.True(t, last.Filled)
			d.ledger.Claim(d.now, last, 50, d.longest)
			d.settleOf(g, filling, 150)
			p, err = d.s.Peek()
			require.NoError(t, err)
			require.Equal(t, []any{5000, d.longest + d.rule.Rest}, []any{p.Attempted, p.Resting}, "the rest that the next one set stays")
		},
		"interleaving 1: a lower limit acts at once, a higher one from the next cycle": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(300)
			d.rule.Limit, d.rule.Version = 400, 2
			require.Equal(t, "100, rest 3m0s, 200", d.send(300))
			d.rule.Limit, d.rule.Version = 600, 3
			require.Equal(t, "200, rest 3m0s, 200, 200, 200, rest 3m0s, 1", d.send(801))
			old := d.rule
			old.Limit, old.Version = 100, 2
			d.rule = old
			require.Equal(t, "200, 200, 199, rest 3m0s, 1", d.send(600), "an older version changes nothing")
		},
		"interleaving 2: a settlement of an older cycle changes nothing": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(4800)
			d.begin()
			g := d.reserve(200)
			filling := fmt.Sprintf("b%d", d.batch)
			d.call(g, 200, 40) // and its owner is stopped
			d.now += (d.longest + d.rule.Rest).Milliseconds()
			require.Equal(t, "200", d.send(200))
			for _, more := range []int{0, 4800} { // the newer cycle at its beginning, and full
				d.send(more)
				before := d.quota()
				for _, attempted := range []int{0, 200} {
					d.settleOf(g, filling, attempted)
					require.Equal(t, before, d.quota())
				}
			}
			require.Positive(t, d.quota().Resting)

			// Also where only the ledger knew that the cycle had ended.
			d = newDesk(t, fresh(t))
			g = d.ask(200)
			require.NoError(t, d.s.Reconcile(school.Ledger{Cycle: g.Cycle + 1, Attempted: 300, Rule: d.rule}, d.rule))
			d.ledger = Ledger{cycle: g.Cycle + 1, attempted: 300, rule: d.rule}
			d.reserve(100)
			before := d.quota()
			require.Equal(t, []any{g.Cycle + 1, 400}, []any{before.Cycle, before.Attempted})
			d.settleOf(g, "b1", 0)
			require.Equal(t, before, d.quota())
		},
		"interleaving 3: a reservation past its deadline is closed in full by whoever comes next": func(t *testing.T) {
			for name, comes := range map[string]func(d *run){
				"a reservation": func(d *run) { d.reserve(100) },
				"a settlement":  func(d *run) { d.settleOf(school.Grant{Cycle: d.quota().Cycle}, "b2", 0) },
				"a new owner":   func(d *run) { d.begin() },
			} {
				d := newDesk(t, fresh(t))
				first := d.ask(200) // never claimed, never settled
				d.now += d.longest.Milliseconds() - 1
				d.reserve(1)
				d.now++
				d.s.At(Epoch + d.now)
				require.True(t, d.quota().Orphaned, name)
				comes(d)
				require.False(t, d.quota().Orphaned, name)
				was := d.attempted()
				require.GreaterOrEqual(t, was, 200, name)
				d.settleOf(first, "b1", 0)
				require.Equal(t, was, d.attempted(), "%s: nothing comes back after the deadline", name)
			}
		},
		"interleaving 4: after the clock went back the ledger tells the rest, and a merge could not": func(t *testing.T) {
			d := newDesk(t, fresh(t))
			d.send(5000)
			d.now += 100_000
			l := d.ledger.At(d.now) // 80 s are left
			d.begin()
			d.s.At(Epoch + d.now - 86_400_000)
			ask := func() school.Grant {
				d.batch++
				g, err := d.s.Reserve(school.Reservation{School: "A", Acquisition: d.acq, Fence: d.fence, Batch: fmt.Sprintf("b%d", d.batch),
					Want: 1, Longest: d.longest, Margin: time.Second, Floor: l, Rule: d.rule})
				require.NoError(t, err)
				return g
			}
			require.NoError(t, d.s.Reconcile(l, d.rule))
			g := ask()
			require.Equal(t, []any{school.NeedRebuild, true}, []any{g.Kind, g.ClockJumped})
			require.NoError(t, d.s.Rebuild(d.acq, d.fence, l, d.rule))
			g = ask()
			require.Equal(t, []any{school.Resting, 80 * time.Second}, []any{g.Kind, g.Wait})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sentence(t)
		})
	}
}

// newDesk is a school that has sent nothing, with nothing to send.
func newDesk(t *testing.T, s Subject) *run {
	d := &run{t: t, s: s, longest: 15 * time.Second, replica: "a",
		c:    Case{Batch: 200, CallMS: 100},
		rule: school.Rule{Limit: 5000, Rest: 180 * time.Second, Version: 1}}
	d.ledger = Ledger{rule: d.rule}
	d.begin()
	return d
}

// send makes n attempts and says in which batches and after which rests.
func (d *run) send(n int) string {
	var did []string
	d.begin()
	for n > 0 {
		g := d.reserve(min(n, d.c.Batch))
		if g.Kind == school.Resting {
			did = append(did, fmt.Sprintf("rest %v", g.Wait))
			d.now += g.Wait.Milliseconds()
			d.begin()
			continue
		}
		did = append(did, fmt.Sprint(g.Size))
		n -= g.Size
		d.finish(g, g.Size, d.c.CallMS)
	}
	return strings.Join(did, ", ")
}

func (d *run) attempted() int {
	p, err := d.s.Peek()
	require.NoError(d.t, err)
	return p.Attempted
}

// ask reserves whatever the answer is.
func (d *run) ask(want int) school.Grant {
	d.begin()
	return d.reserve(want)
}

// settleOf settles any batch, also one of long ago.
func (d *run) settleOf(g school.Grant, batch string, attempted int) {
	d.s.At(Epoch + d.now)
	require.NoError(d.t, d.s.Settle(school.Settlement{School: "A", Batch: batch, Cycle: g.Cycle, Attempted: attempted}))
}

// quota is what is known of the school but for its lock.
func (d *run) quota() school.Peek {
	p, err := d.s.Peek()
	require.NoError(d.t, err)
	p.Held, p.Owner, p.Fence, p.LeaseLeft = false, "", 0, 0
	return p
}
