package quota_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/school"
	"schoolbell/school/quota"
	"schoolbell/school/quota/quotatest"
)

const epoch = quotatest.Epoch

var fifty = school.Rule{Limit: 50, Rest: 200 * time.Millisecond, Version: 1}

type drawn struct{ t *rapid.T }

func (d drawn) Intn(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "n") }

// reached draws a state that operations lead to, and its moment.
func reached(t *rapid.T) *quotatest.Pure {
	p := &quotatest.Pure{Now: epoch}
	steps := rapid.IntRange(0, 30).Draw(t, "steps")
	// The subject that it is compared with is itself: only the way counts.
	if err := quotatest.Compare(drawn{t}, p, func() quota.State { return p.State }, steps, func() bool { return false }); err != nil {
		t.Fatal(err)
	}
	return p
}

func alike(t require.TestingT, want, got quota.State, why ...any) {
	require.Empty(t, cmp.Diff(want, got, cmpopts.EquateEmpty()), why...)
}

func drawLedger(t *rapid.T, s quota.State) school.Ledger {
	l := school.Ledger{
		Cycle:     max(0, s.Cycle+rapid.Int64Range(-1, 1).Draw(t, "cycle")),
		Attempted: rapid.IntRange(0, 60).Draw(t, "attempted"),
		Filled:    rapid.Bool().Draw(t, "filled"),
		Rule:      fifty,
	}
	if rapid.Bool().Draw(t, "rests") {
		l.Resting = time.Duration(rapid.IntRange(0, 300).Draw(t, "resting")) * time.Millisecond
	}
	return l
}

func TestEveryOperationTwiceIsOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := reached(t)
		l := drawLedger(t, p.State)
		r := school.Reservation{Batch: "new", Want: rapid.IntRange(1, 60).Draw(t, "want"),
			Longest: 100 * time.Millisecond, Rule: fifty, Floor: l}
		once, g1, err := p.State.Reserve(p.Now, r)
		require.NoError(t, err)
		twice, g2, err := once.Reserve(p.Now, r)
		require.NoError(t, err)
		if g1.Kind == school.Resting && g1.Wait == 0 {
			return // a rest that had passed by the time it was set: the next ask begins the cycle
		}
		require.Equal(t, g1, g2)
		alike(t, once, twice)

		for _, o := range once.Open {
			x := school.Settlement{Batch: o.Batch, Cycle: o.Cycle, Attempted: rapid.IntRange(0, o.Size).Draw(t, "sent")}
			once, _, err := once.Settle(p.Now, x)
			require.NoError(t, err)
			twice, did, err := once.Settle(p.Now, x)
			require.NoError(t, err)
			require.Equal(t, quota.Duplicate, did)
			alike(t, once, twice)
		}

		once, _, err = p.State.Reconcile(p.Now, l, fifty)
		require.NoError(t, err)
		twice, did, err := once.Reconcile(p.Now, l, fifty)
		require.NoError(t, err)
		require.Equal(t, quota.Kept, did)
		alike(t, once, twice)

		once, _, err = p.State.Rebuild(p.Now, l, fifty)
		require.NoError(t, err)
		twice, did, err = once.Rebuild(p.Now, l, fifty)
		require.NoError(t, err)
		require.Equal(t, quota.Kept, did, "after a rebuild the clock is fine")
		alike(t, once, twice)
	})
}

func TestLedgersCommute(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s, now := quota.State{}, int64(epoch)
		var ledgers []school.Ledger
		for range rapid.IntRange(1, 5).Draw(t, "ledgers") {
			// A ledger that is not full at a limit has no rest: a school's ledger
			// tells one story, in whatever order its pages arrive.
			l := drawLedger(t, quota.State{Cycle: 3})
			if l.Attempted < l.Rule.Limit {
				l.Filled, l.Resting = false, 0
			}
			ledgers = append(ledgers, l)
		}
		merge := func(order []school.Ledger) quota.State {
			out := s
			for _, l := range order {
				var err error
				out, _, err = out.Reconcile(now, l, fifty)
				require.NoError(t, err)
			}
			return out
		}
		want := merge(ledgers)
		got := merge(rapid.Permutation(ledgers).Draw(t, "order"))
		alike(t, want, got)
	})
}

func TestReconcileLowersNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := reached(t)
		l := drawLedger(t, p.State)
		// What is overdue closes in any case and makes its rest exact.
		before, _, err := p.State.Settle(p.Now, school.Settlement{Batch: "none"})
		require.NoError(t, err)
		after, _, err := before.Reconcile(p.Now, l, fifty)
		require.NoError(t, err)
		require.GreaterOrEqual(t, after.Cycle, before.Cycle)
		require.GreaterOrEqual(t, after.Cycle, l.Cycle)
		if after.Cycle == before.Cycle {
			require.GreaterOrEqual(t, after.Attempted, before.Attempted)
			require.GreaterOrEqual(t, after.Next, before.Next)
		}
		if after.Cycle == l.Cycle {
			require.GreaterOrEqual(t, after.Attempted, l.Attempted)
			if l.Filled {
				require.Positive(t, after.Next)
			}
			if l.Resting > 0 {
				require.GreaterOrEqual(t, after.Next, p.Now+quota.Millis(l.Resting))
			}
		}
	})
}

// steps is a school of fifty at the epoch, with a ledger of nothing.
func steps(t *testing.T) *quotatest.Pure {
	p := &quotatest.Pure{Now: epoch}
	require.NoError(t, p.Reconcile(school.Ledger{}, fifty))
	return p
}

func ask(batch string, want int, floor school.Ledger, r school.Rule) school.Reservation {
	return school.Reservation{Batch: batch, Want: want, Longest: 100 * time.Millisecond, Floor: floor, Rule: r}
}

func reserve(t *testing.T, p *quotatest.Pure, r school.Reservation, kind school.GrantKind) school.Grant {
	t.Helper()
	g, err := p.Reserve(r)
	require.NoError(t, err)
	require.Equal(t, kind, g.Kind, fmt.Sprintf("%+v", g))
	return g
}

func TestInterleaving01RaisedLimitWaitsForTheNextCycleAndALoweredOneDoesNot(t *testing.T) {
	t.Parallel()
	p := steps(t)
	raised := school.Rule{Limit: 80, Rest: time.Second, Version: 3}
	g := reserve(t, p, ask("b1", 60, school.Ledger{}, raised), school.Granted)
	require.Equal(t, 50, g.Size)
	require.Equal(t, school.Rule{Limit: 50, Rest: time.Second, Version: 3}, g.Rule)
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 50}))

	full := school.Ledger{Attempted: 50, Filled: true, Rule: g.Rule}
	p.At(epoch + 1000)
	stale := school.Rule{Limit: 10, Rest: time.Millisecond, Version: 2}
	g = reserve(t, p, ask("b2", 60, full, stale), school.Granted)
	require.Equal(t, 60, g.Size, "an older version changes nothing")
	require.True(t, g.Opened)
	require.Equal(t, time.Second, g.RestedFor)

	lowered := school.Rule{Limit: 20, Rest: time.Second, Version: 4}
	require.NoError(t, p.Settle(school.Settlement{Batch: "b2", Cycle: 1, Attempted: 60}))
	p.At(epoch + 1400)
	g = reserve(t, p, ask("b3", 1, school.Ledger{Cycle: 1, Attempted: 60, Rule: g.Rule}, lowered), school.Resting)
	require.Equal(t, 600*time.Millisecond, g.Wait, "from the last attempt's end")
}

