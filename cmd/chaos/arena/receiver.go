package arena

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"

	"schoolbell/sender/simulator"
)

// Project is the Firebase project of an arena with FCM.
const Project = "arena"

// Receiver is the simulated receiver with its arrival log in memory.
type Receiver struct {
	*simulator.Engine

	server *http.Server
	addr   string
	dir    string // of the authority behind its certificate, with FCM
	done   sync.WaitGroup
	err    error
}

// newReceiver plays a relay, or FCM over HTTP/2 and TLS.
func newReceiver(b simulator.Behaviour, fcm bool) (r *Receiver, err error) {
	engine, err := simulator.New(simulator.Config{Behaviour: b, Keep: true, Project: Project})
	if err != nil {
		return nil, err
	}
	r = &Receiver{Engine: engine}
	defer func() {
		if err != nil {
			err = errors.Join(err, engine.Close(), os.RemoveAll(r.dir))
		}
	}()
	certificate, authority, err := simulator.SelfSigned("127.0.0.1")
	if err != nil {
		return nil, err
	}
	if fcm {
		if r.dir, err = os.MkdirTemp("", "arena-"); err != nil {
			return nil, fmt.Errorf("make a place for the receiver's authority: %w", err)
		}
		if err := os.WriteFile(r.authority(), authority, 0o600); err != nil {
			return nil, fmt.Errorf("write the receiver's authority: %w", err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the receiver: %w", err)
	}
	r.addr, r.server = l.Addr().String(), simulator.NewServer(engine, certificate)
	r.done.Go(func() {
		serve := r.server.Serve
		if fcm {
			serve = func(l net.Listener) error { return r.server.ServeTLS(l, "", "") }
		}
		if err := serve(l); !errors.Is(err, http.ErrServerClosed) {
			r.err = err
		}
	})
	return r, nil
}

func (r *Receiver) authority() string { return filepath.Join(r.dir, "ca.pem") }

// URL is where a relay's batches are posted to.
func (r *Receiver) URL() string { return "http://" + r.addr + "/relay" }

// settings are the variables with which a replica sends to the receiver.
func (r *Receiver) settings() map[string]string {
	if r.dir == "" {
		return map[string]string{
			"SCHOOLBELL_SENDERS_RELAY_KIND": "relay",
			"SCHOOLBELL_SENDERS_RELAY_URL":  r.URL(),
		}
	}
	return map[string]string{
		"SCHOOLBELL_SENDERS_FCM_KIND":     "fcm",
		"SCHOOLBELL_SENDERS_FCM_PROJECT":  Project,
		"SCHOOLBELL_SENDERS_FCM_ENDPOINT": "https://" + r.addr,
		"SSL_CERT_FILE":                   r.authority(), // in place of the system's authorities
	}
}

// Close ends the receiver; its arrivals stay readable.
func (r *Receiver) Close() error {
	err := errors.Join(r.Engine.Close(), r.server.Close())
	r.done.Wait()
	if r.dir != "" {
		err = errors.Join(err, os.RemoveAll(r.dir))
	}
	return errors.Join(err, r.err)
}
