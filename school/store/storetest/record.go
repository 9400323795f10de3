package storetest

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// row is a recipient as its row has it, to be compared with a school.Change.
func (w *world) row(notice int64, seq int) (c school.Change, retryAfter string) {
	w.t.Helper()
	rs := w.Query(w.t, fmt.Sprintf(`SELECT job_status, attempts, retry_count, orphan_count, error_code, reason, retry_after
		FROM push_cluster_tokens WHERE cluster_id = %d AND seq = %d`, notice, seq))
	require.Len(w.t, rs, 1)
	n := func(s string) int {
		v, err := strconv.Atoi(s)
		require.NoError(w.t, err)
		return v
	}
	r := rs[0]
	return school.Change{State: school.State(r[0]), Attempts: n(r[1]), Retries: n(r[2]), Orphanings: n(r[3]), Code: r[4], Reason: school.Reason(r[5])}, r[6]
}

// sameAs compares a row with a change, but for the time and the retirement.
func (w *world) sameAs(want school.Change, notice int64, seq int, about ...any) {
	w.t.Helper()
	got, after := w.row(notice, seq)
	require.Equal(w.t, want.State == school.RetryPending, after != "", about...)
	want.RetryIn, want.Retire = 0, false
	require.Equal(w.t, want, got, about...)
}

var everyOutcome = []school.Outcome{
	school.Accepted, school.Gone, school.Rejected, school.Mismatch, school.Throttled, school.Unavailable,
	school.Unknown, school.Misconfigured, school.NotSent,
}

