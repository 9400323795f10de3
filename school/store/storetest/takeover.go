package storetest

import (
	"fmt"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var takeoverTests = []test{
	{"Takeover/settles only what cannot be in flight any more", func(w *world) {
		id := w.notice("A", 30)
		x := w.term("A", "x")
		first := w.claim(x, w.page(x, 10).Work)
		w.Elapse(w.t, longest)
		w.claim(x, w.page(x, 10).Work)
		w.Elapse(w.t, recording+time.Second)
		y := w.term("A", "y")
		require.Len(w.t, y.Unsettled, 2)
		require.LessOrEqual(w.t, y.Unsettled[0].Remaining, time.Duration(0))
		o, err := w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		require.Equal(w.t, []school.OpenBatch{{ID: first.Batch, Fence: x.Fence, Cycle: 1, Size: 10}}, o.Batches)
		require.Equal(w.t, 10, o.Recipients)
		require.InDelta(w.t, longest-time.Second, o.Wait, float64(5*time.Second))
		require.Equal(w.t, "IN_PROGRESS=10 PENDING=10 RETRY_PENDING=10", w.states(id))
		require.Equal(w.t, [][]string{{"y", "taken_over"}}, w.Query(w.t, `SELECT settled_by, settled_as FROM push_batches WHERE settled_at IS NOT NULL`))
		w.check()

		w.Elapse(w.t, longest)
		o, err = w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		require.Equal(w.t, []any{10, time.Duration(0), 1}, []any{o.Recipients, o.Wait, len(o.Batches)})
		o, err = w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		require.Equal(w.t, school.Orphans{}, o)
		// At once and without using a retry.
		p := w.page(y, 100)
		require.Len(w.t, p.Work, 30)
		require.Equal(w.t, school.Standing{State: school.RetryPending, Attempts: 1, Orphanings: 1}, p.Work[0].Standing)
		require.Equal(w.t, 30, w.send(y, school.Accepted))
		require.Equal(w.t, school.Counts{Total: 30, Success: 10, RetrySuccess: 20}, w.progress(id).Counts)
	}},
	{"Takeover/by an older owner is fenced and changes nothing", func(w *world) {
		id := w.notice("A", 10)
		x := w.term("A", "x")
		w.claim(x, w.page(x, 5).Work)
		y := w.term("A", "y")
		w.term("A", "z")
		w.Elapse(w.t, time.Minute)
		_, err := w.Store.Takeover(w.ctx(), y, policy)
		require.ErrorIs(w.t, err, school.ErrFenced)
		require.Equal(w.t, "IN_PROGRESS=5 PENDING=5", w.states(id))
		require.Equal(w.t, [][]string{{"1"}}, w.Query(w.t, `SELECT count(*) FROM push_batches WHERE settled_at IS NULL`))
	}},
	{"Takeover/leaves its own term's batches alone", func(w *world) {
		w.notice("A", 10)
		x := w.term("A", "x")
		w.claim(x, w.page(x, 5).Work)
		w.Elapse(w.t, time.Minute)
		o, err := w.Store.Takeover(w.ctx(), x, policy)
		require.NoError(w.t, err)
		require.Equal(w.t, school.Orphans{}, o)
	}},
	{"Takeover/goes on in a paused school", func(w *world) {
		w.notice("A", 10)
		x := w.term("A", "x")
		w.claim(x, w.page(x, 5).Work)
		require.NoError(w.t, w.Store.Pause(w.ctx(), "A"))
		w.Elapse(w.t, time.Minute)
		o, err := w.Store.Takeover(w.ctx(), w.term("A", "y"), policy)
		require.NoError(w.t, err)
		require.Equal(w.t, 5, o.Recipients)
	}},
	{"Takeover/keeps a rest that the orphaned batch had set", func(w *world) {
		w.notice("A", 10)
		x := w.term("A", "x")
		c := w.claimOf(w.page(x, 5).Work, 5000)
		c.Grant.Filled = true
		require.NoError(w.t, w.Store.Claim(w.ctx(), x, c))
		w.Elapse(w.t, 20*time.Second)
		_, err := w.Store.Takeover(w.ctx(), w.term("A", "y"), policy)
		require.NoError(w.t, err)
		l := w.ledger("A")
		require.Equal(w.t, []any{5000, true}, []any{l.Attempted, l.Filled})
		require.InDelta(w.t, longest+rule.Rest-20*time.Second, l.Resting, float64(5*time.Second))
	}},
	{"Takeover/does to a recipient what the domain's orphaning does", func(w *world) {
		type standing struct {
			school.Standing
			delivery school.Delivery
			closing  school.Reason
		}
		var cases []standing
		for _, state := range []school.State{school.Pending, school.RetryPending} {
			for _, delivery := range []school.Delivery{school.AtLeastOnce, school.AtMostOnce} {
				for _, closing := range []school.Reason{"", school.Cancelled, school.Expired} {
					for _, orphanings := range []int{0, 1, school.MaxOrphanings - 2, school.MaxOrphanings - 1} {
						s := standing{school.Standing{State: state}, delivery, closing}
						if state == school.RetryPending {
							s.Attempts, s.Retries, s.Orphanings = orphanings+2, 1, orphanings
						} else if orphanings > 0 {
							continue
						}
						cases = append(cases, s)
					}
				}
			}
		}
		for i, c := range cases {
			id := fmt.Sprint("school-", i)
			n := plain(id)
			n.Delivery = c.delivery
			if c.closing == school.Expired {
				n.ExpiresAt = time.Now().Add(20 * time.Minute)
			}
			notice := w.accept(n, devices(3))
			x := w.term(id, "x")
			if c.State == school.RetryPending {
				w.record(x, w.claim(x, w.page(x, 2).Work), all(school.Unavailable))
				w.Exec(w.t, fmt.Sprintf(`UPDATE push_cluster_tokens SET attempts = %d, retry_count = %d, orphan_count = %d WHERE cluster_id = %d AND seq <= 2`,
					c.Attempts, c.Retries, c.Orphanings, notice))
				w.Elapse(w.t, 2*time.Minute)
			}
			work := w.page(x, 2).Work
			require.Equal(w.t, c.Standing, work[0].Standing)
			w.claim(x, work)
			switch c.closing {
			case school.Cancelled:
				require.NoError(w.t, w.Store.Cancel(w.ctx(), notice))
			case school.Expired:
				w.Elapse(w.t, time.Hour)
				_, err := w.Store.Expire(w.ctx(), 100)
				require.NoError(w.t, err)
			}
			w.Elapse(w.t, time.Minute)
			o, err := w.Store.Takeover(w.ctx(), w.term(id, "y"), policy)
			require.NoError(w.t, err)
			require.Equal(w.t, 2, o.Recipients)
			want, err := school.Next(c.Standing, school.Event{Outcome: school.OrphanedUnsure, Code: "ORPHANED", Closing: c.closing, Delivery: c.delivery}, policy)
			require.NoError(w.t, err)
			w.sameAs(want, notice, 1, "%+v", c)
			w.sameAs(want, notice, 2, "%+v", c)
		}
	}},
}
