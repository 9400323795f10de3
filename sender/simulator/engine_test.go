package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// receiver is an engine behind a real server.
type receiver struct {
	*Engine
	t      *testing.T
	url    string
	client *http.Client
}

func receive(t *testing.T, cfg Config) *receiver {
	t.Helper()
	cfg.Keep = true
	e, err := New(cfg)
	require.NoError(t, err)
	s := httptest.NewServer(e)
	client := &http.Client{
		Transport:     &http.Transport{},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(func() {
		e.Stop()
		client.CloseIdleConnections()
		s.Close()
		require.NoError(t, e.Close())
	})
	return &receiver{Engine: e, t: t, url: s.URL, client: client}
}

// message is one message as a test writes it: the n-th of notice "n".
type message struct {
	seq      int
	token    string
	attempt  int
	requeued int
}

func requestBody(batch string, messages ...message) string {
	var list []map[string]any
	for _, m := range messages {
		list = append(list, map[string]any{
			"id": fmt.Sprintf("n.%d", m.seq), "token": m.token, "title": "t", "body": "b", "data": map[string]string{},
			"attempt": max(m.attempt, 1), "requeued": m.requeued,
		})
	}
	body, err := json.Marshal(map[string]any{"batch_id": batch, "school": "A", "messages": list})
	if err != nil {
		panic(err)
	}
	return string(body)
}

func (r *receiver) request(batch, body string) *http.Request {
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.url+"/relay", strings.NewReader(body))
	require.NoError(r.t, err)
	req.GetBody = nil
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer key")
	req.Header.Set("Idempotency-Key", batch)
	req.Header.Set("X-Schoolbell-School", "A")
	req.Header.Set("X-Schoolbell-Fence", "7")
	return req
}

// send posts a batch; status is 0 where no answer came.
func (r *receiver) send(batch string, messages ...message) (status int, header http.Header, body string) {
	r.t.Helper()
	resp, err := r.client.Do(r.request(batch, requestBody(batch, messages...)))
	if err != nil {
		return 0, nil, ""
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(r.t, err)
	return resp.StatusCode, resp.Header, string(b)
}

func (r *receiver) answers() map[string]string {
	all := map[string]string{}
	for _, a := range r.Arrivals() {
		s := a.Answer
		if a.Lost {
			s += " lost"
		}
		if a.Repeat {
			s += " repeat"
		}
		all[a.Message] = s
	}
	return all
}

func TestScriptedMessages(t *testing.T) {
	t.Parallel()
	for token, c := range map[string]struct{ result, logged string }{
		"device-1":                 {`[{"id":"n.1","status":"ok"}]`, "200"},
		"unregistered-1":           {`[{"id":"n.1","status":"error","code":"UNREGISTERED"}]`, "UNREGISTERED"},
		"unavailable-1":            {`[{"id":"n.1","status":"error","code":"UNAVAILABLE","retry_after_seconds":3}]`, "UNAVAILABLE"},
		"internal-1":               {`[{"id":"n.1","status":"error","code":"INTERNAL"}]`, "INTERNAL"},
		"quota-1":                  {`[{"id":"n.1","status":"error","code":"QUOTA_EXCEEDED","retry_after_seconds":3}]`, "QUOTA_EXCEEDED"},
		"quota_exceeded-1":         {`[{"id":"n.1","status":"error","code":"QUOTA_EXCEEDED","retry_after_seconds":3}]`, "QUOTA_EXCEEDED"},
		"mismatch-1":               {`[{"id":"n.1","status":"error","code":"SENDER_ID_MISMATCH"}]`, "SENDER_ID_MISMATCH"},
		"invalid-1":                {`[{"id":"n.1","status":"error","code":"INVALID_ARGUMENT"}]`, "INVALID_ARGUMENT"},
		"thirdparty-1":             {`[{"id":"n.1","status":"error","code":"THIRD_PARTY_AUTH_ERROR"}]`, "THIRD_PARTY_AUTH_ERROR"},
		"strange-1":                {`[{"id":"n.1","status":"error","code":"STRANGE_ERROR"}]`, "STRANGE_ERROR"},
		"missing-1":                {`[]`, "200 lost"},
		"duplicate-1":              {`[{"id":"n.1","status":"ok"},{"id":"n.1","status":"ok"}]`, "200 lost"},
		"extra-1":                  {`[{"id":"n.1","status":"ok"},{"id":"stranger.n.1","status":"ok"}]`, "200"},
		"badstatus-1":              {`[{"id":"n.1","status":"queued"}]`, "200 lost"},
		"unregistered":             {`[{"id":"n.1","status":"ok"}]`, "200"},
		"UNREGISTERED-1":           {`[{"id":"n.1","status":"ok"}]`, "200"},
		"unavailable0-1":           {`[{"id":"n.1","status":"ok"}]`, "200"},
		"cXyz-unregistered-:APA91": {`[{"id":"n.1","status":"ok"}]`, "200"},
	} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			r := receive(t, Config{Behaviour: Behaviour{RetryAfter: 3}})
			status, _, body := r.send("b1", message{seq: 1, token: token})
			require.Equal(t, 200, status)
			require.JSONEq(t, `{"results":`+c.result+`}`, body)
			require.Equal(t, map[string]string{"n.1": c.logged}, r.answers())
		})
	}
}

