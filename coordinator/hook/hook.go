// Package hook posts what waits in a table to a webhook: at least once, by
// whichever replica claims it, for as long as it is worth anything.
//
// A Pump claims a few rows at a time for a lease, lets each be posted, and writes
// what became of it. A replica that dies with a claim loses it when the lease
// ends. A Client makes one post and says what its answer means. Neither knows
// what is posted or what the table is.
//
// Invariants: a post is tried by one replica at a time as long as it ends within
// its lease; a webhook that does not answer costs one try at a time, with pauses
// that grow, and delays nobody but what waits for it; nothing that is logged or
// counted holds the webhook's address, a text or a token.
package hook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Fate is what became of one post.
type Fate int

const (
	Taken   Fate = iota + 1 // answered with 2xx
	Refused                 // this post, for good: another try would get the same answer
	Delayed                 // not now: to be tried again
)

// Answer is what a webhook said to one post.
type Answer struct {
	Fate Fate
	Wait time.Duration // with Delayed: what the webhook asked for at least; 0: nothing
	Code string        // why it was not taken: HTTP_422, TIMEOUT, CONNECT_FAILED, NO_ANSWER
}

// Codes of posts without an answer.
const (
	CodeTimeout       = "TIMEOUT"        // it may have arrived
	CodeConnectFailed = "CONNECT_FAILED" // it has not
	CodeNoAnswer      = "NO_ANSWER"      // it may have arrived
)

// CallTimeout bounds one post, from the connection to the end of the answer.
const CallTimeout = 10 * time.Second

const (
	connectTimeout = 3 * time.Second
	maxAnswer      = 64 << 10 // read of an answer, to use the connection again
	maxWait        = time.Hour
)

// Config sets up a Client.
type Config struct {
	URL   string // http or https
	Token string // sent as bearer token; empty: no Authorization

	// Dial replaces the way to a connection; nil: the net package's own.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Timeout of one post; 0: CallTimeout.
	Timeout time.Duration
}

// Client posts JSON to one webhook. It may be used concurrently. It does not
// repeat a post by itself and does not follow a redirect, which would hand the
// post, and its token, to an address that nobody has set.
type Client struct {
	url    string
	token  string
	client *http.Client
}

// New makes a client. It opens no connection. The error names no part of the
// address, which may be secret.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, errors.New("webhook: its address must be http://host… or https://host…")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = CallTimeout
	}
	dial := cfg.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: connectTimeout}).DialContext
	}
	return &Client{url: cfg.URL, token: cfg.Token, client: &http.Client{
		Timeout:       cfg.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: dial, TLSHandshakeTimeout: connectTimeout,
			MaxIdleConnsPerHost: 16, IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: maxAnswer,
		},
	}}, nil
}

// Close ends the idle connections.
func (c *Client) Close() { c.client.CloseIdleConnections() }

// Post posts body once. id goes into the header Idempotency-Key, empty for none.
//
// 2xx is taken. 400, 405, 406, 411, 413, 414, 415, 417, 422, 431 and 451 refuse
// this post. Everything else is about the webhook or the moment, and delays it: a
// token or an address that is wrong can be put right without losing a message.
func (c *Client) Post(ctx context.Context, id string, body []byte) Answer {
	// The body is hidden behind a plain reader: without GetBody the transport cannot
	// send it again on a fresh connection, which it otherwise does for whatever has
	// an Idempotency-Key. A repeat is for the table to count.
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, struct{ io.Reader }{bytes.NewReader(body)})
	if err != nil {
		return Answer{Fate: Delayed, Code: CodeConnectFailed}
	}
	req.ContentLength = int64(len(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "schoolbell")
	if id != "" {
		req.Header.Set("Idempotency-Key", id)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return Answer{Fate: Delayed, Code: codeOf(err)}
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer)
	code := fmt.Sprintf("HTTP_%d", resp.StatusCode)
	switch s := resp.StatusCode; {
	case s >= 200 && s <= 299:
		return Answer{Fate: Taken}
	case refusal[s]:
		return Answer{Fate: Refused, Code: code}
	}
	return Answer{Fate: Delayed, Code: code, Wait: retryAfter(resp.Header)}
}

var refusal = map[int]bool{
	http.StatusBadRequest: true, http.StatusMethodNotAllowed: true, http.StatusNotAcceptable: true, http.StatusLengthRequired: true,
	http.StatusRequestEntityTooLarge: true, http.StatusRequestURITooLong: true, http.StatusUnsupportedMediaType: true,
	http.StatusExpectationFailed: true, http.StatusUnprocessableEntity: true, http.StatusRequestHeaderFieldsTooLarge: true,
	http.StatusUnavailableForLegalReasons: true,
}

// codeOf says in one word why there was no answer: the error itself quotes the
// address.
func codeOf(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return CodeConnectFailed
	}
	if e, ok := errors.AsType[*url.Error](err); ok && e.Timeout() {
		return CodeTimeout
	}
	return CodeNoAnswer
}

// retryAfter reads the header Retry-After: seconds, with a fraction as Discord
// writes them, or a date, counted from the answer's own. What means nothing is 0.
func retryAfter(h http.Header) time.Duration {
	text := strings.TrimSpace(h.Get("Retry-After"))
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		if !(seconds > 0) {
			return 0
		}
		return time.Duration(min(seconds, maxWait.Seconds()) * float64(time.Second))
	}
	at, err := http.ParseTime(text)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		return 0
	}
	return min(max(0, at.Sub(now)), maxWait)
}
