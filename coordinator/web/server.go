package web

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
)

const maxHeader = 32 << 10

// Serve answers on l until ctx ends, then takes no more connections and waits
// for the requests under way, at most Config.StopTimeout, when it cuts them
// off. A nil error means that every request got its answer. It closes l.
//
// There is no one deadline for reading a request: a notice of a few bytes and an
// upload of minutes have each their own, set where the request comes in and
// where its body is read. net/http takes it back at the body's end, so that it
// does not end a request while the store works on it.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{
		Handler:           s.handler,
		ReadHeaderTimeout: s.cfg.HeaderTimeout,
		IdleTimeout:       s.cfg.IdleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.With("event", "http_server").Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve http: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.StopTimeout)
	defer cancel()
	err := srv.Shutdown(stop)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop http: requests were cut off: %w", err), srv.Close())
	}
	<-served
	return err
}

// Drain makes /readyz say that the replica is not ready, for good. Requests are
// answered as before: a load balancer needs a while to look away.
func (s *Server) Drain() { s.draining.Store(true) }
