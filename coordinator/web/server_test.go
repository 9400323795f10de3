package web

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// pipeListener hands out in-memory connections, so that a server and its
// deadlines run in a synctest bubble, where a minute takes no time.
type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newPipeListener() *pipeListener {
	return &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe", Net: "pipe"} }

func (l *pipeListener) dial(t *testing.T) net.Conn {
	t.Helper()
	client, server := net.Pipe()
	select {
	case l.conns <- server:
	case <-l.done:
		t.Fatal("the server takes no connections")
	}
	return client
}

// bubble runs f with a server in a bubble; f's connections are closed and the
// server has ended when it returns.
func bubble(t *testing.T, change func(*Config, *Deps), f func(t *testing.T, w *world, l *pipeListener)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, change)
		l := newPipeListener()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.server.Serve(ctx, l) }()
		f(t, w, l)
		cancel()
		require.NoError(t, <-ended)
		w.requireNothingLeft()
	})
}

// send writes a request's head and the beginning of its body in the background,
// since a pipe's writer waits for its reader.
func send(c net.Conn, contentType, length, body string) {
	go func() {
		_, _ = fmt.Fprintf(c, "POST /v1/notices HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\n%s\r\n\r\n%s",
			testKey, contentType, length, body)
	}()
}

// receive reads the answer and when it came.
func receive(t *testing.T, c net.Conn) (int, api.Error) {
	t.Helper()
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var body api.ErrorBody
	require.NoError(t, json.Unmarshal(b, &body), string(b))
	if resp.StatusCode == http.StatusRequestTimeout {
		require.True(t, resp.Close, "the rest of the body must not be taken for a request")
	}
	return resp.StatusCode, body.Error
}

const chunked = "Transfer-Encoding: chunked"

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

// TestUploadThatStops: a client that stops in the middle, or whose machine is
// gone without a word, is given up after the grace.
func TestUploadThatStops(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		send(c, api.NDJSON, chunked, chunk(head)+chunk(tokenLine(0)+"\n"))
		status, e := receive(t, c)
		require.Equal(t, http.StatusRequestTimeout, status)
		require.Equal(t, api.RequestTimeout, e.Code)
		require.InDelta(t, 30, time.Since(start).Seconds(), 0.1)
		accepts, _, _ := w.store.counts()
		require.Zero(t, accepts)
		require.NoError(t, c.Close())
	})
}

// TestRefusedInTheMiddle: whoever waits for the answer before it goes on gets it
// at once, and whoever goes on writing gets it as well.
func TestRefusedInTheMiddle(t *testing.T) {
	for name, c := range map[string]struct{ contentType, length, body string }{
		"an upload that waits":   {api.NDJSON, chunked, chunk(head) + chunk("x\n")},
		"a body without its key": {api.JSON, "Content-Length: 1000\r\nAuthorization: Bearer two", `{"school"`},
		"a body too large":       {api.JSON, "Content-Length: 100000000", `{"school"`},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
				conn := l.dial(t)
				start := time.Now()
				send(conn, c.contentType, c.length, c.body)
				r := bufio.NewReader(conn)
				resp, err := http.ReadResponse(r, nil)
				require.NoError(t, err)
				require.GreaterOrEqual(t, resp.StatusCode, 400)
				require.True(t, resp.Close)
				_, err = io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.Zero(t, time.Since(start), "the answer waits for nothing")
				taken := 0
				for range 1000 {
					if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: smuggled\r\n\r\n"); err != nil {
						break // where what was announced has come, or it is no chunk: that is the end as well
					}
					taken++
				}
				require.NotZero(t, taken, "the server takes what it no longer wants")
				rest, _ := io.ReadAll(r)
				require.Empty(t, rest, "nothing after the answer was taken for a request")
				require.LessOrEqual(t, time.Since(start), lingerTime+time.Second, "but not for long")
				require.NoError(t, conn.Close())
			})
		})
	}
}

