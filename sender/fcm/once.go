package fcm

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
)

var (
	errCallTimeout = errors.New("the call took longer than call_timeout")
	errSealed      = errors.New("fcm: the request was given up before it was written")
	errGateClosed  = errors.New("fcm: the batch's gate is closed")
	errTooLarge    = errors.New("fcm: the answer is larger than its bound")
)

// maxAnswer bounds an answer. FCM's are a few hundred bytes.
const maxAnswer = 64 << 10

// statusFailed is what the SDK sees in place of a transport failure, which it
// would repeat. The SDK takes it for an error like any other; what really
// happened is in the call.
const statusFailed = 599

// call is one message's way through the SDK and what the SDK cannot tell of it.
// It travels in the request's context, which the SDK hands through.
type call struct {
	gate          func() error // nil: open
	authorization string       // empty: none is sent

	reached bool // the SDK made a request of the message
	repeats int  // requests that the SDK made beyond the first, all refused
	notSent bool // proved: no part of the message left
	err     error
	status  int // of the answer; 0: none, or none that came whole
	header  http.Header
	body    []byte
}

type callKey struct{}

// once is the outermost RoundTripper under the SDK. It lets exactly one request
// of a call through and never returns anything that the SDK would repeat: a
// transport failure becomes an answer with status 599, and a 503 gets a
// Retry-After beyond the two minutes that the SDK is ready to wait. The body is
// read here, since the SDK takes a body that breaks off for a failure as well.
// The call keeps the truth.
type once struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (o *once) RoundTrip(req *http.Request) (*http.Response, error) {
	c, ok := req.Context().Value(callKey{}).(*call)
	if !ok {
		return nil, errors.New("fcm: a request that belongs to no message")
	}
	if c.reached {
		c.repeats++ // a later SDK might find another reason to repeat
		_ = req.Body.Close()
		return failed(req), nil
	}
	c.reached = true

	out := req.WithContext(req.Context())
	out.Header = req.Header.Clone()
	if c.authorization != "" {
		out.Header.Set("Authorization", c.authorization)
	}
	body := &sealable{from: req.Body, gate: c.gate}
	out.Body = body
	out.GetBody = nil // with it net/http repeats by itself
	resp, err := o.next.RoundTrip(out)
	if err != nil {
		c.err, c.notSent = err, body.seal()
		if body.gateClosed() { // which the transport words as a failure of its own
			c.err = errGateClosed
		}
		return failed(req), nil
	}
	c.header = resp.Header
	c.body, err = read(resp.Body)
	if err != nil {
		c.err = err
		return failed(req), nil
	}
	c.status = resp.StatusCode
	seen := *resp
	seen.Body = io.NopCloser(bytes.NewReader(c.body))
	if resp.StatusCode == http.StatusServiceUnavailable {
		seen.Header = resp.Header.Clone()
		seen.Header.Set("Retry-After", "121")
	}
	return &seen, nil
}

func failed(req *http.Request) *http.Response {
	return &http.Response{
		Status: "599 Not Answered", StatusCode: statusFailed,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: http.NoBody, Request: req,
	}
}

func read(body io.ReadCloser) ([]byte, error) {
	defer body.Close()
	b, err := io.ReadAll(io.LimitReader(body, maxAnswer+1))
	if err == nil && len(b) > maxAnswer {
		err = errTooLarge
	}
	return b, err
}

// sealable is a request body that tells for certain whether any of it can have
// left. All of the message is in the body, so as long as it is unread no part of
// the message has left, whatever the transport did with the head. seal fixes
// that: a transport that comes to read later, in a goroutine of its own, gets an
// error. Reading it is also the last moment before the message leaves, when a
// connection is at hand: there the gate is asked.
type sealable struct {
	gate func() error

	mu      sync.Mutex
	from    io.ReadCloser
	started bool
	sealed  error
}

// Read implements io.Reader.
func (s *sealable) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sealed == nil && !s.started && s.gate != nil && s.gate() != nil {
		s.sealed = errGateClosed
	}
	if s.sealed != nil {
		return 0, s.sealed
	}
	s.started = true
	return s.from.Read(p)
}

// Close implements io.Closer.
func (s *sealable) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.started && s.sealed == nil {
		s.sealed = errSealed
	}
	return s.from.Close()
}

// seal reports whether the body is unread, and then keeps it so.
func (s *sealable) seal() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		return false
	}
	if s.sealed == nil {
		s.sealed = errSealed
	}
	return true
}

// gateClosed reports whether the gate let nothing leave.
func (s *sealable) gateClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sealed == errGateClosed
}
