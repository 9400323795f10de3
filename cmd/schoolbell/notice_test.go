package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// server is a replica as the client sees it.
type server struct {
	t    *testing.T
	url  string
	mu   sync.Mutex
	key  string // Idempotency-Key of the last upload
	read []string
	ask  []answer // answers to GET /v1/notices/{id}, the last one repeats

	reject *api.Error   // what an upload is answered with
	school []api.School // answers to GET /v1/schools/{id}, the last one repeats
}

type answer struct {
	status int
	body   any
}

func newServer(t *testing.T, ask ...answer) *server {
	s := &server{t: t, ask: ask}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/notices", s.accept)
	mux.HandleFunc("GET /v1/notices/{id}", s.show)
	mux.HandleFunc("GET /v1/notices", s.list)
	mux.HandleFunc("GET /v1/schools/{id}", s.showSchool)
	mux.HandleFunc("POST /v1/notices/{id}/cancel", s.show)
	ts := httptest.NewServer(mux)
	t.Cleanup(ts.Close)
	s.url = ts.URL
	return s
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", api.JSON)
	if e, ok := body.(api.Error); ok {
		body = api.ErrorBody{Error: e}
		if e.RetryAfter > 0 {
			w.Header().Set("Retry-After", fmt.Sprint(int(e.RetryAfter.Seconds())))
		}
	}
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(e api.Error) answer { return answer{e.Code.Status(), e} }

func (s *server) accept(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Header.Get("Authorization") != "Bearer k" {
		write(w, 401, api.Error{Code: api.Unauthenticated, Message: "no such key"})
		return
	}
	s.key, s.read = r.Header.Get("Idempotency-Key"), nil
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		s.read = append(s.read, lines.Text())
	}
	if r.Context().Err() != nil || len(s.read) < 2 {
		return // broken off
	}
	if s.reject != nil {
		write(w, s.reject.Code.Status(), *s.reject)
		return
	}
	write(w, 202, api.Accepted{ID: "7", School: "A", Status: "PENDING", Total: len(s.read) - 1})
}

func (s *server) show(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.ask[0]
	if len(s.ask) > 1 {
		s.ask = s.ask[1:]
	}
	write(w, a.status, a.body)
}

func (s *server) showSchool(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.school) == 0 {
		write(w, 403, api.Error{Code: api.PermissionDenied, Message: "not for this key"})
		return
	}
	write(w, 200, s.school[0])
	if len(s.school) > 1 {
		s.school = s.school[1:]
	}
}

func (s *server) list(w http.ResponseWriter, r *http.Request) {
	items := []api.Notice{{ID: "7", School: r.FormValue("school"), Status: "PENDING", Title: "a\x1b[2Jb", Counts: api.Counts{Total: 5, Waiting: 2}}}
	write(w, 200, api.List[api.Notice]{Items: items, Next: r.FormValue("limit")})
}

func (s *server) stage() *stage {
	st := newStage()
	st.environ = []string{"SCHOOLBELL_SERVER=" + s.url, "SCHOOLBELL_KEY=k"}
	return st
}

func TestSend(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	st := srv.stage()
	st.files["tokens.txt"] = "\ufefftok-1\r\n\n# a comment\n{\"token\":\"tok-2\",\"ref\":\"m\",\"enabled\":false,\"badge\":3,\"data\":{\"k\":\"v\"}}\n  tok-3  "
	code := st.run("notice", "send", "--school", "A", "--title", "T <b>", "--body", "B", "--data", "k=v=w", "--data", "e=", "--tokens-file", "tokens.txt",
		"--scheduled-at", "2030-03-04T08:00:00+09:00", "--priority", "urgent", "--delivery", "at_most_once", "--idempotency-key", "once")
	require.Equal(t, exitDone, code, st.err.String())
	require.Equal(t, "notice 7 accepted: 3 recipients\n", st.out.String())
	require.Empty(t, st.err.String())
	require.Equal(t, "once", srv.key)
	require.Len(t, srv.read, 4)
	require.JSONEq(t, `{"school":"A","title":"T <b>","body":"B","data":{"k":"v=w","e":""},"scheduled_at":"2030-03-04T08:00:00+09:00","priority":"urgent","delivery":"at_most_once"}`, srv.read[0])
	require.JSONEq(t, `{"token":"tok-1"}`, srv.read[1])
	require.JSONEq(t, `{"token":"tok-2","ref":"m","enabled":false,"badge":3,"data":{"k":"v"}}`, srv.read[2])
	require.JSONEq(t, `{"token":"tok-3"}`, srv.read[3])
}