func TestInterleaving01FullWithoutARestRestsFromWhatIsKnown(t *testing.T) {
	t.Parallel()
	low := school.Rule{Limit: 10, Rest: 200 * time.Millisecond, Version: 2}
	t.Run("the end is not known", func(t *testing.T) {
		t.Parallel()
		p := &quotatest.Pure{Now: epoch}
		l := school.Ledger{Attempted: 30, Rule: fifty}
		require.NoError(t, p.Reconcile(l, fifty))
		g := reserve(t, p, ask("b1", 1, l, low), school.Resting)
		require.Equal(t, 200*time.Millisecond, g.Wait)
	})
	t.Run("a call may be running", func(t *testing.T) {
		t.Parallel()
		p := steps(t)
		reserve(t, p, ask("b1", 30, school.Ledger{}, fifty), school.Granted)
		p.At(epoch + 40)
		l := school.Ledger{Attempted: 30, Rule: fifty}
		g := reserve(t, p, ask("b2", 1, l, low), school.Resting)
		require.Equal(t, 260*time.Millisecond, g.Wait, "from the latest moment at which it ends")
		require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 30}))
		g = reserve(t, p, ask("b2", 1, l, low), school.Resting)
		require.Equal(t, 200*time.Millisecond, g.Wait, "exact once it is settled")
	})
	t.Run("the rest has passed already", func(t *testing.T) {
		t.Parallel()
		p := steps(t)
		reserve(t, p, ask("b1", 30, school.Ledger{}, fifty), school.Granted)
		require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 30}))
		p.At(epoch + 5000)
		l := school.Ledger{Attempted: 30, Rule: fifty}
		g := reserve(t, p, ask("b2", 1, l, low), school.Resting)
		require.Zero(t, g.Wait, "it answers resting all the same: this answer never opens a cycle")
		g = reserve(t, p, ask("b2", 1, l, low), school.Granted)
		require.True(t, g.Opened)
	})
}

func TestARestOfBeforeARefundDoesNotComeBack(t *testing.T) {
	t.Parallel()
	p := steps(t)
	reserve(t, p, ask("b1", 50, school.Ledger{}, fifty), school.Granted)
	replica := p.Save() // full, with a rest
	p.At(epoch + 50)
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 30}))
	l := school.Ledger{Attempted: 30, Rule: fifty}
	p.At(epoch + 290)
	reserve(t, p, ask("b2", 10, l, fifty), school.Granted)
	require.NoError(t, p.Settle(school.Settlement{Batch: "b2", Attempted: 10}))
	l.Attempted = 40

	p.Load(replica) // its rest would be over at once
	p.At(epoch + 310)
	reserve(t, p, ask("b3", 50, l, fifty), school.NeedRebuild)
	require.NoError(t, p.Reconcile(l, fifty))
	g := reserve(t, p, ask("b3", 50, l, fifty), school.Resting)
	require.Equal(t, 200*time.Millisecond, g.Wait)
	p.At(epoch + 510)
	require.NoError(t, p.Reconcile(l, fifty))
	g = reserve(t, p, ask("b3", 50, l, fifty), school.Granted)
	require.True(t, g.Opened, "it begins anew once, not at every look")
}

func TestInterleaving04ClockThatWentBack(t *testing.T) {
	t.Parallel()
	p := steps(t)
	reserve(t, p, ask("b1", 50, school.Ledger{}, fifty), school.Granted)
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 50}))
	l := school.Ledger{Attempted: 50, Filled: true, Resting: 80 * time.Millisecond, Rule: fifty}

	p.At(epoch - 3_600_000)
	g := reserve(t, p, ask("b2", 1, l, fifty), school.NeedRebuild)
	require.True(t, g.ClockJumped)
	require.NoError(t, p.Reconcile(l, fifty))
	require.True(t, reserve(t, p, ask("b2", 1, l, fifty), school.NeedRebuild).ClockJumped, "a merge cannot help")
	require.NoError(t, p.Rebuild("", 0, l, fifty))
	require.Equal(t, 80*time.Millisecond, reserve(t, p, ask("b2", 1, l, fifty), school.Resting).Wait)

	p.At(epoch - 9_000_000)
	unaware := school.Ledger{Cycle: 0, Attempted: 50, Rule: fifty}
	require.True(t, reserve(t, p, ask("b2", 1, unaware, fifty), school.NeedRebuild).ClockJumped)
	require.NoError(t, p.Rebuild("", 0, unaware, fifty))
	require.LessOrEqual(t, reserve(t, p, ask("b2", 1, unaware, fifty), school.Resting).Wait, 300*time.Millisecond)
}

