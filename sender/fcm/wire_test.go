package fcm

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"schoolbell/sender"
	"schoolbell/sender/simulator"
)

// http1TLS is what a proxy that inspects TLS may leave of HTTP/2.
const http1TLS protocol = "HTTP/1.1 over TLS"

var allProtocols = []protocol{http1, http1TLS, h2c, h2TLS}

func (p protocol) secure() bool { return p == http1TLS || p == h2TLS }
func (p protocol) http2() bool  { return p == h2c || p == h2TLS }

// exchange is one request at a receiver made of bytes, and what may be done to it.
type exchange interface {
	interim(status int)                                    // an answer before the answer
	head(status int, header map[string]string, length int) // length < 0: none is said
	body(part string, last bool)                           // behind head
	noise(text string)                                     // bytes that are none of the protocol's
	conn() net.Conn                                        // the TCP connection
	gone() <-chan struct{}                                 // the caller has left, or the test has ended
}

func answerAll(x exchange, status int, header map[string]string, body string) {
	x.head(status, header, len(body))
	x.body(body, true)
}

func hangUp(x exchange) { _ = x.conn().Close() }
func resetUp(x exchange) {
	_ = x.conn().(*net.TCPConn).SetLinger(0)
	_ = x.conn().Close()
}

// seen is a request that came in whole.
type seen struct {
	batch, message string
	conn           int
}

// bare is a receiver made of bytes with a log of what came in.
type bare struct {
	cfg Config

	mu       sync.Mutex
	requests []seen
	conns    int
	streams  int // HEADERS, or heads of HTTP/1.1
}

// of are the requests of a batch.
func (b *bare) of(batch string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.requests {
		if r.batch == batch {
			n++
		}
	}
	return n
}

func (b *bare) note(n int, body []byte) {
	var m struct {
		Message struct {
			Data map[string]string `json:"data"`
		} `json:"message"`
	}
	_ = json.Unmarshal(body, &m)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests = append(b.requests, seen{m.Message.Data[dataBatch], m.Message.Data[dataMessage], n})
}

// receiveBare serves connections: greet may end one before anything of it is
// read, and each request goes to handle.
func receiveBare(t *testing.T, p protocol, settings []http2.Setting, greet func(n int, c net.Conn) bool, handle func(x exchange)) *bare {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b := &bare{cfg: Config{Name: "test", Project: "p", Endpoint: "http://" + l.Addr().String(), PriorKnowledge: p == h2c}}
	var secure *tls.Config
	if p.secure() {
		certificate, authority, err := selfSigned()
		require.NoError(t, err)
		b.cfg.Endpoint = "https://" + l.Addr().String()
		b.cfg.RootCAs = x509.NewCertPool()
		require.True(t, b.cfg.RootCAs.AppendCertsFromPEM(authority))
		secure = &tls.Config{Certificates: []tls.Certificate{*certificate}, NextProtos: []string{"http/1.1"}}
		if p.http2() {
			secure.NextProtos = []string{"h2"}
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.conns++
			n := b.conns
			b.mu.Unlock()
			after := context.AfterFunc(ctx, func() { _ = c.Close() })
			open.Go(func() {
				defer after()
				defer c.Close()
				if greet != nil && !greet(n, c) {
					return
				}
				over := c
				if secure != nil {
					over = tls.Server(c, secure)
				}
				if p.http2() {
					b.serve2(ctx, n, c, over, settings, handle)
				} else {
					b.serve1(ctx, n, c, over, handle)
				}
			})
		}
	})
	t.Cleanup(func() { stop(); _ = l.Close(); open.Wait() })
	return b
}

// selfSigned makes one certificate for all: a pair of keys costs more than a test.
var selfSigned = func() func() (*tls.Certificate, []byte, error) {
	type made struct {
		certificate *tls.Certificate
		authority   []byte
	}
	once := sync.OnceValues(func() (made, error) {
		c, a, err := simulator.SelfSigned("127.0.0.1")
		return made{c, a}, err
	})
	return func() (*tls.Certificate, []byte, error) {
		m, err := once()
		return m.certificate, m.authority, err
	}
}()

func (b *bare) serve1(ctx context.Context, n int, tcp, over net.Conn, handle func(exchange)) {
	r := bufio.NewReader(over)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		b.mu.Lock()
		b.streams++
		b.mu.Unlock()
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		b.note(n, body)
		handle(&exchange1{ctx: ctx, tcp: tcp, over: over, r: r})
	}
}

type exchange1 struct {
	ctx       context.Context
	tcp, over net.Conn
	r         *bufio.Reader
}

