package storetest

import (
	"fmt"
	"slices"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var pageTests = []test{
	{"Page/3,000 waiting are met in pages of 1,000, none skipped, none twice", func(w *world) {
		id := w.notice("A", 3000)
		term := w.term("A", "x")
		next := 1
		for range 3 {
			p := w.page(term, 1000)
			require.Len(w.t, p.Work, 1000)
			require.True(w.t, p.More)
			for len(p.Work) > 0 {
				work := p.Work[:200]
				p.Work = p.Work[200:]
				for i := range work {
					require.Equal(w.t, next, work[i].Seq)
					next++
				}
				w.record(term, w.claim(term, work), all(school.Accepted))
			}
		}
		p := w.page(term, 1000)
		require.Empty(w.t, p.Work)
		require.False(w.t, p.More)
		require.Equal(w.t, school.Counts{Total: 3000, Success: 3000}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
	}},
	{"Page/rows that leave and come back while it is read make no other be skipped", func(w *world) {
		w.notice("A", 1000)
		term := w.term("A", "x")
		met := map[int]int{}
		for round := 0; ; round++ {
			p := w.page(term, 300)
			if len(p.Work) == 0 {
				break
			}
			c := w.claim(term, p.Work[:min(100, len(p.Work))])
			for i := range c.Work {
				met[c.Work[i].Seq]++
			}
			// Every third comes back at once, the first time.
			w.record(term, c, func(i int, k *school.Work) school.Event {
				if k.Seq%3 == 0 && k.Kind == school.First {
					return school.Event{Outcome: school.Unavailable}
				}
				return school.Event{Outcome: school.Accepted}
			})
			w.Elapse(w.t, 2*time.Minute)
			require.Less(w.t, round, 100)
		}
		require.Len(w.t, met, 1000)
		for seq, n := range met {
			want := 1
			if seq%3 == 0 {
				want = 2
			}
			require.Equal(w.t, want, n, "recipient %d", seq)
		}
	}},
	{"Page/what is not due yet blocks nothing behind it", func(w *world) {
		id := w.notice("A", 300)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 200).Work), all(school.Unavailable))
		p := w.page(term, 1000)
		require.Len(w.t, p.Work, 100)
		require.Equal(w.t, 201, p.Work[0].Seq)
		require.InDelta(w.t, time.Minute, p.NextDue, float64(15*time.Second))
		w.Elapse(w.t, 2*time.Minute)
		p = w.page(term, 1000)
		require.Len(w.t, p.Work, 300)
		require.Equal(w.t, school.Again, p.Work[0].Kind)
		require.Equal(w.t, school.Standing{State: school.RetryPending, Attempts: 1, Retries: 1}, p.Work[0].Standing)
		require.Equal(w.t, school.Counts{Total: 300, Waiting: 100, RetryPending: 200}, w.progress(id).Counts)
		require.Zero(w.t, p.NextDue)
	}},
	{"Page/many small notices fill one page and one batch", func(w *world) {
		var ids []int64
		for range 120 {
			ids = append(ids, w.notice("A", 2))
		}
		term := w.term("A", "x")
		p := w.page(term, 200)
		require.Len(w.t, p.Work, 200)
		require.True(w.t, p.More)
		c := w.claim(term, p.Work)
		require.Equal(w.t, [][]string{{"100"}}, w.Query(w.t, `SELECT count(*) FROM push_batch_ranges`))
		w.check()
		w.record(term, c, all(school.Accepted))
		for i, id := range ids {
			want := school.NoticePending
			if i < 100 {
				want = school.NoticeCompleted
			}
			require.Equal(w.t, want, w.progress(id).Status)
		}
	}},
	{"interleaving 15: Page/urgent comes first, then due retries, then by priority and age", func(w *world) {
		old := w.notice("A", 2)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 1).Work), all(school.Unavailable))
		low := plain("A")
		low.Priority = school.Low
		lowID := w.accept(low, devices(1))
		young := w.notice("A", 1)
		urgent := plain("A")
		urgent.Priority = school.Urgent
		urgentID := w.accept(urgent, devices(2))
		w.Elapse(w.t, 5*time.Minute)
		p := w.page(term, 100)
		var got []int64
		for i := range p.Work {
			got = append(got, p.Work[i].Notice.ID)
		}
		require.Equal(w.t, []int64{urgentID, urgentID, old, old, young, lowID}, got)
		require.Equal(w.t, school.Again, p.Work[2].Kind)
		require.Equal(w.t, school.First, p.Work[3].Kind)
		require.Same(w.t, p.Work[2].Notice, p.Work[3].Notice)
		// A page cut short keeps the order.
		require.Equal(w.t, got[:3], noticesOf(w.page(term, 3).Work))
	}},
	{"interleaving 15: Claim/that leaves an urgent notice behind is stale and writes nothing", func(w *world) {
		big := w.notice("A", 10)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 2).Work), all(school.Unavailable)) // 1 and 2 are due again later
		w.Elapse(w.t, 5*time.Minute)
		page := w.page(term, 100).Work // 1 and 2 again, 3 … 10
		claim := func(work []school.Work, first bool) error {
			c := w.claimOf(work, 10)
			c.UrgentFirst = first
			return w.Store.Claim(w.ctx(), term, c)
		}
		later := plain("A")
		later.Priority, later.ScheduledAt = school.Urgent, time.Now().Add(time.Hour)
		w.accept(later, devices(1))
		other := plain("B")
		other.Priority = school.Urgent
		w.accept(other, devices(1))
		require.NoError(w.t, claim(page[:1], true), "one that is not due yet, or of another school, is not waited for")
		urgent := plain("A")
		urgent.Priority = school.Urgent
		id := w.accept(urgent, devices(3))
		for about, work := range map[string][]school.Work{"a retry": page[1:2], "a first attempt": page[2:5]} {
			require.ErrorIs(w.t, claim(work, true), school.ErrStalePage, about)
		}
		require.Equal(w.t, "IN_PROGRESS=1 PENDING=8 RETRY_PENDING=1", w.states(big))
		w.check()
		require.NoError(w.t, claim(page[1:3], false), "whoever does not ask for it")
		fresh := w.page(term, 100).Work
		require.Equal(w.t, []int64{id, id, id, big}, noticesOf(fresh[:4]))
		require.NoError(w.t, claim(fresh[:2], true), "a part of it leaves the rest behind for nothing")
		require.ErrorIs(w.t, claim(fresh[3:], true), school.ErrStalePage)
		require.NoError(w.t, claim(fresh[2:], true), "with all of it the rest may go along")
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		again := plain("A")
		again.Priority = school.Urgent
		gone := w.accept(again, devices(1))
		require.NoError(w.t, w.Store.Cancel(w.ctx(), gone))
		w.notice("A", 1)
		require.NoError(w.t, claim(w.page(term, 100).Work, true), "one that was cancelled is not waited for")
	}},
	{"Page/a notice scheduled for later is not met before its time", func(w *world) {
		n := plain("A")
		n.ScheduledAt = time.Now().Add(time.Hour)
		id := w.accept(n, devices(3))
		term := w.term("A", "x")
		p := w.page(term, 10)
		require.Empty(w.t, p.Work)
		require.InDelta(w.t, time.Hour, p.NextDue, float64(time.Minute))
		b, err := w.Store.School(w.ctx(), "A")
		require.NoError(w.t, err)
		require.Equal(w.t, []int{3, 0}, []int{b.Scheduled, b.Waiting})
		due, err := w.Store.Due(w.ctx(), time.Minute)
		require.NoError(w.t, err)
		require.Empty(w.t, due)
		due, err = w.Store.Due(w.ctx(), 2*time.Hour)
		require.NoError(w.t, err)
		require.Len(w.t, due, 1)
		require.InDelta(w.t, time.Hour, due[0].In, float64(time.Minute))
		w.Elapse(w.t, time.Hour+time.Minute)
		work := w.page(term, 10).Work
		require.Len(w.t, work, 3)
		require.InDelta(w.t, time.Minute, work[0].Notice.DueFor, float64(30*time.Second), "since its own time, not since it was accepted")
		require.Equal(w.t, 3, w.send(term, school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
	}},
	{"Page/a device switched off in the registry is skipped, one retired is not", func(w *world) {
		w.notice("A", 4)
		w.notice("B", 4)
		w.Device(w.t, "A", "token-0000002", false, false)
		w.Device(w.t, "A", "token-0000003", false, true)
		w.Device(w.t, "A", "token-0000004", true, false)
		skips := func(schoolID string) (off []int) {
			for _, k := range w.page(w.term(schoolID, "x"), 10).Work {
				if k.Skip != "" {
					require.Equal(w.t, school.Disabled, k.Skip)
					off = append(off, k.Seq)
				}
			}
			return off
		}
		require.Equal(w.t, []int{2}, skips("A"))
		require.Empty(w.t, skips("B"))
	}},
	{"Page/duplicates keep the range gapless", func(w *world) {
		id := w.accept(plain("A"), list(
			school.NewRecipient{Token: "a"}, school.NewRecipient{Token: "a"}, school.NewRecipient{Token: "b"},
			school.NewRecipient{Token: "b"}, school.NewRecipient{Token: "a"}))
		term := w.term("A", "x")
		p := w.page(term, 10)
		var settled []bool
		for i := range p.Work {
			settled = append(settled, p.Work[i].Settled)
		}
		require.Equal(w.t, []bool{false, true, false, true, true}, settled)
		// Without the duplicates at its end it ends all the same.
		w.record(term, w.claim(term, p.Work[:3]), all(school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		require.Empty(w.t, w.page(term, 10).Work)
	}},
	{"interleaving 8: Page/a notice that commits after a later one was sent is met", func(w *world) {
		const size = 5000
		reading, proceed, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		older := plain("A")
		go func() {
			_, err := w.Store.Accept(w.ctx(), older, size, func(yield func(school.NewRecipient, error) bool) {
				for i := range size {
					if i == size-1 {
						close(reading)
						<-proceed
					}
					if !yield(school.NewRecipient{Token: fmt.Sprint("token-", i)}, nil) {
						return
					}
				}
			})
			done <- err
		}()
		<-reading
		younger := w.notice("A", 300)
		term := w.term("A", "x")
		require.Equal(w.t, 300, w.send(term, school.Accepted))
		close(proceed)
		require.NoError(w.t, <-done)
		// Its id is made when its transaction begins, or when it ends: here it is
		// made the older one in any case, as a slower clock would make it.
		id := younger - 1
		for _, sql := range []string{`UPDATE push_clusters SET id = %d WHERE id = %d`, `UPDATE push_cluster_tokens SET cluster_id = %d WHERE cluster_id = %d`} {
			w.Exec(w.t, fmt.Sprintf(sql, id, older.ID))
		}
		due, err := w.Store.Due(w.ctx(), 0)
		require.NoError(w.t, err)
		require.Len(w.t, due, 1)
		work := w.page(term, 10).Work
		require.Len(w.t, work, 10)
		require.Equal(w.t, id, work[0].Notice.ID)
		w.record(term, w.claim(term, work), all(school.Accepted))
		require.Equal(w.t, school.Counts{Total: size, Waiting: size - 10, Success: 10}, w.progress(id).Counts)
	}},
	{"interleaving 6: Due/names a school for each kind of work and of a paused one only what is orphaned", func(w *world) {
		due := func() []string {
			list, err := w.Store.Due(w.ctx(), 0)
			require.NoError(w.t, err)
			var ids []string
			for _, d := range list {
				require.Zero(w.t, d.In)
				ids = append(ids, d.School)
			}
			slices.Sort(ids)
			return ids
		}
		for _, id := range []string{"first", "orphan", "paused", "retry"} {
			w.notice(id, 1)
		}
		_, _, err := w.Store.PutSchool(w.ctx(), "idle", school.SchoolChange{})
		require.NoError(w.t, err)
		require.NoError(w.t, w.Store.Pause(w.ctx(), "paused"))
		retry, orphan := w.term("retry", "x"), w.term("orphan", "x")
		w.record(retry, w.claim(retry, w.page(retry, 1).Work), all(school.Unavailable))
		w.claim(orphan, w.page(orphan, 1).Work)
		w.notice("orphan", 1)
		require.NoError(w.t, w.Store.Pause(w.ctx(), "orphan"))
		require.Equal(w.t, []string{"first"}, due())
		w.Elapse(w.t, 2*time.Minute)
		require.Equal(w.t, []string{"first", "orphan", "retry"}, due())
		require.NoError(w.t, w.Store.Resume(w.ctx(), "paused"))
		require.Equal(w.t, []string{"first", "orphan", "paused", "retry"}, due())
		list, err := w.Store.Due(w.ctx(), 0)
		require.NoError(w.t, err)
		require.InDelta(w.t, 2*time.Minute, list[0].Since, float64(30*time.Second))
	}},
}

func noticesOf(work []school.Work) (ids []int64) {
	for i := range work {
		ids = append(ids, work[i].Notice.ID)
	}
	return ids
}