func TestSendFromStandardInput(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	st := srv.stage()
	st.stdin = strings.NewReader("a\nb\n")
	require.Equal(t, exitDone, st.run("notice", "send", "--school", "A", "--title", "T", "--tokens-file", "-", "--output", "json"), st.err.String())
	require.JSONEq(t, `{"id":"7","school":"A","status":"PENDING","total":2}`, st.out.String())
	first := srv.key
	require.NotEmpty(t, first)
	st.stdin = strings.NewReader("a\n")
	require.Equal(t, exitDone, st.run("notice", "send", "--school", "A", "--title", "T", "--tokens-file", "-"))
	require.NotEqual(t, first, srv.key)
}

func TestTokensFilesThatAreRefused(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, text, want string }{
		{"none", "", "t has no recipients; write one device token a line"},
		{"csv", "tok\nsecret-1,secret-2\n", "t line 2: is neither one device token nor a JSON object"},
		{"unknown field", "tok\n\n{\"token\":\"secret\",\"refs\":\"x\"}", `t line 3: has an unknown field "refs"; a recipient has token, ref, enabled, badge, data`},
		{"wrong type", "{\"token\":5}", "t line 1: token must be a string, not a number"},
		{"badge a text", "{\"token\":\"secret\",\"badge\":\"3\"}", "t line 1: badge must be a whole number, not a string"},
		{"cut off", "tok\n{\"token\":\"secret\"\ntok\n", `t line 2: its JSON object is not closed; write {"token":"…"} on one line`},
		{"no JSON", "{token:\"secret\"}", `t line 1: is not JSON at byte 2: invalid character 't' looking for beginning of object key string`},
		{"two on a line", "{\"token\":\"secret\"} {}", "t line 1: has something behind its JSON object"},
		{"long", "tok\n" + strings.Repeat("secret", 20000), "t line 2 is longer than 65536 bytes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			st := newServer(t).stage()
			st.files["t"] = tc.text
			st.failed(t, exitUsage, tc.want, "notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t")
			require.NotContains(t, st.err.String(), "secret")
		})
	}
	st := newServer(t).stage()
	st.failed(t, exitUsage, "--tokens-file no: file does not exist", "notice", "send", "--school", "A", "--title", "T", "--tokens-file", "no")
}

func TestSendRefused(t *testing.T) {
	t.Parallel()
	srv := newServer(t)
	st := srv.stage()
	st.files["t"] = "tok\n"
	st.failed(t, exitRefused, "send notice to school A: unauthenticated: no such key; give a key that the server knows with SCHOOLBELL_KEY or --key",
		"notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t", "--key", "wrong")
}

// TestWhatTheServerRefusesIsNamedAsItWasGiven: the lines that it counts are the
// client's own, and the person gave flags and a file.
func TestWhatTheServerRefusesIsNamedAsItWasGiven(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		e    api.Error
		code int
		want string
	}{
		{api.Error{Code: api.InvalidArgument, Field: "link", Message: "line 1: must be an absolute http or https address"}, exitUsage, "send notice to school A: --link: must be an absolute http or https address"},
		{api.Error{Code: api.InvalidArgument, Field: "data.gcm.x", Message: "line 1: this key is reserved"}, exitUsage, "send notice to school A: --data gcm.x: this key is reserved"},
		{api.Error{Code: api.TooLarge, Field: "scheduled_at", Message: "line 1: m"}, exitUsage, "send notice to school A: --scheduled-at: m"},
		{api.Error{Code: api.InvalidArgument, Field: "recipients[0].token", Message: "line 2: is required"}, exitUsage, "send notice to school A: t line 2: token: is required"},
		{api.Error{Code: api.InvalidArgument, Field: "recipients[2].data.k", Message: "line 4: m"}, exitUsage, "send notice to school A: t line 6: data.k: m"},
		{api.Error{Code: api.InvalidArgument, Field: "recipients[99].ref", Message: "line 101: m"}, exitUsage, "send notice to school A: invalid_argument: recipients[99].ref: line 101: m"},
		{api.Error{Code: api.TooLarge, Field: "recipients", Message: "a notice has at most 1,000,000 recipients"}, exitUsage, "send notice to school A: too_large: recipients: a notice has at most 1,000,000 recipients"},
		{api.Error{Code: api.UnsupportedMediaType, Message: "m"}, exitUsage, "send notice to school A: unsupported_media_type: m"},
		{api.Error{Code: api.InvalidArgument, Field: "Idempotency-Key", Message: "must be 1 to 255 printable characters"}, exitUsage, "send notice to school A: --idempotency-key: must be 1 to 255 printable characters"},
		{api.Error{Code: api.IdempotencyMismatch, Field: "Idempotency-Key", Message: "m"}, exitFailed, "send notice to school A: --idempotency-key: m"},
	} {
		srv := newServer(t)
		srv.reject = &tc.e
		st := srv.stage()
		st.files["t"] = "# devices\na\n\nb\n# the last\nc\n"
		st.failed(t, tc.code, tc.want, "notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t")
	}
}