func (x *exchange1) interim(status int) { x.noise(fmt.Sprintf("HTTP/1.1 %d Wait\r\n\r\n", status)) }
func (x *exchange1) head(status int, header map[string]string, length int) {
	text := fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\n", status)
	for k, v := range header {
		text += k + ": " + v + "\r\n"
	}
	if length >= 0 {
		text += "Content-Length: " + strconv.Itoa(length) + "\r\n"
	}
	x.noise(text + "\r\n")
}
func (x *exchange1) body(part string, _ bool) { x.noise(part) }
func (x *exchange1) noise(text string)        { _, _ = io.WriteString(x.over, text) } // the caller may have gone
func (x *exchange1) conn() net.Conn           { return x.tcp }
func (x *exchange1) gone() <-chan struct{} {
	left := make(chan struct{})
	go func() { defer close(left); _, _ = io.Copy(io.Discard, x.r) }()
	return left
}

func (b *bare) serve2(ctx context.Context, n int, tcp, over net.Conn, settings []http2.Setting, handle func(exchange)) {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(over, preface); err != nil {
		return
	}
	fr := http2.NewFramer(over, over)
	var mu sync.Mutex
	write := func(do func() error) {
		mu.Lock()
		defer mu.Unlock()
		_ = do() // the caller may have gone
	}
	write(func() error { return fr.WriteSettings(settings...) })
	left := make(chan struct{})
	bodies := map[uint32]*bytes.Buffer{}
	var answering sync.WaitGroup
	defer func() { close(left); answering.Wait() }()
	for {
		frame, err := fr.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				write(fr.WriteSettingsAck)
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				write(func() error { return fr.WritePing(true, frame.Data) })
			}
		case *http2.HeadersFrame:
			bodies[frame.StreamID] = new(bytes.Buffer)
			b.mu.Lock()
			b.streams++
			b.mu.Unlock()
		case *http2.DataFrame:
			bodies[frame.StreamID].Write(frame.Data())
			if frame.StreamEnded() {
				b.note(n, bodies[frame.StreamID].Bytes())
				x := &exchange2{id: frame.StreamID, tcp: tcp, over: over, fr: fr, write: write, left: left}
				answering.Go(func() { handle(x) })
			}
		}
	}
}

type exchange2 struct {
	id        uint32
	tcp, over net.Conn
	fr        *http2.Framer
	write     func(func() error)
	left      chan struct{}
}

func (x *exchange2) interim(status int) { x.headers(status, nil) }
func (x *exchange2) head(status int, header map[string]string, length int) {
	all := map[string]string{"content-type": "application/json"}
	for k, v := range header {
		all[strings.ToLower(k)] = v
	}
	if length >= 0 {
		all["content-length"] = strconv.Itoa(length)
	}
	x.headers(status, all)
}

func (x *exchange2) headers(status int, header map[string]string) {
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	e.SetMaxDynamicTableSize(0) // of each block its own encoder
	err := e.WriteField(hpack.HeaderField{Name: ":status", Value: strconv.Itoa(status)})
	for k, v := range header {
		err = errors.Join(err, e.WriteField(hpack.HeaderField{Name: k, Value: v}))
	}
	x.write(func() error {
		first := block.Next(16 << 10)
		err = errors.Join(err, x.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: x.id, BlockFragment: first, EndHeaders: block.Len() == 0}))
		for block.Len() > 0 {
			err = errors.Join(err, x.fr.WriteContinuation(x.id, block.Len() <= 16<<10, block.Next(16<<10)))
		}
		return err
	})
}

func (x *exchange2) body(part string, last bool) {
	for len(part) > 16<<10 {
		x.write(func() error { return x.fr.WriteData(x.id, false, []byte(part[:16<<10])) })
		part = part[16<<10:]
	}
	x.write(func() error { return x.fr.WriteData(x.id, last, []byte(part)) })
}
func (x *exchange2) noise(text string) {
	x.write(func() error { _, err := io.WriteString(x.over, text); return err })
}
func (x *exchange2) conn() net.Conn        { return x.tcp }
func (x *exchange2) gone() <-chan struct{} { return x.left }

// drip writes a body one byte after the other until the caller has gone.
func drip(x exchange) {
	gone, tick := x.gone(), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-gone:
			return
		case <-tick.C:
			x.body(" ", false)
		}
	}
}

// await keeps the caller waiting.
func await(x exchange) { <-x.gone() }

