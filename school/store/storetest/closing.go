package storetest

import (
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// inEveryState makes a notice with recipients in every state that a closing can
// meet: accepted, waiting for a retry, withdrawn, in an open batch (first and
// later attempts), and beyond the frontier.
func (w *world) inEveryState(n *school.Notice) (id int64, term school.Term, open school.Claim) {
	w.t.Helper()
	id = w.accept(n, devices(100))
	term = w.term(n.School, "x")
	w.record(term, w.claim(term, w.page(term, 40).Work), func(i int, k *school.Work) school.Event {
		if k.Seq <= 20 {
			return school.Event{Outcome: school.Accepted}
		}
		return school.Event{Outcome: school.Unavailable, Code: "UNAVAILABLE"}
	})
	c := w.claim(term, w.page(term, 10).Work) // 41 … 50
	require.NoError(w.t, w.Store.Withdraw(w.ctx(), term, c.Batch))
	w.Elapse(w.t, 2*time.Minute)
	work := w.page(term, 100).Work // 41 … 50 withdrawn, 21 … 40 retries, 51 … 100 first
	require.Len(w.t, work, 80)
	open = w.claim(term, append(append([]school.Work(nil), work[15:30]...), work[30:40]...))
	require.Equal(w.t, "IN_PROGRESS=25 PENDING=50 RETRY_PENDING=5 SUCCESS=20", w.states(id))
	return id, term, open
}

var closingTests = []test{
	{"interleaving 15: Cancel/leaves nothing to claim and ends when the calls in flight are recorded", func(w *world) {
		id, term, open := w.inEveryState(plain("A"))
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.Equal(w.t, "IN_PROGRESS=25 PERMANENT_FAIL=5 SKIPPED=50 SUCCESS=20", w.states(id))
		require.Equal(w.t, school.Counts{Total: 100, InProgress: 25, Success: 20, PermanentFail: 5, Skipped: school.Skips{Cancelled: 50}}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeInProgress, w.progress(id).Status)
		require.Empty(w.t, w.page(term, 100).Work)
		w.check()
		rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{State: school.PermanentFail, Limit: 100})
		require.NoError(w.t, err)
		require.Equal(w.t, []any{school.Cancelled, "UNAVAILABLE", 1}, []any{rows[0].Reason, rows[0].Code, rows[0].Attempts})

		// The call's outcome counts, but no retry follows.
		w.record(term, open, func(i int, k *school.Work) school.Event {
			return school.Event{Outcome: []school.Outcome{school.Accepted, school.Unavailable, school.NotSent}[i%3], Code: "X"}
		})
		p := w.progress(id)
		require.Equal(w.t, school.NoticeCancelled, p.Status)
		require.Equal(w.t, 9, p.Counts.Success+p.Counts.RetrySuccess-20)
		require.Equal(w.t, 5+16, p.Counts.PermanentFail)
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
	}},
	{"Cancel/a record of a retry writes what the domain decides for a closing notice", func(w *world) {
		id, term, open := w.inEveryState(plain("A"))
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		w.record(term, open, all(school.Throttled)) // decided before it was known
		for i := range open.Work {
			k := &open.Work[i]
			want, err := school.Next(k.Standing, school.Event{Outcome: school.Throttled, Code: codes[school.Throttled], Closing: school.Cancelled}, policy)
			require.NoError(w.t, err)
			w.sameAs(want, id, k.Seq, "recipient %d", k.Seq)
		}
	}},
	{"Cancel/makes a claim of the page before it stale", func(w *world) {
		id := w.notice("A", 10)
		term := w.term("A", "x")
		work := w.page(term, 10).Work
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.ErrorIs(w.t, w.Store.Claim(w.ctx(), term, w.claimOf(work, 10)), school.ErrStalePage)
		require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
		require.Equal(w.t, "SKIPPED=10", w.states(id))
	}},
	{"Cancel/racing a claim keeps the counts", func(w *world) {
		for range 25 {
			id := w.notice("A", 10)
			term := w.term("A", "x")
			c := w.claimOf(w.page(term, 5).Work, 5)
			var (
				wg  sync.WaitGroup
				err error
			)
			wg.Go(func() { err = w.Store.Claim(w.ctx(), term, c) })
			require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
			wg.Wait()
			w.check()
			if err == nil {
				w.record(term, c, all(school.Accepted))
			} else {
				require.ErrorIs(w.t, err, school.ErrStalePage)
			}
			require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
		}
	}},
	{"interleaving 15: Cancel/a big notice counts as skipped at once and is written in steps", func(w *world) {
		id := w.notice("A", 90_000)
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.Equal(w.t, school.Counts{Total: 90_000, Skipped: school.Skips{Cancelled: 90_000}}, w.progress(id).Counts)
		require.Equal(w.t, "SKIPPED=90000", w.states(id))
		require.Equal(w.t, school.NoticePending, w.progress(id).Status)
		due, err := w.Store.Due(w.ctx(), time.Hour)
		require.NoError(w.t, err)
		require.Empty(w.t, due)
		steps := 0
		for ; ; steps++ {
			n, err := w.Store.Expire(w.ctx(), 10)
			require.NoError(w.t, err)
			if n == 0 {
				break
			}
			require.Less(w.t, steps, 100)
			require.Equal(w.t, "SKIPPED=90000", w.states(id))
		}
		require.Greater(w.t, steps, 2)
		require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
		require.Equal(w.t, [][]string{{"90000"}}, w.Query(w.t, `SELECT count(*) FROM push_cluster_tokens WHERE job_status = 'SKIPPED' AND reason = 'CANCELLED'`))
	}},
	{"Cancel/of what is not there or has ended says so", func(w *world) {
		require.ErrorIs(w.t, w.Store.Cancel(w.ctx(), 12345), school.ErrNotFound)
		id := w.notice("A", 1)
		w.send(w.term("A", "x"), school.Accepted)
		require.ErrorIs(w.t, w.Store.Cancel(w.ctx(), id), school.ErrConflict)
	}},
	{"Withdraw/of a notice cancelled meanwhile ends its recipients", func(w *world) {
		id, term, open := w.inEveryState(plain("A"))
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.NoError(w.t, w.Store.Withdraw(w.ctx(), term, open.Batch))
		require.Equal(w.t, school.Counts{Total: 100, Success: 20, PermanentFail: 20, Skipped: school.Skips{Cancelled: 60}}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
	}},
	{"interleaving 15: Expire/closes what has expired and nothing else", func(w *world) {
		n := plain("A")
		n.ExpiresAt = time.Now().Add(time.Hour)
		id, term, open := w.inEveryState(n)
		other := w.notice("A", 5)
		touched, err := w.Store.Expire(w.ctx(), 10)
		require.NoError(w.t, err)
		require.Zero(w.t, touched)

		w.Elapse(w.t, 2*time.Hour)
		// Expired but not closed yet it is not to be claimed any more either.
		require.Equal(w.t, []int64{other, other, other, other, other}, noticesOf(w.page(term, 100).Work))
		touched, err = w.Store.Expire(w.ctx(), 10)
		require.NoError(w.t, err)
		require.Equal(w.t, 1, touched)
		require.Equal(w.t, "IN_PROGRESS=25 PERMANENT_FAIL=5 SKIPPED=50 SUCCESS=20", w.states(id))
		require.Equal(w.t, 50, w.progress(id).Counts.Skipped.Expired)
		touched, err = w.Store.Expire(w.ctx(), 10)
		require.NoError(w.t, err)
		require.Zero(w.t, touched, "it waits for its calls in flight")
		require.ErrorIs(w.t, w.Store.Cancel(w.ctx(), id), school.ErrConflict)
		w.record(term, open, all(school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		require.Equal(w.t, "PENDING=5", w.states(other))
	}},
	{"Expire/by several replicas at once closes each notice once", func(w *world) {
		for range 20 {
			n := plain("A")
			n.ExpiresAt = time.Now().Add(time.Hour)
			w.accept(n, devices(20))
		}
		w.Elapse(w.t, 2*time.Hour)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if _, err := w.Store.Expire(w.ctx(), 100); err != nil {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		_, err := w.Store.Expire(w.ctx(), 100)
		require.NoError(w.t, err)
		for _, p := range mustList(w) {
			require.Equal(w.t, school.NoticeCompleted, p.Status)
			require.Equal(w.t, school.Counts{Total: 20, Skipped: school.Skips{Expired: 20}}, p.Counts)
		}
	}},
	{"Sweep/finds nothing in a sound store", func(w *world) {
		w.inEveryState(plain("A"))
		n := plain("B")
		id, _, _ := w.inEveryState(n)
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		before := w.Query(w.t, `SELECT * FROM push_clusters ORDER BY id`)
		stranded, err := w.Store.Sweep(w.ctx())
		require.NoError(w.t, err)
		require.Zero(w.t, stranded)
		require.Equal(w.t, before, w.Query(w.t, `SELECT * FROM push_clusters ORDER BY id`))
	}},
	{"Sweep/puts back what is stranded and puts counts right", func(w *world) {
		id, term, open := w.inEveryState(plain("A"))
		// As if a batch had been settled without its recipients.
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_batches SET settled_at = claimed_at, settled_by = 'nobody' WHERE id = '%s'`, open.Batch))
		require.NotEmpty(w.t, w.faults())
		stranded, err := w.Store.Sweep(w.ctx())
		require.NoError(w.t, err)
		require.Equal(w.t, 25, stranded)
		w.check()
		require.Equal(w.t, 80, w.send(term, school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
	}},
	{"Sweep/ends what has ended", func(w *world) {
		id := w.notice("A", 3)
		w.send(w.term("A", "x"), school.Accepted)
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_clusters SET ended_at = NULL, job_status = 'IN_PROGRESS', success_count = 1, fail_count = 2 WHERE id = %d`, id))
		_, err := w.Store.Sweep(w.ctx())
		require.NoError(w.t, err)
		require.Equal(w.t, []any{school.NoticeCompleted, 3}, []any{w.progress(id).Status, w.progress(id).Counts.Success})
	}},
}
