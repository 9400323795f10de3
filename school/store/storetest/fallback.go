package storetest

import (
	"fmt"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// withFallback is a notice of n recipients with a fallback.
func (w *world) withFallback(n int) int64 {
	w.t.Helper()
	notice := plain("A")
	notice.Fallback = "call the school"
	return w.accept(notice, devices(n))
}

// failed lets all n recipients of a new notice fail for good, and returns it.
func (w *world) failed(n int) int64 {
	w.t.Helper()
	id := w.withFallback(n)
	require.Equal(w.t, n, w.send(w.term("A", "x"), school.Gone))
	return id
}

func (w *world) claimFallbacks(limit int, lease time.Duration) []school.Fallback {
	w.t.Helper()
	list, err := w.Store.ClaimFallbacks(w.ctx(), limit, lease)
	require.NoError(w.t, err)
	return list
}

func (w *world) settleFallback(f school.Fallback, p school.Posted) {
	w.t.Helper()
	require.NoError(w.t, w.Store.SettleFallback(w.ctx(), f, p))
}

func (w *world) fallbacks(id int64) school.FallbackCounts {
	w.t.Helper()
	counts := w.progress(id).Fallbacks
	require.NotNil(w.t, counts)
	return *counts
}

var fallbackTests = []test{
	{"Fallback/the text is kept with the notice, however the notice is stored", func(w *world) {
		for _, size := range []int{1, 3000} { // stored at once, and streamed
			n := plain("A")
			n.Fallback, n.IdempotencyKey, n.RequestHash = "one", fmt.Sprint("key-", size), []byte{1}
			id := w.accept(n, devices(size))
			again := *n
			again.Fallback = "two" // only the hash says what the request was
			r, err := w.Store.Accept(w.ctx(), &again, 0, devices(size))
			require.NoError(w.t, err)
			require.True(w.t, r.Replay)
			require.Equal(w.t, id, r.ID)
			p := w.progress(id)
			require.Equal(w.t, "one", p.Notice.Fallback)
			require.Equal(w.t, &school.FallbackCounts{}, p.Fallbacks)
		}
		other := w.notice("A", 1)
		require.Nil(w.t, w.progress(other).Fallbacks)
		texts := map[int64]string{}
		for _, k := range w.page(w.term("A", "x"), 10_000).Work {
			texts[k.Notice.ID] = k.Notice.Fallback
		}
		require.Len(w.t, texts, 3)
		require.Empty(w.t, texts[other])
		delete(texts, other)
		for _, text := range texts {
			require.Equal(w.t, "one", text)
		}
	}},
	{"Fallback/one is made with the record of a definite failure, and of nothing else", func(w *world) {
		off := false
		for _, delivery := range []school.Delivery{school.AtLeastOnce, school.AtMostOnce} {
			for _, outcome := range everyOutcome {
				n := plain("A")
				n.Delivery, n.Fallback = delivery, "call the school"
				id := w.accept(n, list(school.NewRecipient{Token: "same"}, school.NewRecipient{Token: "same"}, school.NewRecipient{Token: "off", Enabled: &off}))
				var states []string
				for range policy.Max + 2 {
					w.send(w.term("A", "x"), outcome)
					r := w.recipients(id)
					states = append(states, string(r[0].State)+"/"+string(r[0].Fallback))
					require.Empty(w.t, r[1].Fallback, "a duplicate was never handed over")
					require.Empty(w.t, r[2].Fallback, "nor was one that is switched off")
					w.Elapse(w.t, 30*time.Minute)
				}
				made := ""
				switch outcome {
				case school.Gone:
					made = "FAIL/PENDING"
				case school.Rejected, school.Mismatch, school.Throttled, school.Unavailable:
					made = "PERMANENT_FAIL/PENDING"
				}
				if made == "" {
					require.Equal(w.t, school.FallbackCounts{}, w.fallbacks(id), "%s, %s: %v", outcome, delivery, states)
				} else {
					require.Equal(w.t, school.FallbackCounts{Pending: 1}, w.fallbacks(id), "%s, %s: %v", outcome, delivery, states)
					require.Contains(w.t, states, made, "%s, %s", outcome, delivery)
				}
				for _, s := range states {
					require.NotEqual(w.t, "RETRY_PENDING/PENDING", s, "%s: before the failure was definite", outcome)
				}
				if w.progress(id).EndedAt.IsZero() { // not sent, or not let in: that goes on for ever
					require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
					require.Equal(w.t, school.FallbackCounts{}, w.fallbacks(id), "cancelled is no failure")
				}
			}
		}
	}},
	{"Fallback/a notice without one makes none", func(w *world) {
		w.notice("A", 3)
		w.send(w.term("A", "x"), school.Gone)
		require.Empty(w.t, w.Query(w.t, `SELECT seq FROM push_fallbacks`))
	}},
	{"Fallback/a takeover makes none: whether the message arrived is not known", func(w *world) {
		n := plain("A")
		n.Delivery, n.Fallback = school.AtMostOnce, "call the school"
		id := w.accept(n, devices(3))
		x := w.term("A", "x")
		c := w.claim(x, w.page(x, 10).Work)
		w.Elapse(w.t, time.Hour)
		_, err := w.Store.Takeover(w.ctx(), w.term("A", "y"), policy)
		require.NoError(w.t, err)
		require.Equal(w.t, "PERMANENT_FAIL=3", w.states(id))
		require.Equal(w.t, school.FallbackCounts{}, w.fallbacks(id))
		require.ErrorIs(w.t, w.Store.Record(w.ctx(), w.recordOf(x, c, all(school.Gone))), school.ErrTakenOver)
		require.Equal(w.t, school.FallbackCounts{}, w.fallbacks(id), "a record that comes too late makes none either")
	}},
	{"Fallback/a recipient gets one in its life, and a record that is repeated makes none twice", func(w *world) {
		id := w.withFallback(3)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 10).Work)
		// As if the third had failed, been sent to and been requeued before.
		w.Exec(w.t, fmt.Sprintf(`INSERT INTO push_fallbacks (cluster_id, seq, school_id, kind, job_status, created_at)
			SELECT id, 3, 'A', 'sms', 'SENT', created_at FROM push_clusters WHERE id = %d`, id))
		r := w.recordOf(term, c, all(school.Gone))
		for range 3 {
			require.NoError(w.t, w.Store.Record(w.ctx(), r))
		}
		require.Equal(w.t, school.FallbackCounts{Pending: 2, Sent: 1}, w.fallbacks(id))
		r.Owner = "z"
		require.Error(w.t, w.Store.Record(w.ctx(), r))
		require.Equal(w.t, school.FallbackCounts{Pending: 2, Sent: 1}, w.fallbacks(id))
	}},
	{"Fallback/a record that is refused makes none", func(w *world) {
		id := w.withFallback(2)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 10).Work)
		r := w.recordOf(term, c, all(school.Gone))
		r.Results[1].Seq = 7
		require.Error(w.t, w.Store.Record(w.ctx(), r))
		require.Equal(w.t, school.FallbackCounts{}, w.fallbacks(id))
		w.record(term, c, all(school.Gone))
	}},
	{"Fallback/claimed ones are one claimer's until the lease ends, and come back under the same name", func(w *world) {
		id := w.failed(5)
		first := w.claimFallbacks(3, time.Minute)
		require.Len(w.t, first, 3)
		require.Equal(w.t, school.Fallback{Notice: id, Seq: first[0].Seq, School: "A", Ref: fmt.Sprint("r", first[0].Seq), Text: "call the school", Attempt: 1, Age: first[0].Age}, first[0])
		require.Equal(w.t, fmt.Sprintf("%d.%d.sms", id, first[0].Seq), first[0].ID())
		require.Less(w.t, first[0].Age, time.Minute)
		rest := w.claimFallbacks(10, time.Minute)
		require.Len(w.t, rest, 2)
		require.Empty(w.t, w.claimFallbacks(10, time.Minute))
		w.Elapse(w.t, 59*time.Second)
		require.Empty(w.t, w.claimFallbacks(10, time.Minute))
		w.Elapse(w.t, 2*time.Second)
		again := w.claimFallbacks(10, time.Minute)
		require.Len(w.t, again, 5)
		names := map[string]int{}
		for _, f := range append(append(first, rest...), again...) {
			names[f.ID()]++
		}
		require.Len(w.t, names, 5)
		require.Equal(w.t, 2, again[0].Attempt)
		require.GreaterOrEqual(w.t, again[0].Age, time.Minute)
	}},
	{"Fallback/what became of a try is written once, by the claimer whose it is", func(w *world) {
		id := w.failed(4)
		list := w.claimFallbacks(4, time.Minute)
		w.settleFallback(list[0], school.Posted{State: school.PostSent})
		w.settleFallback(list[0], school.Posted{State: school.PostSent})
		w.settleFallback(list[1], school.Posted{State: school.PostFailed, Code: "HTTP_422"})
		w.settleFallback(list[2], school.Posted{State: school.PostPending, RetryIn: 10 * time.Minute, Code: "HTTP_503"})
		require.Equal(w.t, school.FallbackCounts{Pending: 2, Sent: 1, Failed: 1}, w.fallbacks(id))
		w.Elapse(w.t, 2*time.Minute) // the fourth's lease has ended, the third's wait has not
		again := w.claimFallbacks(4, time.Minute)
		require.Len(w.t, again, 1)
		require.Equal(w.t, list[3].Seq, again[0].Seq)
		w.settleFallback(list[3], school.Posted{State: school.PostFailed, Code: "HTTP_422"}) // the first claimer, too late
		require.Equal(w.t, school.FallbackCounts{Pending: 2, Sent: 1, Failed: 1}, w.fallbacks(id))
		w.settleFallback(list[3], school.Posted{State: school.PostSent}) // but what was sent was sent
		w.settleFallback(again[0], school.Posted{State: school.PostFailed, Code: "HTTP_422"})
		require.Equal(w.t, school.FallbackCounts{Pending: 1, Sent: 2, Failed: 1}, w.fallbacks(id))
		require.Equal(w.t, [][]string{{"FAILED", "HTTP_422", "0"}, {"PENDING", "HTTP_503", "1"}, {"SENT", "", "0"}, {"SENT", "", "0"}},
			w.Query(w.t, `SELECT job_status, error_code, CASE WHEN retry_after IS NULL THEN 0 ELSE 1 END FROM push_fallbacks ORDER BY job_status, seq`))
		require.Empty(w.t, w.claimFallbacks(4, time.Minute))
		w.Elapse(w.t, 10*time.Minute)
		require.Len(w.t, w.claimFallbacks(4, time.Minute), 1)
	}},
	{"Fallback/the notice's end is told where it was cancelled or has expired", func(w *world) {
		n := plain("A")
		n.Fallback, n.ExpiresAt = "x", time.Now().Add(10*time.Minute)
		expiring := w.accept(n, devices(1))
		cancelled := w.withFallback(2)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 2).Work) // one of each
		w.record(term, c, all(school.Gone))
		require.NoError(w.t, w.Store.Cancel(w.ctx(), cancelled))
		w.Elapse(w.t, time.Hour)
		voids := map[int64]school.Reason{}
		for _, f := range w.claimFallbacks(10, time.Minute) {
			voids[f.Notice] = f.Void
		}
		require.Equal(w.t, map[int64]school.Reason{expiring: school.Expired, cancelled: school.Cancelled}, voids)
	}},
	{"Fallback/several claimers at once share them out", func(w *world) {
		w.failed(60)
		var mu sync.Mutex
		var wg sync.WaitGroup
		names := map[string]int{}
		for range 4 {
			wg.Go(func() {
				for {
					list, err := w.Store.ClaimFallbacks(w.ctx(), 7, time.Minute)
					if err != nil || len(list) == 0 {
						if err != nil {
							w.t.Error(err)
						}
						return
					}
					mu.Lock()
					for _, f := range list {
						names[f.ID()]++
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		require.Empty(w.t, w.claimFallbacks(10, time.Minute), "some were passed over while another took them")
		require.Len(w.t, names, 60)
		for name, n := range names {
			require.Equal(w.t, 1, n, name)
		}
	}},
}

func (w *world) recipients(id int64) []school.RecipientRow {
	w.t.Helper()
	rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 1000})
	require.NoError(w.t, err)
	return rows
}
