package storetest

import (
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var confirmTests = []test{
	{"Confirm/writes what the receiver took without an attempt", func(w *world) {
		id := w.notice("A", 10)
		x := w.term("A", "x")
		w.send(x, school.Unknown)
		w.Elapse(w.t, time.Hour)
		p := w.page(x, 100)
		require.Len(w.t, p.Work, 10)
		require.True(w.t, p.Work[0].Uncertain, "it may have arrived")
		confirmed := confirmationsOf(w, p.Work[:4])
		require.NoError(w.t, w.Store.Confirm(w.ctx(), x, confirmed))
		require.Equal(w.t, school.Counts{Total: 10, Success: 4, RetryPending: 6}, w.progress(id).Counts)
		w.check()

		// Asked twice, or late, it changes nothing more.
		require.NoError(w.t, w.Store.Confirm(w.ctx(), x, confirmed))
		require.Equal(w.t, school.Counts{Total: 10, Success: 4, RetryPending: 6}, w.progress(id).Counts)
		require.Len(w.t, w.page(x, 100).Work, 6)

		require.NoError(w.t, w.Store.Confirm(w.ctx(), x, confirmationsOf(w, p.Work[4:])))
		require.Equal(w.t, school.NoticeCompleted, w.progress(id).Status, "the last confirmation ends the notice")
	}},
	{"Confirm/by an older owner is fenced", func(w *world) {
		id := w.notice("A", 3)
		x := w.term("A", "x")
		w.send(x, school.Unknown)
		w.Elapse(w.t, time.Hour)
		work := w.page(x, 100).Work
		w.term("A", "y")
		require.ErrorIs(w.t, w.Store.Confirm(w.ctx(), x, confirmationsOf(w, work)), school.ErrFenced)
		require.Equal(w.t, school.Counts{Total: 3, RetryPending: 3}, w.progress(id).Counts)
	}},
	{"Confirm/leaves what was claimed meanwhile", func(w *world) {
		id := w.notice("A", 3)
		x := w.term("A", "x")
		w.send(x, school.Unknown)
		w.Elapse(w.t, time.Hour)
		work := w.page(x, 100).Work
		w.claim(x, work)
		require.NoError(w.t, w.Store.Confirm(w.ctx(), x, confirmationsOf(w, work)))
		require.Equal(w.t, school.Counts{Total: 3, InProgress: 3}, w.progress(id).Counts)
	}},
	{"Confirm/of a definite failure is not asked for", func(w *world) {
		w.notice("A", 3)
		x := w.term("A", "x")
		w.send(x, school.Unavailable)
		w.Elapse(w.t, time.Hour)
		for _, k := range w.page(x, 100).Work {
			require.False(w.t, k.Uncertain)
		}
	}},
	{"Confirm/an orphan may have arrived", func(w *world) {
		w.notice("A", 3)
		x := w.term("A", "x")
		w.claim(x, w.page(x, 3).Work)
		w.Elapse(w.t, time.Minute)
		y := w.term("A", "y")
		_, err := w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		for _, k := range w.page(y, 100).Work {
			require.True(w.t, k.Uncertain)
		}
	}},
	{"WorkIn/agrees with Due", func(w *world) {
		next := func() time.Duration {
			w.t.Helper()
			in, err := w.Store.WorkIn(w.ctx(), "A")
			require.NoError(w.t, err)
			due, err := w.Store.Due(w.ctx(), 0)
			require.NoError(w.t, err)
			require.Equal(w.t, len(due) > 0, in == 0, "Due: %v", due)
			return in
		}
		require.Equal(w.t, school.Never, next(), "a school that is not there")
		later := plain("A")
		later.ScheduledAt = time.Now().Add(time.Hour)
		w.accept(later, devices(1))
		require.InDelta(w.t, time.Hour, next(), float64(time.Minute), "scheduled for later")
		w.notice("A", 3)
		require.Zero(w.t, next(), "a due notice")
		x := w.term("A", "x")
		w.claim(x, w.page(x, 3).Work)
		require.InDelta(w.t, longest+recording, next(), float64(5*time.Second), "all is in flight: the batch's deadline")
		w.Elapse(w.t, 30*time.Second)
		require.Zero(w.t, next(), "an orphaned batch")
		require.NoError(w.t, w.Store.Pause(w.ctx(), "A"))
		require.Zero(w.t, next(), "which is settled while the school is paused, too")
		y := w.term("A", "y")
		_, err := w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		require.Equal(w.t, school.Never, next(), "paused")
		require.NoError(w.t, w.Store.Resume(w.ctx(), "A"))
		require.Zero(w.t, next(), "orphans are due at once")
		w.send(y, school.Unavailable)
		require.InDelta(w.t, time.Minute, next(), float64(15*time.Second), "a retry")
		w.Elapse(w.t, 2*time.Minute)
		w.send(y, school.Accepted)
		require.InDelta(w.t, time.Hour, next(), float64(5*time.Minute), "only what is scheduled is left")
	}},
}

func confirmationsOf(w *world, work []school.Work) []school.Recorded {
	w.t.Helper()
	var rs []school.Recorded
	for i := range work {
		change, err := school.Confirm(work[i].Standing)
		require.NoError(w.t, err)
		rs = append(rs, school.Recorded{Notice: work[i].Notice.ID, Seq: work[i].Seq, Change: change})
	}
	return rs
}
