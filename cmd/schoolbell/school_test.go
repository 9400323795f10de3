package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// schoolServer answers for one school, A, and notes what it was asked.
func schoolServer(t *testing.T) (st *stage, asked *[]string) {
	next := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	school := api.School{ID: "A", Name: "한빛초", State: api.Resting, Limit: 500, RestSeconds: 90, Attempted: 500, Cycle: 3,
		NextEligibleAt: &next, RestingSeconds: 4.2, Waiting: 70, RetryDue: 2, RetryWaiting: 3, OldestWaitingSeconds: 61}
	asked = &[]string{}
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		*asked = append(*asked, r.Method+" "+r.URL.RequestURI()+" "+string(body))
		switch r.URL.Path {
		case "/v1/schools":
			other := school
			other.ID, other.Name, other.Degraded = "B", "x\x1b[2Jy", true
			held := school
			held.State, held.RestingSeconds, held.Lock = api.Sending, 0, &api.Lock{Owner: "one"}
			write(w, 200, api.List[api.School]{Items: []api.School{school, other, held}, Next: "C"})
		case "/v1/schools/A/pause":
			school.State = api.Paused
			write(w, 200, school)
		case "/v1/schools/A", "/v1/schools/A/resume":
			write(w, 200, school)
		default:
			write(w, 404, api.Error{Code: api.NotFound, Message: "there is no school B"})
		}
	}))
	t.Cleanup(ts.Close)
	st = newStage()
	st.environ = []string{"SCHOOLBELL_SERVER=" + ts.URL}
	return st, asked
}

func TestSchools(t *testing.T) {
	t.Parallel()
	st, asked := schoolServer(t)
	require.Equal(t, exitDone, st.run("school", "list", "--limit", "3", "--cursor", "0"), st.err.String())
	require.Regexp(t, `^ID +STATE +QUOTA +REST +OWNER +WAITING +RETRY +OLDEST +NAME\n`+
		`A +resting +500/500 +5s +- +70 +5 +1m1s +한빛초\n`+
		`B +resting +500/500 +5s +not known +70 +5 +1m1s +x \[2Jy\n`+
		`A +sending +500/500 +- +one +70 +5 +1m1s +한빛초\n`+
		`more: --cursor C\n$`, st.out.String())
	require.Equal(t, exitDone, st.run("school", "show", "A"), st.err.String())
	require.Regexp(t, `attempted +500 in cycle 3\n.*rest left +5s\n`, st.out.String())
	require.Equal(t, exitDone, st.run("school", "put", "A", "--limit", "0", "--rest", "1m30s"), st.err.String())
	require.Equal(t, exitDone, st.run("school", "put", "A", "--name", "", "--sender", "fcm"), st.err.String())
	require.Equal(t, []string{"GET /v1/schools?cursor=0&limit=3 ", "GET /v1/schools/A ",
		`PUT /v1/schools/A {"limit":0,"rest_seconds":90}`, `PUT /v1/schools/A {"name":"","sender":"fcm"}`}, *asked, "what is not named is not sent")
}

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	st, asked := schoolServer(t)
	require.Equal(t, exitDone, st.run("school", "pause", "A"), st.err.String())
	require.Regexp(t, `state +paused\n`, st.out.String())
	require.Equal(t, exitDone, st.run("school", "resume", "A", "--output", "json"), st.err.String())
	require.Contains(t, st.out.String(), `"id":"A"`)
	st.failed(t, exitNotFound, "resume school B: not_found: there is no school B", "school", "resume", "B")
	require.Equal(t, []string{"POST /v1/schools/A/pause ", "POST /v1/schools/A/resume ", "POST /v1/schools/B/resume "}, *asked)
}
