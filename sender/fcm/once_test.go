package fcm

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tripper is a transport in memory.
type tripper func(*http.Request) (*http.Response, error)

func (f tripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// brokenBody breaks off.
type brokenBody struct{ closed bool }

func (*brokenBody) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
func (b *brokenBody) Close() error           { b.closed = true; return nil }

func request(t *testing.T, c *call) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(context.WithValue(t.Context(), callKey{}, c), http.MethodPost, "http://h/", strings.NewReader("text"))
	require.NoError(t, err)
	return r
}

func TestOnceGivesTheSDKNothingToRepeat(t *testing.T) {
	t.Parallel()
	broken := new(brokenBody)
	reads := func(r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }
	for name, c := range map[string]struct {
		trip    tripper
		status  int // that the SDK sees
		truth   int
		notSent bool
		fails   bool
	}{
		"an answer": {func(r *http.Request) (*http.Response, error) {
			reads(r)
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("ok"))}, nil
		}, 200, 200, false, false},
		"503": {func(r *http.Request) (*http.Response, error) {
			reads(r)
			return &http.Response{StatusCode: 503, Header: http.Header{"Retry-After": {"1"}}, Body: http.NoBody}, nil
		}, 503, 503, false, false},
		"a failure after the body was read": {func(r *http.Request) (*http.Response, error) { reads(r); return nil, errors.New("reset") }, statusFailed, 0, false, true},
		"a failure before it was read":      {func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") }, statusFailed, 0, true, true},
		"a body that breaks off": {func(r *http.Request) (*http.Response, error) {
			reads(r)
			return &http.Response{StatusCode: 200, Header: http.Header{}, Body: broken}, nil
		}, statusFailed, 0, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			trips := 0
			o := &once{next: tripper(func(r *http.Request) (*http.Response, error) {
				trips++
				require.Nil(t, r.GetBody)
				return c.trip(r)
			})}
			one := &call{}
			resp, err := o.RoundTrip(request(t, one))
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, c.status, resp.StatusCode)
			if c.status == 503 {
				require.Equal(t, "121", resp.Header.Get("Retry-After"))
				require.Equal(t, "1", one.header.Get("Retry-After"), "the call keeps FCM's")
			}
			require.Equal(t, c.truth, one.status)
			require.Equal(t, c.notSent, one.notSent)
			require.Equal(t, c.fails, one.err != nil)

			again, err := o.RoundTrip(request(t, one))
			require.NoError(t, err)
			defer again.Body.Close()
			require.Equal(t, statusFailed, again.StatusCode)
			require.Equal(t, c.truth, one.status, "the first one's truth stays")
			require.Equal(t, 1, trips)
			require.Equal(t, 1, one.repeats)
		})
	}
}

func TestABodyThatWasGivenUpIsNeverRead(t *testing.T) {
	t.Parallel()
	var late io.Reader
	o := &once{next: tripper(func(r *http.Request) (*http.Response, error) { late = r.Body; return nil, errors.New("gone") })}
	one := &call{}
	resp, err := o.RoundTrip(request(t, one))
	require.NoError(t, err)
	defer resp.Body.Close()
	require.True(t, one.notSent)
	n, err := late.Read(make([]byte, 10))
	require.Zero(t, n)
	require.ErrorIs(t, err, errSealed)
}

// The SDK itself, before failures that it would repeat: it does not even try.
func TestTheSDKTriesOnce(t *testing.T) {
	t.Parallel()
	for name, handle := range map[string]http.HandlerFunc{
		"503":            answering(503, nil, fcmError(503, "UNAVAILABLE", detail("UNAVAILABLE"))),
		"503 and a wish": answering(503, map[string]string{"Retry-After": "0"}, ""),
		"no answer":      func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"half an answer": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			_, _ = io.WriteString(w, "{")
			panic(http.ErrAbortHandler)
		},
		"another place":   answering(307, map[string]string{"Location": "/v1/projects/p/messages:send"}, ""),
		"an empty answer": answering(200, nil, ""),
	} {
		for _, p := range protocols {
			t.Run(name+"/"+string(p), func(t *testing.T) {
				t.Parallel()
				r := receive(t, p, handle)
				f := r.open(t, nil)
				one, b := &call{}, batchOf("12.1")
				_, err := f.client.Send(context.WithValue(t.Context(), callKey{}, one), message(b, &b.Messages[0], time.Now()))
				require.Error(t, err)
				require.Zero(t, one.repeats)
				require.EqualValues(t, 1, r.requests.Load())
			})
		}
	}
}
