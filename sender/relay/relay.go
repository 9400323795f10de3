// Package relay sends batches to a relay: an HTTP service that takes up to a
// batch of messages in one request and answers for each of them.
//
// # Protocol
//
// POST to the relay's URL with Content-Type application/json, Authorization
// (Bearer), Idempotency-Key (the batch id, new for each claim),
// X-Schoolbell-School, X-Schoolbell-Fence and traceparent:
//
//	{"batch_id":"…","school":"A","messages":[{"id":"…","token":"…","title":"…","body":"…","data":{…},"attempt":1}]}
//
// with image, link, badge and requeued where set. The answer is 200 with
//
//	{"results":[{"id":"…","status":"ok"},{"id":"…","status":"error","code":"UNREGISTERED","retry_after_seconds":0}]}
//
// in any order. 429, and 503 with Retry-After, say that the whole batch was not
// accepted; 401 and 403 that this sender is not. Everything else says nothing:
// the messages are unknown.
//
// Where a status URL is set, Ask posts {"ids":["…"]} to it and reads
// {"results":[{"id":"…","status":"accepted"}]} with accepted, not_accepted or
// unknown.
//
// # What it keeps
//
// A request leaves this process at most once. net/http takes a request with an
// Idempotency-Key for one that it may repeat by itself on a fresh connection;
// the body has no way to be read again, so it cannot. Redirects are not
// followed: a redirect is no answer. Only HTTP/1.1 is spoken, since an HTTP/2
// connection shared by all batches fails for all of them at once.
//
// It does not retry, limit its rate or count attempts.
package relay

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/sender"
)

// Defaults of Config (R31).
const (
	DefaultConnectTimeout = 3 * time.Second
	DefaultReadTimeout    = 7 * time.Second
	DefaultCallTimeout    = 10 * time.Second
)

// idleTimeout closes our idle connections before the receiver does: a request
// that meets a closing connection is unknown and would be sent again. The
// common servers keep an idle connection for 2 s at least.
const idleTimeout = 1500 * time.Millisecond

// maxIdle is how many idle connections are kept: more than calls run at once in
// an ordinary replica, so that none is closed between two batches.
const maxIdle = 128

// Bounds of an answer, after decompression.
const (
	maxAnswer           = 1 << 20
	maxAnswerPerMessage = 1 << 10
	maxDrain            = 64 << 10 // read of an answer that says nothing, to keep the connection
)

// Config sets up a relay.
type Config struct {
	Name  string // the sender's name, for metrics and errors
	URL   string // http or https, without user and password
	Token string // sent as bearer token; empty: no Authorization

	// StatusURL is asked what became of unknown messages; empty: nobody is.
	StatusURL string

	ConnectTimeout time.Duration // to a connection, and again for TLS; 0: 3 s
	ReadTimeout    time.Duration // to the answer's head, and between its parts; 0: 7 s
	CallTimeout    time.Duration // the whole call; 0: 10 s. Unset others are at most this
}

// Relay is a sender.Sender and a sender.StatusAsker for one relay.
type Relay struct {
	cfg       Config
	url       *url.URL
	statusURL *url.URL // nil: cannot be asked
	transport *http.Transport
	metrics   *metrics
}

var (
	_ sender.Sender      = (*Relay)(nil)
	_ sender.StatusAsker = (*Relay)(nil)
)

// New returns a relay. It opens no connection. Close ends the idle ones. An
// error names the setting and never its value, which may be secret. A nil reg
// registers no metrics.
func New(cfg Config, reg prometheus.Registerer) (*Relay, error) {
	target, err := parseURL(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("relay %s: url %w", cfg.Name, err)
	}
	var status *url.URL
	if cfg.StatusURL != "" {
		if status, err = parseURL(cfg.StatusURL); err != nil {
			return nil, fmt.Errorf("relay %s: status_url %w", cfg.Name, err)
		}
	}
	if !printable(cfg.Token) {
		return nil, fmt.Errorf("relay %s: token may hold printable ASCII only", cfg.Name)
	}
	if err := cfg.setTimeouts(); err != nil {
		return nil, fmt.Errorf("relay %s: %w", cfg.Name, err)
	}
	m, err := newMetrics(cfg.Name, reg)
	if err != nil {
		return nil, fmt.Errorf("relay %s: %w", cfg.Name, err)
	}
	return &Relay{cfg: cfg, url: target, statusURL: status, transport: newTransport(cfg), metrics: m}, nil
}

