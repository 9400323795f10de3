package web

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator/api"
)

// requestInfo is what one request is known by, filled in on its way and read
// once at its end. One goroutine at a time touches it.
type requestInfo struct {
	id        string
	trace     traceContext
	route     string // pattern, never the path: a path holds ids
	quiet     bool   // probes and scrapes: logged at debug
	principal Principal
	school    string
	notice    string

	code       api.Code
	err        error
	clientGone bool
}

type infoKey struct{}

// infoOf returns the request's info. Every request has one; the empty one is
// for contexts that did not come through the server.
func infoOf(ctx context.Context) *requestInfo {
	if info, ok := ctx.Value(infoKey{}).(*requestInfo); ok {
		return info
	}
	return &requestInfo{}
}

// observe gives each request its id and trace, bounds its times, catches its
// panic, and writes its one log line and its metrics.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		info := &requestInfo{id: requestID(r.Header), trace: traceOf(r.Header), route: "unmatched"}
		rec := &recorder{ResponseWriter: w, control: http.NewResponseController(w), timeout: s.cfg.WriteTimeout}
		r = r.WithContext(context.WithValue(r.Context(), infoKey{}, info))
		w.Header().Set("X-Request-Id", info.id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// The deadline of the answer before, on the same connection, is still set.
		_ = rec.control.SetWriteDeadline(time.Time{})
		if r.Body != http.NoBody {
			// Also where no handler reads the body: net/http reads on for a while
			// after the answer, and a client that stopped must not hold it there.
			_ = rec.control.SetReadDeadline(start.Add(s.cfg.BodyTimeout))
			r.Body = &requestBody{ReadCloser: r.Body}
		}
		s.metrics.inFlight.Inc()
		defer func() {
			if v := recover(); v != nil {
				if v == http.ErrAbortHandler { //nolint:errorlint // compared as net/http compares it
					s.metrics.inFlight.Dec()
					panic(v)
				}
				s.panicked(rec, r, v)
			}
			s.metrics.inFlight.Dec()
			if rec.answered.IsZero() { // by nobody, or by net/http after this
				rec.answered = time.Now()
			}
			s.finished(rec, r, info, rec.answered.Sub(start))
		}()
		next.ServeHTTP(rec, r)
	})
}

// panicked logs a panic by its kind and its stack, not by its value, which may
// be made of a request's text.
func (s *Server) panicked(w *recorder, r *http.Request, v any) {
	info := infoOf(r.Context())
	kind := fmt.Sprintf("%T", v)
	if e, ok := v.(runtime.Error); ok {
		kind = e.Error()
	}
	s.log.LogAttrs(r.Context(), slog.LevelError, "request panicked",
		slog.String("event", "http_panic"), slog.String("request_id", info.id), slog.String("trace_id", info.trace.id()),
		slog.String("route", info.route), slog.String("kind", kind), slog.String("stack", string(debug.Stack())))
	if !w.wrote {
		s.writeError(w, r, fmt.Errorf("panic: %s", kind))
	}
}

func (s *Server) finished(w *recorder, r *http.Request, info *requestInfo, took time.Duration) {
	status := w.status
	switch {
	case info.clientGone:
		status = statusClientGone
	case status == 0:
		status = http.StatusOK // net/http writes it
	}
	method := methodLabel(r.Method)
	s.metrics.requests.WithLabelValues(info.route, method, strconv.Itoa(status)).Inc()
	s.metrics.duration.WithLabelValues(info.route, method).Observe(took.Seconds())

	level := slog.LevelInfo
	switch {
	case status >= 500 && status != http.StatusServiceUnavailable:
		level = slog.LevelError
	case status == http.StatusServiceUnavailable:
		level = slog.LevelWarn
	case info.quiet:
		level = slog.LevelDebug
	}
	if !s.log.Enabled(r.Context(), level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("event", "http_request"), slog.String("request_id", info.id), slog.String("trace_id", info.trace.id()),
		slog.String("method", method), slog.String("route", info.route), slog.Int("status", status),
		slog.Int64("ms", took.Milliseconds()),
	}
	for _, a := range []slog.Attr{
		slog.String("school", info.school), slog.String("notice", info.notice),
		slog.String("key", info.principal.Name), slog.String("code", string(info.code)),
	} {
		if a.Value.String() != "" {
			attrs = append(attrs, a)
		}
	}
	// What was wrong on our side; a caller's mistakes are the caller's to read.
	if status >= 500 && info.err != nil {
		attrs = append(attrs, slog.String("error", info.err.Error()))
	}
	s.log.LogAttrs(r.Context(), level, "request", attrs...)
}

// methodLabel bounds what a client can write into a metric or a log line.
func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return m
	}
	return "other"
}

// recorder notes the status, and gives the client a bounded time to take the
// answer from its first byte on.
type recorder struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
	status  int
	wrote   bool

	answered time.Time // when the answer began; what is left of a refused body is taken after it
}

func (w *recorder) WriteHeader(status int) {
	if !w.wrote && status >= 200 {
		w.wrote, w.status = true, status
		w.answered = time.Now()
		_ = w.control.SetWriteDeadline(w.answered.Add(w.timeout))
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(b []byte) (int, error) {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// requestID takes over the id that a proxy gave, if it can stand in a log line,
// and makes one otherwise.
func requestID(h http.Header) string {
	id := h.Get("X-Request-Id")
	if len(id) >= 1 && len(id) <= 64 && strings.IndexFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
	}) < 0 {
		return id
	}
	return rand.Text()
}

// traceContext is a W3C traceparent header, checked: version 00, ids in lower
// case hexadecimal and not zero.
type traceContext string

func (t traceContext) id() string {
	if len(t) < 35 {
		return ""
	}
	return string(t[3:35])
}

// traceOf takes over the caller's trace or begins one, so that every notice can
// be followed from its request to its result (R41).
func traceOf(h http.Header) traceContext {
	if values := h.Values("Traceparent"); len(values) == 1 && validTrace(values[0]) {
		return traceContext(values[0])
	}
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails
	return traceContext("00-" + hex.EncodeToString(b[:16]) + "-" + hex.EncodeToString(b[16:]) + "-00")
}

func validTrace(s string) bool {
	if len(s) != 55 || s[:3] != "00-" || s[35] != '-' || s[52] != '-' {
		return false
	}
	trace, span, flags := s[3:35], s[36:52], s[53:]
	for _, part := range []string{trace, span, flags} {
		if strings.ToLower(part) != part {
			return false
		}
		if _, err := hex.DecodeString(part); err != nil {
			return false
		}
	}
	return strings.Trim(trace, "0") != "" && strings.Trim(span, "0") != ""
}

type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	inFlight prometheus.Gauge
	uploads  prometheus.Gauge
	accepted prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_http_requests_total", Help: "Requests answered; status 499: the client hung up.",
		}, []string{"route", "method", "status"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "schoolbell_http_request_duration_seconds", Help: "From the header read to the answer written.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}, []string{"route", "method"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "schoolbell_http_requests_in_flight", Help: "Requests being answered.",
		}),
		uploads: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "schoolbell_http_uploads", Help: "NDJSON uploads being read or stored.",
		}),
		accepted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "schoolbell_notices_accepted_total", Help: "Notices committed through the API; repeated requests count once.",
		}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.duration, m.inFlight, m.uploads, m.accepted} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("web: register metrics: %w", err)
		}
	}
	return m, nil
}