// TestUploadThatTrickles: a line a second is far below the slowest permitted
// rate, and holds its place no longer than the grace and what it has earned.
func TestUploadThatTrickles(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		send(c, api.NDJSON, chunked, chunk(head))
		stop := make(chan struct{})
		var writer sync.WaitGroup
		writer.Go(func() {
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-tick.C:
					if _, err := io.WriteString(c, chunk(tokenLine(i)+"\n")); err != nil {
						return
					}
				}
			}
		})
		status, _ := receive(t, c)
		close(stop)
		require.Equal(t, http.StatusRequestTimeout, status)
		require.InDelta(t, 30, time.Since(start).Seconds(), 1.1)
		require.NoError(t, c.Close())
		writer.Wait()
	})
}

// TestUploadAtTheSlowestRate is slow for minutes and is taken.
func TestUploadAtTheSlowestRate(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		go func() {
			send := func(s string) { _, _ = io.WriteString(c, s) }
			send("POST /v1/notices HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + testKey + "\r\nContent-Type: " + api.NDJSON + "\r\n" + chunked + "\r\n\r\n")
			send(chunk(head))
			line := `{"token":"` + strings.Repeat("t", 4000) + `"}` + "\n"
			for range 300 {
				<-time.After(time.Second)
				send(chunk(strings.Repeat(line, 17)))
			}
			send("0\r\n\r\n")
		}()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusAccepted, resp.StatusCode)
		require.GreaterOrEqual(t, time.Since(start), 300*time.Second)
		require.NoError(t, resp.Body.Close())
		require.NoError(t, c.Close())
	})
}

// TestUploadTakesTooLong is fast enough, and endless.
func TestUploadTakesTooLong(t *testing.T) {
	bubble(t, func(c *Config, _ *Deps) { c.UploadTimeout = 2 * time.Minute }, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		send(c, api.NDJSON, chunked, chunk(head))
		var writer sync.WaitGroup
		writer.Go(func() {
			line := chunk(strings.Repeat(" ", 60_000) + tokenLine(0) + "\n")
			for {
				<-time.After(500 * time.Millisecond)
				if _, err := io.WriteString(c, line); err != nil {
					return
				}
			}
		})
		status, _ := receive(t, c)
		require.Equal(t, http.StatusRequestTimeout, status)
		require.InDelta(t, 120, time.Since(start).Seconds(), 1)
		require.NoError(t, c.Close())
		writer.Wait()
	})
}

func TestBodyThatStops(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		send(c, api.JSON, "Content-Length: 1000", small)
		status, _ := receive(t, c)
		require.Equal(t, http.StatusRequestTimeout, status, w.log.String())
		require.InDelta(t, 30, time.Since(start).Seconds(), 0.1)
		require.True(t, w.server.bodies.TryAcquire(w.server.cfg.MaxBodies), "its room was given back")
		w.server.bodies.Release(w.server.cfg.MaxBodies)
		require.NoError(t, c.Close())
	})
}

// TestHeaderThatStops: a connection that never finishes its header is closed.
func TestHeaderThatStops(t *testing.T) {
	bubble(t, nil, func(t *testing.T, _ *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		go func() { _, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost:") }()
		_, _ = io.ReadAll(c)
		require.InDelta(t, 10, time.Since(start).Seconds(), 0.1)
		require.NoError(t, c.Close())
	})
}

// TestStoringTakesLongerThanReadingMay: the body's deadline has no say once the
// body is there.
func TestStoringTakesLongerThanReadingMay(t *testing.T) {
	for name, contentType := range map[string]string{"json": api.JSON, "upload": api.NDJSON} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(c *Config, _ *Deps) { c.AcceptTimeout = 5 * time.Minute }, func(t *testing.T, w *world, l *pipeListener) {
				w.store.onAccept = func(ctx context.Context) error {
					select {
					case <-ctx.Done():
						return ctx.Err()
					case <-time.After(4 * time.Minute):
						return nil
					}
				}
				c := l.dial(t)
				body := small
				if contentType == api.NDJSON {
					body = head + tokenLine(0)
				}
				send(c, contentType, fmt.Sprintf("Content-Length: %d", len(body)), body)
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				require.NoError(t, err)
				require.Equal(t, http.StatusAccepted, resp.StatusCode)
				require.NoError(t, resp.Body.Close())
				require.NoError(t, c.Close())
			})
		})
	}
}

