package simulator

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fcmReceiver is an engine behind a server of its own.
type fcmReceiver struct {
	*Engine
	url    string
	client *http.Client
}

func openFCM(t *testing.T, cfg Config, secure bool) *fcmReceiver {
	t.Helper()
	cfg.Keep = true
	engine, err := New(cfg)
	require.NoError(t, err)
	certificate, authority, err := SelfSigned("127.0.0.1", "localhost")
	require.NoError(t, err)
	server := NewServer(engine, certificate)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	transport := &http.Transport{Protocols: new(http.Protocols)}
	r := &fcmReceiver{Engine: engine, url: "http://" + l.Addr().String(), client: &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	served := make(chan error, 1)
	if secure {
		roots := x509.NewCertPool()
		require.True(t, roots.AppendCertsFromPEM(authority))
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
		transport.Protocols.SetHTTP2(true)
		r.url = "https://" + l.Addr().String()
		go func() { served <- server.ServeTLS(l, "", "") }()
	} else {
		transport.Protocols.SetHTTP1(true)
		go func() { served <- server.Serve(l) }()
	}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		engine.Stop()
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
		require.NoError(t, engine.Close())
	})
	return r
}

// fcmBody is a whole message; change says what is different about it.
func fcmBody(token string, n int, change func(req, message map[string]any)) string {
	message := map[string]any{
		"token":        token,
		"notification": map[string]any{"title": "t", "body": "b"},
		"data": map[string]any{
			"schoolbell_school": "A", "schoolbell_notice": "7", "schoolbell_message": "7." + strconv.Itoa(n),
			"schoolbell_attempt": "1", "schoolbell_batch": "b1", "schoolbell_fence": "3",
		},
		"android": map[string]any{"ttl": "60s", "notification": map[string]any{"tag": "7." + strconv.Itoa(n)}},
		"apns":    map[string]any{"headers": map[string]any{"apns-collapse-id": "7." + strconv.Itoa(n)}},
	}
	req := map[string]any{"message": message}
	if change != nil {
		change(req, message)
	}
	text, err := json.Marshal(req)
	if err != nil {
		panic(err)
	}
	return string(text)
}

func (r *fcmReceiver) post(t *testing.T, body string, header ...string) (*http.Response, string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/projects/p/messages:send", strings.NewReader(body))
	require.NoError(t, err)
	req.GetBody = nil // net/http must not repeat by itself
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp, string(text), err
}

func TestFCMAcceptsAndLogs(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		r := openFCM(t, Config{}, secure)
		resp, body, err := r.post(t, fcmBody("device", 1, nil))
		require.NoError(t, err)
		require.Equal(t, 200, resp.StatusCode)
		require.Equal(t, secure, resp.ProtoMajor == 2)
		require.Regexp(t, `^\{"name":"projects/p/messages/0:\d+%1"\}\n$`, body)
		arrivals := r.Arrivals()
		require.Len(t, arrivals, 1)
		a := arrivals[0]
		require.Positive(t, a.T)
		require.GreaterOrEqual(t, a.Ended, a.T)
		a.T, a.Ended = 0, 0
		require.Equal(t, Arrival{
			N: 1, Kind: "fcm", School: "A", Notice: "7", Message: "7.1", TokenSHA: tokenSHA("device"), Batch: "b1", Fence: 3, Attempt: 1,
			Tag: "7.1", CollapseID: "7.1", Answer: "200",
		}, a)
		require.EqualValues(t, 1, r.Counts().Connections)
	}
}

