package storetest

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

func stopped(n int) school.Condition {
	return school.Condition{Key: "stopped/relay", Kind: "sender_stopped", Body: []byte(`{"sender":"relay"}`), Count: n, Every: time.Hour, Lapse: 10 * time.Minute}
}

func (w *world) raise(c school.Condition) bool {
	w.t.Helper()
	told, err := w.Store.RaiseAlert(w.ctx(), c)
	require.NoError(w.t, err)
	return told
}

func (w *world) endAlert(key string) bool {
	w.t.Helper()
	told, err := w.Store.EndAlert(w.ctx(), key, "sender_resumed", []byte(`{}`))
	require.NoError(w.t, err)
	return told
}

func (w *world) claimAlerts() []school.Alert {
	w.t.Helper()
	list, err := w.Store.ClaimAlerts(w.ctx(), 100, time.Minute)
	require.NoError(w.t, err)
	return list
}

func (w *world) newFailures() school.Failures {
	w.t.Helper()
	f, err := w.Store.NewFailures(w.ctx())
	require.NoError(w.t, err)
	return f
}

func (w *world) tell(f school.Failures) bool {
	w.t.Helper()
	told, err := w.Store.TellFailures(w.ctx(), f, "failures", []byte(`{}`))
	require.NoError(w.t, err)
	return told
}

// told are the failures since the last digest, in words, which is then past them.
func (w *world) told() string {
	w.t.Helper()
	f := w.newFailures()
	require.True(w.t, w.tell(f))
	words := make([]string, len(f.Counts))
	for i, c := range f.Counts {
		words[i] = fmt.Sprint(c.School, c.Name, " ", c.Code, "/", c.Reason, "=", c.Count)
	}
	return strings.Join(words, " ")
}

