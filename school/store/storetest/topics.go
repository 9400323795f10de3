package storetest

import (
	"errors"
	"fmt"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// subscribe registers devices token-1 … token-n of a school with the topics.
func (w *world) subscribe(schoolID string, n int, topics ...string) {
	w.t.Helper()
	for i := range n {
		w.topics(schoolID, fmt.Sprintf("token-%d", i+1), topics...)
	}
}

// topics registers one device.
func (w *world) topics(schoolID, token string, topics ...string) {
	w.t.Helper()
	w.Device(w.t, schoolID, token, true, false)
	for _, topic := range topics {
		w.Exec(w.t, fmt.Sprintf(`INSERT INTO device_topics (school_id, topic, token_sha)
			SELECT school_id, '%s', token_sha FROM devices WHERE school_id = '%s' AND token = '%s'`, topic, schoolID, token))
	}
}

func toTopic(schoolID, topic string) *school.Notice {
	n := plain(schoolID)
	n.Topic = topic
	return n
}

// nobody is a sequence that must not be touched.
func nobody(func(school.NewRecipient, error) bool) { panic("the recipients were asked for") }

func (w *world) acceptTopic(n *school.Notice) school.Receipt {
	w.t.Helper()
	r, err := w.Store.Accept(w.ctx(), n, 0, nobody)
	require.NoError(w.t, err)
	return r
}

var topicTests = []test{
	{"Topic/its recipients are the school's devices that have it, in an order that stays", func(w *world) {
		w.subscribe("A", 20, "board-3", "other")
		w.topics("A", "elsewhere", "other")
		w.topics("B", "token-1", "board-3")
		w.Device(w.t, "A", "gone", true, true)
		w.Exec(w.t, `INSERT INTO device_topics (school_id, topic, token_sha) SELECT school_id, 'board-3', token_sha FROM devices WHERE token = 'gone'`)
		w.Exec(w.t, `UPDATE devices SET ref = 'member-7' WHERE school_id = 'A' AND token = 'token-7'`)

		n := toTopic("A", "board-3")
		r := w.acceptTopic(n)
		require.Equal(w.t, school.Receipt{ID: n.ID, School: "A", Status: school.NoticePending, Total: 20}, r)
		require.Equal(w.t, school.Counts{Total: 20, Waiting: 20}, w.progress(r.ID).Counts)
		require.Equal(w.t, "board-3", w.progress(r.ID).Notice.Topic)
		again := w.acceptTopic(toTopic("A", "board-3"))
		recipients := func(id int64) [][]string {
			return w.Query(w.t, fmt.Sprintf(`SELECT seq, token, ref FROM push_cluster_tokens WHERE cluster_id = %d ORDER BY seq`, id))
		}
		require.Equal(w.t, recipients(r.ID), recipients(again.ID))
		require.Equal(w.t, [][]string{{"20", "1", "20"}}, w.Query(w.t, fmt.Sprintf(
			`SELECT count(DISTINCT token), min(seq), max(seq) FROM push_cluster_tokens WHERE token LIKE 'token-%%' AND cluster_id = %d`, r.ID)))
		require.Equal(w.t, [][]string{{"token-7"}}, w.Query(w.t, fmt.Sprintf(
			`SELECT token FROM push_cluster_tokens WHERE ref = 'member-7' AND cluster_id = %d`, r.ID)))

		require.Equal(w.t, 40, w.send(w.term("A", "x"), school.Accepted))
		require.Equal(w.t, school.NoticeCompleted, w.progress(r.ID).Status)
	}},
	{"Topic/without a device the notice has ended, and makes its school", func(w *world) {
		w.topics("A", "token-1", "board-3")
		w.Exec(w.t, `UPDATE devices SET retired_at = registered_at`)
		for _, schoolID := range []string{"A", "unknown"} {
			r := w.acceptTopic(toTopic(schoolID, "board-3"))
			require.Equal(w.t, []any{school.NoticeCompleted, 0}, []any{r.Status, r.Total})
			p := w.progress(r.ID)
			require.Equal(w.t, school.Progress{Status: school.NoticeCompleted}, school.Progress{Status: p.Status, Counts: p.Counts})
			require.False(w.t, p.EndedAt.IsZero())
			_, err := w.Store.School(w.ctx(), schoolID)
			require.NoError(w.t, err)
			in, err := w.Store.WorkIn(w.ctx(), schoolID)
			require.NoError(w.t, err)
			require.Equal(w.t, school.Never, in)
			require.NoError(w.t, w.Store.DeleteSchool(w.ctx(), schoolID), "nothing is under way")
		}
		_, err := w.Store.Expire(w.ctx(), 10)
		require.NoError(w.t, err)
		stranded, err := w.Store.Sweep(w.ctx())
		require.NoError(w.t, err)
		require.Zero(w.t, stranded)
	}},
	{"Topic/a device that is off when the page is read is skipped, whatever it was before", func(w *world) {
		w.subscribe("A", 3, "board-3")
		w.Exec(w.t, `UPDATE devices SET enabled = (token <> 'token-1')`)
		r := w.acceptTopic(toTopic("A", "board-3"))
		require.Equal(w.t, 3, r.Total)
		w.Exec(w.t, `UPDATE devices SET enabled = (token <> 'token-2')`)
		require.Equal(w.t, 2, w.send(w.term("A", "x"), school.Accepted))
		require.Equal(w.t, school.Counts{Total: 3, Success: 2, Skipped: school.Skips{Disabled: 1}}, w.progress(r.ID).Counts)
		require.Equal(w.t, [][]string{{"token-2"}}, w.Query(w.t, `SELECT token FROM push_cluster_tokens WHERE job_status = 'SKIPPED'`))
	}},
	{"Topic/who comes or goes afterwards changes nothing", func(w *world) {
		w.subscribe("A", 3, "board-3")
		n := toTopic("A", "board-3")
		n.ScheduledAt = time.Now().Add(time.Hour)
		r := w.acceptTopic(n)
		w.topics("A", "later", "board-3")
		w.Exec(w.t, `DELETE FROM devices WHERE token = 'token-1'`)
		w.Elapse(w.t, 2*time.Hour)
		require.Equal(w.t, 3, w.send(w.term("A", "x"), school.Accepted))
		require.Equal(w.t, 3, w.progress(r.ID).Counts.Success)
	}},
	{"Topic/the same key gets the first answer", func(w *world) {
		w.subscribe("A", 3, "board-3")
		n := keyed("A", "key", "body")
		n.Topic = "board-3"
		first := w.acceptTopic(n)
		w.topics("A", "later", "board-3")
		n = keyed("A", "key", "body")
		n.Topic = "board-3"
		again := w.acceptTopic(n)
		require.Equal(w.t, []any{first.ID, 3, true}, []any{again.ID, again.Total, again.Replay})
		n = keyed("A", "key", "other")
		n.Topic = "board-3"
		_, err := w.Store.Accept(w.ctx(), n, 0, nobody)
		require.ErrorIs(w.t, err, school.ErrIdempotencyMismatch)
		require.Equal(w.t, [][]string{{"1", "3"}}, w.Query(w.t, `SELECT count(DISTINCT cluster_id), count(*) FROM push_cluster_tokens`))
	}},
	{"Topic/expired before it came is refused", func(w *world) {
		w.subscribe("A", 3, "board-3")
		n := toTopic("A", "board-3")
		n.ExpiresAt = time.Now().Add(-time.Minute)
		_, err := w.Store.Accept(w.ctx(), n, 0, nobody)
		field, ok := errors.AsType[*school.FieldError](err)
		require.True(w.t, ok)
		require.Equal(w.t, "expires_at", field.Field)
		require.Empty(w.t, w.Query(w.t, `SELECT id FROM push_clusters`))
	}},
}
