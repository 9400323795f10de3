package simulator

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"time"
)

// maxStreams is how many requests one HTTP/2 connection takes at once, as
// Google's front ends do.
const maxStreams = 100

type connKey struct{}

// NewServer returns a server for the engine: on plain listeners (Serve) it
// speaks HTTP/1.1 and HTTP/2 with prior knowledge, on TLS listeners (ServeTLS
// with empty file names) HTTP/2 and HTTP/1.1. certificate is nil where there is
// no TLS listener. It counts the engine's connections.
func NewServer(e *Engine, certificate *tls.Certificate) *http.Server {
	s := &http.Server{
		Handler:           e,
		ReadHeaderTimeout: 10 * time.Second,
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState:         e.memory.connection,
		ErrorLog:          log.New(logWriter{e.log}, "", 0),
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	if certificate != nil {
		s.TLSConfig = &tls.Config{Certificates: []tls.Certificate{*certificate}, MinVersion: tls.VersionTLS12}
	}
	return s
}

// logWriter takes what net/http has to say of connections and handshakes.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug("server", "event", "simulator_server", "says", string(p))
	return len(p), nil
}

// cutConnection ends the request's whole connection without an answer, and with
// HTTP/2 all requests on it.
func cutConnection(w http.ResponseWriter, r *http.Request) {
	if conn, ok := r.Context().Value(connKey{}).(net.Conn); ok && r.ProtoMajor == 2 {
		if secure, ok := conn.(*tls.Conn); ok {
			conn = secure.NetConn()
		}
		_ = conn.Close()
		panic(http.ErrAbortHandler)
	}
	drop(w)
}

// SelfSigned makes a certificate for the hosts (names or addresses) and the
// authority that a caller has to trust, as PEM. Both are good for a day.
func SelfSigned(hosts ...string) (certificate *tls.Certificate, authority []byte, err error) {
	fail := func(err error) (*tls.Certificate, []byte, error) {
		return nil, nil, fmt.Errorf("make a certificate: %w", err)
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	now := time.Now()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "push simulator's authority"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		return fail(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano() + 1), Subject: pkix.Name{CommonName: "push simulator"},
		NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else {
			leaf.DNSNames = append(leaf.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return fail(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der, caDER}, PrivateKey: key},
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER}), nil
}
