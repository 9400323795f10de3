package fcm

import (
	"bytes"
	"context"
	"crypto/x509"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// protocol is one of the three ways to speak to a receiver.
type protocol string

const (
	http1 protocol = "HTTP/1.1"
	h2c   protocol = "h2c"
	h2TLS protocol = "h2 over TLS"
)

var protocols = []protocol{http1, h2c, h2TLS}

// receiver is an HTTP server that counts requests and connections.
type receiver struct {
	cfg      Config // to reach it
	requests atomic.Int64
	dials    atomic.Int64
	protos   sync.Map
}

func receive(t *testing.T, p protocol, handle http.HandlerFunc) *receiver {
	t.Helper()
	r := &receiver{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.requests.Add(1)
		r.protos.Store(req.Proto, true)
		handle(w, req)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			r.dials.Add(1)
		}
	}
	server.Config.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: 100}
	r.cfg = Config{Name: "test", Project: "p"}
	switch p {
	case h2c:
		server.Config.Protocols = new(http.Protocols)
		server.Config.Protocols.SetUnencryptedHTTP2(true)
		r.cfg.PriorKnowledge = true
		server.Start()
	case h2TLS, http1TLS:
		server.EnableHTTP2 = p == h2TLS
		server.StartTLS()
		r.cfg.RootCAs = x509.NewCertPool()
		r.cfg.RootCAs.AddCert(server.Certificate())
	default:
		server.Start()
	}
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	r.cfg.Endpoint = server.URL
	return r
}

// open returns an FCM for the receiver, changed by with.
func (r *receiver) open(t *testing.T, with func(*Config)) *FCM {
	t.Helper()
	cfg := r.cfg
	if with != nil {
		with(&cfg)
	}
	return open(t, cfg, nil)
}

func open(t *testing.T, cfg Config, log *slog.Logger) *FCM {
	t.Helper()
	f, err := New(cfg, log, nil)
	require.NoError(t, err)
	t.Cleanup(f.Close)
	return f
}

// answering replies the same to everybody, after it has read the request.
func answering(status int, header map[string]string, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		for k, v := range header {
			w.Header().Set(k, v)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

const name = `{"name":"projects/p/messages/0:1"}`

func batchOf(ids ...string) sender.Batch {
	b := sender.Batch{ID: "batch-1", School: "A", Fence: 7}
	content := &sender.Content{Title: "title", Body: "body", Data: map[string]string{"k": "v"}}
	for _, id := range ids {
		b.Messages = append(b.Messages, sender.Message{ID: id, Notice: "12", Token: "token-of-" + id, Content: content, Attempt: 1})
	}
	return b
}

func sendOne(t *testing.T, ctx context.Context, f *FCM) sender.Result {
	t.Helper()
	got := f.Send(ctx, batchOf("12.1"))
	require.Len(t, got, 1)
	require.Equal(t, "12.1", got[0].ID)
	return got[0]
}

// logged collects what is logged.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logged) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }
