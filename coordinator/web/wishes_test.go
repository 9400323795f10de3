package web

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// ask sends a request without a body.
func (w *world) ask(method, target string) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(method, target, "", nil)
}

func TestPriorities(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for i, c := range []struct{ given, want string }{{`"urgent"`, "urgent"}, {`"normal"`, "normal"}, {`"low"`, "low"}, {"null", "normal"}} {
		require.Equal(t, http.StatusAccepted, w.post(with(`"priority":`+c.given)).Code)
		n := requireAnswer[api.Notice](t, w.get("/v1/notices/"+string(rune('1'+i))), http.StatusOK)
		require.Equal(t, c.want, n.Priority)
		require.Equal(t, school.Priority(c.want), w.store.notices[int64(i+1)].notice.Priority)
	}
	requireError(t, w.upload(strings.NewReader(`{"school":"A","title":"t","priority":"URGENT"}`+"\n"+`{"token":"a"}`)), api.InvalidArgument, "priority")
}

func TestCancel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	for range 2 { // again answers the same
		n := requireAnswer[api.Notice](t, w.ask(http.MethodPost, "/v1/notices/1/cancel"), http.StatusOK)
		require.Equal(t, []any{"1", "CANCELLED", "CANCELLED", 1}, []any{n.ID, n.Status, n.Closing, n.Skipped.Cancelled})
		require.Equal(t, "b", n.Body)
	}
	w.store.set(func(f *fakeStore) { f.notices[2].closing = school.Expired })
	e := requireError(t, w.ask(http.MethodPost, "/v1/notices/2/cancel"), api.Conflict, "")
	require.Equal(t, "the notice has ended or expired; there is nothing to cancel", e.Message)
	require.Empty(t, w.ask(http.MethodPost, "/v1/notices/2/cancel").Header().Get("Retry-After"), "trying again does not help")
	for _, id := range []string{"3", "0", "x"} {
		requireError(t, w.ask(http.MethodPost, "/v1/notices/"+id+"/cancel"), api.NotFound, "")
	}
	requireError(t, w.ask(http.MethodGet, "/v1/notices/1/cancel"), api.MethodNotAllowed, "")
	w.store.set(func(f *fakeStore) { f.err = school.ErrUnavailable })
	requireError(t, w.ask(http.MethodPost, "/v1/notices/1/cancel"), api.Unavailable, "")
}

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	w.waker.woken = nil
	for range 2 {
		require.Equal(t, api.Paused, requireAnswer[api.School](t, w.ask(http.MethodPost, "/v1/schools/A/pause"), http.StatusOK).State)
	}
	require.Empty(t, w.waker.woken)
	for range 2 {
		require.Equal(t, api.Idle, requireAnswer[api.School](t, w.ask(http.MethodPost, "/v1/schools/A/resume"), http.StatusOK).State)
	}
	require.Equal(t, []string{"A", "A"}, w.waker.woken, "a school that goes on is looked at at once")
	for _, what := range []string{"pause", "resume"} {
		for _, id := range []string{"B", "A%7D"} {
			requireError(t, w.ask(http.MethodPost, "/v1/schools/"+id+"/"+what), api.NotFound, "")
		}
	}
	w.store.set(func(f *fakeStore) { f.err = school.ErrUnavailable })
	requireError(t, w.ask(http.MethodPost, "/v1/schools/A/resume"), api.Unavailable, "")
	require.Len(t, w.waker.woken, 2, "nobody is woken for what was not done")
}

func TestFailures(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	require.JSONEq(t, `{"items":[],"next":""}`, w.get("/v1/failures").Body.String())
	require.Equal(t, failurePage{limit: 100}, w.store.asked[0])
	w.store.set(func(f *fakeStore) {
		f.failures = school.FailureList{More: true, Next: school.FailureKey{Notice: 1, Code: "A/B", Reason: "REJECTED"}, Items: []school.Failure{
			{School: "A", Notice: 1, Title: "T", Code: "A/B", Reason: school.RejectedReason, Recipients: 3, LastAt: testNow}}}
	})
	rec := w.get("/v1/failures?school=A&notice=1&code=X&limit=1")
	require.JSONEq(t, `{"items":[{"school":"A","notice":"1","title":"T","error_code":"A/B","reason":"REJECTED","recipients":3,"last_failed_at":"2026-03-02T09:00:00Z"}],
		"next":"1/A/B/REJECTED"}`, rec.Body.String())
	for _, key := range []school.FailureKey{{Notice: 7, Code: "A/B", Reason: "REJECTED"}, {Notice: 7, Whole: true}, {Notice: 7, Code: "", Reason: "DISABLED"}} {
		require.Equal(t, http.StatusOK, w.get("/v1/failures?school=A&code=X&cursor="+url.QueryEscape(failureKeyText(key))).Code)
		require.Equal(t, failurePage{school.FailureFilter{School: "A", Code: "X"}, key, 100}, w.store.asked[len(w.store.asked)-1])
	}
	for target, field := range map[string]string{
		"?school=}": "school", "?school=": "school", "?notice=x": "notice", "?notice=": "notice", "?code=": "code", "?code=a%20b": "code", "?limit=0": "limit",
		"?cursor=x": "cursor", "?cursor=1/2": "cursor", "?cursor=1/%00/R": "cursor", "?error=X": "error",
	} {
		requireError(t, w.get("/v1/failures"+target), api.InvalidArgument, field)
	}
	requireError(t, w.get("/v1/failures?notice=9"), api.NotFound, "")
}