var alertTests = []test{
	{"Alert/what several see is told once, again after a while, and when it has ended", func(w *world) {
		var told atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				made, err := w.Store.RaiseAlert(w.ctx(), stopped(2))
				if err != nil {
					w.t.Error(err)
				}
				if made {
					told.Add(1)
				}
			})
		}
		wg.Wait()
		require.EqualValues(w.t, 1, told.Load())
		first := w.claimAlerts()
		require.Len(w.t, first, 1)
		require.Equal(w.t, []any{"sender_stopped", int64(2), 1}, []any{first[0].Kind, first[0].Seen, first[0].Attempt})
		require.JSONEq(w.t, `{"sender":"relay"}`, string(first[0].Body))
		require.WithinDuration(w.t, time.Now(), first[0].At, time.Minute)
		require.NoError(w.t, w.Store.SettleAlert(w.ctx(), first[0], school.Posted{State: school.PostSent}))

		for range 12 { // it goes on, and is said to every five minutes
			w.Elapse(w.t, 5*time.Minute)
			w.raise(stopped(1))
		}
		again := w.claimAlerts()
		require.Len(w.t, again, 1, "after an hour")
		require.EqualValues(w.t, 7*2+12, again[0].Seen, "since it was told")
		require.InDelta(w.t, time.Hour, again[0].At.Sub(again[0].Since), float64(time.Minute))

		require.False(w.t, w.endAlert("stopped/other"))
		require.True(w.t, w.endAlert("stopped/relay"))
		require.False(w.t, w.endAlert("stopped/relay"))
		require.Equal(w.t, "sender_resumed", w.claimAlerts()[0].Kind)
		require.True(w.t, w.raise(stopped(1)), "at once when it comes back")
	}},
	{"Alert/a reminder tells nothing of what does not hold", func(w *world) {
		remind := stopped(1)
		remind.Remind = true
		require.False(w.t, w.raise(remind))
		require.True(w.t, w.raise(stopped(1)))
		require.False(w.t, w.raise(remind))
		w.Elapse(w.t, 5*time.Minute)
		require.False(w.t, w.raise(remind))
		require.True(w.t, w.endAlert("stopped/relay"))
		w.Elapse(w.t, 2*time.Hour)
		require.False(w.t, w.raise(remind), "a replica that has not heard of the end does not begin anew")
	}},
	{"Alert/what nobody saw for a while is a new one", func(w *world) {
		require.True(w.t, w.raise(stopped(1)))
		w.Elapse(w.t, 9*time.Minute)
		require.False(w.t, w.raise(stopped(1)))
		w.Elapse(w.t, 11*time.Minute)
		require.True(w.t, w.raise(stopped(1)))
	}},
	{"Alert/one that was claimed is one claimer's until the lease ends", func(w *world) {
		w.raise(stopped(1))
		first := w.claimAlerts()
		require.Len(w.t, first, 1)
		require.Empty(w.t, w.claimAlerts())
		w.Elapse(w.t, 61*time.Second)
		again := w.claimAlerts()
		require.Equal(w.t, []any{first[0].ID, 2}, []any{again[0].ID, again[0].Attempt})
		require.GreaterOrEqual(w.t, again[0].Age, time.Minute)
		require.NoError(w.t, w.Store.SettleAlert(w.ctx(), first[0], school.Posted{State: school.PostFailed, Code: "HTTP_400"}))
		require.NoError(w.t, w.Store.SettleAlert(w.ctx(), again[0], school.Posted{State: school.PostPending, RetryIn: time.Minute, Code: "HTTP_500"}))
		require.Equal(w.t, [][]string{{"PENDING", "HTTP_500"}}, w.Query(w.t, `SELECT job_status, error_code FROM alerts`))
		w.Elapse(w.t, 61*time.Second)
		last := w.claimAlerts()
		require.Equal(w.t, 3, last[0].Attempt)
		require.NoError(w.t, w.Store.SettleAlert(w.ctx(), last[0], school.Posted{State: school.PostSent}))
		w.Elapse(w.t, time.Hour)
		require.Empty(w.t, w.claimAlerts())
	}},
	{"Digest/each recipient that failed for good is in one, whatever made it fail", func(w *world) {
		_, err := w.Store.NewFailures(w.ctx())
		require.ErrorIs(w.t, err, school.ErrNotFound)
		w.notice("A", 3)
		w.send(w.term("A", "x"), school.Rejected)
		w.Elapse(w.t, time.Second)
		require.NoError(w.t, w.Store.StartDigest(w.ctx()))
		require.Equal(w.t, "", w.told(), "what was before is no news")
		require.NoError(w.t, w.Store.StartDigest(w.ctx()))

		name := "Primary"
		_, _, err = w.Store.PutSchool(w.ctx(), "B", school.SchoolChange{Name: &name})
		require.NoError(w.t, err)
		w.notice("A", 2)
		w.send(w.term("A", "x"), school.Mismatch)
		w.notice("B", 3)
		w.send(w.term("B", "x"), school.Rejected)
		w.notice("B", 1)
		w.send(w.term("B", "x"), school.Accepted)
		w.notice("B", 1)
		w.send(w.term("B", "x"), school.Gone)
		require.Equal(w.t, "BPrimary INVALID_ARGUMENT/REJECTED=3 A SENDER_ID_MISMATCH/SENDER_MISMATCH=2", w.told())
		require.Equal(w.t, "", w.told())

		// By a takeover, and by a cancel that met a recipient waiting for its retry.
		once := plain("A")
		once.Delivery = school.AtMostOnce
		w.accept(once, devices(1))
		term := w.term("A", "x")
		w.claim(term, w.page(term, 10).Work)
		w.Exec(w.t, `UPDATE push_batches SET send_deadline = claimed_at WHERE settled_at IS NULL`)
		_, err = w.Store.Takeover(w.ctx(), w.term("A", "y"), policy)
		require.NoError(w.t, err)
		id := w.notice("A", 1)
		w.send(w.term("A", "x"), school.Unavailable)
		require.Equal(w.t, "A ORPHANED/OUTCOME_UNKNOWN=1", w.told())
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.Equal(w.t, "A UNAVAILABLE/CANCELLED=1", w.told())
	}},
	{"Digest/of several that tell the same one is first, and the alert comes with the position", func(w *world) {
		require.NoError(w.t, w.Store.StartDigest(w.ctx()))
		w.notice("A", 3)
		w.send(w.term("A", "x"), school.Rejected)
		f := w.newFailures()
		require.Equal(w.t, 3, f.Recipients())
		require.Equal(w.t, f.Counts, w.newFailures().Counts, "looking moves nothing")
		require.True(w.t, w.tell(f))
		require.False(w.t, w.tell(f))
		list := w.claimAlerts()
		require.Len(w.t, list, 1)
		require.Equal(w.t, []any{"failures", int64(3)}, []any{list[0].Kind, list[0].Seen})
		require.True(w.t, json.Valid(list[0].Body))
		require.True(w.t, f.From.Equal(list[0].Since), "%s %s", f.From, list[0].Since)

		next := w.newFailures()
		require.True(w.t, next.From.Equal(f.Until))
		told, err := w.Store.TellFailures(w.ctx(), next, "failures", nil)
		require.NoError(w.t, err)
		require.False(w.t, told, "nothing to tell")
		require.False(w.t, w.tell(next), "but it was moved")
		require.Empty(w.t, w.claimAlerts())
	}},
	{"Digest/one that was off for long comes to its end in steps", func(w *world) {
		require.NoError(w.t, w.Store.StartDigest(w.ctx()))
		w.notice("A", 2)
		w.send(w.term("A", "x"), school.Rejected)
		w.Exec(w.t, `UPDATE job_positions SET position = position - 15 * 24 * 3600 * CAST(1000000 AS bigint) WHERE job = 'digest'`)
		require.Equal(w.t, "", w.told())
		require.Equal(w.t, "", w.told())
		require.Equal(w.t, "A INVALID_ARGUMENT/REJECTED=2", w.told())
	}},
}