func TestSendUnreachable(t *testing.T) {
	t.Parallel()
	gone := httptest.NewServer(nil)
	gone.Close()
	st := newStage()
	st.files["t"] = "tok\n"
	code := st.run("notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t", "--server", gone.URL, "--idempotency-key", "once")
	require.Equal(t, exitUnreachable, code)
	require.Regexp(t, `^schoolbell: cannot reach `+gone.URL+`: send notice to school A: POST /v1/notices: .*connection refused; `+
		`whether it was stored is not known: the same command with --idempotency-key once stores it once; `+
		`is a replica running there\? --server or SCHOOLBELL_SERVER names another\n$`, st.err.String())
}

func notice(status string, c api.Counts) answer {
	return answer{200, api.Notice{ID: "7", School: "A", Status: status, Title: "T", Delivery: "at_least_once", Counts: c}}
}

func TestSendAndWait(t *testing.T) {
	t.Parallel()
	args := []string{"notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t", "--wait"}
	restart := refuse(api.Error{Code: api.Unavailable, Message: "stopping"})
	working := notice("IN_PROGRESS", api.Counts{Total: 2, Waiting: 1, Success: 1})
	for _, tc := range []struct {
		name string
		ask  []answer
		code int
		want string // last line on stderr
	}{
		{"all accepted", []answer{notice("PENDING", api.Counts{Total: 2, Waiting: 2}), restart, working, notice("COMPLETED", api.Counts{Total: 2, Success: 1, Fail: 1})},
			exitDone, "sending: 2 of 2"},
		{"one failed", []answer{working, notice("COMPLETED", api.Counts{Total: 2, Success: 1, PermanentFail: 1})},
			exitFailed, "schoolbell: 1 of 2 recipients of notice 7 failed permanently; see its recipients in state PERMANENT_FAIL"},
		{"cancelled", []answer{notice("CANCELLED", api.Counts{Total: 2, Skipped: api.Skipped{Cancelled: 2}})},
			exitFailed, "schoolbell: notice 7 was cancelled"},
		{"gone", []answer{working, refuse(api.Error{Code: api.NotFound, Message: "no such notice"})},
			exitNotFound, "schoolbell: wait for notice 7, which goes on without this command (schoolbell notice show 7): not_found: no such notice"},
	} {
		for _, terminal := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/terminal=%v", tc.name, terminal), func(t *testing.T) {
				t.Parallel()
				st := newServer(t, tc.ask...).stage()
				st.terminal = terminal
				st.files["t"] = "a\nb\n"
				require.Equal(t, tc.code, st.run(args...), st.err.String())
				lines := strings.Split(strings.TrimSuffix(st.err.String(), "\n"), "\n")
				require.Contains(t, st.err.String(), "notice 7 accepted: 2 recipients\n")
				if terminal && tc.code == exitDone {
					require.Contains(t, st.err.String(), "\r") // a bar that moves
				} else if !terminal || tc.code != exitDone {
					require.Equal(t, tc.want, lastPart(lines))
				}
			})
		}
	}
}

// lastPart is the last line without what a bar drew before it.
func lastPart(lines []string) string {
	last := lines[len(lines)-1]
	return last[strings.LastIndex(last, "\r")+1:]
}

