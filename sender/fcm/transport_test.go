package fcm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"schoolbell/sender"
)

// stream is one request as a receiver made of frames sees it.
type stream struct {
	id uint32
	*framed
}

// framed is an HTTP/2 receiver made of frames, which can do what no decent one
// does. It hands each request, once its body is read, to handle.
type framed struct {
	t        *testing.T
	conn     net.Conn
	n        int // of the connection, from 1
	mu       *sync.Mutex
	fr       *http2.Framer
	requests *atomic.Int64
}

func (f *framed) write(do func(*http2.Framer) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_ = do(f.fr) // the caller may have gone
}

func (s stream) accept() {
	var head bytes.Buffer
	e := hpack.NewEncoder(&head)
	_ = e.WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
	_ = e.WriteField(hpack.HeaderField{Name: "content-type", Value: "application/json"})
	s.write(func(fr *http2.Framer) error {
		return errors.Join(
			fr.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: head.Bytes(), EndHeaders: true}),
			fr.WriteData(s.id, true, []byte(name)))
	})
}

func (s stream) reset(code http2.ErrCode) {
	s.write(func(fr *http2.Framer) error { return fr.WriteRSTStream(s.id, code) })
}

func (s stream) goAway(last uint32) {
	s.write(func(fr *http2.Framer) error { return fr.WriteGoAway(last, http2.ErrCodeNo, nil) })
}

// frames serves connections with handle, which runs in the reading goroutine.
func frames(t *testing.T, settings []http2.Setting, handle func(stream)) (cfg Config, requests *atomic.Int64) {
	t.Helper()
	return framesAfter(t, func(fr *http2.Framer) error { return fr.WriteSettings(settings...) }, handle)
}

// framesAfter is frames with a greeting of the receiver's own.
func framesAfter(t *testing.T, greet func(*http2.Framer) error, handle func(stream)) (cfg Config, requests *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	requests = new(atomic.Int64)
	var open sync.WaitGroup
	ctx, stop := context.WithCancel(context.Background())
	open.Go(func() {
		for n := 1; ; n++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			after := context.AfterFunc(ctx, func() { _ = conn.Close() })
			open.Go(func() {
				defer after()
				defer conn.Close()
				serveFrames(&framed{t: t, conn: conn, n: n, mu: new(sync.Mutex), fr: http2.NewFramer(conn, conn), requests: requests}, greet, handle)
			})
		}
	})
	t.Cleanup(func() { stop(); _ = l.Close(); open.Wait() })
	return Config{Name: "test", Project: "p", Endpoint: "http://" + l.Addr().String(), PriorKnowledge: true}, requests
}

func serveFrames(f *framed, greet func(*http2.Framer) error, handle func(stream)) {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(f.conn, preface); err != nil {
		return
	}
	f.write(greet)
	for {
		frame, err := f.fr.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				f.write(func(fr *http2.Framer) error { return fr.WriteSettingsAck() })
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				f.write(func(fr *http2.Framer) error { return fr.WritePing(true, frame.Data) })
			}
		case *http2.HeadersFrame:
			if frame.StreamEnded() {
				f.requests.Add(1)
				handle(stream{frame.StreamID, f})
			}
		case *http2.DataFrame:
			if frame.StreamEnded() {
				f.requests.Add(1)
				handle(stream{frame.StreamID, f})
			}
		}
	}
}

// warm makes sure that a connection is there and settled.
func warm(t *testing.T, f *FCM) {
	t.Helper()
	require.Equal(t, sender.Accepted, sendOne(t, t.Context(), f).Class)
}