func TestScriptedRequests(t *testing.T) {
	t.Parallel()
	for token, c := range map[string]struct {
		status        int
		retryAfter    string
		mine, another string // what is logged
	}{
		"auth-1":       {401, "", "401", "401"},
		"forbidden-1":  {403, "", "403", "403"},
		"throttled-1":  {429, "3", "429", "429"},
		"busy-1":       {503, "3", "503", "503"},
		"down-1":       {503, "", "503", "503"},
		"error-1":      {500, "", "500", "500"},
		"redirect-1":   {307, "", "307", "307"},
		"garbage-1":    {200, "", "garbage", "garbage"},
		"reset-1":      {0, "", "reset", "reset"},
		"loseanswer-1": {0, "", "200 lost", "200 lost"},
		"truncated-1":  {200, "", "200 lost", "200 lost"},
	} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			r := receive(t, Config{Behaviour: Behaviour{RetryAfter: 3}})
			status, header, body := r.send("b1", message{seq: 1, token: token}, message{seq: 2, token: "device"})
			require.Equal(t, c.status, status)
			require.Equal(t, c.retryAfter, header.Get("Retry-After"))
			require.False(t, json.Valid([]byte(body)), "no answer that could be understood: %s", body)
			require.Equal(t, map[string]string{"n.1": c.mine, "n.2": c.another}, r.answers())
		})
	}
}

func TestALostAnswerIsStillOfEachMessage(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	r.send("b1", message{seq: 1, token: "loseanswer-1"}, message{seq: 2, token: "unregistered-2"})
	require.Equal(t, map[string]string{"n.1": "200 lost", "n.2": "UNREGISTERED"}, r.answers())
}

func TestATokenMayAskForAnOutcomeSoManyTimes(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	var got []string
	for i := range 4 {
		r.send(fmt.Sprint("b", i), message{seq: 1, token: "unavailable2-x", attempt: i + 1}, message{seq: 2, token: "unavailable2-y", attempt: i + 1})
		got = append(got, r.Arrivals()[2*i].Answer, r.Arrivals()[2*i+1].Answer)
	}
	require.Equal(t, []string{"UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE", "200", "200", "200", "200"}, got)

	status, _, _ := r.send("b9", message{seq: 3, token: "auth1-x"})
	require.Equal(t, 401, status)
	status, _, _ = r.send("b10", message{seq: 3, token: "auth1-x"})
	require.Equal(t, 200, status)
}

func TestTheLogIsExact(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	e, err := New(Config{Log: &out, Behaviour: Behaviour{Latency: Latency{Base: 20 * time.Millisecond}}})
	require.NoError(t, err)
	body := requestBody("b1", message{seq: 1, token: "device-1"}, message{seq: 2, token: "unregistered-2", attempt: 2, requeued: 1})
	req := httptest.NewRequest(http.MethodPost, "/relay", strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	req.Header.Set("Idempotency-Key", "b1")
	req.Header.Set("X-Schoolbell-School", "A")
	req.Header.Set("X-Schoolbell-Fence", "7")
	before := time.Now().UnixNano()
	e.ServeHTTP(httptest.NewRecorder(), req)
	after := time.Now().UnixNano()
	require.NoError(t, e.Close())

	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 4)
	var raw []map[string]any
	for _, line := range lines {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		came := int64(m["t_ns"].(float64))
		require.True(t, came >= before-1e6 && came <= after+1e6)
		if ended, ok := m["ended_ns"]; ok {
			require.GreaterOrEqual(t, int64(ended.(float64))-came, int64(19*time.Millisecond))
		}
		delete(m, "t_ns")
		delete(m, "ended_ns")
		raw = append(raw, m)
	}
	first := map[string]any{"n": 1.0, "kind": "relay", "school": "A", "notice": "n", "message": "n.1", "token_sha": "01d6a2397db067f8", "batch": "b1", "fence": 7.0, "attempt": 1.0}
	second := map[string]any{"n": 2.0, "kind": "relay", "school": "A", "notice": "n", "message": "n.2", "token_sha": tokenSHA("unregistered-2"), "batch": "b1", "fence": 7.0, "attempt": 2.0, "requeued": 1.0}
	first["token_sha"] = tokenSHA("device-1")
	with := func(m map[string]any, answer string) map[string]any {
		c := map[string]any{"answer": answer}
		for k, v := range m {
			c[k] = v
		}
		return c
	}
	require.Equal(t, []map[string]any{first, second, with(first, "200"), with(second, "UNREGISTERED")}, raw)
	require.NotContains(t, out.String(), "device-1")
}

func TestACallerThatHasGoneEndedWhenItWasLastSeen(t *testing.T) {
	t.Parallel()
	for token, logged := range map[string]string{"device-1": "200 lost", "hang-1": "hang"} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			r := receive(t, Config{Behaviour: Behaviour{Latency: Latency{Base: time.Minute}}})
			client := *r.client
			client.Timeout = 100 * time.Millisecond
			_, err := client.Do(r.request("b1", requestBody("b1", message{seq: 1, token: token})))
			require.Error(t, err)
			eventually(t, func() bool { return r.Counts().InFlight == 0 })
			require.Equal(t, map[string]string{"n.1": logged}, r.answers())
			a := r.Arrivals()[0]
			require.Less(t, time.Duration(a.Ended-a.T), 90*time.Millisecond, "the caller's end may not seem later than it was")
		})
	}
}

func TestStopEndsWaits(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{Behaviour: Behaviour{Latency: Latency{Base: time.Hour}}})
	var wg sync.WaitGroup
	wg.Go(func() { r.send("b1", message{seq: 1, token: "device-1"}) })
	wg.Go(func() { r.send("b2", message{seq: 2, token: "hang-1"}) })
	eventually(t, func() bool { return r.Counts().InFlight == 2 })
	r.Stop()
	wg.Wait()
	require.Equal(t, map[string]string{"n.1": "200", "n.2": "hang"}, r.answers())
}