// TestEachFailureOfTheWay goes through what may befall one request between the
// sender and FCM, on each protocol, over a connection that has carried one
// before: what is known of the message, and that the receiver saw it once.
func TestEachFailureOfTheWay(t *testing.T) {
	t.Parallel()
	said := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	gone := fcmError(404, "NOT_FOUND", detail("UNREGISTERED"))
	noAnswer := sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer}
	late := sender.Result{Class: sender.Unknown, Code: sender.CodeCallTimeout}
	for what, c := range map[string]struct {
		do    func(x exchange)
		want  sender.Result
		brief bool // the call's time runs out
	}{
		"reset behind the request":  {do: resetUp, want: noAnswer},
		"closed behind the request": {do: hangUp, want: noAnswer},
		"reset behind the head":     {do: func(x exchange) { x.head(200, nil, len(name)); resetUp(x) }, want: noAnswer},
		"closed in the body":        {do: func(x exchange) { x.head(200, nil, len(name)); x.body(name[:12], false); hangUp(x) }, want: noAnswer},
		"closed before the body's last byte": {do: func(x exchange) {
			x.head(200, nil, len(name))
			x.body(name[:len(name)-1], false)
			hangUp(x)
		}, want: noAnswer},
		"UNREGISTERED, cut off behind the detail": {do: func(x exchange) { x.head(404, nil, len(gone)+1); x.body(gone, false); hangUp(x) }, want: noAnswer},
		"429 with Retry-After, cut off": {
			do: func(x exchange) {
				x.head(429, map[string]string{"Retry-After": "30"}, 100)
				x.body("{", false)
				hangUp(x)
			},
			want: sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer, RetryAfter: 30 * time.Second},
		},
		"503 with a date as Retry-After, cut off": {
			do: func(x exchange) {
				x.head(503, map[string]string{"Date": said.Format(http.TimeFormat), "Retry-After": said.Add(7 * time.Minute).Format(http.TimeFormat)}, 100)
				x.body("{", false)
				resetUp(x)
			},
			want: sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer, RetryAfter: 7 * time.Minute},
		},
		"no answer":            {do: await, want: late, brief: true},
		"none behind a 103":    {do: func(x exchange) { x.interim(103); await(x) }, want: late, brief: true},
		"none behind a head":   {do: func(x exchange) { x.head(200, nil, len(name)); await(x) }, want: late, brief: true},
		"half a body":          {do: func(x exchange) { x.head(200, nil, len(name)); x.body(name[:12], false); await(x) }, want: late, brief: true},
		"a body that drips":    {do: func(x exchange) { x.head(200, nil, 1<<20); drip(x) }, want: late, brief: true},
		"429 that drips":       {do: func(x exchange) { x.head(429, map[string]string{"Retry-After": "30"}, 1<<20); drip(x) }, want: sender.Result{Class: sender.Unknown, Code: sender.CodeCallTimeout, RetryAfter: 30 * time.Second}, brief: true},
		"an answer behind 103": {do: func(x exchange) { x.interim(103); answerAll(x, 200, nil, name) }, want: sender.Result{Class: sender.Accepted}},
		"a body without an end": {
			do:   func(x exchange) { x.head(200, nil, -1); x.body(name+strings.Repeat(" ", maxAnswer+1), false); await(x) },
			want: sender.Result{Class: sender.Unknown, Code: sender.CodeBadAnswer},
		},
		"a head without bounds": {do: func(x exchange) {
			x.head(200, map[string]string{"X-Much": strings.Repeat("x", 2*maxHeader)}, len(name))
			x.body(name, true)
		}, want: noAnswer},
		"what is no HTTP": {do: func(x exchange) { x.noise("SSH-2.0-OpenSSH_9.6 this is another door altogether\r\n"); await(x) }, want: noAnswer},
	} {
		for _, p := range allProtocols {
			t.Run(what+"/"+string(p), func(t *testing.T) {
				t.Parallel()
				ctx, end := context.WithCancelCause(t.Context())
				defer end(nil)
				first := true
				b := receiveBare(t, p, nil, nil, func(x exchange) {
					if first {
						first = false
						answerAll(x, 200, nil, name)
						return
					}
					if c.brief { // counted from the request, however long a busy machine takes to make it
						time.AfterFunc(time.Second, func() { end(context.DeadlineExceeded) })
					}
					c.do(x)
				})
				b.cfg.CallTimeout = time.Minute
				f := open(t, b.cfg, nil)
				warm(t, f)
				batch := batchOf("12.1")
				batch.ID = "batch-2"
				got := f.Send(ctx, batch)[0]
				got.ID, got.Detail = "", ""
				require.Equal(t, c.want, got)
				require.Equal(t, 1, b.of("batch-2"), "exactly one request")
			})
		}
	}
}

