package web

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// logged returns the log's lines of one event.
func (w *world) logged(event string) []map[string]any {
	w.t.Helper()
	var out []map[string]any
	for line := range strings.Lines(w.log.String()) {
		var m map[string]any
		require.NoError(w.t, json.Unmarshal([]byte(line), &m))
		if m["event"] == event {
			out = append(out, m)
		}
	}
	return out
}

func TestOneLogLineARequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.post(small, "X-Request-Id", "from-the-proxy.1")
	w.post(`{`, "X-Request-Id", "not\tone")
	w.get("/v1/notices/1?x=1")
	w.get("/v1/no/such/path")
	w.get("/healthz") // at debug: not in this log
	lines := w.logged("http_request")
	require.Len(t, lines, 4)
	for _, l := range lines {
		for _, name := range []string{"time", "level", "msg"} {
			delete(l, name)
		}
		require.Regexp(t, `^[0-9a-f]{32}$`, l["trace_id"])
		require.NotEmpty(t, l["request_id"])
	}
	require.Equal(t, "from-the-proxy.1", lines[0]["request_id"])
	require.NotEqual(t, "not\tone", lines[1]["request_id"])
	require.Equal(t, "/v1/notices", lines[0]["route"])
	require.Equal(t, "A", lines[0]["school"])
	require.Equal(t, "1", lines[0]["notice"])
	require.Equal(t, "admin", lines[0]["key"])
	require.EqualValues(t, 202, lines[0]["status"])
	require.Equal(t, "invalid_argument", lines[1]["code"])
	require.Equal(t, "/v1/notices/{id}", lines[2]["route"])
	require.Equal(t, "unmatched", lines[3]["route"])
}

// TestNoSecretsAnywhere sends a request whose every text is a secret, in ways
// that are taken and refused, and looks for them in the log and in refusals.
func TestNoSecretsAnywhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	good := `{"school":"A","title":"TITLE-s3cret","body":"BODY-s3cret","data":{"k":"DATA-s3cret"},"link":"https://example.org/LINK-s3cret",
		"recipients":[{"token":"TOKEN-s3cret","ref":"REF-s3cret"}]}`
	require.Equal(t, http.StatusAccepted, w.post(good).Code)
	for _, broken := range []string{
		strings.Replace(good, `BODY-s3cret`, `BODY-s3cret\u0000`, 1), strings.Replace(good, `TOKEN-s3cret`, `TOKEN-s3cret\u0000`, 1),
		strings.Replace(good, `https:`, ``, 1), strings.Replace(good, `"TOKEN-s3cret"`, `["TOKEN-s3cret"]`, 1),
		strings.Replace(good, `DATA-s3cret`, `DATA-s3cret\u0000`, 1), good + "TOKEN-s3cret", `"TOKEN-s3cret"`, strings.Repeat("TOKEN-s3cret", 10),
	} {
		rec := w.post(broken)
		require.Equal(t, http.StatusBadRequest, rec.Code)
		require.NotContains(t, rec.Body.String(), "s3cret")
	}
	rec := w.upload(strings.NewReader(head + `{"token":"TOKEN-s3cret"` + "\n"))
	require.Equal(t, http.StatusBadRequest, rec.Code)
	require.NotContains(t, rec.Body.String(), "s3cret")
	w.store.onAccept = func(context.Context) error { panic("TOKEN-s3cret") }
	require.NotContains(t, w.post(good).Body.String(), "s3cret")
	require.Len(t, w.logged("http_panic"), 1)
	require.NotContains(t, w.log.String(), "s3cret")
	require.NotContains(t, w.log.String(), testKey)
}

func TestTraceIsKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	const trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	w.post(small, "Traceparent", trace)
	require.Equal(t, trace, w.store.notices[1].notice.TraceParent)
	require.Equal(t, "4bf92f3577b34da6a3ce929d0e0e4736", w.logged("http_request")[0]["trace_id"])

	made := regexp.MustCompile(`^00-[0-9a-f]{32}-[0-9a-f]{16}-00$`)
	for i, bad := range []string{
		"", "x", "01" + trace[2:], strings.ToUpper(trace), trace + "-x", "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
		"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", strings.Replace(trace, "4bf9", "4bg9", 1),
	} {
		w.post(small, "Traceparent", bad)
		got := w.store.notices[int64(i+2)].notice.TraceParent
		require.Regexp(t, made, got, bad)
		require.True(t, validTrace(got))
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.post(small, "Idempotency-Key", "k")
	w.post(small, "Idempotency-Key", "k")
	w.post(`{`)
	w.get("/v1/notices/1")
	w.get("/v1/notices/2")
	w.get("/nothing/1")
	w.do("BREW", "/v1/notices", "", nil)
	require.NoError(t, testutil.GatherAndCompare(w.reg, strings.NewReader(`
# HELP schoolbell_http_requests_total Requests answered; status 499: the client hung up.
# TYPE schoolbell_http_requests_total counter
schoolbell_http_requests_total{method="GET",route="/v1/notices/{id}",status="200"} 1
schoolbell_http_requests_total{method="GET",route="/v1/notices/{id}",status="404"} 1
schoolbell_http_requests_total{method="GET",route="unmatched",status="404"} 1
schoolbell_http_requests_total{method="POST",route="/v1/notices",status="202"} 2
schoolbell_http_requests_total{method="POST",route="/v1/notices",status="400"} 1
schoolbell_http_requests_total{method="other",route="unmatched",status="405"} 1
# HELP schoolbell_notices_accepted_total Notices committed through the API; repeated requests count once.
# TYPE schoolbell_notices_accepted_total counter
schoolbell_notices_accepted_total 1
# HELP schoolbell_http_requests_in_flight Requests being answered.
# TYPE schoolbell_http_requests_in_flight gauge
schoolbell_http_requests_in_flight 0
# HELP schoolbell_http_uploads NDJSON uploads being read or stored.
# TYPE schoolbell_http_uploads gauge
schoolbell_http_uploads 0
`), "schoolbell_http_requests_total", "schoolbell_notices_accepted_total", "schoolbell_http_requests_in_flight", "schoolbell_http_uploads"))
	require.Contains(t, w.get("/metrics").Body.String(), `schoolbell_http_request_duration_seconds_bucket{method="POST",route="/v1/notices"`)
}

// TestMetricNames: each of these is in somebody's alert.
func TestMetricNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.post(small)
	families, err := w.reg.Gather()
	require.NoError(t, err)
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	slices.Sort(names)
	require.Equal(t, []string{"schoolbell_http_request_duration_seconds", "schoolbell_http_requests_in_flight", "schoolbell_http_requests_total",
		"schoolbell_http_uploads", "schoolbell_notices_accepted_total"}, names)
}

func TestReady(t *testing.T) {
	t.Parallel()
	redis, fcm := errors.New("redis: dial tcp 10.0.0.1"), error(nil)
	synctest.Test(t, func(t *testing.T) {
		asked := new(atomic.Int64)
		w := newWorld(t, func(_ *Config, d *Deps) {
			d.Checks = map[string]func(context.Context) error{
				"redis": func(context.Context) error { asked.Add(1); return redis }, "sender fcm": func(context.Context) error { return fcm },
			}
		})
		got := requireAnswer[api.Ready](t, w.get("/readyz"), http.StatusOK)
		require.Equal(t, api.Ready{Ready: true, Checks: map[string]string{"database": "ok", "redis": "unreachable", "sender fcm": "ok"}, Degraded: []string{"redis"}}, got)
		require.NotContains(t, w.get("/readyz").Body.String(), "10.0.0.1", "the endpoint is open")
		require.Len(t, w.logged("health_changed"), 1)
		require.Contains(t, w.log.String(), "10.0.0.1")
		require.EqualValues(t, 1, asked.Load(), "the second answer is the first one's")

		w.store.set(func(f *fakeStore) { f.pingErr = school.ErrUnavailable })
		<-time.After(probeValid)
		rec := w.get("/readyz")
		got = requireAnswer[api.Ready](t, rec, http.StatusServiceUnavailable)
		require.False(t, got.Ready)
		require.Equal(t, "unreachable", got.Checks["database"])
		require.Equal(t, "1", rec.Header().Get("Retry-After"))
		require.Equal(t, http.StatusOK, w.get("/healthz").Code, "the process is well")

		w.store.set(func(f *fakeStore) { f.pingErr = nil })
		redis = nil
		<-time.After(probeValid)
		got = requireAnswer[api.Ready](t, w.get("/readyz"), http.StatusOK)
		require.Empty(t, got.Degraded)
		require.Len(t, w.logged("health_changed"), 4, "redis away, database away, both back")
	})
}

