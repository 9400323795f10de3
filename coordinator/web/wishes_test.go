package web

import (
	"net/http"
	"net/http/httptest"
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
