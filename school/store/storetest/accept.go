package storetest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var acceptTests = []test{
	{"Accept/a notice is stored with all its recipients and makes its school", func(w *world) {
		off, badge := false, 7
		n := plain("A")
		n.Content = school.Content{Title: "Title", Body: "Body", Data: map[string]string{"k": "v"}, Image: "https://i", Link: "https://l"}
		n.Priority, n.Delivery, n.TraceParent = school.Urgent, school.AtMostOnce, "00-abc-def-01"
		n.ExpiresAt = time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond)
		r, err := w.Store.Accept(w.ctx(), n, 3, list(
			school.NewRecipient{Token: "aaaaaaaaaa", Ref: "one", Badge: &badge, Data: map[string]string{"own": "1"}},
			school.NewRecipient{Token: "bbbbbbbbbb", Enabled: &off},
			school.NewRecipient{Token: "cccccccccc"}))
		require.NoError(w.t, err)
		require.Equal(w.t, school.Receipt{ID: n.ID, School: "A", Status: school.NoticePending, Total: 3}, r)

		p := w.progress(r.ID)
		require.Equal(w.t, school.Counts{Total: 3, Waiting: 3}, p.Counts)
		require.Equal(w.t, n.Content, p.Notice.Content)
		require.Equal(w.t, []any{n.Priority, n.Delivery, n.TraceParent}, []any{p.Notice.Priority, p.Notice.Delivery, p.Notice.TraceParent})
		require.WithinDuration(w.t, n.ExpiresAt, p.Notice.ExpiresAt, 0)

		page := w.page(w.term("A", "x"), 10)
		require.Len(w.t, page.Work, 3)
		require.Equal(w.t, n.Content, page.Work[0].Notice.Content)
		require.Equal(w.t, []any{"A", n.ID, n.TraceParent, n.Delivery}, []any{page.Work[0].Notice.School, page.Work[0].Notice.ID, page.Work[0].Notice.TraceParent, page.Work[0].Notice.Delivery})
		require.InDelta(w.t, time.Hour, page.Work[0].Notice.ExpiresIn, float64(time.Minute))
		require.Equal(w.t, "aaaaaaaaaa", page.Work[0].Token)
		require.Equal(w.t, map[string]string{"own": "1"}, page.Work[0].Data)
		require.Equal(w.t, &badge, page.Work[0].Badge)
		require.Equal(w.t, school.Disabled, page.Work[1].Skip)
		require.True(w.t, page.Work[2].Sendable())
		require.Nil(w.t, page.Work[2].Badge)

		b, err := w.Store.School(w.ctx(), "A")
		require.NoError(w.t, err)
		require.Equal(w.t, int64(1), b.School.SettingsVersion)
		require.Equal(w.t, school.Ledger{}, b.Ledger)
	}},
	{"Accept/a notice without recipients is refused and leaves nothing", func(w *world) {
		_, err := w.Store.Accept(w.ctx(), plain("A"), 0, devices(0))
		field, ok := errors.AsType[*school.FieldError](err)
		require.True(w.t, ok, "%v", err)
		require.Equal(w.t, "recipients", field.Field)
		_, err = w.Store.School(w.ctx(), "A")
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"Accept/a notice that has expired by the store's clock is refused and takes nothing", func(w *world) {
		for _, n := range []int{1, 3000} {
			late := plain("A")
			late.ExpiresAt = time.Now().Add(-time.Minute)
			_, err := w.Store.Accept(w.ctx(), late, n, func(func(school.NewRecipient, error) bool) { w.t.Error("recipients were asked for") })
			field, ok := errors.AsType[*school.FieldError](err)
			require.True(w.t, ok, "%v", err)
			require.Equal(w.t, "expires_at", field.Field)
		}
		_, err := w.Store.School(w.ctx(), "A")
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"Accept/the same device twice is stored once to be sent", func(w *world) {
		for _, size := range []int{2, 5000} { // stored at once, and streamed
			id := w.accept(plain("A"), func(yield func(school.NewRecipient, error) bool) {
				for i := range 2 * size {
					if !yield(school.NewRecipient{Token: fmt.Sprint("token-", i%size)}, nil) {
						return
					}
				}
			})
			c := w.progress(id).Counts
			require.Equal(w.t, school.Counts{Total: 2 * size, Waiting: size, Skipped: school.Skips{Duplicate: size}}, c)
			require.Equal(w.t, fmt.Sprintf("PENDING=%d SKIPPED=%d", size, size), w.states(id))
		}
		w.send(w.term("A", "x"), school.Accepted)
		for _, p := range mustList(w) {
			require.Equal(w.t, school.NoticeCompleted, p.Status)
		}
	}},
	{"Accept/an error of the iterator in the middle of 10,000 stores nothing", func(w *world) {
		broken := errors.New("line 5001 is broken")
		for _, at := range []int{0, 5, 1999, 2000, 2001, 5000} {
			n := plain("A")
			n.IdempotencyKey, n.RequestHash = fmt.Sprint("key-", at), []byte{1}
			_, err := w.Store.Accept(w.ctx(), n, 10_000, func(yield func(school.NewRecipient, error) bool) {
				for i := range 10_000 {
					if i == at {
						yield(school.NewRecipient{}, broken)
						return
					}
					if !yield(school.NewRecipient{Token: fmt.Sprint("token-", i)}, nil) {
						return
					}
				}
			})
			require.Same(w.t, broken, err, "at %d", at)
			require.Equal(w.t, [][]string{{"0"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
			require.Equal(w.t, [][]string{{"0"}}, w.Query(w.t, `SELECT count(*) FROM push_cluster_tokens`))
			require.Equal(w.t, [][]string{{"0"}}, w.Query(w.t, `SELECT count(*) FROM schools`))
			// The key is free again.
			_, err = w.Store.Accept(w.ctx(), n, 1, devices(1))
			require.NoError(w.t, err)
			w.Exec(w.t, `DELETE FROM push_cluster_tokens`)
			w.Exec(w.t, `DELETE FROM push_clusters`)
			w.Exec(w.t, `DELETE FROM schools`)
		}
	}},
	{"Accept/a panic of the iterator reaches the caller and stores nothing", func(w *world) {
		for _, at := range []int{1, 5000} {
			require.PanicsWithValue(w.t, "boom", func() {
				_, _ = w.Store.Accept(w.ctx(), plain("A"), 10_000, func(yield func(school.NewRecipient, error) bool) {
					for i := range 10_000 {
						if i == at {
							panic("boom")
						}
						if !yield(school.NewRecipient{Token: fmt.Sprint("token-", i)}, nil) {
							return
						}
					}
				})
			})
		}
		require.Equal(w.t, [][]string{{"0"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
	}},
	{"Accept/the same key and request gets the first answer and reads nothing", func(w *world) {
		n := keyed("A", "key", "body")
		first, err := w.Store.Accept(w.ctx(), n, 0, devices(3))
		require.NoError(w.t, err)
		w.send(w.term("A", "x"), school.Accepted)
		again, err := w.Store.Accept(w.ctx(), keyed("A", "key", "body"), 0, func(func(school.NewRecipient, error) bool) {
			w.t.Error("the recipients were read")
		})
		require.NoError(w.t, err)
		require.True(w.t, again.Replay)
		require.Equal(w.t, []any{first.ID, first.Total, first.School}, []any{again.ID, again.Total, again.School})
		require.Equal(w.t, [][]string{{"1"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
	}},
	{"Accept/the same key with another request is refused", func(w *world) {
		w.accept(keyed("A", "key", "body"), devices(3))
		_, err := w.Store.Accept(w.ctx(), keyed("A", "key", "other"), 0, devices(3))
		require.ErrorIs(w.t, err, school.ErrIdempotencyMismatch)
	}},
	{"Accept/a key belongs to its school", func(w *world) {
		a := w.accept(keyed("A", "key", "body"), devices(3))
		b := w.accept(keyed("B", "key", "other"), devices(3))
		require.NotEqual(w.t, a, b)
	}},
	{"Accept/the same key while the first is in progress conflicts at once", func(w *world) {
		const size = 5000
		reading, proceed := make(chan struct{}), make(chan struct{})
		done := make(chan error, 1)
		go func() {
			_, err := w.Store.Accept(w.ctx(), keyed("A", "key", "body"), size, func(yield func(school.NewRecipient, error) bool) {
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
		_, err := w.Store.Accept(w.ctx(), keyed("A", "key", "body"), 0, devices(5))
		_, otherErr := w.Store.Accept(w.ctx(), keyed("A", "other", "body"), 0, devices(5))
		close(proceed)
		require.NoError(w.t, <-done)
		require.ErrorIs(w.t, err, school.ErrConflict)
		require.NoError(w.t, otherErr)
		require.Equal(w.t, [][]string{{"2"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
	}},
	{"Accept/of twenty with one key at once one is stored", func(w *world) {
		var wg sync.WaitGroup
		ids := make(chan int64, 20)
		for range 20 {
			wg.Go(func() {
				r, err := w.Store.Accept(w.ctx(), keyed("A", "key", "body"), 0, devices(50))
				if errors.Is(err, school.ErrConflict) {
					return
				}
				if err != nil {
					w.t.Error(err)
					return
				}
				ids <- r.ID
			})
		}
		wg.Wait()
		close(ids)
		one := int64(0)
		for id := range ids {
			require.True(w.t, one == 0 || one == id)
			one = id
		}
		require.NotZero(w.t, one)
		require.Equal(w.t, [][]string{{"1"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
		require.Equal(w.t, [][]string{{"50"}}, w.Query(w.t, `SELECT count(*) FROM push_cluster_tokens`))
	}},
	{"Accept/many at once for one new school make it once", func(w *world) {
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if _, err := w.Store.Accept(w.ctx(), plain("A"), 0, devices(5)); err != nil {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(w.t, [][]string{{"A", "1"}}, w.Query(w.t, `SELECT id, settings_version FROM schools`))
		require.Equal(w.t, [][]string{{"10"}}, w.Query(w.t, `SELECT count(*) FROM push_clusters`))
	}},
	{"Accept/text of any kind comes back as it was", func(w *world) {
		n := plain("A")
		n.Content.Title = "가정통신문 \"인용\" \\ ' 🔔\t\n"
		n.Content.Data = map[string]string{"키": "값 \\u0041 \"x\""}
		long := strings.Repeat("x", school.MaxToken-1)
		id := w.accept(n, list(school.NewRecipient{Token: long + "1", Ref: "학생\\,{}\"", Data: map[string]string{"q": "{\"a\":[1,null]}"}}, school.NewRecipient{Token: long + "2"}))
		p := w.page(w.term("A", "x"), 10)
		require.Len(w.t, p.Work, 2)
		require.Equal(w.t, n.Content, p.Work[0].Notice.Content)
		require.Equal(w.t, long+"1", p.Work[0].Token)
		require.Equal(w.t, map[string]string{"q": "{\"a\":[1,null]}"}, p.Work[0].Data)
		rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 10})
		require.NoError(w.t, err)
		require.Equal(w.t, "학생\\,{}\"", rows[0].Ref)
		require.Less(w.t, len(rows[0].Token), 20)
	}},
}

func keyed(schoolID, key, body string) *school.Notice {
	n := plain(schoolID)
	hash := sha256.Sum256([]byte(body))
	n.IdempotencyKey, n.RequestHash = key, hash[:]
	return n
}

func mustList(w *world) []school.Progress {
	w.t.Helper()
	list, err := w.Store.Notices(w.ctx(), school.NoticeFilter{Limit: 1000})
	require.NoError(w.t, err)
	return list
}
