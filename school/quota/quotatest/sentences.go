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
		"the process that makes the filling call dies: the rest runs from the call's latest end": func(t *testing.T) {
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