func TestHTTP2Failures(t *testing.T) {
	t.Parallel()
	refused := sender.Result{ID: "12.1", Class: sender.NotSent, Code: codeStreamRefused}
	unknown := sender.Result{ID: "12.1", Class: sender.Unknown, Code: sender.CodeNoAnswer}
	reset := func(code http2.ErrCode) func(stream) { return func(s stream) { s.reset(code) } }
	for name, c := range map[string]struct {
		fail func(stream)
		want sender.Result
	}{
		"refused before it was looked at":   {reset(http2.ErrCodeRefusedStream), refused},
		"graceful GOAWAY below the request": {func(s stream) { s.goAway(s.id - 2) }, refused},
		"PROTOCOL_ERROR":                    {reset(http2.ErrCodeProtocol), unknown},
		"INTERNAL_ERROR":                    {reset(http2.ErrCodeInternal), unknown},
		"CANCEL":                            {reset(http2.ErrCodeCancel), unknown},
		"ENHANCE_YOUR_CALM":                 {reset(http2.ErrCodeEnhanceYourCalm), unknown},
		"NO_ERROR":                          {reset(http2.ErrCodeNo), unknown},
		"GOAWAY after it, then the end":     {func(s stream) { s.goAway(s.id); _ = s.conn.Close() }, unknown},
		"GOAWAY for all, then the end":      {func(s stream) { s.goAway(1<<31 - 1); _ = s.conn.Close() }, unknown},
		"the end":                           {func(s stream) { _ = s.conn.Close() }, unknown},
		"half an answer, then the end": {func(s stream) {
			s.write(func(fr *http2.Framer) error {
				return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: []byte{0x88}, EndHeaders: true})
			})
			_ = s.conn.Close()
		}, unknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg, requests := frames(t, nil, func(s stream) {
				if s.n == 1 && s.id == 3 { // the second request of the first connection
					c.fail(s)
					return
				}
				s.accept() // a repeat would be accepted
			})
			f := open(t, cfg, nil)
			warm(t, f)
			require.Equal(t, c.want, sendOne(t, t.Context(), f))
			require.EqualValues(t, 2, requests.Load(), "no request comes twice")
			warm(t, f)
		})
	}
}

// A GOAWAY in the midst of a batch: what is below its last stream gets answers,
// what is above was not looked at, and the next batch takes a new connection.
func TestGoAwayInTheMidstOfABatch(t *testing.T) {
	t.Parallel()
	var held []stream
	cfg, requests := frames(t, nil, func(s stream) {
		if s.n > 1 || s.id == 1 {
			s.accept()
			return
		}
		if held = append(held, s); len(held) < 10 {
			return
		}
		last := held[4].id
		s.goAway(last)
		for _, h := range held {
			if h.id <= last {
				h.accept()
			}
		}
	})
	f := open(t, cfg, nil)
	warm(t, f)
	classes := map[sender.Class]int{}
	for _, r := range f.Send(t.Context(), batchOf("1", "2", "3", "4", "5", "6", "7", "8", "9", "10")) {
		classes[r.Class]++
	}
	require.Equal(t, map[sender.Class]int{sender.Accepted: 5, sender.NotSent: 5}, classes)
	warm(t, f)
	require.EqualValues(t, 12, requests.Load())
}

// The receiver's limit is below what net/http assumes until it is told: the
// requests must not wait for each other for good.
func TestFewStreams(t *testing.T) {
	t.Parallel()
	for _, limit := range []uint32{1, 3, 7} {
		cfg, requests := frames(t, []http2.Setting{{ID: http2.SettingMaxConcurrentStreams, Val: limit}}, func(s stream) {
			time.AfterFunc(time.Millisecond, s.accept)
		})
		f := open(t, cfg, nil)
		var ids []string
		for i := range 60 {
			ids = append(ids, "12."+string(rune('A'+i)))
		}
		b := batchOf(ids...)
		require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), f.Send(t.Context(), b), "limit %d", limit)
		require.EqualValues(t, 60, requests.Load())
	}
}

