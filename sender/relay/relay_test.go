package relay

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func batchOf(ids ...string) sender.Batch {
	b := sender.Batch{ID: "batch-1", School: "A", Fence: 7, TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	c := &sender.Content{Title: "title", Body: "body", Data: map[string]string{"k": "v"}}
	for _, id := range ids {
		b.Messages = append(b.Messages, sender.Message{ID: id, Token: "token-of-" + id, Content: c, Attempt: 1})
	}
	return b
}

func newRelay(t *testing.T, url string, change func(*Config)) *Relay {
	t.Helper()
	// No timeout but those that a test is about: the machine may be busy.
	const never = time.Minute
	cfg := Config{Name: "r", URL: url, Token: "secret-key", ConnectTimeout: never, ReadTimeout: never, CallTimeout: never}
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg, nil)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// serve answers every request with handler and counts them.
func serve(t *testing.T, handler http.HandlerFunc) (url string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		handler(w, r)
	}))
	t.Cleanup(s.Close)
	return s.URL, requests
}

// answering serves one fixed answer, after having read the request.
func answering(t *testing.T, status int, header map[string]string, body string) (url string, requests *atomic.Int64) {
	return serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		for k, v := range header {
			w.Header().Set(k, v)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
}

func TestRequestKeepsTheProtocol(t *testing.T) {
	t.Parallel()
	var header http.Header
	var body []byte
	url, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		header = r.Header.Clone()
		body, _ = io.ReadAll(r.Body)
		if r.Method != http.MethodPost || r.URL.RequestURI() != "/hook?x=1" || r.ContentLength != int64(len(body)) {
			t.Errorf("%s %s, length %d of %d", r.Method, r.URL, r.ContentLength, len(body))
		}
		_, _ = io.WriteString(w, `{"results":[{"id":"n.1","status":"ok"},{"id":"n.2","status":"ok"}]}`)
	})
	b := batchOf("n.1", "n.2")
	badge := 0
	b.Messages[1].Badge = &badge
	b.Messages[1].Attempt = 3
	b.Messages[1].Requeued = 1
	b.Messages[1].Content = &sender.Content{Title: "t2", Image: "https://i", Link: "https://l"}

	got := newRelay(t, url+"/hook?x=1", nil).Send(t.Context(), b)

	require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), got)
	require.Equal(t, "application/json", header.Get("Content-Type"))
	require.Equal(t, "Bearer secret-key", header.Get("Authorization"))
	require.Equal(t, "batch-1", header.Get("Idempotency-Key"))
	require.Equal(t, "A", header.Get("X-Schoolbell-School"))
	require.Equal(t, "7", header.Get("X-Schoolbell-Fence"))
	require.Equal(t, b.TraceParent, header.Get("traceparent"))
	require.JSONEq(t, `{"batch_id":"batch-1","school":"A","messages":[
		{"id":"n.1","token":"token-of-n.1","title":"title","body":"body","data":{"k":"v"},"attempt":1},
		{"id":"n.2","token":"token-of-n.2","title":"t2","body":"","data":{},"image":"https://i","link":"https://l","badge":0,"attempt":3,"requeued":1}
	]}`, string(body))
}

