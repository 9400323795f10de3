package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"

	"schoolbell/sender/simulator"
)

// receiver is a simulated FCM on a loopback port, with its arrival log in memory.
type receiver struct {
	*simulator.Engine
	server *http.Server
	addr   string
	served sync.WaitGroup
	err    error
}

func newReceiver(latency simulator.Latency) (*receiver, error) {
	engine, err := simulator.New(simulator.Config{Behaviour: simulator.Behaviour{Latency: latency}, Keep: true})
	if err != nil {
		return nil, fmt.Errorf("simulate FCM: %w", err)
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("simulate FCM: %w", err), engine.Close())
	}
	r := &receiver{Engine: engine, server: simulator.NewServer(engine, nil), addr: l.Addr().String()}
	r.served.Go(func() {
		if err := r.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			r.err = err
		}
	})
	return r, nil
}

func (r *receiver) endpoint() string { return "http://" + r.addr }

// close ends it; its arrivals stay readable.
func (r *receiver) close() error {
	err := errors.Join(r.Engine.Close(), r.server.Close())
	r.served.Wait()
	return errors.Join(err, r.err)
}