// A receiver that says how many streams it takes only after several requests
// got room on what is assumed without its word: none waits for another for good.
func TestStreamsSaidLate(t *testing.T) {
	t.Parallel()
	first := make(chan stream, 1)
	cfg, requests := framesAfter(t, func(*http2.Framer) error { return nil }, func(s stream) {
		if s.id == 1 {
			first <- s
			return
		}
		s.accept()
	})
	f := open(t, cfg, nil)
	p := f.wire.(*pool)
	do := func(g grant) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, cfg.Endpoint, http.NoBody)
		require.NoError(t, err)
		resp, err := g.link.conn.RoundTrip(req)
		if assert.NoError(t, err) {
			p.ended(g.link, true, false, g.before)
			assert.NoError(t, resp.Body.Close())
		}
		p.leave(g.link)
	}

	var running sync.WaitGroup
	grants := []grant{p.take(t.Context())}
	running.Go(func() { do(grants[0]) })
	s := <-first
	for range 3 { // once settleTime has passed
		grants = append(grants, p.take(t.Context()))
	}
	conn := grants[0].link.conn
	for _, g := range grants {
		require.NoError(t, g.err)
		require.Same(t, conn, g.link.conn)
	}
	s.write(func(fr *http2.Framer) error {
		return fr.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1})
	})
	require.Eventually(t, func() bool { return conn.Available()+conn.InFlight() == 1 }, 10*time.Second, time.Millisecond)
	s.accept()
	for _, g := range grants[1:] {
		running.Go(func() { do(g) })
	}
	ended := make(chan struct{})
	go func() { running.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		_ = conn.Close() // or they wait for good
		<-ended
		t.Fatal("requests wait for each other")
	}
	require.EqualValues(t, 4, requests.Load())
}

// Requests that got room on what is assumed, and others that follow once the
// receiver has said as much, are none in the others' way.
func TestRoomBeforeAndAfterTheWord(t *testing.T) {
	t.Parallel()
	for range 12 {
		first := make(chan stream, 1)
		cfg, _ := frames(t, []http2.Setting{{ID: http2.SettingMaxConcurrentStreams, Val: assumedStreams}}, func(s stream) {
			if s.id == 1 && s.n == 1 {
				first <- s
				return
			}
			s.write(func(fr *http2.Framer) error { return fr.WriteWindowUpdate(0, 2000) })
			time.AfterFunc(time.Millisecond, s.accept)
		})
		f := open(t, cfg, nil)
		p := f.wire.(*pool)
		var running sync.WaitGroup
		do := func(g grant) {
			running.Go(func() {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, cfg.Endpoint, http.NoBody)
				assert.NoError(t, err)
				resp, err := g.link.conn.RoundTrip(req)
				p.ended(g.link, err == nil, false, g.before)
				if assert.NoError(t, err) {
					assert.NoError(t, resp.Body.Close())
				}
				p.leave(g.link)
			})
		}
		do(p.take(t.Context()))
		s := <-first
		early := []grant{}
		for range assumedStreams - 10 { // once settleTime has passed
			early = append(early, p.take(t.Context()))
		}
		s.accept()
		running.Go(func() {
			var ids []string
			for i := range 1000 {
				ids = append(ids, "12."+strconv.Itoa(i))
			}
			b := batchOf(ids...)
			assert.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), f.Send(t.Context(), b))
		})
		for _, g := range early {
			do(g)
		}
		running.Wait()
		f.Close()
	}
}

// A connection that is dead without a word, as a forgetful firewall leaves it,
// costs what was on it; the next batch takes another.
func TestADeadConnectionIsLeft(t *testing.T) {
	t.Parallel()
	var dead atomic.Int64
	cfg, requests := frames(t, nil, func(s stream) {
		if s.n == 1 && s.id > 1 {
			dead.Add(1)
			return
		}
		s.accept()
	})
	cfg.CallTimeout = brief
	f := open(t, cfg, nil)
	warm(t, f)
	b := batchOf("1", "2", "3")
	require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Unknown, Code: sender.CodeCallTimeout}), f.Send(t.Context(), b))
	require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), f.Send(t.Context(), b))
	require.EqualValues(t, 3, dead.Load())
	require.EqualValues(t, 7, requests.Load())
	pool := f.wire.(*pool)
	require.Eventually(t, func() bool {
		pool.mu.Lock()
		defer pool.mu.Unlock()
		return len(pool.links) == 1
	}, 10*time.Second, time.Millisecond, "the dead one is closed")
}

