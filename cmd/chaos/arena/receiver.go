package arena

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"schoolbell/sender/simulator"
)

// Receiver is the simulated relay with its arrival log in memory.
type Receiver struct {
	*simulator.Engine

	server *http.Server
	addr   string
	done   sync.WaitGroup
	err    error
}

func newReceiver(b simulator.Behaviour) (*Receiver, error) {
	engine, err := simulator.New(simulator.Config{Behaviour: b, Keep: true})
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for the receiver: %w", err), engine.Close())
	}
	r := &Receiver{Engine: engine, addr: l.Addr().String(), server: &http.Server{Handler: engine, ReadHeaderTimeout: 10 * time.Second}}
	r.done.Go(func() {
		if err := r.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			r.err = err
		}
	})
	return r, nil
}

// URL is where batches are posted to.
func (r *Receiver) URL() string { return "http://" + r.addr + "/relay" }

// Close ends the receiver; its arrivals stay readable.
func (r *Receiver) Close() error {
	err := errors.Join(r.Engine.Close(), r.server.Close())
	r.done.Wait()
	return errors.Join(err, r.err)
}