func TestRequeue(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	w.waker.woken = nil
	ask := func(body string) *httptest.ResponseRecorder {
		return w.do(http.MethodPost, "/v1/failures/requeue", api.JSON, strings.NewReader(body))
	}
	next := school.RequeuePlace{Notice: 5, Seq: 10, Before: testNow}
	w.store.requeued = []school.Requeued{{Recipients: 7, Schools: []string{"A", "B"}, More: true, Next: next, Left: school.RequeueLeft{Cancelled: 1, Expired: 2, Purged: 3, SchoolDeleted: 4, OutcomeUnknown: 5}}}
	got := ask(`{"code":"UNAVAILABLE"}`)
	require.JSONEq(t, `{"requeued":7,"dry_run":false,"left":{"cancelled":1,"expired":2,"purged":3,"school_deleted":4,"outcome_unknown":5},"next":"5.10.1772442000000000"}`, got.Body.String())
	require.Equal(t, []string{"A", "B"}, w.waker.woken)
	requireAnswer[api.Requeued](t, ask(`{"school":"A","notice":"1","code":"X","dry_run":true,"cursor":"5.10.1772442000000000"}`), http.StatusOK)
	order := w.store.orders[1]
	require.True(t, order.From.Before.Equal(testNow))
	order.From.Before = testNow
	require.Equal(t, school.RequeueOrder{FailureFilter: school.FailureFilter{School: "A", Notice: 1, Code: "X"}, DryRun: true, From: next, Limit: requeueMost}, order)

	for body, field := range map[string]string{
		``: "", `{}`: "", `{"dry_run":true}`: "", `{"school":null}`: "", `[]`: "", `{"school":""}`: "school", `{"notice":1}`: "notice", `{"notice":"x"}`: "notice",
		`{"code":""}`: "code", `{"code":"a b"}`: "code", `{"school":"A","all":true}`: "all", `{"school":"A","cursor":"1.2"}`: "cursor",
		`{"school":"A","cursor":"1.-2.3"}`: "cursor", `{"school":"A","dry_run":"yes"}`: "dry_run",
	} {
		requireError(t, ask(body), api.InvalidArgument, field)
	}
	requireError(t, w.do(http.MethodPost, "/v1/failures/requeue", "text/plain", strings.NewReader(`{"school":"A"}`)), api.UnsupportedMediaType, "")
	require.Len(t, w.store.orders, 2)

	// What was done before an error is sent.
	w.waker.woken = nil
	w.store.set(func(f *fakeStore) {
		f.requeued, f.refused = []school.Requeued{{Recipients: 1, Schools: []string{"A"}}}, school.ErrUnavailable
	})
	requireError(t, ask(`{"school":"A"}`), api.Unavailable, "")
	require.Equal(t, []string{"A"}, w.waker.woken)
}

func TestRetryOfANotice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	w.waker.woken = nil
	next := school.RequeuePlace{Notice: 1, Seq: 10, Before: testNow}
	w.store.requeued = []school.Requeued{
		{Recipients: 7, Schools: []string{"A"}, More: true, Next: next, Left: school.RequeueLeft{OutcomeUnknown: 2}},
		{Recipients: 3, Schools: []string{"A"}, Left: school.RequeueLeft{OutcomeUnknown: 1}},
	}
	got := requireAnswer[api.Requeued](t, w.ask(http.MethodPost, "/v1/notices/1/retry"), http.StatusOK)
	require.Equal(t, api.Requeued{Requeued: 10, Left: api.RequeueLeft{OutcomeUnknown: 3}}, got)
	require.Equal(t, next, w.store.orders[1].From)
	require.Equal(t, []string{"A", "A"}, w.waker.woken)
	requireError(t, w.ask(http.MethodPost, "/v1/notices/2/retry"), api.NotFound, "")
	for why, left := range map[string]school.RequeueLeft{"cancelled": {Cancelled: 1}, "expired": {Expired: 1}, "removed": {Purged: 1}, "deleted": {SchoolDeleted: 1}} {
		w.store.set(func(f *fakeStore) { f.requeued, f.refused = []school.Requeued{{Left: left}}, school.ErrConflict })
		rec := w.ask(http.MethodPost, "/v1/notices/1/retry")
		require.Contains(t, requireError(t, rec, api.Conflict, "").Message, why)
		require.Empty(t, rec.Header().Get("Retry-After"))
	}
}