func TestFCMRefusesWhatBreaksItsRules(t *testing.T) {
	t.Parallel()
	r := openFCM(t, Config{Project: "p"}, false)
	data := func(k, v string) func(_, m map[string]any) {
		return func(_, m map[string]any) { m["data"].(map[string]any)[k] = v }
	}
	set := func(k string, v any) func(_, m map[string]any) { return func(_, m map[string]any) { m[k] = v } }
	for name, c := range map[string]struct {
		change func(req, message map[string]any)
		field  string
	}{
		"no message":        {func(req, _ map[string]any) { delete(req, "message") }, "message"},
		"no target":         {func(_, m map[string]any) { delete(m, "token") }, "message"},
		"two targets":       {set("topic", "t"), "message"},
		"a number as data":  {set("data", map[string]any{"k": 1}), "message"},
		"a reserved key":    {data("google.c.x", "1"), "message.data"},
		"from":              {data("from", "1"), "message.data"},
		"too big":           {data("k", strings.Repeat("x", 4096)), "message"},
		"ttl":               {set("android", map[string]any{"ttl": "1m"}), "message.android.ttl"},
		"priority":          {set("android", map[string]any{"priority": "urgent"}), "message.android.priority"},
		"a long collapseid": {set("apns", map[string]any{"headers": map[string]any{"apns-collapse-id": strings.Repeat("9", 65)}}), "message.apns.headers"},
		"an http link":      {set("webpush", map[string]any{"fcm_options": map[string]any{"link": "http://h"}}), "message.webpush.fcm_options.link"},
		"no fence":          {data("schoolbell_fence", ""), "message.data"},
		"attempt 0":         {data("schoolbell_attempt", "0"), "message.data"},
		"no school":         {data("schoolbell_school", ""), "message.data"},
	} {
		resp, body, err := r.post(t, fcmBody("device", 1, c.change))
		require.NoError(t, err, name)
		require.Equal(t, 400, resp.StatusCode, name)
		require.Contains(t, body, `"status":"INVALID_ARGUMENT"`, name)
		require.Contains(t, body, `"field":"`+c.field+`"`, name)
	}
	resp, _, err := r.post(t, fcmBody("device", 1, nil), "Content-Type", "text/plain")
	require.NoError(t, err)
	require.Equal(t, 400, resp.StatusCode)
	require.Empty(t, r.Arrivals())
	require.EqualValues(t, 15, r.Counts().ProtocolErrors)

	// Another project.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/v1/projects/q/messages:send", strings.NewReader(fcmBody("device", 1, nil)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err = r.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 404, resp.StatusCode)
	require.NotContains(t, string(text), "FcmError")
}

func TestFCMOutcomesByToken(t *testing.T) {
	t.Parallel()
	for _, secure := range []bool{false, true} {
		r := openFCM(t, Config{Behaviour: Behaviour{RetryAfter: 9}}, secure)
		n := 0
		for token, c := range map[string]struct {
			status int
			says   string
			wait   string
			answer string
			lost   bool
		}{
			"unregistered-1": {404, `"errorCode":"UNREGISTERED"`, "", "UNREGISTERED", false},
			"unavailable-1":  {503, `"errorCode":"UNAVAILABLE"`, "9", "UNAVAILABLE", false},
			"internal-1":     {500, `"errorCode":"INTERNAL"`, "", "INTERNAL", false},
			"quota-1":        {429, `"errorCode":"QUOTA_EXCEEDED"`, "9", "QUOTA_EXCEEDED", false},
			"mismatch-1":     {403, `"errorCode":"SENDER_ID_MISMATCH"`, "", "SENDER_ID_MISMATCH", false},
			"invalid-1":      {400, `"errorCode":"INVALID_ARGUMENT"`, "", "INVALID_ARGUMENT", false},
			"thirdparty-1":   {401, `"errorCode":"THIRD_PARTY_AUTH_ERROR"`, "", "THIRD_PARTY_AUTH_ERROR", false},
			"auth-1":         {401, `"status":"UNAUTHENTICATED"`, "", "401", false},
			"forbidden-1":    {403, `"reason":"SERVICE_DISABLED"`, "", "403", false},
			"throttled-1":    {429, "<html>", "9", "429", false},
			"busy-1":         {503, "<html>", "9", "503", false},
			"down-1":         {503, "<html>", "", "503", false},
			"error-1":        {500, "<html>", "", "500", false},
			"redirect-1":     {307, "elsewhere", "", "307", false},
			"garbage-1":      {200, "<html>", "", "garbage", false},
			"missing-1":      {200, "{}", "", "200", true},
			"badstatus-1":    {200, `"status":"INTERNAL"`, "", "200", true},
			"falsealarm-1":   {503, `"errorCode":"UNAVAILABLE"`, "", "200", true},
			"goaway-1":       {200, `"name"`, "", "200", false},
			"reset-1":        {0, "", "", "reset", false},
			"loseanswer-1":   {0, "", "", "200", true},
			"truncated-1":    {0, "", "", "200", true},
			"cut-1":          {0, "", "", "200", true},
		} {
			n++
			resp, body, err := r.post(t, fcmBody(token, n, nil))
			if c.status == 0 {
				require.Error(t, err, token)
			} else {
				require.NoError(t, err, token)
				require.Equal(t, c.status, resp.StatusCode, token)
				require.Contains(t, body, c.says, token)
				require.Equal(t, c.wait, resp.Header.Get("Retry-After"), token)
			}
			arrivals := r.Arrivals()
			a := arrivals[len(arrivals)-1]
			require.Equal(t, c.answer, a.Answer, token)
			require.Equal(t, c.lost, a.Lost, token)
		}
		require.EqualValues(t, n, r.Counts().Requests)
	}
}

