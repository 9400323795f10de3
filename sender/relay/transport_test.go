package relay

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

// rawServer hands each connection, in turn, to handle.
func rawServer(t *testing.T, handle func(c net.Conn, r *bufio.Reader, n int)) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var open sync.WaitGroup
	open.Go(func() {
		for n := 1; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				handle(c, bufio.NewReader(c), n)
			})
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		open.Wait()
	})
	return "http://" + l.Addr().String()
}

// readRequest reads one whole request.
func readRequest(r *bufio.Reader) (body string, ok bool) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return "", false
	}
	b, err := io.ReadAll(req.Body)
	return string(b), err == nil
}

const okAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 38\r\n\r\n" + `{"results":[{"id":"1","status":"ok"}]}`

func TestAKeptConnectionThatClosesIsNotReplayed(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	url := rawServer(t, func(c net.Conn, r *bufio.Reader, n int) {
		for i := 0; ; i++ {
			if _, ok := readRequest(r); !ok {
				return
			}
			requests.Add(1)
			if n == 1 && i == 1 {
				return // the second request on the kept connection: read, then dropped
			}
			_, _ = io.WriteString(c, okAnswer)
		}
	})
	r := newRelay(t, url, nil)
	require.Equal(t, sender.Accepted, r.Send(t.Context(), batchOf("1"))[0].Class)

	got := r.Send(t.Context(), batchOf("1"))[0]

	require.Equal(t, sender.Result{ID: "1", Class: sender.Unknown, Code: sender.CodeNoAnswer}, got)
	require.EqualValues(t, 2, requests.Load(), "the transport must not have sent it again")
	require.Equal(t, sender.Accepted, r.Send(t.Context(), batchOf("1"))[0].Class, "the relay is usable again")
}

// untilGone waits for the caller to end the connection.
func untilGone(r *bufio.Reader) { _, _ = io.Copy(io.Discard, r) }

func TestWhatFailsAfterTheRequestIsUnknown(t *testing.T) {
	t.Parallel()
	head, body, _ := strings.Cut(okAnswer, "\r\n\r\n")
	head += "\r\n\r\n"
	silent := func(cfg *Config) { cfg.ReadTimeout = 300 * time.Millisecond }
	within := func(read, call time.Duration) func(*Config) {
		return func(cfg *Config) { cfg.ConnectTimeout, cfg.ReadTimeout, cfg.CallTimeout = call, read, call }
	}
	for name, c := range map[string]struct {
		handle func(c net.Conn, r *bufio.Reader)
		set    func(*Config)
		size   int // of the message's body
		code   string
	}{
		"the connection ends": {
			handle: func(_ net.Conn, r *bufio.Reader) { readRequest(r) },
			code:   sender.CodeNoAnswer,
		},
		"it is reset": {
			handle: func(c net.Conn, r *bufio.Reader) { readRequest(r); _ = c.(*net.TCPConn).SetLinger(0) },
			code:   sender.CodeNoAnswer,
		},
		"it is reset before the request's end": {
			handle: func(c net.Conn, r *bufio.Reader) { _, _ = r.ReadByte(); _ = c.(*net.TCPConn).SetLinger(0) },
			code:   sender.CodeNoAnswer,
		},
		"the answer is no HTTP": {
			handle: func(c net.Conn, r *bufio.Reader) { readRequest(r); _, _ = io.WriteString(c, "SSH-2.0-OpenSSH\r\n") },
			code:   sender.CodeNoAnswer,
		},
		"the answer is cut off": {
			handle: func(c net.Conn, r *bufio.Reader) { readRequest(r); _, _ = io.WriteString(c, head+body[:20]) },
			code:   sender.CodeNoAnswer,
		},
		"silence": {
			handle: func(_ net.Conn, r *bufio.Reader) { readRequest(r); untilGone(r) },
			set:    silent,
			code:   sender.CodeReadTimeout,
		},
		"silence in the answer": {
			handle: func(c net.Conn, r *bufio.Reader) {
				readRequest(r)
				_, _ = io.WriteString(c, head+body[:20])
				untilGone(r)
			},
			set:  silent,
			code: sender.CodeReadTimeout,
		},
		"an answer that drips": {
			handle: func(c net.Conn, r *bufio.Reader) {
				readRequest(r)
				_, _ = io.WriteString(c, head)
				drip := time.NewTicker(150 * time.Millisecond)
				defer drip.Stop()
				for i := range body {
					<-drip.C
					if _, err := io.WriteString(c, body[i:i+1]); err != nil {
						return
					}
				}
			},
			set:  within(1500*time.Millisecond, 3*time.Second),
			code: sender.CodeCallTimeout,
		},
		"a receiver that does not read": {
			handle: func(c net.Conn, r *bufio.Reader) { _, _ = r.ReadByte(); waitClosed(c) },
			set:    within(3*time.Second, 3*time.Second),
			size:   16 << 20, // more than the two sockets hold
			code:   sender.CodeCallTimeout,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var conns atomic.Int64
			url := rawServer(t, func(conn net.Conn, r *bufio.Reader, _ int) {
				conns.Add(1)
				c.handle(conn, r)
			})
			b := batchOf("1")
			b.Messages[0].Content = &sender.Content{Body: strings.Repeat("x", c.size)}

			got := newRelay(t, url, c.set).Send(t.Context(), b)

			require.Equal(t, []sender.Result{{ID: "1", Class: sender.Unknown, Code: c.code}}, got)
			require.EqualValues(t, 1, conns.Load(), "one connection, so one request")
		})
	}
}