// TestNothingLeavesBeforeThereIsAWay goes through the phases before a request:
// what fails there has not left.
func TestNothingLeavesBeforeThereIsAWay(t *testing.T) {
	t.Parallel()
	for _, p := range allProtocols {
		t.Run("the dial hangs/"+string(p), func(t *testing.T) {
			t.Parallel()
			cfg := Config{Name: "test", Project: "p", Endpoint: "http://" + fullQueue(t), PriorKnowledge: p == h2c, CallTimeout: brief}
			if p.secure() {
				cfg.Endpoint = "https" + strings.TrimPrefix(cfg.Endpoint, "http")
			}
			require.Equal(t, sender.Result{ID: "12.1", Class: sender.NotSent, Code: sender.CodeConnectTimeout}, sendOne(t, t.Context(), open(t, cfg, nil)))
		})
		t.Run("reset at the door/"+string(p), func(t *testing.T) {
			t.Parallel()
			b := receiveBare(t, p, nil, func(n int, c net.Conn) bool {
				_ = c.(*net.TCPConn).SetLinger(0)
				return false
			}, nil)
			got := sendOne(t, t.Context(), open(t, b.cfg, nil))
			// Without TLS the request may be on its way when the reset comes.
			require.True(t, got.Class == sender.NotSent || got.Class == sender.Unknown && !p.secure(), "%+v", got)
			require.Zero(t, b.of("batch-1"))
			require.Equal(t, 1, b.conns, "one try")
		})
		t.Run("the kept connection is closed/"+string(p), func(t *testing.T) {
			t.Parallel()
			b := receiveBare(t, p, nil, nil, func(x exchange) { answerAll(x, 200, nil, name); hangUp(x) })
			f := open(t, b.cfg, nil)
			for i := range 20 {
				batch := batchOf("12.1")
				batch.ID = fmt.Sprint("batch-", i)
				got := f.Send(t.Context(), batch)[0]
				switch n := b.of(batch.ID); got.Class {
				case sender.Accepted:
					require.Equal(t, 1, n)
				case sender.NotSent:
					require.Zero(t, n)
				case sender.Unknown:
					require.LessOrEqual(t, n, 1)
				default:
					t.Fatalf("%+v", got)
				}
			}
		})
	}
	t.Run("the window is shut", func(t *testing.T) {
		t.Parallel()
		for _, p := range []protocol{h2c, h2TLS} {
			b := receiveBare(t, p, []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: 0}}, nil, func(x exchange) { answerAll(x, 200, nil, name) })
			b.cfg.CallTimeout = brief
			f := open(t, b.cfg, nil)
			// The first may leave before the receiver has said that nothing may.
			first := sendOne(t, t.Context(), f)
			batch := batchOf("12.1")
			batch.ID = "batch-2"
			got := f.Send(t.Context(), batch)[0]
			if first.Class != sender.Accepted { // its connection is left, and the next one begins anew
				continue
			}
			require.True(t, got.Class == sender.Unknown && got.Code == sender.CodeCallTimeout || got.Class == sender.NotSent, "%+v", got)
			require.Zero(t, b.of("batch-2"))
		}
	})
}

// fullQueue is an address where connections are neither taken nor refused.
func fullQueue(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	raw, err := l.(*net.TCPListener).SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { err = syscall.Listen(int(fd), 0) }))
	require.NoError(t, err)
	for range 64 {
		c, err := net.DialTimeout("tcp", l.Addr().String(), 300*time.Millisecond)
		if err != nil {
			return l.Addr().String()
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Fatal("the queue of a listener does not fill")
	return ""
}

// TestTheTokenEndpointFails: without an access token no request is made, and
// none waits for the endpoint.
func TestTheTokenEndpointFails(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]sender.Result{
		"refuse": {Class: sender.Misconfigured, Code: codeTokenRefused},
		"fail":   {Class: sender.NotSent, Code: codeTokenMissing},
		"hang":   {Class: sender.NotSent, Code: codeTokenMissing},
	} {
		for _, p := range protocols {
			t.Run(answer+"/"+string(p), func(t *testing.T) {
				t.Parallel()
				// The endpoint's address is plain: credentials fetch by the system's roots.
				at := simulate(t, http1, simulator.Config{Behaviour: simulator.Behaviour{TokenAnswer: answer}})
				s := simulate(t, p, simulator.Config{Authorize: true})
				s.cfg.CredentialsFile = at.credentialsFile(t)
				f := open(t, s.cfg, nil)
				began := time.Now()
				for range 3 {
					got := sendOne(t, t.Context(), f)
					got.ID, got.Detail = "", ""
					require.Equal(t, want, got)
				}
				require.Less(t, time.Since(began), DefaultCallTimeout)
				require.Zero(t, s.Counts().Requests+s.Counts().Unauthorized, "no request")
			})
		}
	}
}