var recordTests = []test{
	{"Record/writes what was decided for each outcome, attempt after attempt", func(w *world) {
		for _, delivery := range []school.Delivery{school.AtLeastOnce, school.AtMostOnce} {
			id := string(delivery)
			n := plain(id)
			n.Delivery = delivery
			notice := w.accept(n, devices(2*len(everyOutcome)))
			term := w.term(id, "x")
			for range 6 {
				work := w.page(term, 100).Work
				if len(work) == 0 {
					break
				}
				c := w.claim(term, work)
				outcome := func(i int, k *school.Work) school.Event {
					o := everyOutcome[(k.Seq-1)%len(everyOutcome)]
					return school.Event{Outcome: o, Code: codes[o]}
				}
				r := w.recordOf(term, c, outcome)
				require.NoError(w.t, w.Store.Record(w.ctx(), r))
				for _, result := range r.Results {
					w.sameAs(result.Change, result.Notice, result.Seq, "recipient %d after %d attempts", result.Seq, result.Change.Attempts)
				}
				w.check()
				w.Elapse(w.t, time.Hour)
			}
			p := w.progress(notice)
			require.Equal(w.t, 2, p.Counts.Success)
			require.Equal(w.t, 2, p.Counts.Fail)
		}
	}},
	{"Record/a retry is due after what was decided, no sooner", func(w *world) {
		w.notice("A", 1)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 1).Work)
		r := w.recordOf(term, c, all(school.Unavailable))
		r.Results[0].Change.RetryIn = 90 * time.Second
		require.NoError(w.t, w.Store.Record(w.ctx(), r))
		p := w.page(term, 1)
		require.Empty(w.t, p.Work)
		require.InDelta(w.t, 90*time.Second, p.NextDue, float64(10*time.Second))
		rows, err := w.Store.Recipients(w.ctx(), c.Work[0].Notice.ID, school.RecipientFilter{Limit: 1})
		require.NoError(w.t, err)
		require.WithinDuration(w.t, time.Now().Add(90*time.Second), rows[0].NextTryAt, 15*time.Second)
		w.Elapse(w.t, 80*time.Second)
		require.Empty(w.t, w.page(term, 1).Work)
		w.Elapse(w.t, 10*time.Second)
		require.Len(w.t, w.page(term, 1).Work, 1)
	}},
	{"Record/counts first attempts and later ones apart", func(w *world) {
		id := w.notice("A", 10)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 10).Work), func(i int, k *school.Work) school.Event {
			return school.Event{Outcome: []school.Outcome{school.Accepted, school.Gone, school.Unavailable, school.Unavailable, school.Rejected}[i%5]}
		})
		require.Equal(w.t, school.Counts{Total: 10, Success: 2, Fail: 2, RetryPending: 4, PermanentFail: 2}, w.progress(id).Counts)
		w.Elapse(w.t, time.Hour)
		w.record(term, w.claim(term, w.page(term, 10).Work), func(i int, k *school.Work) school.Event {
			return school.Event{Outcome: []school.Outcome{school.Accepted, school.Gone}[i%2]}
		})
		require.Equal(w.t, school.Counts{Total: 10, Success: 2, Fail: 2, RetrySuccess: 2, RetryFail: 2, PermanentFail: 2}, w.progress(id).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status)
		require.False(w.t, w.progress(id).EndedAt.IsZero())
	}},
	{"interleaving 11: Record/twice is recorded once", func(w *world) {
		id := w.notice("A", 10)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 5).Work)
		for range 3 {
			w.record(term, c, all(school.Accepted))
			require.Equal(w.t, school.Counts{Total: 10, Waiting: 5, Success: 5}, w.progress(id).Counts)
		}
		// The first word counts.
		w.record(term, c, all(school.Rejected))
		require.Equal(w.t, "PENDING=5 SUCCESS=5", w.states(id))
	}},
	{"Record/of an older owner counts while the batch is unsettled", func(w *world) {
		id := w.notice("A", 10)
		x := w.term("A", "x")
		c := w.claim(x, w.page(x, 5).Work)
		w.term("A", "y")
		w.record(x, c, all(school.Accepted))
		require.Equal(w.t, "PENDING=5 SUCCESS=5", w.states(id))
		require.Equal(w.t, [][]string{{"x", "recorded"}}, w.Query(w.t, `SELECT settled_by, settled_as FROM push_batches`))
	}},
	{"interleaving 11: Record/after a takeover is void, also where the same replica took over", func(w *world) {
		for _, successor := range []string{"x", "y"} {
			id := w.notice(successor, 10)
			x := w.term(successor, "x")
			c := w.claim(x, w.page(x, 5).Work)
			w.Elapse(w.t, time.Minute)
			next := w.term(successor, successor)
			_, err := w.Store.Takeover(w.ctx(), next, policy)
			require.NoError(w.t, err)
			require.ErrorIs(w.t, w.Store.Record(w.ctx(), w.recordOf(x, c, all(school.Accepted))), school.ErrTakenOver)
			require.Equal(w.t, "PENDING=5 RETRY_PENDING=5", w.states(id))
		}
	}},
	{"interleaving 11: Record/racing a takeover has one winner", func(w *world) {
		id := w.notice("A", 400)
		for round := range 30 {
			x := w.term("A", "x")
			c := w.claim(x, w.page(x, 5).Work)
			w.Elapse(w.t, time.Minute)
			y := w.term("A", "y")
			r := w.recordOf(x, c, all(school.Accepted))
			var (
				wg        sync.WaitGroup
				recordErr error
			)
			wg.Go(func() { recordErr = w.Store.Record(w.ctx(), r) })
			o, err := w.Store.Takeover(w.ctx(), y, policy)
			wg.Wait()
			require.NoError(w.t, err)
			if recordErr != nil {
				require.ErrorIs(w.t, recordErr, school.ErrTakenOver)
			}
			require.Equal(w.t, recordErr != nil, len(o.Batches) == 1, "round %d", round)
		}
		w.check()
		require.Equal(w.t, 400, w.progress(id).Counts.Sum())
	}},
	{"Record/sets the rest from now, only in the cycle that the batch filled", func(w *world) {
		w.notice("A", 30)
		term := w.term("A", "x")
		fill := func(cycle int64) school.Claim {
			c := w.claimOf(w.page(term, 10).Work, 5000)
			c.Grant.Cycle, c.Grant.Filled = cycle, true
			require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
			return c
		}
		c := fill(1)
		require.InDelta(w.t, longest+rule.Rest, w.ledger("A").Resting, float64(5*time.Second))
		w.record(term, c, all(school.Accepted))
		require.InDelta(w.t, rule.Rest, w.ledger("A").Resting, float64(5*time.Second))
		require.LessOrEqual(w.t, w.ledger("A").Resting, rule.Rest)
		w.Elapse(w.t, rule.Rest)
		require.Equal(w.t, []any{time.Duration(0), true}, []any{w.ledger("A").Resting, w.ledger("A").Filled})

		late := fill(2)
		next := w.claimOf(w.page(term, 5).Work, 5)
		next.Grant.Cycle = 3
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, next))
		w.record(term, late, all(school.Accepted))
		require.Equal(w.t, school.Ledger{Cycle: 3, Attempted: 5, Rule: rule}, w.ledger("A"))
	}},
	{"Record/of results that are not the batch's is refused and writes nothing", func(w *world) {
		id := w.notice("A", 20)
		other := w.notice("A", 20)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 10).Work)
		foreign := w.claim(term, w.page(term, 40).Work[10:20])
		require.Equal(w.t, other, foreign.Work[0].Notice.ID)
		for name, spoil := range map[string]func(rs []school.Recorded) []school.Recorded{
			"one missing": func(rs []school.Recorded) []school.Recorded { return rs[1:] },
			"one too many": func(rs []school.Recorded) []school.Recorded {
				return append(rs, school.Recorded{Notice: id, Seq: 11, Change: rs[0].Change})
			},
			"one twice":             func(rs []school.Recorded) []school.Recorded { return append(rs[1:], rs[1]) },
			"one of another notice": func(rs []school.Recorded) []school.Recorded { rs[0].Notice = other; return rs },
			"a failure never claimed": func(rs []school.Recorded) []school.Recorded {
				rs[0].Seq = 15
				rs[0].Change.State, rs[0].Change.Reason = school.PermanentFail, school.RejectedReason
				return rs
			},
			"a failure of another one": func(rs []school.Recorded) []school.Recorded {
				rs[0].Notice, rs[0].Seq = other, 1
				rs[0].Change.State = school.Fail
				return rs
			},
			"a leap in attempts": func(rs []school.Recorded) []school.Recorded {
				rs[0].Change.State = school.Fail
				rs[0].Change.Attempts = 2
				return rs
			},
			"a state of no outcome": func(rs []school.Recorded) []school.Recorded { rs[0].Change.State = school.Skipped; return rs },
		} {
			r := w.recordOf(term, c, all(school.Accepted))
			r.Results = spoil(r.Results)
			require.Error(w.t, w.Store.Record(w.ctx(), r), name)
			require.Equal(w.t, "IN_PROGRESS=10 PENDING=10", w.states(id), name)
			require.Equal(w.t, [][]string{{"2"}}, w.Query(w.t, `SELECT count(*) FROM push_batches WHERE settled_at IS NULL`), name)
		}
		// Where nothing was accepted, no count by range finds a stranger.
		r := w.recordOf(term, c, all(school.Rejected))
		r.Results[0].Notice, r.Results[0].Seq = foreign.Work[0].Notice.ID, foreign.Work[0].Seq
		require.Error(w.t, w.Store.Record(w.ctx(), r))
		require.Equal(w.t, "IN_PROGRESS=10 PENDING=10", w.states(id))
		r = w.recordOf(term, c, all(school.Rejected))
		r.Results = r.Results[1:]
		require.Error(w.t, w.Store.Record(w.ctx(), r), "one missing of ten that failed")
		require.Equal(w.t, "IN_PROGRESS=10 PENDING=10", w.states(id))
		r = w.recordOf(term, c, all(school.Accepted))
		r.Batch = "never-committed"
		require.ErrorIs(w.t, w.Store.Record(w.ctx(), r), school.ErrNotFound)
		w.record(term, c, all(school.Accepted))
	}},
	{"interleaving 15: Record/retires a device that is gone, unless it was registered since", func(w *world) {
		for _, token := range []string{"token-0000001", "token-0000002", "token-0000003"} {
			w.Device(w.t, "A", token, true, false)
		}
		w.Device(w.t, "B", "token-0000001", true, false)
		w.notice("A", 3)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 3).Work)
		w.Elapse(w.t, time.Second)
		w.Exec(w.t, `DELETE FROM devices WHERE school_id = 'A' AND token = 'token-0000002'`)
		w.Device(w.t, "A", "token-0000002", true, false)
		w.record(term, c, func(i int, k *school.Work) school.Event {
			return school.Event{Outcome: []school.Outcome{school.Gone, school.Gone, school.Accepted}[i]}
		})
		require.Equal(w.t, [][]string{{"A", "token-0000001"}}, w.Query(w.t, `SELECT school_id, token FROM devices WHERE retired_at IS NOT NULL`))
	}},
}