// waitClosed waits until the caller has closed a connection whose data nobody
// reads: only then does a write fail.
func waitClosed(c net.Conn) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 500 {
		<-tick.C
		if _, err := c.Write([]byte(" ")); err != nil {
			return
		}
	}
}

func TestWhatFailsBeforeTheRequestIsNotSent(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	refused := "http://" + closed.Addr().String()
	require.NoError(t, closed.Close())

	var requests atomic.Int64
	count := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) })
	untrusted := httptest.NewUnstartedServer(count)
	untrusted.Config.ErrorLog = discardLog()
	untrusted.StartTLS()
	t.Cleanup(untrusted.Close)
	plain := httptest.NewServer(count)
	t.Cleanup(plain.Close)
	// A listener whose queue is never served: connections are made, TLS is not.
	mute := rawServer(t, func(_ net.Conn, r *bufio.Reader, _ int) { untilGone(r) })
	oldTLS := httptest.NewUnstartedServer(count)
	oldTLS.Config.ErrorLog = discardLog()
	oldTLS.TLS = &tls.Config{MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}
	oldTLS.StartTLS()
	t.Cleanup(oldTLS.Close)

	soon := func(cfg *Config) { cfg.ConnectTimeout = 300 * time.Millisecond }
	for name, c := range map[string]struct {
		url, code string
		set       func(*Config)
	}{
		"refused":           {refused, sender.CodeConnectFailed, nil},
		"no such name":      {"http://relay.invalid", sender.CodeDNSFailed, nil},
		"untrusted":         {untrusted.URL, sender.CodeTLSFailed, nil},
		"TLS to plain HTTP": {strings.Replace(plain.URL, "http:", "https:", 1), sender.CodeTLSFailed, nil},
		"TLS too old":       {oldTLS.URL, sender.CodeTLSFailed, nil},
		"TLS silence":       {strings.Replace(mute, "http:", "https:", 1), sender.CodeConnectTimeout, soon},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRelay(t, c.url, c.set)
			got := r.Send(t.Context(), batchOf("1"))[0]
			got.Detail = ""
			require.Equal(t, sender.Result{ID: "1", Class: sender.NotSent, Code: c.code}, got)
			require.Zero(t, requests.Load())
		})
	}
}

func TestAContextThatEndsBeforeTheRequestIsNotSentAndNothingFollows(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	url := rawServer(t, func(_ net.Conn, r *bufio.Reader, _ int) {
		if _, ok := readRequest(r); ok {
			requests.Add(1)
		}
	})
	r := newRelay(t, url, nil)
	dialing, proceed := make(chan struct{}), make(chan struct{})
	dialed := make(chan struct{})
	dial := r.transport.DialContext
	r.transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		close(dialing)
		<-proceed
		defer close(dialed)
		return dial(context.WithoutCancel(ctx), network, addr)
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []sender.Result)
	go func() { done <- r.Send(ctx, batchOf("1")) }()
	<-dialing
	cancel()
	require.Equal(t, []sender.Result{{ID: "1", Class: sender.NotSent, Code: sender.CodeCancelled}}, <-done)

	close(proceed) // the transport gets its connection after all
	<-dialed
	r.Close()
	require.Zero(t, requests.Load())

	require.Equal(t, sender.NotSent, r.Send(ctx, batchOf("1"))[0].Class, "an ended context")
}

func TestAContextThatEndsAfterTheRequestIsUnknown(t *testing.T) {
	t.Parallel()
	got := make(chan struct{})
	url := rawServer(t, func(_ net.Conn, r *bufio.Reader, _ int) {
		readRequest(r)
		close(got)
		untilGone(r)
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []sender.Result)
	r := newRelay(t, url, nil)
	go func() { done <- r.Send(ctx, batchOf("1")) }()
	<-got
	cancel()
	require.Equal(t, []sender.Result{{ID: "1", Class: sender.Unknown, Code: sender.CodeCancelled}}, <-done)
}

func TestTheContextsDeadlineCounts(t *testing.T) {
	t.Parallel()
	url := rawServer(t, func(_ net.Conn, r *bufio.Reader, _ int) { readRequest(r); untilGone(r) })
	r := newRelay(t, url, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.Equal(t, []sender.Result{{ID: "1", Class: sender.Unknown, Code: sender.CodeCallTimeout}}, r.Send(ctx, batchOf("1")))
}

// A sealed body is never read, and an unsealed one never sealed, whoever is first.
func TestSealOrRead(t *testing.T) {
	t.Parallel()
	for range 2000 {
		body := newBody(encodeIDs(takeBuffer(), []string{"x"}))
		var n int
		var wg sync.WaitGroup
		wg.Go(func() { n, _ = body.Read(make([]byte, 64)); _ = body.Close() })
		sealed := body.seal()
		wg.Wait()
		require.Equal(t, sealed, n == 0)
	}
}