func TestWhatBreaksTheProtocolIsRefused(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	good := requestBody("b1", message{seq: 1, token: "device"})
	for name, c := range map[string]struct {
		body   string
		change func(*http.Request)
	}{
		"content type":    {good, func(r *http.Request) { r.Header.Set("Content-Type", "text/plain") }},
		"idempotency key": {good, func(r *http.Request) { r.Header.Set("Idempotency-Key", "other") }},
		"school":          {good, func(r *http.Request) { r.Header.Set("X-Schoolbell-School", "B") }},
		"fence":           {good, func(r *http.Request) { r.Header.Del("X-Schoolbell-Fence") }},
		"not JSON":        {good[1:], nil},
		"no messages":     {requestBody("b1"), nil},
		"no token":        {requestBody("b1", message{seq: 1}), nil},
		"id twice":        {requestBody("b1", message{seq: 1, token: "a"}, message{seq: 1, token: "b"}), nil},
		"attempt 0":       {strings.Replace(good, `"attempt":1`, `"attempt":0`, 1), nil},
		"no data":         {strings.Replace(good, `"data":{},`, ``, 1), nil},
	} {
		before := r.Counts().ProtocolErrors
		req := r.request("b1", c.body)
		if c.change != nil {
			c.change(req)
		}
		resp, err := r.client.Do(req)
		require.NoError(t, err, name)
		resp.Body.Close()
		require.Equal(t, 400, resp.StatusCode, name)
		require.Equal(t, before+1, r.Counts().ProtocolErrors, name)
	}
	require.Empty(t, r.Arrivals())
	require.NotEmpty(t, r.Counts().LastProtocol)
}

func TestTheBearerTokenIsAsked(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{Token: "another"})
	status, _, _ := r.send("b1", message{seq: 1, token: "device"})
	require.Equal(t, 401, status)
	require.Equal(t, map[string]string{"n.1": "401"}, r.answers(), "it arrived all the same")
	r = receive(t, Config{Token: "key"})
	status, _, _ = r.send("b1", message{seq: 1, token: "device"})
	require.Equal(t, 200, status)
}

func TestRepeats(t *testing.T) {
	t.Parallel()
	for _, dedupe := range []bool{false, true} {
		t.Run(fmt.Sprint("dedupe ", dedupe), func(t *testing.T) {
			t.Parallel()
			r := receive(t, Config{Behaviour: Behaviour{Dedupe: dedupe}})
			r.send("b1", message{seq: 1, token: "loseanswer1-a"}, message{seq: 2, token: "unavailable1-b"})
			_, _, body := r.send("b2", message{seq: 1, token: "loseanswer1-a", attempt: 2}, message{seq: 2, token: "unavailable1-b", attempt: 2})
			require.JSONEq(t, `{"results":[{"id":"n.2","status":"ok"},{"id":"n.1","status":"ok"}]}`, body)
			r.send("b2", message{seq: 1, token: "x", attempt: 3, requeued: 1})

			c := r.Counts()
			if dedupe {
				require.Equal(t, "200 repeat", r.answers2(2))
				require.EqualValues(t, []int64{3, 3, 0, 1}, []int64{c.Accepted, c.Distinct, c.Repeated, c.Dropped})
			} else {
				require.Equal(t, "200", r.answers2(2))
				require.EqualValues(t, []int64{4, 3, 1, 0}, []int64{c.Accepted, c.Distinct, c.Repeated, c.Dropped})
			}
			require.Equal(t, "200", r.answers2(3), "a retry after a definite failure is no repeat")
			require.Equal(t, "200", r.answers2(4), "nor is a requeue")
			require.EqualValues(t, 1, c.Replays, "b2 came twice")
		})
	}
}

// answers2 is what was logged for the i-th arrival.
func (r *receiver) answers2(i int) string {
	a := r.Arrivals()[i]
	if a.Repeat {
		return a.Answer + " repeat"
	}
	return a.Answer
}

func TestStatusTellsWhatBecameOfMessages(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	r.send("b1", message{seq: 1, token: "loseanswer-1"}, message{seq: 2, token: "unavailable-2"})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url+"/status", strings.NewReader(`{"ids":["n.1","n.2","n.3"]}`))
	require.NoError(t, err)
	resp, err := r.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.JSONEq(t, `{"results":[{"id":"n.1","status":"accepted"},{"id":"n.2","status":"not_accepted"},{"id":"n.3","status":"not_accepted"}]}`, string(body))
}

