package fcm

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

const (
	// connectTimeout bounds a dial with its handshake. A connection is made for
	// whoever comes, so no message's own deadline bounds it.
	connectTimeout = 5 * time.Second

	// FCM closes idle connections after about three minutes; ours go first.
	idleTimeout = 90 * time.Second
	// HTTP/1.1 has no way to say that a connection is about to close, so a
	// request that meets one that does is unknown; common servers keep an idle
	// connection for 2 s at least.
	idleTimeoutHTTP1 = 1500 * time.Millisecond

	// A connection that is silent for so long is asked for a sign of life.
	pingAfter   = 30 * time.Second
	pingTimeout = 10 * time.Second

	maxHeader = 64 << 10
)

// endpoint is where requests go.
type endpoint struct {
	secure     bool
	host, port string
}

// parseEndpoint keeps the value out of its errors.
func parseEndpoint(s string) (endpoint, error) {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return endpoint{}, errors.New("endpoint must be scheme://host:port with http or https; /v1/… is added")
	}
	e := endpoint{secure: u.Scheme == "https", host: u.Hostname(), port: u.Port()}
	if e.port == "" {
		if e.port = "80"; e.secure {
			e.port = "443"
		}
	}
	return e, nil
}

func (e endpoint) scheme() string {
	if e.secure {
		return "https"
	}
	return "http"
}

func (e endpoint) address() string { return net.JoinHostPort(e.host, e.port) }

// base leaves a port out that goes without saying, as everybody who calls FCM does.
func (e endpoint) base() string {
	if e.secure && e.port == "443" || !e.secure && e.port == "80" {
		return e.scheme() + "://" + strings.TrimSuffix(e.address(), ":"+e.port)
	}
	return e.scheme() + "://" + e.address()
}

func (e endpoint) loopback() bool {
	ip := net.ParseIP(e.host)
	return e.host == "localhost" || ip != nil && ip.IsLoopback()
}

// newWire returns the transport for the endpoint: HTTP/2 over few connections
// of our own pool, or HTTP/1.1 with a connection a message in flight.
func newWire(cfg Config, to endpoint, m *metrics) wire {
	t := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: connectTimeout}).DialContext,
		TLSHandshakeTimeout:    connectTimeout,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cfg.RootCAs},
		IdleConnTimeout:        idleTimeout,
		MaxResponseHeaderBytes: maxHeader,
		DisableCompression:     true, // an answer is smaller than its compressed self
		Protocols:              new(http.Protocols),
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
	}
	switch {
	case to.secure:
		t.Protocols.SetHTTP2(true)
		t.Protocols.SetHTTP1(true) // a proxy that inspects TLS may speak no other
	case cfg.PriorKnowledge:
		t.Protocols.SetUnencryptedHTTP2(true)
	default:
		t.Protocols.SetHTTP1(true)
		t.MaxIdleConnsPerHost = cfg.InFlight
		t.IdleConnTimeout = idleTimeoutHTTP1
		return plainWire{t}
	}
	return newPool(func(ctx context.Context) (*http.ClientConn, error) {
		return t.NewClientConn(ctx, to.scheme(), to.address())
	}, m)
}

type plainWire struct{ *http.Transport }

func (w plainWire) close() { w.CloseIdleConnections() }