func (c *Config) setTimeouts() error {
	for _, t := range []struct {
		name  string
		value time.Duration
	}{{"connect_timeout", c.ConnectTimeout}, {"read_timeout", c.ReadTimeout}, {"call_timeout", c.CallTimeout}} {
		if t.value < 0 {
			return fmt.Errorf("%s %v is negative", t.name, t.value)
		}
	}
	if c.CallTimeout == 0 {
		c.CallTimeout = DefaultCallTimeout
	}
	if c.ConnectTimeout == 0 {
		c.ConnectTimeout = min(DefaultConnectTimeout, c.CallTimeout)
	}
	if c.ReadTimeout == 0 {
		c.ReadTimeout = min(DefaultReadTimeout, c.CallTimeout)
	}
	if c.ConnectTimeout > c.CallTimeout {
		return fmt.Errorf("connect_timeout %v is longer than call_timeout %v", c.ConnectTimeout, c.CallTimeout)
	}
	if c.ReadTimeout > c.CallTimeout {
		return fmt.Errorf("read_timeout %v is longer than call_timeout %v", c.ReadTimeout, c.CallTimeout)
	}
	return nil
}

// parseURL keeps the value out of its errors: it may carry a key in its query.
func parseURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("cannot be read as a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("must begin with http:// or https://")
	case u.Host == "":
		return nil, errors.New("names no host")
	case u.User != nil:
		return nil, errors.New("may not hold a user or password: use token")
	}
	return u, nil
}

func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

func newTransport(cfg Config) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: cfg.ConnectTimeout}).DialContext,
		TLSHandshakeTimeout:    cfg.ConnectTimeout,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		ResponseHeaderTimeout:  cfg.ReadTimeout,
		MaxIdleConns:           maxIdle,
		MaxIdleConnsPerHost:    maxIdle,
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: 64 << 10,
		Protocols:              protocols,
	}
}

// Longest is the call timeout.
func (r *Relay) Longest() time.Duration { return r.cfg.CallTimeout }

// Close ends the idle connections. Calls that run are left alone.
func (r *Relay) Close() { r.transport.CloseIdleConnections() }

// Send posts the batch once.
func (r *Relay) Send(ctx context.Context, batch sender.Batch) []sender.Result {
	if len(batch.Messages) == 0 {
		return nil
	}
	if ctx.Err() != nil {
		return sender.Fill(batch.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled})
	}
	call := newCall(ctx, r.cfg.CallTimeout)
	defer call.end()

	body := newBody(encodeBatch(takeBuffer(), batch))
	resp, err := r.transport.RoundTrip(r.request(call.ctx, r.url, body, batch))
	if err != nil {
		// Sealed before the transport touched it: nothing has left, and
		// nothing will. Otherwise nobody knows how far it got.
		if body.seal() {
			return sender.Fill(batch.Messages, call.notSent(err))
		}
		return sender.Fill(batch.Messages, call.unanswered(err))
	}
	defer resp.Body.Close()

	// Whatever the status: who names a time is not asked again before it.
	wait, said := sender.ParseRetryAfter(resp.Header)
	switch resp.StatusCode {
	case http.StatusOK:
		limit := int64(maxAnswer + maxAnswerPerMessage*len(batch.Messages))
		answer, err := call.read(resp.Body, limit, r.cfg.ReadTimeout)
		if err != nil {
			return sender.Fill(batch.Messages, call.unanswered(err))
		}
		return r.results(batch.Messages, answer)
	case http.StatusTooManyRequests:
		r.drain(call, resp)
		return sender.Fill(batch.Messages, sender.Result{Class: sender.Throttled, Code: codeQuota, RetryAfter: wait})
	case http.StatusServiceUnavailable:
		r.drain(call, resp)
		if said {
			return sender.Fill(batch.Messages, sender.Result{Class: sender.Unavailable, Code: codeUnavailable, RetryAfter: wait})
		}
	case http.StatusUnauthorized, http.StatusForbidden:
		r.drain(call, resp)
		return sender.Fill(batch.Messages, sender.Result{
			Class: sender.Misconfigured, Code: httpCode(resp.StatusCode), RetryAfter: wait, Detail: "the relay refuses this sender's token",
		})
	default:
		r.drain(call, resp)
	}
	return sender.Fill(batch.Messages, sender.Result{
		Class: sender.Unknown, Code: httpCode(resp.StatusCode), RetryAfter: wait, Detail: "the relay's status says nothing about the messages",
	})
}

