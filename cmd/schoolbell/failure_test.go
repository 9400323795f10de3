package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// failureServer answers requeues one after the other and notes what was asked.
type failureServer struct {
	mu      sync.Mutex
	answers []answer
	asked   []api.RequeueRequest
	paths   []string
}

func (s *failureServer) stage(t *testing.T) *stage {
	ts := httptest.NewServer(s)
	t.Cleanup(ts.Close)
	st := newStage()
	st.environ = []string{"SCHOOLBELL_SERVER=" + ts.URL}
	return st
}

func (s *failureServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.paths = append(s.paths, r.Method+" "+r.URL.RequestURI())
	var o api.RequeueRequest
	_ = json.NewDecoder(r.Body).Decode(&o)
	s.asked = append(s.asked, o)
	write(w, s.answers[0].status, s.answers[0].body)
	s.answers = s.answers[1:]
}

func TestFailureList(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	s := &failureServer{answers: []answer{
		{200, api.List[api.Failure]{Next: "1", Items: []api.Failure{{School: "A", Notice: "7", Title: "x\x1b[2Jy", ErrorCode: "TIMEOUT", Reason: "OUTCOME_UNKNOWN", Recipients: 3, LastFailedAt: &at},
			{School: "A", Notice: "7", Reason: "CANCELLED", Recipients: 1}}}},
		{200, api.List[api.Failure]{}},
	}}
	st := s.stage(t)
	require.Equal(t, exitDone, st.run("failure", "list", "--school", "A", "--notice", "7", "--code", "X", "--limit", "2", "--cursor", "9"), st.err.String())
	require.Regexp(t, `^SCHOOL +NOTICE +CODE +REASON +RECIPIENTS +LAST +TITLE\nA +7 +TIMEOUT +OUTCOME_UNKNOWN +3 +2026-.* x \[2Jy\nA +7 +- +CANCELLED +1 +- +\nmore: --cursor 1\n$`, st.out.String())
	require.Equal(t, []string{"GET /v1/failures?code=X&cursor=9&limit=2&notice=7&school=A"}, s.paths)
	require.Equal(t, exitDone, st.run("failure", "list"))
	require.Equal(t, "no permanent failures\n", st.out.String())
}

func TestFailureRequeue(t *testing.T) {
	t.Parallel()
	unknown := api.RequeueLeft{OutcomeUnknown: 2}
	s := &failureServer{answers: []answer{
		{200, api.Requeued{Requeued: 100, DryRun: true, Next: "a"}}, {200, api.Requeued{Requeued: 20, DryRun: true, Left: unknown}},
		{200, api.Requeued{Requeued: 100, Next: "b", Left: unknown}}, {200, api.Requeued{Requeued: 20, Left: api.RequeueLeft{Cancelled: 1}}},
		{200, api.Requeued{Requeued: 100, Next: "c"}}, refuse(api.Error{Code: api.Unavailable, Message: "away", RetryAfter: time.Second}),
	}}
	st := s.stage(t)
	require.Equal(t, exitDone, st.run("failure", "requeue", "--school", "A", "--code", "X"), st.err.String())
	require.Equal(t, "120 recipients would be tried again; --yes does it\nleft: 2 may have arrived (at most once; --code OUTCOME_UNKNOWN takes them)\n", st.out.String())
	require.Equal(t, []api.RequeueRequest{{School: "A", Code: "X", DryRun: true}, {School: "A", Code: "X", DryRun: true, Cursor: "a"}}, s.asked)
	s.asked = nil
	require.Equal(t, exitDone, st.run("failure", "requeue", "--notice", "7", "--yes"), st.err.String())
	require.Equal(t, "120 recipients are tried again\nleft: 1 of cancelled notices, 2 may have arrived (at most once; --code OUTCOME_UNKNOWN takes them)\n", st.out.String())
	require.Equal(t, "100 so far\n", st.err.String())
	require.Equal(t, []api.RequeueRequest{{Notice: "7"}, {Notice: "7", Cursor: "b"}}, s.asked)
	require.Equal(t, exitUnreachable, st.run("failure", "requeue", "--notice", "7", "--yes"))
	require.Contains(t, st.err.String(), "100 were put back before: the same command goes on with the rest")
}

func TestNoticeRetry(t *testing.T) {
	t.Parallel()
	left := api.RequeueLeft{OutcomeUnknown: 2}
	s := &failureServer{answers: []answer{
		{200, api.Requeued{Requeued: 100, Next: "a", Left: left}}, {200, api.Requeued{Requeued: 20, Left: left}},
		refuse(api.Error{Code: api.Conflict, Message: "the notice was cancelled; it takes no more attempts"}),
	}}
	st := s.stage(t)
	require.Equal(t, exitDone, st.run("notice", "retry", "7", "--output", "json"), st.err.String())
	require.JSONEq(t, `{"requeued":120,"dry_run":false,"left":{"cancelled":0,"expired":0,"purged":0,"school_deleted":0,"outcome_unknown":2},"next":""}`, st.out.String())
	st.failed(t, exitFailed, "retry notice 7: conflict: the notice was cancelled; it takes no more attempts", "notice", "retry", "7")
	require.Equal(t, []string{"POST /v1/notices/7/retry", "POST /v1/notices/7/retry", "POST /v1/notices/7/retry"}, s.paths)
}