// TestWaitSaysWhyNothingMoves, once, on a terminal and elsewhere.
func TestWaitSaysWhyNothingMoves(t *testing.T) {
	t.Parallel()
	until := time.Now().Add(time.Minute)
	for _, terminal := range []bool{false, true} {
		srv := newServer(t, notice("IN_PROGRESS", api.Counts{Total: 2, Waiting: 2}), notice("IN_PROGRESS", api.Counts{Total: 2, Waiting: 1, Success: 1}),
			notice("IN_PROGRESS", api.Counts{Total: 2, Waiting: 1, Success: 1}), notice("COMPLETED", api.Counts{Total: 2, Success: 2}))
		jittered := until.Add(100 * time.Millisecond)
		srv.school = []api.School{{ID: "A", State: api.Sending}, {ID: "A", State: api.Resting, NextEligibleAt: &until}, {ID: "A", State: api.Resting, NextEligibleAt: &jittered}}
		st := srv.stage()
		st.terminal = terminal
		st.files["t"] = "a\nb\n"
		require.Equal(t, exitDone, st.run("notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t", "--wait"), st.err.String())
		require.Equal(t, 1, strings.Count(st.err.String(), "school A rests until "+soon(until, time.Now(), time.Local)+" (1 of 2 sent)\n"), st.err.String())
		require.Equal(t, 1, strings.Count(st.err.String(), "rests"), st.err.String())
	}
}

func TestHindrances(t *testing.T) {
	t.Parallel()
	zone := time.FixedZone("KST", 9*60*60)
	now := time.Date(2026, 3, 4, 8, 55, 0, 0, zone)
	start := now
	at := func(d time.Duration) *time.Time { t := start.Add(d).UTC(); return &t }
	n := api.Notice{ID: "7", School: "B", Counts: api.Counts{Total: 6000, Waiting: 1000, Success: 5000}}
	later := n
	later.ScheduledAt = at(26 * time.Hour)
	resting := func(d time.Duration) api.School { return api.School{State: api.Resting, NextEligibleAt: at(d)} }
	filling := resting(250 * time.Second)
	filling.InProgress = 200
	h := hindrances{zone: zone}
	for i, step := range []struct {
		after time.Duration // since the last step
		still time.Duration // since the counts moved
		n     api.Notice
		s     api.School
		want  string
	}{
		{0, 0, later, api.School{State: api.Idle}, "notice 7 is scheduled for 2026-03-05 10:55:00 KST"},
		{time.Minute, 0, later, api.School{State: api.Idle}, ""},
		{0, 0, n, api.School{State: api.Sending}, ""},
		{time.Minute, 0, n, filling, ""}, // its last batch is on its way, and the end of the rest not known
		{0, 0, n, resting(191 * time.Second), "school B rests until 08:58:11 (5000 of 6000 sent)"},
		{10 * time.Second, time.Second, n, resting(191*time.Second + 300*time.Millisecond), ""}, // a clock a little off, the same rest
		{0, 0, n, resting(400 * time.Second), "school B rests until 09:01:40 (5000 of 6000 sent)"},
		{2 * time.Second, 0, n, resting(500 * time.Second), ""}, // too soon for another line
		{4 * time.Second, 0, n, resting(500 * time.Second), "school B rests until 09:03:20 (5000 of 6000 sent)"},
		{time.Minute, 0, n, api.School{State: api.Paused}, "school B is paused (5000 of 6000 sent)"},
		{time.Minute, 0, n, api.School{State: api.WaitingForRetry}, "what is left of school B waits for its retry (5000 of 6000 sent)"},
		{time.Minute, time.Second, n, api.School{State: api.WaitingForSlot}, ""},
		{time.Minute, 6 * time.Second, n, api.School{State: api.WaitingForSlot}, "school B waits for its turn (5000 of 6000 sent)"},
		{time.Minute, 0, n, api.School{State: api.WaitingForSlot, Degraded: true}, "Redis does not answer the replica: nothing is sent until it does (5000 of 6000 sent)"},
	} {
		now = now.Add(step.after)
		require.Equal(t, step.want, h.look(now, step.n, step.s, step.still), "step %d", i)
	}
}

func TestInterruptedWaitSaysThatTheNoticeGoesOn(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	st := newServer(t, notice("IN_PROGRESS", api.Counts{Total: 1, Waiting: 1})).stage()
	st.files["t"] = "a\n"
	st.stderr = cancelOn{st.stderr, "accepted", cancel}
	code := run(ctx, []string{"notice", "send", "--school", "A", "--title", "T", "--tokens-file", "t", "--wait"}, st.surroundings)
	require.Equal(t, exitFailed, code)
	require.Contains(t, st.err.String(), "schoolbell: interrupted: wait for notice 7, which goes on without this command (schoolbell notice show 7): context canceled\n")
}

// cancelOn ends a context when a text is written.
type cancelOn struct {
	w interface {
		Write([]byte) (int, error)
	}
	text   string
	cancel func()
}