// One slow answer among others says nothing about the connection.
func TestASlowAnswerKeepsItsConnection(t *testing.T) {
	t.Parallel()
	var connections atomic.Int64
	cfg, _ := frames(t, nil, func(s stream) {
		connections.Store(max(connections.Load(), int64(s.n)))
		if s.id != 3 {
			s.accept()
		}
	})
	cfg.CallTimeout = brief
	f := open(t, cfg, nil)
	warm(t, f)
	classes := map[sender.Class]int{}
	for _, r := range f.Send(t.Context(), batchOf("1", "2", "3")) {
		classes[r.Class]++
	}
	require.Equal(t, map[sender.Class]int{sender.Accepted: 2, sender.Unknown: 1}, classes)
	warm(t, f)
	require.EqualValues(t, 1, connections.Load())
}

// plain serves raw connections.
func plain(t *testing.T, handle func(c net.Conn)) (address string, accepted *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted = new(atomic.Int64)
	ctx, stop := context.WithCancel(context.Background())
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			after := context.AfterFunc(ctx, func() { _ = c.Close() })
			open.Go(func() {
				defer after()
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() { stop(); _ = l.Close(); open.Wait() })
	return l.Addr().String(), accepted
}

func silent(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

func TestWhatNeverLeftIsNotSent(t *testing.T) {
	t.Parallel()
	refusing := func(t *testing.T) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, l.Close())
		return l.Addr().String()
	}
	quiet := func(t *testing.T) string { addr, _ := plain(t, silent); return addr }
	chatty := func(t *testing.T) string {
		addr, _ := plain(t, func(c net.Conn) { _, _ = io.WriteString(c, "220 mail.example ESMTP\r\n"); silent(c) })
		return addr
	}
	untrusted := func(t *testing.T) string {
		r := receive(t, h2TLS, answering(200, nil, name))
		return r.cfg.Endpoint[len("https://"):]
	}
	for name, c := range map[string]struct {
		endpoint func(t *testing.T) string
		prior    bool
		timeout  time.Duration
		code     string
	}{
		"refused":                          {func(t *testing.T) string { return "http://" + refusing(t) }, false, 0, sender.CodeConnectFailed},
		"refused, h2c":                     {func(t *testing.T) string { return "http://" + refusing(t) }, true, 0, sender.CodeConnectFailed},
		"refused, TLS":                     {func(t *testing.T) string { return "https://" + refusing(t) }, false, 0, sender.CodeConnectFailed},
		"no such name":                     {func(*testing.T) string { return "https://fcm.invalid:443" }, false, 0, sender.CodeDNSFailed},
		"no TLS there":                     {func(t *testing.T) string { return "https://" + chatty(t) }, false, 0, sender.CodeTLSFailed},
		"a certificate of somebody else's": {func(t *testing.T) string { return "https://" + untrusted(t) }, false, 0, sender.CodeTLSFailed},
		"a handshake that hangs":           {func(t *testing.T) string { return "https://" + quiet(t) }, false, 200 * time.Millisecond, sender.CodeConnectTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var said logged
			f := open(t, Config{Name: "test", Project: "p", Endpoint: c.endpoint(t), PriorKnowledge: c.prior, CallTimeout: c.timeout}, said.logger())
			for range 2 {
				b := batchOf("12.1", "12.2")
				got := f.Send(t.Context(), b)
				for i := range got {
					got[i].Detail = ""
				}
				require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.NotSent, Code: c.code}), got)
			}
			require.Empty(t, said.String())
		})
	}
}