func TestAnswersOfAWholeBatch(t *testing.T) {
	t.Parallel()
	date := time.Now().Add(30 * time.Minute).UTC().Format(http.TimeFormat)
	for name, c := range map[string]struct {
		status int
		header map[string]string
		body   string
		want   sender.Result
		about  bool // RetryAfter is counted from now
	}{
		"429":                          {status: 429, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED"}},
		"429 Retry-After":              {status: 429, header: map[string]string{"Retry-After": "30"}, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: 30 * time.Second}},
		"429 with a date":              {status: 429, header: map[string]string{"Retry-After": date}, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: 30 * time.Minute}, about: true},
		"429 malformed Retry-After":    {status: 429, header: map[string]string{"Retry-After": "later"}, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED"}},
		"429 far Retry-After":          {status: 429, header: map[string]string{"Retry-After": "86400"}, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: time.Hour}},
		"429 with accepting body":      {status: 429, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}`, want: sender.Result{Class: sender.Throttled, Code: "QUOTA_EXCEEDED"}},
		"503 Retry-After":              {status: 503, header: map[string]string{"Retry-After": "7"}, want: sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE", RetryAfter: 7 * time.Second}},
		"503 Retry-After 0":            {status: 503, header: map[string]string{"Retry-After": "0"}, want: sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE"}},
		"503":                          {status: 503, want: sender.Result{Class: sender.Unknown, Code: "HTTP_503"}},
		"503 malformed Retry-After":    {status: 503, header: map[string]string{"Retry-After": "-1"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_503"}},
		"401":                          {status: 401, want: sender.Result{Class: sender.Misconfigured, Code: "HTTP_401"}},
		"403":                          {status: 403, want: sender.Result{Class: sender.Misconfigured, Code: "HTTP_403"}},
		"401 Retry-After":              {status: 401, header: map[string]string{"Retry-After": "90"}, want: sender.Result{Class: sender.Misconfigured, Code: "HTTP_401", RetryAfter: 90 * time.Second}},
		"500 Retry-After":              {status: 500, header: map[string]string{"Retry-After": "90"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_500", RetryAfter: 90 * time.Second}},
		"503 Retry-After, no number":   {status: 503, header: map[string]string{"Retry-After": "soon"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_503"}},
		"400":                          {status: 400, want: sender.Result{Class: sender.Unknown, Code: "HTTP_400"}},
		"404":                          {status: 404, want: sender.Result{Class: sender.Unknown, Code: "HTTP_404"}},
		"413":                          {status: 413, want: sender.Result{Class: sender.Unknown, Code: "HTTP_413"}},
		"500":                          {status: 500, want: sender.Result{Class: sender.Unknown, Code: "HTTP_500"}},
		"502 HTML":                     {status: 502, body: "<html>", want: sender.Result{Class: sender.Unknown, Code: "HTTP_502"}},
		"504":                          {status: 504, want: sender.Result{Class: sender.Unknown, Code: "HTTP_504"}},
		"302":                          {status: 302, header: map[string]string{"Location": "/elsewhere"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_302"}},
		"307":                          {status: 307, header: map[string]string{"Location": "/elsewhere"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_307"}},
		"308":                          {status: 308, header: map[string]string{"Location": "/elsewhere"}, want: sender.Result{Class: sender.Unknown, Code: "HTTP_308"}},
		"201 with an accepting body":   {status: 201, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}`, want: sender.Result{Class: sender.Unknown, Code: "HTTP_201"}},
		"204":                          {status: 204, want: sender.Result{Class: sender.Unknown, Code: "HTTP_204"}},
		"200 empty":                    {status: 200, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 HTML":                     {status: 200, body: "<html>captive portal</html>", want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 cut off":                  {status: 200, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","sta`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 with something behind it": {status: 200, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]} oops`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 without results":          {status: 200, body: `{}`, want: sender.Result{Class: sender.Unknown, Code: "RESULT_MISSING"}},
		"200 with an array":            {status: 200, body: `[]`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 with results of a scalar": {status: 200, body: `{"results":"ok"}`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 with results by id":       {status: 200, body: `{"results":{"1":"ok","2":"ok"}}`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 with null results":        {status: 200, body: `{"results":null}`, want: sender.Result{Class: sender.Unknown, Code: "RESULT_MISSING"}},
		"200 with results twice":       {status: 200, body: `{"results":[],"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 in another spelling":      {status: 200, body: `{"Results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}`, want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 in a compression unasked": {status: 200, header: map[string]string{"Content-Encoding": "br"}, body: "\x0b\x02\x80ok\x03", want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
		"200 said to be zipped":        {status: 200, header: map[string]string{"Content-Encoding": "gzip"}, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}`, want: sender.Result{Class: sender.Unknown, Code: "NO_ANSWER"}},
		"200 too large":                {status: 200, body: `{"results":[{"id":"1","status":"ok"},{"id":"2","status":"ok"}]}` + strings.Repeat(" ", 2<<20), want: sender.Result{Class: sender.Unknown, Code: "BAD_ANSWER"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, requests := answering(t, c.status, c.header, c.body)
			b := batchOf("1", "2")

			got := newRelay(t, url, nil).Send(t.Context(), b)

			require.Len(t, got, 2)
			for i := range got {
				got[i].Detail = ""
				if c.about {
					require.InDelta(t, c.want.RetryAfter.Seconds(), got[i].RetryAfter.Seconds(), 300)
					got[i].RetryAfter = c.want.RetryAfter
				}
			}
			require.Equal(t, sender.Fill(b.Messages, c.want), got)
			require.EqualValues(t, 1, requests.Load(), "exactly one request")
		})
	}
}

func TestResultsOfMessages(t *testing.T) {
	t.Parallel()
	accepted := sender.Result{Class: sender.Accepted}
	missing := sender.Result{Class: sender.Unknown, Code: "RESULT_MISSING"}
	malformed := sender.Result{Class: sender.Unknown, Code: "RESULT_MALFORMED"}
	duplicate := sender.Result{Class: sender.Unknown, Code: "RESULT_DUPLICATE"}
	code := func(class sender.Class, code string) sender.Result { return sender.Result{Class: class, Code: code} }
	for name, c := range map[string]struct {
		results string
		want    []sender.Result // of messages 1 and 2
	}{
		"in any order":                {`{"id":"2","status":"ok"},{"id":"1","status":"error","code":"UNREGISTERED"}`, []sender.Result{code(sender.Gone, "UNREGISTERED"), accepted}},
		"UNAVAILABLE":                 {`{"id":"1","status":"error","code":"UNAVAILABLE","retry_after_seconds":5},{"id":"2","status":"ok"}`, []sender.Result{{Class: sender.Unavailable, Code: "UNAVAILABLE", RetryAfter: 5 * time.Second}, accepted}},
		"INTERNAL":                    {`{"id":"1","status":"error","code":"INTERNAL"},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Unavailable, "INTERNAL"), accepted}},
		"QUOTA_EXCEEDED":              {`{"id":"1","status":"error","code":"QUOTA_EXCEEDED","retry_after_seconds":1.5},{"id":"2","status":"ok"}`, []sender.Result{{Class: sender.Throttled, Code: "QUOTA_EXCEEDED", RetryAfter: 1500 * time.Millisecond}, accepted}},
		"SENDER_ID_MISMATCH":          {`{"id":"1","status":"error","code":"SENDER_ID_MISMATCH"},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Mismatch, "SENDER_ID_MISMATCH"), accepted}},
		"THIRD_PARTY_AUTH_ERROR":      {`{"id":"1","status":"error","code":"THIRD_PARTY_AUTH_ERROR"},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Mismatch, "THIRD_PARTY_AUTH_ERROR"), accepted}},
		"INVALID_ARGUMENT":            {`{"id":"1","status":"error","code":"INVALID_ARGUMENT"},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Rejected, "INVALID_ARGUMENT"), accepted}},
		"a code nobody knows":         {`{"id":"1","status":"error","code":"OUT_OF_INK"},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Rejected, "OUT_OF_INK"), accepted}},
		"no code":                     {`{"id":"1","status":"error"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"a token as code":             {`{"id":"1","status":"error","code":"token-of-1"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"ok with a code":              {`{"id":"1","status":"ok","code":"UNREGISTERED"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"OK in capitals":              {`{"id":"1","status":"OK"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"unknown status":              {`{"id":"1","status":"queued"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"no status":                   {`{"id":"1"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"status of another type":      {`{"status":1,"id":"1"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"negative wait":               {`{"id":"1","status":"error","code":"UNAVAILABLE","retry_after_seconds":-5},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Unavailable, "UNAVAILABLE"), accepted}},
		"huge wait":                   {`{"id":"1","status":"error","code":"UNAVAILABLE","retry_after_seconds":1e300},{"id":"2","status":"ok"}`, []sender.Result{{Class: sender.Unavailable, Code: "UNAVAILABLE", RetryAfter: time.Hour}, accepted}},
		"wait of another type":        {`{"id":"1","status":"ok","retry_after_seconds":"soon"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"one missing":                 {`{"id":"2","status":"ok"}`, []sender.Result{missing, accepted}},
		"id of another type":          {`{"id":1,"status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{missing, accepted}},
		"not an object":               {`"1",{"id":"2","status":"ok"},null`, []sender.Result{missing, accepted}},
		"id in capitals":              {`{"ID":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"status in capitals":          {`{"id":"1","Status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"two statuses, one ok":        {`{"id":"1","status":"error","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"two codes":                   {`{"id":"1","status":"error","code":"UNAVAILABLE","code":"UNREGISTERED"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"two ids":                     {`{"id":"2","id":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"an escaped name":             {`{"id":"1","stat\u0075s":"ok"},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"an escaped value":            {`{"id":"\u0031","status":"ok","note":"\\\"status\":"},{"id":"2","status":"ok"}`, []sender.Result{accepted, accepted}},
		"null status":                 {`{"id":"1","status":null},{"id":"2","status":"ok"}`, []sender.Result{malformed, accepted}},
		"null wait":                   {`{"id":"1","status":"error","code":"INTERNAL","retry_after_seconds":null},{"id":"2","status":"ok"}`, []sender.Result{code(sender.Unavailable, "INTERNAL"), accepted}},
		"fields of its own":           {`{"id":"1","status":"ok","provider":{"id":"2","status":"error"},"x":[1,{}]},{"id":"2","status":"ok"}`, []sender.Result{accepted, accepted}},
		"an array":                    {`["1","ok"],{"id":"2","status":"ok"}`, []sender.Result{missing, accepted}},
		"a stranger":                  {`{"id":"9","status":"ok"},{"id":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{accepted, accepted}},
		"by position, without ids":    {`{"status":"ok"},{"status":"ok"}`, []sender.Result{missing, missing}},
		"twice, the same":             {`{"id":"1","status":"ok"},{"id":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{duplicate, accepted}},
		"twice, in contradiction":     {`{"id":"1","status":"error","code":"UNREGISTERED"},{"id":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{duplicate, accepted}},
		"twice, the second malformed": {`{"id":"1","status":"ok"},{"id":"1","status":7},{"id":"2","status":"ok"}`, []sender.Result{duplicate, accepted}},
		"three times":                 {`{"id":"1","status":"ok"},{"id":"1","status":"ok"},{"id":"1","status":"ok"},{"id":"2","status":"ok"}`, []sender.Result{duplicate, accepted}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, requests := answering(t, 200, nil, `{"results":[`+c.results+`]}`)
			got := newRelay(t, url, nil).Send(t.Context(), batchOf("1", "2"))
			require.Len(t, got, 2)
			for i := range got {
				c.want[i].ID = fmt.Sprint(i + 1)
			}
			require.Equal(t, c.want, got)
			require.EqualValues(t, 1, requests.Load(), "exactly one request")
		})
	}
}

func TestBadResultsAreCounted(t *testing.T) {
	t.Parallel()
	url, _ := answering(t, 200, nil, `{"results":[{"id":"1","status":"ok"},{"id":"1","status":"ok"},{"id":"9","status":"ok"},{"id":"2","status":"what"},7]}`)
	reg := prometheus.NewRegistry()
	r, err := New(Config{Name: "r", URL: url}, reg)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	_, err = New(Config{Name: "other", URL: url}, reg)
	require.NoError(t, err, "relays share their metrics")

	r.Send(t.Context(), batchOf("1", "2", "3"))

	require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP schoolbell_relay_bad_results_total Results of relays that could not be used: missing, extra, duplicate, malformed.
# TYPE schoolbell_relay_bad_results_total counter
schoolbell_relay_bad_results_total{kind="duplicate",sender="other"} 0
schoolbell_relay_bad_results_total{kind="duplicate",sender="r"} 1
schoolbell_relay_bad_results_total{kind="extra",sender="other"} 0
schoolbell_relay_bad_results_total{kind="extra",sender="r"} 1
schoolbell_relay_bad_results_total{kind="malformed",sender="other"} 0
schoolbell_relay_bad_results_total{kind="malformed",sender="r"} 2
schoolbell_relay_bad_results_total{kind="missing",sender="other"} 0
schoolbell_relay_bad_results_total{kind="missing",sender="r"} 1
`)))
}

func TestCompressedAnswersAreReadWithinBounds(t *testing.T) {
	t.Parallel()
	zipped := func(body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, body)
			_ = z.Close()
		}
	}
	url, _ := serve(t, zipped(`{"results":[{"id":"1","status":"ok"}]}`))
	require.Equal(t, []sender.Result{{ID: "1", Class: sender.Accepted}}, newRelay(t, url, nil).Send(t.Context(), batchOf("1")))

	bomb, _ := serve(t, zipped(`{"results":[{"id":"1","status":"ok"}],"x":"`+strings.Repeat("0", 4<<20)+`"}`))
	got := newRelay(t, bomb, nil).Send(t.Context(), batchOf("1"))
	require.Equal(t, sender.Unknown, got[0].Class)
	require.Equal(t, sender.CodeBadAnswer, got[0].Code)
}

func TestConnectionsAreReused(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	peers := map[string]int{}
	status := []int{200, 429, 503, 401, 500}
	var n atomic.Int64
	url, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		mu.Lock()
		peers[r.RemoteAddr]++
		mu.Unlock()
		w.WriteHeader(status[int(n.Add(1))%len(status)])
		_, _ = io.WriteString(w, `{"results":[{"id":"1","status":"ok"}]}`)
	})
	r := newRelay(t, url, nil)
	for range 10 {
		r.Send(t.Context(), batchOf("1"))
	}
	require.Len(t, peers, 1, "every answer is read to its end")
}
