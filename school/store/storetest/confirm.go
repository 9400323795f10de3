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
	{"HasWork/agrees with Due", func(w *world) {
		has := func() bool {
			w.t.Helper()
			got, err := w.Store.HasWork(w.ctx(), "A")
			require.NoError(w.t, err)
			due, err := w.Store.Due(w.ctx(), 0)
			require.NoError(w.t, err)
			require.Equal(w.t, len(due) > 0, got, "Due: %v", due)
			return got
		}
		require.False(w.t, has(), "a school that is not there")
		later := plain("A")
		later.ScheduledAt = time.Now().Add(time.Hour)
		w.accept(later, devices(1))
		require.False(w.t, has(), "scheduled for later")
		w.notice("A", 3)
		require.True(w.t, has(), "a due notice")
		x := w.term("A", "x")
		w.claim(x, w.page(x, 3).Work)
		require.False(w.t, has(), "all is in flight")
		w.Elapse(w.t, 30*time.Second)
		require.True(w.t, has(), "an orphaned batch")
		require.NoError(w.t, w.Store.Pause(w.ctx(), "A"))
		require.False(w.t, has(), "paused")
		require.NoError(w.t, w.Store.Resume(w.ctx(), "A"))
		y := w.term("A", "y")
		_, err := w.Store.Takeover(w.ctx(), y, policy)
		require.NoError(w.t, err)
		require.True(w.t, has(), "orphans are due at once")
		w.send(y, school.Accepted)
		require.False(w.t, has(), "nothing left")
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
