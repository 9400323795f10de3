package storetest

import (
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// failing makes a notice of n recipients all of which are recorded with the outcome.
func (w *world) failing(n *school.Notice, size int, outcome func(int, *school.Work) school.Event) (id int64, term school.Term) {
	w.t.Helper()
	id = w.accept(n, devices(size))
	term = w.term(n.School, "x")
	for work := w.page(term, 1000).Work; len(work) > 0; work = w.page(term, 1000).Work {
		w.record(term, w.claim(term, work), outcome)
	}
	return id, term
}

func (w *world) requeue(o school.RequeueOrder) school.Requeued {
	w.t.Helper()
	if o.Limit == 0 {
		o.Limit = 1000
	}
	r, err := w.Store.Requeue(w.ctx(), o)
	require.NoError(w.t, err)
	return r
}

func ofNotice(id int64) school.RequeueOrder {
	return school.RequeueOrder{FailureFilter: school.FailureFilter{Notice: id}}
}

// twoCodes fails every third recipient with one code and the others with another.
func twoCodes(i int, _ *school.Work) school.Event {
	if i%3 == 0 {
		return school.Event{Outcome: school.Mismatch, Code: codes[school.Mismatch]}
	}
	return school.Event{Outcome: school.Rejected, Code: codes[school.Rejected]}
}

var requeueTests = []test{
	{"Requeue/opens an ended notice again and does what the domain says", func(w *world) {
		id, term := w.failing(plain("A"), 9, twoCodes)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		r := w.requeue(ofNotice(id))
		require.Equal(w.t, school.Requeued{Recipients: 9, Schools: []string{"A"}}, r)
		p := w.progress(id)
		require.Equal(w.t, school.NoticeInProgress, p.Status)
		require.Zero(w.t, p.EndedAt)
		require.Equal(w.t, school.Counts{Total: 9, RetryPending: 9}, p.Counts)
		w.check()
		want, err := school.Requeue(school.Standing{State: school.PermanentFail, Attempts: 1, Retries: 2, Orphanings: 1})
		require.NoError(w.t, err)
		w.sameAs(want, id, 1)

		in, err := w.Store.WorkIn(w.ctx(), "A")
		require.NoError(w.t, err)
		require.Zero(w.t, in, "it is due now")
		work := w.page(term, 100).Work
		require.Len(w.t, work, 9)
		require.Equal(w.t, school.Standing{State: school.RetryPending, Attempts: 1}, work[0].Standing)
		require.Equal(w.t, []any{school.Again, 1, false}, []any{work[0].Kind, work[0].Requeued, work[0].Uncertain})
		w.record(term, w.claim(term, work), all(school.Accepted))
		require.Equal(w.t, school.Counts{Total: 9, RetrySuccess: 9}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		require.Equal(w.t, school.Requeued{}, w.requeue(ofNotice(id)), "again changes nothing")
	}},
	{"Requeue/counts anew, and goes on counting how often", func(w *world) {
		id, term := w.failing(plain("A"), 1, all(school.Rejected))
		for n := 1; n <= 3; n++ {
			require.Equal(w.t, 1, w.requeue(ofNotice(id)).Recipients)
			for retry := range policy.Max + 1 {
				work := w.page(term, 10).Work
				require.Len(w.t, work, 1)
				require.Equal(w.t, []int{n, retry}, []int{work[0].Requeued, work[0].Standing.Retries})
				w.record(term, w.claim(term, work), all(school.Unavailable))
				w.Elapse(w.t, time.Hour)
			}
			require.Equal(w.t, "PERMANENT_FAIL=1", w.states(id))
		}
		rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 1})
		require.NoError(w.t, err)
		require.Equal(w.t, []any{13, school.RetriesExhausted}, []any{rows[0].Attempts, rows[0].Reason})
	}},
	{"Requeue/selects by school, by notice, by code and by reason", func(w *world) {
		a, _ := w.failing(plain("A"), 9, twoCodes)
		b, _ := w.failing(plain("A"), 9, twoCodes)
		c, _ := w.failing(plain("B"), 9, twoCodes)
		order := func(schoolID string, notice int64, code string) school.RequeueOrder {
			return school.RequeueOrder{FailureFilter: school.FailureFilter{School: schoolID, Notice: notice, Code: code}}
		}
		dry := order("", 0, "")
		dry.DryRun = true
		require.Equal(w.t, school.Requeued{Recipients: 27}, w.requeue(dry))
		require.Equal(w.t, "PERMANENT_FAIL=9", w.states(a))
		require.Equal(w.t, school.Requeued{}, w.requeue(order("C", 0, "")))
		require.Equal(w.t, school.Requeued{}, w.requeue(order("B", a, "")))
		require.Equal(w.t, school.Requeued{}, w.requeue(order("", 0, "UNREGISTERED")))
		require.Equal(w.t, school.Requeued{Recipients: 3, Schools: []string{"A"}}, w.requeue(order("", a, "SENDER_ID_MISMATCH")))
		require.Equal(w.t, []string{"PERMANENT_FAIL=6 RETRY_PENDING=3", "PERMANENT_FAIL=9", "PERMANENT_FAIL=9"}, []string{w.states(a), w.states(b), w.states(c)})
		require.Equal(w.t, school.Requeued{Recipients: 12, Schools: []string{"A"}}, w.requeue(order("A", 0, "REJECTED")))
		require.Equal(w.t, []string{"RETRY_PENDING=9", "PERMANENT_FAIL=3 RETRY_PENDING=6", "PERMANENT_FAIL=9"}, []string{w.states(a), w.states(b), w.states(c)})
		require.Equal(w.t, school.Requeued{Recipients: 6, Schools: []string{"A", "B"}}, w.requeue(order("", 0, "SENDER_MISMATCH")))
		require.Equal(w.t, school.Requeued{Recipients: 6, Schools: []string{"B"}}, w.requeue(order("", 0, "")))
	}},
	{"Requeue/only of what failed for good", func(w *world) {
		id, _, _ := w.inEveryState(plain("A"))
		require.Equal(w.t, school.Requeued{}, w.requeue(ofNotice(id)))
		require.Equal(w.t, "IN_PROGRESS=25 PENDING=50 RETRY_PENDING=5 SUCCESS=20", w.states(id))
	}},
	{"interleaving 15: Requeue/beside an open batch leaves it its recipients", func(w *world) {
		id := w.notice("A", 10)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 4).Work), all(school.Rejected))
		open := w.claim(term, w.page(term, 4).Work)
		require.Equal(w.t, 4, w.requeue(ofNotice(id)).Recipients)
		w.check()
		require.Equal(w.t, "IN_PROGRESS=4 PENDING=2 RETRY_PENDING=4", w.states(id))
		w.record(term, open, all(school.Rejected))
		require.Equal(w.t, "PENDING=2 PERMANENT_FAIL=4 RETRY_PENDING=4", w.states(id))
		require.Equal(w.t, 6, w.send(term, school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
	}},
	{"interleaving 15: Requeue/leaves what was cancelled, has expired, was purged, or whose school is gone", func(w *world) {
		rejected := all(school.Rejected)
		cancelled, _ := w.failing(plain("A"), 3, func(i int, k *school.Work) school.Event {
			return school.Event{Outcome: []school.Outcome{school.Rejected, school.Unavailable, school.Unavailable}[i], Code: "X"}
		})
		require.NoError(w.t, w.Store.Cancel(w.ctx(), cancelled))
		over := plain("A")
		over.ExpiresAt = time.Now().Add(time.Hour)
		expired, _ := w.failing(over, 4, rejected) // ended before it expired
		w.Elapse(w.t, 2*time.Hour)
		purged, _ := w.failing(plain("A"), 5, rejected)
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_clusters SET purged_at = ended_at WHERE id = %d`, purged))
		deleted, _ := w.failing(plain("B"), 6, rejected)
		require.NoError(w.t, w.Store.DeleteSchool(w.ctx(), "B"))
		sound, _ := w.failing(plain("A"), 7, rejected)
		for _, dry := range []bool{true, false} {
			r := w.requeue(school.RequeueOrder{DryRun: dry})
			require.Equal(w.t, school.RequeueLeft{Cancelled: 3, Expired: 4, Purged: 5, SchoolDeleted: 6}, r.Left)
			require.Equal(w.t, 7, r.Recipients)
		}
		require.Equal(w.t, "RETRY_PENDING=7", w.states(sound))
		for _, id := range []int64{cancelled, expired, purged, deleted} {
			o := ofNotice(id)
			o.Limit = 10
			_, err := w.Store.Requeue(w.ctx(), o)
			require.ErrorIs(w.t, err, school.ErrConflict)
			require.NotZero(w.t, w.progress(id).EndedAt)
		}
		_, err := w.Store.Requeue(w.ctx(), school.RequeueOrder{FailureFilter: school.FailureFilter{Notice: 12345}, Limit: 1})
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"interleaving 15: Requeue/what may have arrived of an at-most-once notice only where it is named", func(w *world) {
		outcomes := func(i int, _ *school.Work) school.Event {
			if i < 3 {
				return school.Event{Outcome: school.Unknown, Code: "TIMEOUT"}
			}
			return school.Event{Outcome: school.Rejected, Code: "TIMEOUT"}
		}
		once := plain("A")
		once.Delivery = school.AtMostOnce
		id, _ := w.failing(once, 5, outcomes)
		o := ofNotice(id)
		o.DryRun = true
		require.Equal(w.t, school.Requeued{Recipients: 2, Left: school.RequeueLeft{OutcomeUnknown: 3}}, w.requeue(o))
		o.DryRun, o.Code = false, "TIMEOUT"
		require.Equal(w.t, school.Requeued{Recipients: 2, Left: school.RequeueLeft{OutcomeUnknown: 3}, Schools: []string{"A"}}, w.requeue(o))
		require.Equal(w.t, "PERMANENT_FAIL=3 RETRY_PENDING=2", w.states(id))
		o.Code = string(school.OutcomeUnknown)
		require.Equal(w.t, school.Requeued{Recipients: 3, Schools: []string{"A"}}, w.requeue(o))
		// Whoever asked for at least once has asked for this.
		again, term := w.failing(plain("B"), 1, all(school.Unknown))
		for range policy.Max {
			w.Elapse(w.t, time.Hour)
			w.record(term, w.claim(term, w.page(term, 10).Work), all(school.Unknown))
		}
		require.Equal(w.t, "PERMANENT_FAIL=1", w.states(again))
		require.Equal(w.t, 1, w.requeue(ofNotice(again)).Recipients)
	}},
	{"Requeue/a big notice in steps and calls, none twice, what fails meanwhile not again", func(w *world) {
		const size = 13_000
		other, _ := w.failing(plain("A"), 3, all(school.Rejected))
		id := w.notice("A", size)
		require.NoError(w.t, w.Store.Pause(w.ctx(), "A"))
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_cluster_tokens SET job_status = 'PERMANENT_FAIL', reason = 'REJECTED', attempts = 1,
			processed_at = (SELECT created_at FROM push_clusters WHERE id = %d) WHERE cluster_id = %d AND seq <= 12001 AND (seq < 4000 OR seq > 11998)`, id, id))
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_cluster_tokens SET job_status = 'SUCCESS', attempts = 1 WHERE cluster_id = %d AND job_status = 'PENDING'`, id))
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_clusters SET frontier = %d, permanent_fail_count = 4002, success_count = %d, job_status = 'COMPLETED', ended_at = created_at WHERE id = %d`, size, size-4002, id))
		w.check()
		o := school.RequeueOrder{FailureFilter: school.FailureFilter{School: "A"}, Limit: 100}
		first := w.requeue(o)
		require.Equal(w.t, []any{3 + 3999, true}, []any{first.Recipients, first.More}, "a step is not cut")
		w.check()
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_cluster_tokens SET job_status = 'PERMANENT_FAIL', reason = 'REJECTED', retry_after = NULL, processed_at = processed_at + (
			SELECT send_deadline - claimed_at FROM push_batches LIMIT 1) WHERE cluster_id = %d AND seq = 7`, id))
		w.Exec(w.t, fmt.Sprintf(`UPDATE push_clusters SET permanent_fail_count = permanent_fail_count + 1, retry_pending_count = retry_pending_count - 1 WHERE id = %d`, id))
		o.From = first.Next
		second := w.requeue(o)
		require.Equal(w.t, 3, second.Recipients)
		if second.More {
			o.From = second.Next
			last := w.requeue(o)
			require.Equal(w.t, []any{0, false}, []any{last.Recipients, last.More})
		}
		require.Equal(w.t, "RETRY_PENDING=3", w.states(other))
		require.Equal(w.t, "PERMANENT_FAIL=1 RETRY_PENDING=4001 SUCCESS=8998", w.states(id))
		require.Equal(w.t, [][]string{{"4002"}}, w.Query(w.t, fmt.Sprintf(`SELECT count(*) FROM push_cluster_tokens WHERE cluster_id = %d AND requeued = 1`, id)))
	}},
	{"Requeue/racing a cancel has one winner", func(w *world) {
		for range 15 {
			id, term := w.failing(plain("A"), 20, all(school.Rejected))
			more := w.notice("A", 5)
			var (
				wg     sync.WaitGroup
				r      school.Requeued
				err    error
				closed error
			)
			wg.Go(func() {
				r, err = w.Store.Requeue(w.ctx(), school.RequeueOrder{FailureFilter: school.FailureFilter{Notice: id}, Limit: 100})
			})
			wg.Go(func() { closed = w.Store.Cancel(w.ctx(), id) })
			wg.Wait()
			w.check()
			require.NoError(w.t, err)
			require.Equal(w.t, 20, r.Recipients)
			if closed == nil {
				require.Equal(w.t, "PERMANENT_FAIL=20", w.states(id))
				require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
			} else {
				require.ErrorIs(w.t, closed, school.ErrConflict)
				require.Equal(w.t, "RETRY_PENDING=20", w.states(id))
			}
			w.send(term, school.Accepted)
			require.Equal(w.t, "SUCCESS=5", w.states(more))
		}
	}},
	{"Requeue/by several at once puts each back once", func(w *world) {
		id, _ := w.failing(plain("A"), 300, all(school.Rejected))
		var wg sync.WaitGroup
		sums := make([]int, 4)
		for i := range sums {
			wg.Go(func() {
				r, err := w.Store.Requeue(w.ctx(), school.RequeueOrder{FailureFilter: school.FailureFilter{School: "A"}, Limit: 1000})
				if err != nil {
					w.t.Error(err)
				}
				sums[i] = r.Recipients
			})
		}
		wg.Wait()
		require.Equal(w.t, 300, sums[0]+sums[1]+sums[2]+sums[3])
		require.Equal(w.t, [][]string{{"300"}}, w.Query(w.t, fmt.Sprintf(`SELECT count(*) FROM push_cluster_tokens WHERE cluster_id = %d AND requeued = 1`, id)))
	}},
	{"Failures/are listed in groups, page by page", func(w *world) {
		old, _ := w.failing(plain("A"), 9, twoCodes)
		w.failing(plain("A"), 5, all(school.Accepted))
		lately, _ := w.failing(plain("B"), 3, all(school.Unknown)) // waits, has not failed
		require.NoError(w.t, w.Store.Cancel(w.ctx(), lately))
		young, _ := w.failing(plain("A"), 4, twoCodes)
		line := func(f school.Failure) string {
			require.Equal(w.t, "T", f.Title)
			require.InDelta(w.t, 0, time.Since(f.LastAt), float64(time.Minute))
			return fmt.Sprintf("%s %d %s %s %d", f.School, f.Notice, f.Code, f.Reason, f.Recipients)
		}
		want := []string{
			fmt.Sprintf("A %d INVALID_ARGUMENT REJECTED 2", young), fmt.Sprintf("A %d SENDER_ID_MISMATCH SENDER_MISMATCH 2", young),
			fmt.Sprintf("B %d TIMEOUT CANCELLED 3", lately),
			fmt.Sprintf("A %d INVALID_ARGUMENT REJECTED 6", old), fmt.Sprintf("A %d SENDER_ID_MISMATCH SENDER_MISMATCH 3", old),
		}
		for limit := 1; limit <= 6; limit++ {
			var got []string
			for after := (school.FailureKey{}); ; {
				page, err := w.Store.Failures(w.ctx(), school.FailureFilter{}, after, limit)
				require.NoError(w.t, err)
				require.LessOrEqual(w.t, len(page.Items), limit)
				for _, f := range page.Items {
					got = append(got, line(f))
				}
				if !page.More {
					break
				}
				after = page.Next
			}
			require.Equal(w.t, want, got, "limit %d", limit)
		}
		for filter, n := range map[school.FailureFilter]int{{School: "A"}: 4, {School: "B"}: 1, {Notice: old}: 2, {Code: "REJECTED"}: 2, {School: "A", Notice: young, Code: "SENDER_ID_MISMATCH"}: 1, {Code: "X"}: 0} {
			page, err := w.Store.Failures(w.ctx(), filter, school.FailureKey{}, 100)
			require.NoError(w.t, err)
			require.Len(w.t, page.Items, n, "%+v", filter)
			require.False(w.t, page.More)
		}
		_, err := w.Store.Failures(w.ctx(), school.FailureFilter{}, school.FailureKey{}, 1001)
		var field *school.FieldError
		require.ErrorAs(w.t, err, &field)
	}},
}