func (c cancelOn) Write(p []byte) (int, error) {
	if strings.Contains(string(p), c.text) {
		c.cancel()
	}
	return c.w.Write(p)
}

func TestShow(t *testing.T) {
	t.Parallel()
	st := newServer(t, notice("IN_PROGRESS", api.Counts{Total: 9, Waiting: 1, InProgress: 1, Success: 2, Fail: 1, RetrySuccess: 1, RetryPending: 1, PermanentFail: 1, Skipped: api.Skipped{Disabled: 1}})).stage()
	require.Equal(t, exitDone, st.run("notice", "show", "7"), st.err.String())
	for _, want := range []string{"id                            7\n", "recipients                    9\n", "  accepted                    2\n", "  skipped: notifications off  1\n", "  waiting for a retry         1\n"} {
		require.Contains(t, st.out.String(), want)
	}
	require.NotContains(t, st.out.String(), "cancelled")
	require.NotContains(t, st.out.String(), "rests", "the key may not look")
	until := time.Now().Add(time.Minute)
	resting := newServer(t, notice("IN_PROGRESS", api.Counts{Total: 9, Waiting: 4, Success: 5}))
	resting.school = []api.School{{ID: "A", State: api.Resting, NextEligibleAt: &until}}
	show := resting.stage()
	require.Equal(t, exitDone, show.run("notice", "show", "7"), show.err.String())
	require.Contains(t, show.out.String(), "\nschool A rests until "+soon(until, time.Now(), time.Local)+" (5 of 9 sent)\n")
	require.Equal(t, exitDone, st.run("notice", "show", "7", "--output", "json"))
	var n api.Notice
	require.NoError(t, json.Unmarshal(st.out.Bytes(), &n))
	require.Equal(t, 9, n.Total)
}

func TestShowErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		e    api.Error
		code int
		want string
	}{
		{api.Error{Code: api.NotFound, Message: "no notice 8"}, exitNotFound, "notice 8: not_found: no notice 8"},
		{api.Error{Code: api.PermissionDenied, Message: "school A is not in the key's scope"}, exitRefused, "notice 8: permission_denied: school A is not in the key's scope; use a key whose role and schools allow it"},
		{api.Error{Code: api.Unavailable, Message: "the database is away", RetryAfter: 5e9}, exitUnreachable, "notice 8: unavailable: the database is away; try again in 5s"},
		{api.Error{Code: api.Internal, Message: "oops", RequestID: "r1"}, exitFailed, "notice 8: internal: oops (request r1)"},
	} {
		newServer(t, refuse(tc.e)).stage().failed(t, tc.code, tc.want, "notice", "show", "8")
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	st := newServer(t).stage()
	require.Equal(t, exitDone, st.run("notice", "list", "--school", "B", "--limit", "3"), st.err.String())
	require.Regexp(t, `^ID +SCHOOL +STATUS +TOTAL +ENDED +FAILED +CREATED +TITLE\n7 +B +PENDING +5 +3 +0 .* a \[2Jb\nmore: --cursor 3\n$`, st.out.String())
	require.Equal(t, exitDone, st.run("notice", "list", "--output", "json"))
	require.Contains(t, st.out.String(), `"next":"20"`)
}

func TestCancel(t *testing.T) {
	t.Parallel()
	n := api.Notice{ID: "7", School: "A", Status: "IN_PROGRESS", Closing: "CANCELLED", Title: "T", Priority: "low", Counts: api.Counts{Total: 3, InProgress: 1, Skipped: api.Skipped{Cancelled: 2}}}
	srv := newServer(t, answer{200, n}, refuse(api.Error{Code: api.Conflict, Message: "the notice has ended or expired; there is nothing to cancel"}),
		refuse(api.Error{Code: api.NotFound, Message: "there is no notice 8"}))
	st := srv.stage()
	require.Equal(t, exitDone, st.run("notice", "cancel", "7"), st.err.String())
	require.Regexp(t, `status +IN_PROGRESS, cancelled: calls in flight are waited for\n`, st.out.String())
	require.Regexp(t, `priority +low\n`, st.out.String())
	require.Regexp(t, `skipped: cancelled +2\n`, st.out.String())
	st.failed(t, exitFailed, "cancel notice 7: conflict: the notice has ended or expired; there is nothing to cancel", "notice", "cancel", "7")
	st.failed(t, exitNotFound, "cancel notice 8: not_found: there is no notice 8", "notice", "cancel", "8")
}