func TestInterleaving02LateSettlements(t *testing.T) {
	t.Parallel()
	p := steps(t)
	reserve(t, p, ask("b1", 50, school.Ledger{}, fifty), school.Granted)
	p.At(epoch + 101)
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 0}))
	require.Equal(t, 50, p.State.Attempted, "nothing is given back after the deadline")
	require.Equal(t, int64(epoch+300), p.State.Next, "and the rest runs from it")
	require.ErrorIs(t, p.Settle(school.Settlement{Batch: "b2", Attempted: 0}), school.ErrReservationUnknown)
	require.ErrorContains(t, (&quotatest.Pure{}).Settle(school.Settlement{Batch: "b c"}), "batch id")

	p.At(epoch + 300)
	full := school.Ledger{Attempted: 50, Filled: true, Rule: fifty}
	reserve(t, p, ask("b3", 10, full, fifty), school.Granted)
	before := p.State
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 0}))
	alike(t, before, p.State, "a settlement of an older cycle changes nothing")
}

func TestWhatTheLedgerConfirmedIsNotGivenBack(t *testing.T) {
	t.Parallel()
	p := steps(t)
	reserve(t, p, ask("b1", 40, school.Ledger{}, fifty), school.Granted)
	require.NoError(t, p.Reconcile(school.Ledger{Attempted: 30, Rule: fifty}, fifty))
	require.NoError(t, p.Settle(school.Settlement{Batch: "b1", Attempted: 0}))
	require.Equal(t, 30, p.State.Attempted)
}

func TestOnlySoManySettledBatchesAreRemembered(t *testing.T) {
	t.Parallel()
	p := &quotatest.Pure{Now: epoch}
	many := school.Rule{Limit: 5000, Rest: time.Second, Version: 1}
	require.NoError(t, p.Reconcile(school.Ledger{}, many))
	for i := range 3 * quota.KeepSettled {
		id := fmt.Sprintf("b%d", i)
		reserve(t, p, ask(id, 1, school.Ledger{}, many), school.Granted)
		require.NoError(t, p.Settle(school.Settlement{Batch: id, Attempted: 1}))
	}
	require.Len(t, p.State.Settled, quota.KeepSettled)
	reserve(t, p, ask(fmt.Sprintf("b%d", 2*quota.KeepSettled), 1, school.Ledger{}, many), school.BatchSettled)
	require.ErrorIs(t, p.Settle(school.Settlement{Batch: "b0"}), school.ErrReservationUnknown)
}

func TestStatesShareNothing(t *testing.T) {
	t.Parallel()
	p := steps(t)
	reserve(t, p, ask("b1", 10, school.Ledger{}, fifty), school.Granted)
	base := p.State
	_, _, err := base.Reserve(epoch, ask("b2", 10, school.Ledger{}, fifty))
	require.NoError(t, err)
	other, _, err := base.Reserve(epoch, ask("b3", 10, school.Ledger{}, fifty))
	require.NoError(t, err)
	_, _, err = other.Settle(epoch, school.Settlement{Batch: "b1", Attempted: 10})
	require.NoError(t, err)
	require.Equal(t, "b3", other.Open[1].Batch)
	require.Len(t, base.Open, 1)
	require.Equal(t, "b1", other.Open[0].Batch)
}

func TestJudge(t *testing.T) {
	t.Parallel()
	require.Empty(t, quotatest.Judge([]quotatest.Sent{{Start: 0, End: 10, Size: 50}, {Start: 210, End: 220, Size: 50}}, 50, 200))
	require.Len(t, quotatest.Judge([]quotatest.Sent{{Start: 0, End: 10, Size: 50}, {Start: 209, End: 220, Size: 1}}, 50, 200), 1)
	require.Len(t, quotatest.Judge([]quotatest.Sent{{Start: 0, End: 10, Size: 51}}, 50, 200), 1)
	require.Len(t, quotatest.Judge([]quotatest.Sent{
		{Start: 300, End: 301, Size: 25}, {Start: 0, End: 250, Size: 25}, {Start: 10, End: 20, Size: 1},
	}, 50, 200), 1, "a long call ends the silence late, in whatever order they are listed")
}