func TestChanceFollowsItsProbabilityAndItsSeed(t *testing.T) {
	t.Parallel()
	run := func(seed uint64) map[string]string {
		r := receive(t, Config{Seed: seed, Behaviour: Behaviour{Outcomes: map[string]float64{"UNREGISTERED": 0.1, "UNAVAILABLE": 0.2}}})
		for b := range 10 {
			var batch []message
			for i := range 200 {
				batch = append(batch, message{seq: b*200 + i, token: "device"})
			}
			r.send(fmt.Sprint("b", b), batch...)
		}
		return r.answers()
	}
	first := run(1)
	require.Equal(t, first, run(1), "the same seed, the same fate")
	require.NotEqual(t, first, run(2))
	count := map[string]int{}
	for _, a := range first {
		count[a]++
	}
	require.InDelta(t, 200, count["UNREGISTERED"], 60)
	require.InDelta(t, 400, count["UNAVAILABLE"], 80)
	require.Equal(t, 2000, count["UNREGISTERED"]+count["UNAVAILABLE"]+count["200"])
}

func TestRequestsFailByChance(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{Behaviour: Behaviour{Reset: 0.2, LoseAnswer: 0.3, Outcomes: map[string]float64{"DOWN": 0.1}}})
	count := map[string]int{}
	for i := range 400 {
		r.send(fmt.Sprint("b", i), message{seq: i, token: "device"})
	}
	for _, a := range r.answers() {
		count[a]++
	}
	require.InDelta(t, 80, count["reset"], 35)
	require.InDelta(t, 120, count["200 lost"], 40)
	require.InDelta(t, 40, count["503"], 28)
}

func TestQuotaIsOfAnyMinute(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{Behaviour: Behaviour{Quota: 3, RetryAfter: 1}})
	two := []message{{seq: 1, token: "a"}, {seq: 2, token: "b"}}
	status, _, _ := r.send("b1", two...)
	require.Equal(t, 200, status)
	status, header, _ := r.send("b2", two...)
	require.Equal(t, 429, status, "the whole batch")
	require.Contains(t, []string{"59", "60"}, header.Get("Retry-After"))
	status, _, _ = r.send("b3", two[0])
	require.Equal(t, 200, status, "what was refused used nothing up")
}

func TestWindow(t *testing.T) {
	t.Parallel()
	var w window
	take := func(n int, second int64) string {
		wait, ok := w.take(n, 100, second)
		return fmt.Sprint(ok, " ", wait)
	}
	require.Equal(t, "true 0", take(60, 1000))
	require.Equal(t, "true 0", take(40, 1010))
	require.Equal(t, "false 50", take(1, 1010), "until the first 60 have left")
	require.Equal(t, "false 1", take(60, 1059))
	require.Equal(t, "true 0", take(60, 1060))
	require.Equal(t, "false 10", take(1, 1060))
	require.Equal(t, "false 60", take(101, 1060))
	require.Equal(t, "true 0", take(100, 9999))
}

func TestBehaviourAtRunTime(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	put := func(body string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, r.url+"/_sim/behaviour", strings.NewReader(body))
		require.NoError(t, err)
		resp, err := r.client.Do(req)
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(b)
	}
	status, body := put(`{"latency":"2ms+-1ms","outcomes":{"UNREGISTERED":1},"dedupe":true}`)
	require.Equal(t, 200, status)
	require.JSONEq(t, `{"latency":"2ms±1ms","outcomes":{"UNREGISTERED":1},"reset":0,"lose_answer":0,"quota":0,"retry_after_seconds":0,"dedupe":true}`, body)
	r.send("b1", message{seq: 1, token: "device"})
	require.Equal(t, map[string]string{"n.1": "UNREGISTERED"}, r.answers())

	for _, bad := range []string{``, `{"latncy":"1s"}`, `{"latency":"soon"}`, `{"latency":"1ms±2ms"}`, `{"outcomes":{"NO_SUCH":1}}`,
		`{"outcomes":{"UNREGISTERED":1.5}}`, `{"outcomes":{"UNREGISTERED":-1}}`, `{"outcomes":{"UNREGISTERED":0.6,"INTERNAL":0.6}}`,
		`{"reset":0.6,"lose_answer":0.6}`, `{"quota":-1}`, `{"reset":0.1,"outcomes":{"RESET":0.1}}`} {
		status, body := put(bad)
		require.Equal(t, 400, status, bad)
		require.NotEmpty(t, body)
	}
	require.True(t, r.Behaviour().Dedupe, "what was refused changed nothing")
}

