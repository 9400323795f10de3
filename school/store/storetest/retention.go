package storetest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

const kept = 90 * 24 * time.Hour

func (w *world) purge(after time.Duration) school.Purged {
	w.t.Helper()
	p, err := w.Store.Purge(w.ctx(), after)
	require.NoError(w.t, err)
	return p
}

// rowsOf counts what is left of a notice, and of everything that was sent.
func (w *world) rowsOf(id int64) string {
	w.t.Helper()
	var words []string
	for _, sql := range []string{
		fmt.Sprintf(`SELECT count(*) FROM push_cluster_tokens WHERE cluster_id = %d`, id),
		fmt.Sprintf(`SELECT count(*) FROM push_fallbacks WHERE cluster_id = %d`, id),
		`SELECT count(*) FROM push_batches`, `SELECT count(*) FROM push_batch_ranges`,
	} {
		words = append(words, w.Query(w.t, sql)[0][0])
	}
	return strings.Join(words, " ")
}

var retentionTests = []test{
	{"interleaving 15: Purge/removes recipients of what ended long ago, marks it first and keeps its counts", func(w *world) {
		old := w.accept(plain("A"), func(yield func(school.NewRecipient, error) bool) {
			for r, err := range devices(6500) { // more than one step
				if !yield(r, err) {
					return
				}
			}
			yield(school.NewRecipient{Token: "token-0000001"}, nil)
		})
		x := w.term("A", "x")
		require.Equal(w.t, 6500, w.send(x, school.Accepted))
		w.Exec(w.t, fmt.Sprintf(`INSERT INTO push_fallbacks (cluster_id, seq, school_id, kind, created_at)
			SELECT id, 7, school_id, 'sms', created_at FROM push_clusters WHERE id = %d UNION ALL SELECT id, 6501, school_id, 'sms', created_at FROM push_clusters WHERE id = %d`, old, old))
		few := w.notice("B", 3)
		y := w.term("B", "y")
		require.Equal(w.t, 3, w.send(y, school.Gone))
		open := w.notice("A", 10) // as old, and not ended
		unsettled := w.claim(x, w.page(x, 5).Work)
		counts := w.progress(old).Counts
		require.Equal(w.t, school.Purged{}, w.purge(kept), "nothing is old yet")

		w.Elapse(w.t, kept+time.Hour)
		recent := w.notice("B", 4)
		y = w.term("B", "y")
		require.Equal(w.t, 4, w.send(y, school.Accepted))
		p := w.purge(kept)
		require.Equal(w.t, school.Purged{Notices: 2, Recipients: 6504, Batches: 34, Ranges: 34, Fallbacks: 2}, p)
		for _, id := range []int64{old, few} {
			require.Equal(w.t, "0 0 2 2", w.rowsOf(id), "the open batch and the recent one stay")
			require.False(w.t, w.progress(id).PurgedAt.IsZero())
			rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 10})
			require.NoError(w.t, err)
			require.Empty(w.t, rows)
		}
		require.Equal(w.t, counts, w.progress(old).Counts)
		require.Equal(w.t, school.NoticeCompleted, w.progress(old).Status)
		require.Equal(w.t, "Title", w.progress(w.accept(&school.Notice{School: "A", Content: school.Content{Title: "Title"}, Priority: school.Normal, Delivery: school.AtLeastOnce}, devices(1))).Notice.Content.Title)
		for _, id := range []int64{open, recent} {
			require.True(w.t, w.progress(id).PurgedAt.IsZero())
		}
		require.Equal(w.t, "10 0 2 2", w.rowsOf(open))
		require.Equal(w.t, "4 0 2 2", w.rowsOf(recent))
		require.Equal(w.t, school.Purged{}, w.purge(kept))
		stranded, err := w.Store.Sweep(w.ctx())
		require.NoError(w.t, err)
		require.Zero(w.t, stranded)
		w.record(x, unsettled, all(school.Accepted))
	}},
	{"Purge/ends with its context and goes on where it stopped", func(w *world) {
		id := w.notice("A", 3000)
		w.send(w.term("A", "x"), school.Accepted)
		w.Elapse(w.t, kept+time.Hour)
		ended, end := context.WithCancel(w.ctx())
		end()
		p, err := w.Store.Purge(ended, kept)
		require.NoError(w.t, err)
		require.Equal(w.t, school.Purged{}, p)
		// A run that is ended after its first step, as by a stop.
		steps := 0
		for total := 0; total < 3000; steps++ {
			ctx, stop := context.WithTimeout(w.ctx(), 30*time.Millisecond)
			p, err := w.Store.Purge(ctx, kept)
			stop()
			require.NoError(w.t, err)
			total += p.Recipients
			if total > 0 {
				require.False(w.t, w.progress(id).PurgedAt.IsZero(), "it says so from the first one removed")
			}
			left := w.Query(w.t, fmt.Sprintf(`SELECT count(*), coalesce(min(seq), 3001) FROM push_cluster_tokens WHERE cluster_id = %d`, id))[0]
			require.Equal(w.t, fmt.Sprint(3000-total), left[0], "what it said is what it did")
			require.Equal(w.t, fmt.Sprint(total+1), left[1], "in order of seq")
			require.Less(w.t, steps, 10_000)
		}
		w.purge(kept)
		require.Equal(w.t, "0 0 0 0", w.rowsOf(id))
	}},
	{"Purge/of what has just ended is refused", func(w *world) {
		_, err := w.Store.Purge(w.ctx(), time.Second)
		require.ErrorContains(w.t, err, "at least 1m")
	}},
}
