package storetest

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var claimTests = []test{
	{"OpenTerm/each term has a higher fence and tells the ledger", func(w *world) {
		w.notice("A", 10)
		for fence := int64(1); fence <= 3; fence++ {
			term := w.term("A", "x")
			require.Equal(w.t, fence, term.Fence)
			require.Equal(w.t, "x", term.Owner)
		}
		_, err := w.Store.OpenTerm(w.ctx(), "nobody", "acq", "x")
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"Claim/covers exactly its recipients and advances the ledger", func(w *world) {
		id := w.notice("A", 500)
		term := w.term("A", "x")
		p := w.page(term, 300)
		w.claim(term, p.Work[:200])
		require.Equal(w.t, "IN_PROGRESS=200 PENDING=300", w.states(id))
		require.Equal(w.t, school.Counts{Total: 500, Waiting: 300, InProgress: 200}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeInProgress, w.progress(id).Status)
		require.False(w.t, w.progress(id).FirstSendAt.IsZero())
		w.claim(term, p.Work[200:])
		require.Equal(w.t, "IN_PROGRESS=300 PENDING=200", w.states(id))

		l := w.term("A", "y")
		require.Equal(w.t, school.Ledger{Cycle: 1, Attempted: 200, Rule: rule}, l.Ledger)
		require.Len(w.t, l.Unsettled, 2)
		require.Equal(w.t, []int{200, 100}, []int{l.Unsettled[0].Size, l.Unsettled[1].Size})
		require.InDelta(w.t, longest+recording, l.Unsettled[0].Remaining, float64(5*time.Second))
	}},
	{"interleaving 21: Claim/the ledger follows the grant within a cycle and never falls", func(w *world) {
		w.notice("A", 100)
		term := w.term("A", "x")
		step := func(cycle int64, attempted int, filled bool, version int64) error {
			c := w.claimOf(w.page(term, 1).Work, attempted)
			c.Grant.Cycle, c.Grant.Filled, c.Rule.Version = cycle, filled, version
			if version != rule.Version {
				c.Rule.Limit, c.Rule.Rest = 50, time.Second
			}
			return w.Store.Claim(w.ctx(), term, c)
		}
		require.NoError(w.t, step(3, 40, false, 1))
		require.NoError(w.t, step(3, 30, false, 1))
		require.Equal(w.t, school.Ledger{Cycle: 3, Attempted: 40, Rule: rule}, w.ledger("A"))
		require.NoError(w.t, step(3, 50, true, 2))
		l := w.ledger("A")
		require.Equal(w.t, []any{int64(3), 50, true, 50}, []any{l.Cycle, l.Attempted, l.Filled, l.Rule.Limit})
		require.InDelta(w.t, longest+time.Second, l.Resting, float64(5*time.Second))
		// An older version of the settings does not come back.
		require.NoError(w.t, step(4, 1, false, 1))
		require.Equal(w.t, school.Ledger{Cycle: 4, Attempted: 1, Rule: school.Rule{Limit: 50, Rest: time.Second, Version: 2}}, w.ledger("A"))
		require.ErrorIs(w.t, step(3, 1, false, 1), school.ErrConflict)
		require.Equal(w.t, int64(4), w.ledger("A").Cycle)
	}},
	{"Claim/of fewer than were granted gives the rest back and fills no cycle", func(w *world) {
		w.notice("A", 100)
		term := w.term("A", "x")
		c := w.claimOf(w.page(term, 60).Work, 5000)
		c.Grant.Size, c.Grant.Filled = 100, true
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
		require.Equal(w.t, school.Ledger{Cycle: 1, Attempted: 4960, Rule: rule}, w.ledger("A"))
		c = w.claimOf(w.page(term, 10).Work, 5000)
		c.Grant.Size = 9
		require.Error(w.t, w.Store.Claim(w.ctx(), term, c))
	}},
	{"Claim/is fenced by a newer term and writes nothing", func(w *world) {
		id := w.notice("A", 10)
		old := w.term("A", "x")
		work := w.page(old, 10).Work
		w.term("A", "y")
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), old, w.claimOf(work, 10)), school.ErrFenced)
		require.ErrorIs(w.t, w.Store.Skip(w.ctx(), old, skipAll(work)), school.ErrFenced)
		require.Equal(w.t, "PENDING=10", w.states(id))
		require.Equal(w.t, school.Ledger{}, w.ledger("A"))
		require.Equal(w.t, [][]string{{"0"}}, w.Query(w.t, `SELECT count(*) FROM push_batches`))
	}},
	{"interleaving 10: Claim/is fenced by another acquisition of the same fence", func(w *world) {
		w.notice("A", 10)
		term := w.term("A", "x")
		other := term
		other.Acquisition = "another"
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), other, w.claimOf(w.page(term, 10).Work, 10)), school.ErrFenced)
	}},
	{"interleaving 12: Claim/racing a new term is refused or among its unsettled", func(w *world) {
		w.notice("A", 1000)
		for round := range 40 {
			old := w.term("A", fmt.Sprint("old-", round))
			c := w.claimOf(w.page(old, 10).Work, 10)
			var (
				wg   sync.WaitGroup
				err  error
				next school.Term
			)
			wg.Go(func() { err = w.Store.Claim(w.ctx(), old, c) })
			next = w.term("A", fmt.Sprint("new-", round))
			wg.Wait()
			known := false
			for _, b := range next.Unsettled {
				known = known || b.ID == c.Batch
			}
			if err != nil {
				require.ErrorIs(w.t, err, school.ErrFenced)
			}
			require.Equal(w.t, err == nil, known, "claim: %v", err)
		}
	}},
	{"interleaving 14: Claim/of a page that has moved is stale and writes nothing", func(w *world) {
		id := w.notice("A", 20)
		term := w.term("A", "x")
		work := w.page(term, 10).Work
		w.claim(term, work[:5])
		for _, stale := range [][]school.Work{work, work[:5], work[6:]} {
			require.ErrorIs(w.t, w.Store.Claim(w.ctx(), term, w.claimOf(stale, 10)), school.ErrStalePage)
		}
		require.Equal(w.t, "IN_PROGRESS=5 PENDING=15", w.states(id))
		require.Equal(w.t, 5, w.ledger("A").Attempted)
		w.claim(term, work[5:])
	}},
	{"interleaving 14: Claim/of a retry that has moved is stale and writes nothing", func(w *world) {
		id := w.notice("A", 4)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 10).Work), all(school.Unavailable))
		w.Elapse(w.t, 2*time.Minute)
		work := w.page(term, 10).Work
		require.Len(w.t, work, 4)
		w.record(term, w.claim(term, work[:1]), all(school.Unavailable))
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), term, w.claimOf(work, 4)), school.ErrStalePage)
		// Due once more it has one attempt more than the old page knows.
		w.Elapse(w.t, 10*time.Minute)
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), term, w.claimOf(work, 4)), school.ErrStalePage)
		require.Equal(w.t, "RETRY_PENDING=4", w.states(id))
		require.Equal(w.t, 4, w.send(term, school.Accepted))
	}},
	{"Claim/with a gap or of the wrong kind is refused before it is tried", func(w *world) {
		w.notice("A", 10)
		term := w.term("A", "x")
		work := w.page(term, 10).Work
		gap := append(append([]school.Work(nil), work[:2]...), work[3:]...)
		err := w.Store.Claim(w.ctx(), term, w.claimOf(gap, 9))
		require.Error(w.t, err)
		require.False(w.t, errors.Is(err, school.ErrStalePage))
		require.Error(w.t, w.Store.Skip(w.ctx(), term, work))
	}},
	{"Claim/neighbouring retries and first attempts share a batch", func(w *world) {
		id := w.notice("A", 30)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 20).Work), func(i int, k *school.Work) school.Event {
			if k.Seq%5 == 0 || k.Seq == 11 {
				return school.Event{Outcome: school.Unavailable}
			}
			return school.Event{Outcome: school.Accepted}
		})
		w.Elapse(w.t, 2*time.Minute)
		c := w.claim(term, w.page(term, 100).Work)
		require.Equal(w.t, 15, c.Size())
		require.Equal(w.t, [][]string{{"4", "5", "retry"}, {"9", "11", "retry"}, {"14", "15", "retry"}, {"19", "20", "retry"}, {"20", "30", "first"}},
			w.Query(w.t, `SELECT from_seq, to_seq, kind FROM push_batch_ranges WHERE batch_id = '`+c.Batch+`' ORDER BY from_seq`))
		require.Equal(w.t, "IN_PROGRESS=15 SUCCESS=15", w.states(id))
		w.check()
		w.record(term, c, all(school.Accepted))
		require.Equal(w.t, school.Counts{Total: 30, Success: 25, RetrySuccess: 5}, w.progress(id).Counts)
	}},
	{"interleaving 14: Claim/writes the skipped ones", func(w *world) {
		off := false
		id := w.accept(plain("A"), list(
			school.NewRecipient{Token: "a"}, school.NewRecipient{Token: "b", Enabled: &off}, school.NewRecipient{Token: "c"},
			school.NewRecipient{Token: "a"}, school.NewRecipient{Token: "d", Enabled: &off}))
		term := w.term("A", "x")
		work := w.page(term, 10).Work
		work[2].Skip = school.NotAllowed
		c := w.claim(term, work)
		require.Equal(w.t, 1, c.Size())
		require.Equal(w.t, "IN_PROGRESS=1 SKIPPED=4", w.states(id))
		w.record(term, c, all(school.Accepted))
		require.Equal(w.t, school.Counts{Total: 5, Success: 1, Skipped: school.Skips{Disabled: 2, NotAllowed: 1, Duplicate: 1}}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
	}},
	{"Claim/one switched off after it was handed over is not SKIPPED any more", func(w *world) {
		id := w.notice("A", 2)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 10).Work), all(school.Unavailable))
		w.Device(w.t, "A", "token-0000001", false, false)
		w.Elapse(w.t, 2*time.Minute)
		w.send(term, school.Accepted)
		rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 10})
		require.NoError(w.t, err)
		require.Equal(w.t, []any{school.PermanentFail, school.Disabled, "UNAVAILABLE", 1}, []any{rows[0].State, rows[0].Reason, rows[0].Code, rows[0].Attempts})
		require.Equal(w.t, school.Counts{Total: 2, RetrySuccess: 1, PermanentFail: 1}, w.progress(id).Counts)
	}},
	{"interleaving 14: Skip/moves the frontier when nothing is to be sent and ends the notice", func(w *world) {
		off := false
		id := w.accept(plain("A"), list(school.NewRecipient{Token: "a", Enabled: &off}, school.NewRecipient{Token: "b", Enabled: &off}, school.NewRecipient{Token: "a"}))
		term := w.term("A", "x")
		p := w.page(term, 10)
		require.NoError(w.t, w.Store.Skip(w.ctx(), term, p.Work))
		require.Equal(w.t, school.Counts{Total: 3, Skipped: school.Skips{Disabled: 2, Duplicate: 1}}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		require.True(w.t, w.progress(id).FirstSendAt.IsZero())
		require.ErrorIs(w.t, w.Store.Skip(w.ctx(), term, p.Work), school.ErrStalePage)
		require.Equal(w.t, school.Ledger{}, w.ledger("A"))
	}},
	{"interleaving 15: Pause/no claim commits after it returned", func(w *world) {
		id := w.notice("A", 10_000) // more than are claimed while a busy machine gets round to a pause
		term := w.term("A", "x")
		for range 25 {
			require.NoError(w.t, w.Store.Resume(w.ctx(), "A"))
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					err := w.Store.Claim(w.ctx(), term, w.claimOf(w.page(term, 1).Work, 1))
					if err != nil {
						if !errors.Is(err, school.ErrPaused) {
							w.t.Error(err)
						}
						return
					}
				}
			})
			require.NoError(w.t, w.Store.Pause(w.ctx(), "A"))
			before := w.Query(w.t, `SELECT count(*) FROM push_batches`)
			wg.Wait()
			require.Equal(w.t, before, w.Query(w.t, `SELECT count(*) FROM push_batches`))
		}
		require.ErrorIs(w.t, w.Store.Skip(w.ctx(), term, skipAll(w.page(term, 2).Work)), school.ErrPaused)
		require.True(w.t, w.term("A", "y").Settings.Paused)
		require.NotZero(w.t, w.progress(id).Counts.Waiting)
	}},
	{"Claim/by an older rule is refused", func(w *world) {
		w.notice("A", 100)
		term := w.term("A", "x")
		w.claim(term, w.page(term, 10).Work)
		lower := 20
		_, _, err := w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{Limit: &lower})
		require.NoError(w.t, err)
		before := w.ledger("A")
		c := w.claimOf(w.page(term, 10).Work, 20)
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), term, c), school.ErrRuleChanged)
		require.Equal(w.t, before, w.ledger("A"))
		require.Len(w.t, w.Query(w.t, `SELECT id FROM push_batches`), 1)

		// The arbiter may know the newer rule before the term does.
		c.Rule.Version = 2
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
		next := w.term("A", "x")
		require.Equal(w.t, &lower, next.Settings.Limit)
		w.claim(next, w.page(next, 10).Work)
	}},
	{"Withdraw/puts the recipients back and the attempts out of the ledger", func(w *world) {
		id := w.notice("A", 30)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 10).Work), all(school.Unavailable))
		w.Elapse(w.t, 2*time.Minute)
		c := w.claimOf(w.page(term, 20).Work, 40)
		c.Grant.Filled = true
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
		require.Equal(w.t, "IN_PROGRESS=20 PENDING=10", w.states(id))
		require.True(w.t, w.ledger("A").Filled)
		for range 2 { // the second time changes nothing
			require.NoError(w.t, w.Store.Withdraw(w.ctx(), term, c.Batch))
			require.Equal(w.t, "PENDING=20 RETRY_PENDING=10", w.states(id))
			require.Equal(w.t, school.Counts{Total: 30, Waiting: 20, RetryPending: 10}, w.progress(id).Counts)
			require.Equal(w.t, school.Ledger{Cycle: 1, Attempted: 20, Rule: rule}, w.ledger("A"))
			w.check()
		}
		p := w.page(term, 100)
		require.Len(w.t, p.Work, 30)
		require.Equal(w.t, school.Standing{State: school.Pending}, p.Work[10].Standing)
		require.Equal(w.t, school.Again, p.Work[10].Kind)
		require.Equal(w.t, 30, w.send(term, school.Accepted))
		require.Equal(w.t, school.Counts{Total: 30, Success: 20, RetrySuccess: 10}, w.progress(id).Counts)
	}},
	{"Withdraw/takes nothing from a later cycle", func(w *world) {
		w.notice("A", 30)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 10).Work)
		later := w.claimOf(w.page(term, 10).Work, 10)
		later.Grant.Cycle, later.Grant.Filled = 2, true
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, later))
		require.NoError(w.t, w.Store.Withdraw(w.ctx(), term, c.Batch))
		l := w.ledger("A")
		require.Equal(w.t, []any{int64(2), 10, true}, []any{l.Cycle, l.Attempted, l.Filled})
	}},
	{"interleaving 12: Withdraw/under the term that follows an unknown commit", func(w *world) {
		id := w.notice("A", 10)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 5).Work)
		next := w.term("A", "x")
		require.ErrorIs(w.t, w.Store.Withdraw(w.ctx(), term, c.Batch), school.ErrFenced)
		require.NoError(w.t, w.Store.Withdraw(w.ctx(), next, c.Batch))
		require.NoError(w.t, w.Store.Withdraw(w.ctx(), next, "never-committed"))
		require.Equal(w.t, "PENDING=10", w.states(id))
		require.ErrorIs(w.t, w.Store.Record(w.ctx(), w.recordOf(term, c, all(school.Accepted))), school.ErrTakenOver)
	}},
	{"Withdraw/leaves alone what is another's or was recorded", func(w *world) {
		w.notice("A", 10)
		x := w.term("A", "x")
		c := w.claim(x, w.page(x, 5).Work)
		y := w.term("A", "y")
		require.ErrorIs(w.t, w.Store.Withdraw(w.ctx(), y, c.Batch), school.ErrConflict)
		w.record(x, c, all(school.Accepted))
		x = w.term("A", "x")
		require.ErrorIs(w.t, w.Store.Withdraw(w.ctx(), x, c.Batch), school.ErrTakenOver)
		require.Equal(w.t, 5, w.ledger("A").Attempted)
	}},
}

func skipAll(work []school.Work) []school.Work {
	out := append([]school.Work(nil), work...)
	for i := range out {
		out[i].Skip = school.Disabled
	}
	return out
}
