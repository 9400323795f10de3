package storetest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

var schoolTests = []test{
	{"PutSchool/changes what is given and its version grows with each change", func(w *world) {
		name, sender, limit, rest := "A school", "fcm", 50, 1500*time.Millisecond
		s, created, err := w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{Name: &name, Limit: &limit})
		require.NoError(w.t, err)
		require.True(w.t, created)
		s.CreatedAt = time.Time{}
		require.Equal(w.t, school.School{ID: "A", Name: name, Limit: &limit, SettingsVersion: 1}, s)
		s, created, err = w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{Sender: &sender, Rest: &rest})
		require.NoError(w.t, err)
		require.False(w.t, created)
		s.CreatedAt = time.Time{}
		require.Equal(w.t, school.School{ID: "A", Name: name, Sender: sender, Limit: &limit, Rest: &rest, SettingsVersion: 2}, s)
		s, _, err = w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{Sender: &sender})
		require.NoError(w.t, err)
		require.Equal(w.t, int64(2), s.SettingsVersion)
		term := w.term("A", "x")
		require.Equal(w.t, []any{&limit, &rest, sender, int64(2)}, []any{term.Settings.Limit, term.Settings.Rest, term.Settings.Sender, term.Settings.SettingsVersion})
	}},
	{"PutSchool/a school has its ledger from birth", func(w *world) {
		_, _, err := w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{})
		require.NoError(w.t, err)
		require.Equal(w.t, [][]string{{"A", "0", "0", "0"}}, w.Query(w.t, `SELECT school_id, fence, cycle, attempted FROM school_terms`))
	}},
	{"DeleteSchool/is refused while there is work and keeps the ledger", func(w *world) {
		require.ErrorIs(w.t, w.Store.DeleteSchool(w.ctx(), "A"), school.ErrNotFound)
		id := w.notice("A", 10)
		limit := 7
		_, _, err := w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{Limit: &limit})
		require.NoError(w.t, err)
		require.ErrorIs(w.t, w.Store.DeleteSchool(w.ctx(), "A"), school.ErrConflict)
		term := w.term("A", "x")
		w.claim(term, w.page(term, 5).Work)
		require.NoError(w.t, w.Store.Cancel(w.ctx(), id))
		require.ErrorIs(w.t, w.Store.DeleteSchool(w.ctx(), "A"), school.ErrConflict)
		w.Elapse(w.t, time.Minute)
		next := w.term("A", "y")
		_, err = w.Store.Takeover(w.ctx(), next, policy)
		require.NoError(w.t, err)
		require.NoError(w.t, w.Store.DeleteSchool(w.ctx(), "A"))
		_, err = w.Store.School(w.ctx(), "A")
		require.ErrorIs(w.t, err, school.ErrNotFound)
		_, err = w.Store.OpenTerm(w.ctx(), "A", "acq", "x")
		require.ErrorIs(w.t, err, school.ErrNotFound)
		require.ErrorIs(w.t, w.Store.Pause(w.ctx(), "A"), school.ErrNotFound)

		s, created, err := w.Store.PutSchool(w.ctx(), "A", school.SchoolChange{})
		require.NoError(w.t, err)
		require.True(w.t, created)
		require.Nil(w.t, s.Limit)
		require.Equal(w.t, int64(3), s.SettingsVersion)
		again := w.term("A", "z")
		require.Equal(w.t, next.Fence+1, again.Fence)
		require.Equal(w.t, []any{int64(1), 5}, []any{again.Ledger.Cycle, again.Ledger.Attempted})
		require.Equal(w.t, school.NoticeCancelled, w.progress(id).Status)
	}},
	{"DeleteSchool/racing an accepted notice never leaves it without its school", func(w *world) {
		for round := range 20 {
			id := fmt.Sprint("school-", round)
			_, _, err := w.Store.PutSchool(w.ctx(), id, school.SchoolChange{})
			require.NoError(w.t, err)
			var wg sync.WaitGroup
			wg.Go(func() {
				if err := w.Store.DeleteSchool(w.ctx(), id); err != nil && !errors.Is(err, school.ErrConflict) {
					w.t.Error(err)
				}
			})
			w.notice(id, 3)
			wg.Wait()
			_, err = w.Store.School(w.ctx(), id)
			require.NoError(w.t, err)
		}
	}},
	{"Schools/are listed by id with their backlog", func(w *world) {
		for _, id := range []string{"b", "B", "a-1", "a.1", "a_1", "1"} {
			w.notice(id, 2)
		}
		var ids []string
		after := ""
		for {
			list, err := w.Store.Schools(w.ctx(), after, 4)
			require.NoError(w.t, err)
			if len(list) == 0 {
				break
			}
			for _, b := range list {
				ids = append(ids, b.School.ID)
				after = b.School.ID
			}
		}
		require.Equal(w.t, []string{"1", "B", "a-1", "a.1", "a_1", "b"}, ids)
		_, err := w.Store.Schools(w.ctx(), "", 0)
		require.Error(w.t, err)
		_, err = w.Store.Schools(w.ctx(), "", 1001)
		require.Error(w.t, err)
	}},
	{"School/tells its backlog by what it waits for", func(w *world) {
		w.inEveryState(plain("A"))
		n := plain("A")
		n.ScheduledAt = time.Now().Add(time.Hour)
		w.accept(n, devices(7))
		b, err := w.Store.School(w.ctx(), "A")
		require.NoError(w.t, err)
		require.Equal(w.t, []int{50, 0, 5, 7, 25}, []int{b.Waiting, b.RetryWaiting, b.RetryDue, b.Scheduled, b.InProgress})
		require.InDelta(w.t, 2*time.Minute, b.OldestWaitingFor, float64(30*time.Second))
		require.Equal(w.t, int64(1), b.Fence)
	}},
	{"Notices/are listed newest first", func(w *world) {
		var ids []int64
		for range 5 {
			ids = append(ids, w.notice("A", 1))
			w.notice("B", 1)
		}
		w.send(w.term("B", "x"), school.Accepted)
		p, err := w.Store.Notices(w.ctx(), school.NoticeFilter{School: "A", Limit: 3})
		require.NoError(w.t, err)
		require.Equal(w.t, []int64{ids[4], ids[3], ids[2]}, []int64{p[0].Notice.ID, p[1].Notice.ID, p[2].Notice.ID})
		p, err = w.Store.Notices(w.ctx(), school.NoticeFilter{School: "A", Limit: 3, Before: ids[2]})
		require.NoError(w.t, err)
		require.Equal(w.t, []int64{ids[1], ids[0]}, []int64{p[0].Notice.ID, p[1].Notice.ID})
		p, err = w.Store.Notices(w.ctx(), school.NoticeFilter{Status: school.NoticeCompleted, Limit: 100})
		require.NoError(w.t, err)
		require.Len(w.t, p, 5)
		_, err = w.Store.Notice(w.ctx(), 1)
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"Recipients/are listed by seq, state and code, with their state worked out", func(w *world) {
		id, _, _ := w.inEveryState(plain("A"))
		rows, err := w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 30, After: 10})
		require.NoError(w.t, err)
		require.Len(w.t, rows, 30)
		require.Equal(w.t, 11, rows[0].Seq)
		require.Equal(w.t, school.MessageID(id, 11), rows[0].MessageID)
		require.Equal(w.t, "r11", rows[0].Ref)
		require.NotContains(w.t, rows[0].Token, "0000011")
		rows, err = w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 100, State: school.InProgress})
		require.NoError(w.t, err)
		require.Len(w.t, rows, 25)
		require.True(w.t, rows[0].NextTryAt.IsZero())
		rows, err = w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 100, State: school.RetryPending, Code: "UNAVAILABLE"})
		require.NoError(w.t, err)
		require.Len(w.t, rows, 5)
		require.False(w.t, rows[0].NextTryAt.IsZero())
		rows, err = w.Store.Recipients(w.ctx(), id, school.RecipientFilter{Limit: 100, Code: "NOTHING"})
		require.NoError(w.t, err)
		require.Empty(w.t, rows)
		_, err = w.Store.Recipients(w.ctx(), 1, school.RecipientFilter{Limit: 100})
		require.ErrorIs(w.t, err, school.ErrNotFound)
	}},
	{"Recipients/never show a whole token, nor more than a third of it", func(w *world) {
		tokens := []string{"a", "ab", "abc", "tok-1", "토큰토큰토큰토", "0123456789abcdefg", "0123456789abcdefgh", strings.Repeat("t", 200)}
		var recipients []school.NewRecipient
		for _, token := range tokens {
			recipients = append(recipients, school.NewRecipient{Token: token})
		}
		rows, err := w.Store.Recipients(w.ctx(), w.accept(plain("A"), list(recipients...)), school.RecipientFilter{Limit: 100})
		require.NoError(w.t, err)
		require.Len(w.t, rows, len(tokens))
		var shown []string
		for _, r := range rows {
			shown = append(shown, r.Token)
		}
		require.Equal(w.t, []string{"…", "…", "a…", "t…", "토큰…", "01234…", "012345…", "tttttt…"}, shown)
	}},
}