// TestStoringTakesTooLong ends at its own timeout.
func TestStoringTakesTooLong(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		w.store.onAccept = func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		c := l.dial(t)
		start := time.Now()
		send(c, api.JSON, fmt.Sprintf("Content-Length: %d", len(small)), small)
		status, _ := receive(t, c)
		require.Equal(t, http.StatusServiceUnavailable, status)
		require.InDelta(t, 30, time.Since(start).Seconds(), 0.1)
		require.NoError(t, c.Close())
	})
}

// TestClientHangsUp: in the middle of its upload, or while the store works.
func TestClientHangsUp(t *testing.T) {
	t.Run("in the middle", func(t *testing.T) {
		bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
			c := l.dial(t)
			send(c, api.NDJSON, chunked, chunk(head)+chunk(tokenLine(0)+"\n"))
			synctest.Wait() // the server waits for more
			require.Len(t, w.server.uploads, 1)
			require.NoError(t, c.Close())
			synctest.Wait()
			require.Empty(t, w.server.uploads)
			accepts, _, _ := w.store.counts()
			require.Zero(t, accepts)
		})
	})
	t.Run("while storing", func(t *testing.T) {
		bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
			cancelled := make(chan error, 1)
			w.store.onAccept = func(ctx context.Context) error {
				<-ctx.Done()
				cancelled <- context.Cause(ctx)
				return fmt.Errorf("accept: %w", ctx.Err())
			}
			c := l.dial(t)
			body := head + tokenLine(0)
			send(c, api.NDJSON, fmt.Sprintf("Content-Length: %d", len(body)), body)
			synctest.Wait() // the store works
			require.NoError(t, c.Close())
			require.ErrorIs(t, <-cancelled, context.Canceled)
			synctest.Wait()
			require.Contains(t, w.log.String(), `"status":499`)
			_, _, kept := w.store.counts()
			require.Zero(t, kept)
		})
	})
}

// TestStop: a request under way at a stop gets its answer, and Serve waits for it.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil)
		w.store.onAccept = func(context.Context) error {
			<-time.After(10 * time.Second)
			return nil
		}
		l := newPipeListener()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.server.Serve(ctx, l) }()
		c := l.dial(t)
		send(c, api.JSON, fmt.Sprintf("Content-Length: %d", len(small)), small)
		synctest.Wait()
		start := time.Now()
		cancel()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusAccepted, resp.StatusCode)
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, <-ended)
		require.InDelta(t, 10, time.Since(start).Seconds(), 1)
		require.NoError(t, c.Close())
	})
}

// TestStopCutsOff: a request that outlives the stop is cut off, and said so.
func TestStopCutsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config, _ *Deps) { c.AcceptTimeout = time.Hour })
		w.store.onAccept = func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}
		l := newPipeListener()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- w.server.Serve(ctx, l) }()
		c := l.dial(t)
		send(c, api.JSON, fmt.Sprintf("Content-Length: %d", len(small)), small)
		synctest.Wait()
		start := time.Now()
		cancel()
		require.ErrorIs(t, <-ended, context.DeadlineExceeded)
		require.InDelta(t, 45, time.Since(start).Seconds(), 1)
		require.NoError(t, c.Close())
		synctest.Wait()
	})
}

// TestAnswerThatNobodyTakes: a client that does not read its answer is given up.
func TestAnswerThatNobodyTakes(t *testing.T) {
	bubble(t, nil, func(t *testing.T, w *world, l *pipeListener) {
		c := l.dial(t)
		start := time.Now()
		_, err := io.WriteString(c, "GET /openapi.yaml HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		for { // the server closes its end
			synctest.Wait()
			if testutil.ToFloat64(w.server.metrics.inFlight) == 0 {
				break
			}
			<-time.After(time.Second)
			require.Less(t, time.Since(start), time.Minute)
		}
		require.InDelta(t, 30, time.Since(start).Seconds(), 2)
		require.NoError(t, c.Close())
	})
}

// TestDrain makes the replica unready and answers as before.
func TestDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusOK, w.get("/readyz").Code)
	w.server.Drain()
	rec := w.get("/readyz")
	got := requireAnswer[api.Ready](t, rec, http.StatusServiceUnavailable)
	require.True(t, got.Draining)
	require.False(t, got.Ready)
	require.Equal(t, "ok", got.Checks["database"])
	require.NotEmpty(t, rec.Header().Get("Retry-After"))
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	require.Equal(t, http.StatusOK, w.get("/healthz").Code)
}