func TestFCMValidatesOnly(t *testing.T) {
	t.Parallel()
	r := openFCM(t, Config{}, false)
	resp, body, err := r.post(t, fcmBody("device", 1, func(req, _ map[string]any) { req["validate_only"] = true }))
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode)
	require.Contains(t, body, "fake_message_id")
	require.Equal(t, "validated", r.Arrivals()[0].Answer)
	require.False(t, r.Arrivals()[0].Accepted())
	require.Zero(t, r.Counts().Accepted)
}

func TestFCMQuotaAndRepeats(t *testing.T) {
	t.Parallel()
	r := openFCM(t, Config{Behaviour: Behaviour{Quota: 2}}, false)
	for i, want := range []int{200, 200, 429} {
		resp, body, err := r.post(t, fcmBody("device", i, nil))
		require.NoError(t, err)
		require.Equal(t, want, resp.StatusCode)
		if want == 429 {
			require.Contains(t, body, "QUOTA_EXCEEDED")
			wait, err := strconv.Atoi(resp.Header.Get("Retry-After"))
			require.NoError(t, err)
			require.InDelta(t, 60, wait, 2)
		}
	}
	require.NoError(t, r.SetBehaviour(Behaviour{}))
	_, _, err := r.post(t, fcmBody("device", 0, nil)) // the same message of the same batch again
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Counts().Replays)
	require.EqualValues(t, 1, r.Counts().Repeated)
}

func TestFCMTokens(t *testing.T) {
	t.Parallel()
	r := openFCM(t, Config{Authorize: true}, false)
	status := func(header ...string) int {
		resp, _, err := r.post(t, fcmBody("device", 1, nil), header...)
		require.NoError(t, err)
		return resp.StatusCode
	}
	ask := func(form url.Values) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/token", strings.NewReader(form.Encode()))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		resp, err := r.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(text)
	}
	require.Equal(t, 401, status())
	require.Equal(t, 401, status("Authorization", "Bearer made-up"))

	grant := "urn:ietf:params:oauth:grant-type:jwt-bearer"
	for _, form := range []url.Values{
		{},
		{"grant_type": {grant}},
		{"grant_type": {grant}, "assertion": {"a.b"}},
		{"grant_type": {grant}, "assertion": {"e30.e30.e30"}},
	} {
		code, body := ask(form)
		require.Equal(t, 400, code)
		require.Contains(t, body, `"error":`)
	}
	text, err := ServiceAccount("p", r.url+"/token")
	require.NoError(t, err)
	var account struct {
		Type string `json:"type"`
		Key  string `json:"private_key"`
		URI  string `json:"token_uri"`
	}
	require.NoError(t, json.Unmarshal(text, &account))
	require.Equal(t, "service_account", account.Type)
	require.Contains(t, account.Key, "BEGIN PRIVATE KEY")
	require.Equal(t, r.url+"/token", account.URI)

	for answer, want := range map[string]int{"refuse": 400, "fail": 503} {
		require.NoError(t, r.SetBehaviour(Behaviour{TokenAnswer: answer}))
		code, _ := ask(url.Values{})
		require.Equal(t, want, code)
	}
	require.Error(t, r.SetBehaviour(Behaviour{TokenAnswer: "shrug"}))
	require.NoError(t, r.SetBehaviour(Behaviour{TokenAnswer: "hang"}))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url+"/token", bytes.NewReader(nil))
	require.NoError(t, err)
	_, err = r.client.Do(req)
	require.True(t, errors.Is(err, context.DeadlineExceeded), err)
}