// brief is a time that is up while a busy machine still gets a request out.
const brief = 400 * time.Millisecond

// afterTheFirst has handle answer all requests but the first.
func afterTheFirst(handle http.HandlerFunc) http.HandlerFunc {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) == 1 {
			answering(200, nil, name)(w, r)
			return
		}
		handle(w, r)
	}
}

func TestTimesRunOut(t *testing.T) {
	t.Parallel()
	hang := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}
	headOnly := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
	for _, p := range protocols {
		for what, handle := range map[string]http.HandlerFunc{"no answer": hang, "half an answer": headOnly} {
			t.Run(string(p)+"/"+what, func(t *testing.T) {
				t.Parallel()
				r := receive(t, p, afterTheFirst(handle))
				f := r.open(t, func(c *Config) { c.CallTimeout = brief })
				warm(t, f)
				require.Equal(t, sender.Result{ID: "12.1", Class: sender.Unknown, Code: sender.CodeCallTimeout}, sendOne(t, t.Context(), f))

				f = r.open(t, nil)
				ctx, cancel := context.WithTimeout(t.Context(), brief)
				defer cancel()
				require.Equal(t, sender.Result{ID: "12.1", Class: sender.Unknown, Code: sender.CodeCallTimeout}, sendOne(t, ctx, f))

				ctx, stop := context.WithCancel(t.Context())
				defer time.AfterFunc(brief, stop).Stop()
				require.Equal(t, sender.Result{ID: "12.1", Class: sender.Unknown, Code: sender.CodeCancelled}, sendOne(t, ctx, f))
				require.EqualValues(t, 4, r.requests.Load())
			})
		}
	}
}

// Who waits for a place when the context ends has not left.
func TestTheQueueEndsWithTheContext(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		r := receive(t, p, afterTheFirst(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		}))
		f := r.open(t, func(c *Config) { c.InFlight = 1 })
		warm(t, f)
		ctx, cancel := context.WithTimeout(t.Context(), brief)
		defer cancel()
		got := f.Send(ctx, batchOf("1", "2", "3"))
		require.Equal(t, []sender.Result{
			{ID: "1", Class: sender.Unknown, Code: sender.CodeCallTimeout},
			{ID: "2", Class: sender.NotSent, Code: sender.CodeCancelled},
			{ID: "3", Class: sender.NotSent, Code: sender.CodeCancelled},
		}, got)
		require.EqualValues(t, 2, r.requests.Load())
	}
}

// The gate is asked before each message leaves, at the last moment.
func TestTheGateClosesBetweenMessages(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		var shut atomic.Bool
		var read atomic.Int64
		r := receive(t, p, func(w http.ResponseWriter, req *http.Request) {
			if _, err := io.Copy(io.Discard, req.Body); err == nil {
				read.Add(1)
				shut.Store(true)
			}
			_, _ = io.WriteString(w, name)
		})
		f := r.open(t, func(c *Config) { c.InFlight = 1 })
		b := batchOf("1", "2", "3")
		b.Gate = func() error {
			if shut.Load() {
				return errors.New("lease lost")
			}
			return nil
		}
		require.Equal(t, []sender.Result{
			{ID: "1", Class: sender.Accepted},
			{ID: "2", Class: sender.NotSent, Code: sender.CodeGateClosed},
			{ID: "3", Class: sender.NotSent, Code: sender.CodeGateClosed},
		}, f.Send(t.Context(), b))
		require.EqualValues(t, 1, r.requests.Load())

		// It was open when the message set out and closes before it leaves.
		asked := 0
		b = batchOf("4")
		b.Gate = func() error {
			if asked++; asked > 1 {
				return errors.New("lease lost")
			}
			return nil
		}
		require.Equal(t, []sender.Result{{ID: "4", Class: sender.NotSent, Code: sender.CodeGateClosed}}, f.Send(t.Context(), b))
		require.EqualValues(t, 1, read.Load(), "no message left")
	}
}