// TestReadyIsBounded: a part that does not answer holds the probe no longer
// than its time.
func TestReadyIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(_ *Config, d *Deps) {
			d.Checks = map[string]func(context.Context) error{"redis": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}
		})
		start := time.Now()
		got := requireAnswer[api.Ready](t, w.get("/readyz"), http.StatusOK)
		require.Equal(t, []string{"redis"}, got.Degraded)
		require.Equal(t, probeTime, time.Since(start))
	})
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	store := newFakeStore()
	good := Config{Rule: school.Rule{Limit: 1, Rest: time.Second}}
	deps := Deps{Notices: store, Schools: store, Devices: store, Brakes: store, Database: store, Arbiter: &fakeArbiter{}, Waker: &fakeWaker{}, Cluster: fakeCluster{}, Auth: Everyone()}
	_, err := New(good, deps)
	require.NoError(t, err, "logger, registry, gatherer, checks and clock may be left out")
	for name, change := range map[string]func(*Config, *Deps){
		"no limit":       func(c *Config, _ *Deps) { c.Rule.Limit = 0 },
		"no rest":        func(c *Config, _ *Deps) { c.Rule.Rest = 0 },
		"negative time":  func(c *Config, _ *Deps) { c.BodyTimeout = -1 },
		"no room":        func(c *Config, _ *Deps) { c.MaxBodies = maxBody - 1 },
		"no uploads":     func(c *Config, _ *Deps) { c.Uploads = -1 },
		"no store":       func(_ *Config, d *Deps) { d.Notices = nil },
		"no auth":        func(_ *Config, d *Deps) { d.Auth = nil },
		"metrics twice":  func(_ *Config, d *Deps) { d.Registerer = taken(t) },
		"no schools":     func(_ *Config, d *Deps) { d.Schools = nil },
		"no database":    func(_ *Config, d *Deps) { d.Database = nil },
		"no arbiter":     func(_ *Config, d *Deps) { d.Arbiter = nil },
		"no waker":       func(_ *Config, d *Deps) { d.Waker = nil },
		"no cluster":     func(_ *Config, d *Deps) { d.Cluster = nil },
		"tiny uploads":   func(c *Config, _ *Deps) { c.UploadBytes = 1 },
		"no upload rate": func(c *Config, _ *Deps) { c.UploadRate = -1 },
	} {
		c, d := good, deps
		change(&c, &d)
		_, err := New(c, d)
		require.Error(t, err, name)
	}
}

func taken(t *testing.T) prometheus.Registerer {
	t.Helper()
	reg := prometheus.NewRegistry()
	_, err := newMetrics(reg)
	require.NoError(t, err)
	return reg
}

func TestAbortedHandlerIsNotSwallowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.store.onAccept = func(context.Context) error { panic(http.ErrAbortHandler) }
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { w.post(small) })
	w.requireNothingLeft()
	require.Zero(t, testutil.ToFloat64(w.server.metrics.inFlight))
}

func TestAnswersHaveTheirHeaders(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	rec := httptest.NewRecorder()
	w.server.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/version", bytes.NewReader(nil)))
	require.JSONEq(t, `{"version":"v0","commit":"abc","go":"go"}`, rec.Body.String())
	require.Equal(t, "nosniff", rec.Header().Get("X-Content-Type-Options"))
	require.Equal(t, "no-store", rec.Header().Get("Cache-Control"))
	require.NotEmpty(t, rec.Header().Get("X-Request-Id"))
}