func TestControlEndpoints(t *testing.T) {
	t.Parallel()
	r := receive(t, Config{})
	r.send("b1", message{seq: 1, token: "device"})
	get := func(path string) string {
		resp, err := r.client.Get(r.url + path)
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return string(b)
	}
	require.Contains(t, get("/_sim/counts"), `"accepted":1`)
	require.Equal(t, 1, strings.Count(get("/_sim/log"), "\n"))
	require.Empty(t, get("/_sim/log?school=B"))
	require.Contains(t, get("/_sim/behaviour"), `"latency":"0s"`)
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestALogThatCannotBeWrittenIsNotHidden(t *testing.T) {
	t.Parallel()
	e, err := New(Config{Log: failingWriter{}})
	require.NoError(t, err)
	send := func() int {
		body := requestBody("b1", message{seq: 1, token: strings.Repeat("d", 10)})
		req := httptest.NewRequest(http.MethodPost, "/relay", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Idempotency-Key", "b1")
		req.Header.Set("X-Schoolbell-School", "A")
		req.Header.Set("X-Schoolbell-Fence", "7")
		w := httptest.NewRecorder()
		e.ServeHTTP(w, req)
		return w.Code
	}
	eventually(t, func() bool { return send() == http.StatusInternalServerError })
	require.ErrorContains(t, e.Close(), "disk full")
}

func TestParseLatency(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]Latency{
		"": {}, "80ms": {Base: 80 * time.Millisecond},
		"80ms±40ms":  {Base: 80 * time.Millisecond, Spread: 40 * time.Millisecond},
		"80ms+-40ms": {Base: 80 * time.Millisecond, Spread: 40 * time.Millisecond},
	} {
		got, err := ParseLatency(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got, s)
	}
	for _, s := range []string{"80", "ms", "80ms±", "±40ms", "80ms±90ms", "80ms±-1ms", "-80ms"} {
		_, err := ParseLatency(s)
		require.Error(t, err, s)
	}
	l := Latency{Base: 80 * time.Millisecond, Spread: 40 * time.Millisecond}
	require.Equal(t, 40*time.Millisecond, l.at(0))
	require.Equal(t, 80*time.Millisecond, l.at(0.5))
}

func eventually(t *testing.T, condition func() bool) {
	t.Helper()
	require.Eventually(t, condition, 10*time.Second, 2*time.Millisecond)
}

func BenchmarkRelay200(b *testing.B) {
	e, err := New(Config{Log: io.Discard})
	if err != nil {
		b.Fatal(err)
	}
	var batch []message
	for i := range 200 {
		batch = append(batch, message{seq: i, token: strings.Repeat("t", 160)})
	}
	body := requestBody("b1", batch...)
	for b.Loop() {
		req := httptest.NewRequest(http.MethodPost, "/relay", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Idempotency-Key", "b1")
		req.Header.Set("X-Schoolbell-School", "A")
		req.Header.Set("X-Schoolbell-Fence", "7")
		w := httptest.NewRecorder()
		e.ServeHTTP(w, req)
		if w.Code != 200 {
			b.Fatal(w.Body.String())
		}
	}
	b.StopTimer()
	if err := e.Close(); err != nil {
		b.Fatal(err)
	}
}