// 500 messages at once over a cold connection: few dials, one at a time.
func TestFewConnections(t *testing.T) {
	t.Parallel()
	for _, p := range []protocol{h2c, h2TLS} {
		// Nothing is answered until there are more messages at once than one
		// connection carries; a machine too slow for that gives up after a while.
		var now atomic.Int64
		var once sync.Once
		many, carried := make(chan struct{}), atomic.Bool{}
		r := receive(t, p, func(w http.ResponseWriter, req *http.Request) {
			_, _ = io.Copy(io.Discard, req.Body)
			defer now.Add(-1)
			if now.Add(1) > 100 {
				carried.Store(true)
				once.Do(func() { close(many) })
			}
			select {
			case <-many:
			case <-time.After(8 * time.Second):
			}
			_, _ = io.WriteString(w, name)
		})
		f := r.open(t, func(c *Config) { c.InFlight = 500 })
		var sending sync.WaitGroup
		for range 5 {
			sending.Go(func() {
				for range 3 {
					var ids []string
					for i := range 100 {
						ids = append(ids, "12."+string(rune('A'+i)))
					}
					b := batchOf(ids...)
					if got := f.Send(context.Background(), b); got[0].Class != sender.Accepted || got[99].Class != sender.Accepted {
						t.Errorf("%+v %+v", got[0], got[99])
					}
				}
			})
		}
		sending.Wait()
		require.EqualValues(t, 1500, r.requests.Load())
		require.LessOrEqual(t, r.dials.Load(), int64(5))
		require.True(t, carried.Load(), "more than one connection carries")
	}
}

// A receiver that is gone and comes back: no dial storm, and no message waits
// longer than it has to.
func TestAFailedDialSpeaksForTheNextOnes(t *testing.T) {
	t.Parallel()
	addr, accepted := plain(t, func(net.Conn) {}) // hangs up at once
	f := open(t, Config{Name: "test", Project: "p", Endpoint: "https://" + addr}, nil)
	var ids []string
	for i := range 200 {
		ids = append(ids, "12."+string(rune('A'+i)))
	}
	for _, r := range f.Send(t.Context(), batchOf(ids...)) {
		require.Equal(t, sender.NotSent, r.Class)
	}
	began := time.Now()
	for range 50 {
		require.Equal(t, sender.NotSent, sendOne(t, t.Context(), f).Class)
	}
	require.LessOrEqual(t, accepted.Load(), int64(3+time.Since(began)/dialPause))
}

func TestHTTP11ConnectionsThatEnd(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(net.Conn){
		"FIN":   func(c net.Conn) { _ = c.Close() },
		"reset": func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); _ = c.Close() },
		"half an answer": func(c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
			_ = c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var requests atomic.Int64
			addr, _ := plain(t, func(c net.Conn) {
				b := make([]byte, 64<<10)
				for read := 0; !bytes.Contains(b[:read], []byte("token-of-12.1")); {
					n, err := c.Read(b[read:])
					if err != nil {
						return
					}
					read += n
				}
				requests.Add(1)
				end(c)
			})
			f := open(t, Config{Name: "test", Project: "p", Endpoint: "http://" + addr}, nil)
			require.Equal(t, sender.Result{ID: "12.1", Class: sender.Unknown, Code: sender.CodeNoAnswer}, sendOne(t, t.Context(), f))
			require.EqualValues(t, 1, requests.Load())
		})
	}
}

func TestClosing(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		r := receive(t, p, answering(200, nil, name))
		f, err := New(r.cfg, nil, nil)
		require.NoError(t, err)
		warm(t, f)
		f.Close()
		if p != http1 {
			require.Equal(t, sender.Result{ID: "12.1", Class: sender.NotSent, Code: sender.CodeClosed}, sendOne(t, t.Context(), f))
		}
	}
}
