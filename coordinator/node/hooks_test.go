package node

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/coordinator/alert"
	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/settings"
	"schoolbell/school"
)

// webhook keeps what arrived at it.
type webhook struct {
	url    string
	mu     sync.Mutex
	posts  []post
	answer func(n int, w http.ResponseWriter, r *http.Request) // to the n-th post, from 1; nil: 200
}

type post struct {
	header http.Header
	body   string
}

func newWebhook(t *testing.T, answer func(n int, w http.ResponseWriter, r *http.Request)) *webhook {
	t.Helper()
	h := &webhook{answer: answer}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the caller was killed in the middle
		}
		h.mu.Lock()
		h.posts = append(h.posts, post{r.Header, string(body)})
		n := len(h.posts)
		h.mu.Unlock()
		if h.answer != nil {
			h.answer(n, w, r)
		}
	}))
	t.Cleanup(server.Close)
	h.url = server.URL + "/hook-secret"
	return h
}

func (h *webhook) arrived() []post {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]post(nil), h.posts...)
}

// sms reads what arrived as fallbacks: how often each id came, and for whom. All
// posts of an id have to be the same.
func (h *webhook) sms(t *testing.T) (times map[string]int, refs map[string]int) {
	t.Helper()
	times, refs = map[string]int{}, map[string]int{}
	bodies := map[string]string{}
	for _, p := range h.arrived() {
		var m struct{ ID, School, Ref, Text string }
		dec := json.NewDecoder(strings.NewReader(p.body))
		dec.DisallowUnknownFields()
		require.NoError(t, dec.Decode(&m))
		require.Equal(t, m.ID, p.header.Get("Idempotency-Key"))
		require.True(t, strings.HasSuffix(m.ID, ".sms"), m.ID)
		require.Equal(t, "Bearer hook-token", p.header.Get("Authorization"))
		if was, again := bodies[m.ID]; again {
			require.Equal(t, was, p.body)
		} else {
			refs[m.Ref]++
		}
		bodies[m.ID] = p.body
		times[m.ID]++
	}
	return times, refs
}

func (s servers) withFallback(instance string, h *webhook) settings.Settings {
	c := s.settings(instance)
	c.Retry.Max, c.Retry.Base = 1, 100*time.Millisecond
	c.Fallback.URL, c.Fallback.Token = settings.Secret(h.url), "hook-token"
	return c
}

// TestFallbackFollowsDefiniteFailuresAlone lets recipients end in every way, with
// two replicas at work: from what arrived at the webhook, exactly those who
// definitely failed got one message each (R35).
func TestFallbackFollowsDefiniteFailuresAlone(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	var log events
	h := newWebhook(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n <= 3 { // taken, and the answer is lost
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		}
	})
	one := run(t, srv.withFallback("one", h), Deps{Log: log.logger()})
	two := run(t, srv.withFallback("two", h), Deps{Log: log.logger()})
	const each = 12
	off := false
	n := api.NoticeRequest{School: "A", Title: "t", Body: "b", Fallback: &api.Fallback{SMS: "please call"}}
	want := map[string]int{}
	for _, kind := range []string{"unregistered", "invalid", "mismatch", "unavailable", "missing", "badstatus", "fine", "off"} {
		for i := range each {
			r := api.Recipient{Token: fmt.Sprintf("%s-%d", kind, i), Ref: fmt.Sprintf("%s-member-%d", kind, i)}
			switch kind {
			case "off":
				r.Enabled = &off
			case "unregistered", "invalid", "mismatch", "unavailable":
				want[r.Ref] = 1
			}
			n.Recipients = append(n.Recipients, r)
		}
	}
	n.Recipients = append(n.Recipients, api.Recipient{Token: "unregistered-1", Ref: "twice"}) // a duplicate
	a, err := one.client.Send(t.Context(), n, "")
	require.NoError(t, err)
	_, err = two.client.Send(t.Context(), notice("A", 5), "") // one without
	require.NoError(t, err)
	var end api.Notice
	eventually(t, "all are told", func() bool {
		end, err = two.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		return end.EndedAt != nil && end.Fallback.Sent == len(want)
	})
	require.Equal(t, api.Fallbacks{Sent: len(want)}, *end.Fallback)
	require.Equal(t, each, end.Success)
	require.Equal(t, 5*each, end.PermanentFail)
	times, refs := h.sms(t)
	require.Equal(t, want, refs)
	again := 0
	for _, n := range times {
		again += n - 1
	}
	require.Equal(t, 3, again, "what was answered is not posted again")
	list, err := one.client.Recipients(t.Context(), a.ID, api.RecipientQuery{Page: api.Page{Limit: 1000}})
	require.NoError(t, err)
	for _, r := range list.Items {
		require.Equal(t, want[r.Ref] == 1, r.Fallback == "SENT", "%s: %q", r.Ref, r.Fallback)
	}
	require.NoError(t, one.end(t))
	require.NoError(t, two.end(t))
	for _, p := range h.arrived() {
		for _, secret := range []string{"unregistered-0", "unavailable-1\""} {
			require.NotContains(t, p.body, `"`+secret, "a token")
		}
	}
	for _, line := range log.lines(t) {
		for _, secret := range []string{"please call", "hook-token", "hook-secret"} {
			require.NotContains(t, fmt.Sprint(line), secret)
		}
	}
	srv.nothingOpen(t)
}