// Ask asks the status URL what became of messages. Without one it answers
// sender.StatusUnknown for each and asks nobody. It takes at most the call
// timeout.
func (r *Relay) Ask(ctx context.Context, ids []string) (map[string]sender.Status, error) {
	answers := make(map[string]sender.Status, len(ids))
	for _, id := range ids {
		answers[id] = sender.StatusUnknown
	}
	if r.statusURL == nil || len(ids) == 0 {
		return answers, nil
	}
	call := newCall(ctx, r.cfg.CallTimeout)
	defer call.end()

	body := newBody(encodeIDs(takeBuffer(), ids))
	resp, err := r.transport.RoundTrip(r.request(call.ctx, r.statusURL, body, sender.Batch{}))
	if err != nil {
		body.seal()
		return nil, fmt.Errorf("ask relay %s: %s", r.cfg.Name, call.unanswered(err).Code)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		r.drain(call, resp)
		return nil, fmt.Errorf("ask relay %s: %s", r.cfg.Name, httpCode(resp.StatusCode))
	}
	answer, err := call.read(resp.Body, int64(maxAnswer+maxAnswerPerMessage*len(ids)), r.cfg.ReadTimeout)
	if err != nil {
		return nil, fmt.Errorf("ask relay %s: %s", r.cfg.Name, call.unanswered(err).Code)
	}
	if err := decodeStatuses(answer, answers); err != nil {
		return nil, fmt.Errorf("ask relay %s: %w", r.cfg.Name, err)
	}
	return answers, nil
}

// request is made by hand and handed to the transport itself: http.Client would
// follow redirects, and http.NewRequest would give the body a GetBody, with
// which the transport replays requests. Headers that would be empty are left out.
func (r *Relay) request(ctx context.Context, target *url.URL, body *sealableBody, batch sender.Batch) *http.Request {
	header := http.Header{
		"Content-Type": {"application/json"},
		"Accept":       {"application/json"},
		"User-Agent":   {"schoolbell"},
	}
	if r.cfg.Token != "" {
		header.Set("Authorization", "Bearer "+r.cfg.Token)
	}
	if batch.ID != "" {
		header.Set("Idempotency-Key", batch.ID)
		header.Set("X-Schoolbell-School", batch.School)
		header.Set("X-Schoolbell-Fence", strconv.FormatInt(batch.Fence, 10))
	}
	if batch.TraceParent != "" && printable(batch.TraceParent) { // a bad trace must not stop a batch
		header.Set("Traceparent", batch.TraceParent)
	}
	req := &http.Request{
		Method: http.MethodPost, URL: target, Host: target.Host, Header: header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Body: body, ContentLength: int64(body.size()),
	}
	return req.WithContext(ctx)
}

// drain reads the rest of an answer that is of no interest, within bounds, so
// that the connection can be used again. What goes wrong here changes nothing.
func (r *Relay) drain(call *call, resp *http.Response) {
	_, _ = call.read(resp.Body, maxDrain, r.cfg.ReadTimeout)
}