// TestFallbackOutlivesItsReplica kills a replica in the middle of its posts: the
// next one posts them again under the same names, and nobody is left out. A
// replica that is stopped waits for its posts, and none of them is repeated.
func TestFallbackOutlivesItsReplica(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	const total, atOnce = 40, 8
	release := make(chan struct{})
	var released sync.Once
	free := func() { released.Do(func() { close(release) }) }
	t.Cleanup(free)
	h := newWebhook(t, func(n int, _ http.ResponseWriter, r *http.Request) {
		switch {
		case n > 10 && n <= 10+atOnce: // it has them, and does not answer
			select {
			case <-release:
			case <-r.Context().Done():
			}
		case n > 10+2*atOnce: // slow, for the stop
			time.Sleep(300 * time.Millisecond)
		}
	})
	life, kill := context.WithCancel(context.Background())
	defer kill()
	one := run(t, srv.withFallback("one", h), Deps{Life: life})
	n := api.NoticeRequest{School: "A", Title: "t", Body: "b", Fallback: &api.Fallback{SMS: "please call"}}
	want := map[string]int{}
	for i := range total {
		ref := fmt.Sprintf("member-%d", i)
		n.Recipients = append(n.Recipients, api.Recipient{Token: fmt.Sprintf("unregistered-%d", i), Ref: ref})
		want[ref] = 1
	}
	a, err := one.client.Send(t.Context(), n, "")
	require.NoError(t, err)
	eventually(t, "posts hang at the webhook", func() bool { return len(h.arrived()) >= 10+1 })
	kill()
	killed := time.Now()
	require.ErrorIs(t, one.wait(t), ErrKilled)
	require.Less(t, time.Since(killed), 5*time.Second, "it ends without its timeouts")
	free()

	conn, err := pgx.Connect(t.Context(), srv.database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	_, err = conn.Exec(t.Context(), `UPDATE push_fallbacks SET retry_after = clock_timestamp() WHERE retry_after IS NOT NULL`) // the lease ends
	require.NoError(t, err)

	sent := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM push_fallbacks WHERE job_status = 'SENT'`).Scan(&n))
		return n
	}
	before, done := len(h.arrived()), sent()
	two := run(t, srv.withFallback("two", h), Deps{})
	eventually(t, "the next one posts", func() bool { return len(h.arrived()) > before+2*atOnce+2 })
	require.NoError(t, two.end(t))
	require.Equal(t, len(h.arrived())-before, sent()-done, "what was posted before the stop is written")

	three := run(t, srv.withFallback("three", h), Deps{})
	eventually(t, "all are told", func() bool {
		n, err := three.client.Notice(t.Context(), a.ID)
		require.NoError(t, err)
		return n.Fallback.Sent == total
	})
	require.NoError(t, three.end(t))
	times, refs := h.sms(t)
	require.Equal(t, want, refs, "nobody is left out")
	again := 0
	for _, n := range times {
		again += n - 1
	}
	require.Positive(t, again)
	require.LessOrEqual(t, again, atOnce, "more than was on its way at the kill")
}

// alertsOf reads what arrived as alerts of the kind json, by kind; all posts of an
// id have to be the same.
func (h *webhook) alertsOf(t *testing.T) map[string][]map[string]any {
	t.Helper()
	all := map[string][]map[string]any{}
	bodies := map[string]string{}
	for _, p := range h.arrived() {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(p.body), &m))
		id := fmt.Sprint(m["id"])
		require.Equal(t, "alert-"+id, p.header.Get("Idempotency-Key"))
		if was, again := bodies[id]; again {
			require.Equal(t, was, p.body)
			continue
		}
		bodies[id] = p.body
		kind := fmt.Sprint(m["kind"])
		all[kind] = append(all[kind], m)
	}
	return all
}

// TestAlerts lets two replicas meet what operators are told of: each thing is told
// once, through a webhook that is down at first, and nothing that arrives there
// holds what is nobody's business (R42).
func TestAlerts(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	var log events
	h := newWebhook(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n <= 2 {
			w.WriteHeader(http.StatusBadGateway)
		}
	})
	var all []*running
	for _, name := range []string{"one", "two"} {
		s := srv.settings(name)
		s.Retry.Max, s.Retry.Base = 0, 100*time.Millisecond
		s.Alerts.WebhookURL, s.Alerts.PageURL = settings.Secret(h.url), "https://bell.example/"
		all = append(all, run(t, s, Deps{Log: log.logger()}))
	}
	one, two := all[0], all[1]
	send := func(school string, tokens ...string) string {
		t.Helper()
		n := api.NoticeRequest{School: school, Title: "secret title", Body: "secret body", Data: map[string]string{"key": "secret value"}}
		for _, token := range tokens {
			n.Recipients = append(n.Recipients, api.Recipient{Token: token, Ref: "secret ref"})
		}
		a, err := two.client.Send(t.Context(), n, "secret key "+school)
		require.NoError(t, err)
		return a.ID
	}
	ended := func(id string) {
		t.Helper()
		eventually(t, "notice "+id+" ends", func() bool {
			n, err := one.client.Notice(t.Context(), id)
			require.NoError(t, err)
			return n.EndedAt != nil
		})
	}
	name := "Primary @everyone"
	_, err := one.client.PutSchool(t.Context(), "B", api.SchoolChange{Name: &name})
	require.NoError(t, err)
	for _, school := range []string{"A", "B", "C", "D"} {
		ended(send(school, "fine-token-1", "mismatch-token-2", "thirdparty-token-3", "invalid-token-4", "unavailable-token-5", "unregistered-token-6"))
	}
	digests := make(chan error, 2)
	for _, r := range all {
		go func() { digests <- r.digest(t.Context()) }()
	}
	require.NoError(t, <-digests)
	require.NoError(t, <-digests)
	require.NoError(t, one.digest(t.Context()), "and there is nothing new")

	stuck := send("Z", "auth-token-7")
	eventually(t, "the stop is told", func() bool { return len(h.alertsOf(t)["sender_stopped"]) == 1 })
	_, err = one.client.Cancel(t.Context(), stuck)
	require.NoError(t, err)
	ended(stuck)
	ended(send("E", "fine-token-8"))
	eventually(t, "everything is told", func() bool {
		got := h.alertsOf(t)
		return len(got["sender_resumed"]) == 1 && len(got["failures"]) == 1 && len(got["sender_id_mismatch"]) == 1 && len(got["third_party_auth_error"]) == 1
	})
	require.NoError(t, one.end(t))
	require.NoError(t, two.end(t))

	got := h.alertsOf(t)
	require.Len(t, got, 5)
	stop := got["sender_stopped"][0]
	require.Equal(t, []any{"relay", "Z", "https://bell.example/", float64(1)}, []any{stop["sender"], stop["school"], stop["link"], stop["version"]})
	require.NotEmpty(t, stop["code"])
	for kind, list := range got {
		require.Len(t, list, 1, kind)
	}
	failures := got["failures"][0]["failures"].(map[string]any)
	require.EqualValues(t, 4*4, failures["recipients"])
	require.EqualValues(t, 4, failures["schools"])
	require.Len(t, failures["items"], 4)
	codes := map[string]bool{}
	for _, item := range failures["items"].([]any) {
		school := item.(map[string]any)
		require.EqualValues(t, 4, school["recipients"])
		for _, c := range school["codes"].([]any) {
			codes[c.(map[string]any)["code"].(string)] = true
		}
	}
	require.Equal(t, map[string]bool{"SENDER_ID_MISMATCH": true, "THIRD_PARTY_AUTH_ERROR": true, "INVALID_ARGUMENT": true, "UNAVAILABLE": true}, codes)
	for _, p := range h.arrived() {
		for _, secret := range []string{"token-", "secret", "hook-"} {
			require.NotContains(t, p.body, secret)
		}
	}
	failed := 0
	for _, line := range log.lines(t) {
		if line["event"] == "alert_failed" {
			failed++
			require.Equal(t, "HTTP_502", line["code"])
		}
		for _, secret := range []string{"hook-secret", "secret title", "secret body", "secret value", "secret key", "token-"} {
			require.NotContains(t, fmt.Sprint(line), secret)
		}
	}
	require.Equal(t, 2, failed)
	srv.nothingOpen(t)
}

// TestASenderThatNobodyAnswersIsTold looks at what one batch does not show.
func TestASenderThatNobodyAnswersIsTold(t *testing.T) {
	t.Parallel()
	var heard heardAlerts
	board := alert.NewBoard(&heard, func() {}, discard())
	lanes := []coordinator.LaneState{{Name: "fine"}, {Name: "stopped", Stopped: true, Code: "UNAUTHENTICATED"}, {Name: "mute", Broken: true, Code: "CONNECT_FAILED"}, {Name: "mute here", Broken: true}}
	w := &senderWatch{board: board, told: map[string]bool{}, lanes: func() []coordinator.LaneState { return lanes },
		silent: func(name string) bool { return name != "mute here" }}
	w.look()
	w.look()
	lanes = lanes[:1]
	lanes = append(lanes, coordinator.LaneState{Name: "mute"})
	w.look()
	w.look()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	board.Run(ctx)
	require.Equal(t, []string{"remind sender_stopped/stopped", "raise sender_unanswered/mute", "end sender_unanswered/mute"}, heard.said)
}

type heardAlerts struct{ said []string }

func (h *heardAlerts) RaiseAlert(_ context.Context, c school.Condition) (bool, error) {
	h.said = append(h.said, map[bool]string{true: "remind ", false: "raise "}[c.Remind]+c.Key)
	return true, nil
}

func (h *heardAlerts) EndAlert(_ context.Context, key, _ string, _ []byte) (bool, error) {
	h.said = append(h.said, "end "+key)
	return true, nil
}

// TestTheDigestIsAJobOfTheCluster: where somebody is told, and nowhere else.
func TestTheDigestIsAJobOfTheCluster(t *testing.T) {
	t.Parallel()
	for _, digest := range []func(context.Context) error{nil, func(context.Context) error { return nil }} {
		sched, err := jobs(t.Context(), settings.Default(), &counted{}, func(context.Context) error { return nil }, digest, idleLocker{}, time.Now, discard())
		require.NoError(t, err)
		var names []string
		for _, j := range sched.Jobs() {
			names = append(names, j.Name())
		}
		require.NoError(t, sched.Shutdown())
		require.Equal(t, digest != nil, slices.Contains(names, jobDigest))
	}
	all, _ := lockers(t, func(*settings.Settings) {})
	require.NotNil(t, all[0].crons[jobDigest])
}
