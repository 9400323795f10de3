package store

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// closePatience is how long Close lets connections say goodbye.
const closePatience = 2 * time.Second

// errClosed is what a dial ends with after the store was closed.
var errClosed = errors.New("store: closed")

// links are the connections of the pools. A pool that is closed says goodbye on
// each, and asks the server on another one to cancel what was given up; where
// nobody answers the driver waits 15 s for that, and a replica that is to stop
// would outlast its time for it.
type links struct {
	mu    sync.Mutex
	conns map[net.Conn]struct{}
	shut  bool
}

// dialer is dial with its connections kept in mind.
func (l *links) dialer(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.shut {
			return nil, errors.Join(errClosed, conn.Close())
		}
		one := &link{Conn: conn, links: l}
		l.conns[one] = struct{}{}
		return one, nil
	}
}

// closeWith runs closing, and cuts what is still connected where that takes
// longer than patience.
func (l *links) closeWith(closing func(), patience time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		closing()
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		l.cut()
		<-done
	}
}

func (l *links) cut() {
	l.mu.Lock()
	conns := l.conns
	l.conns, l.shut = map[net.Conn]struct{}{}, true
	l.mu.Unlock()
	for conn := range conns {
		_ = conn.Close() // nobody is there to hear of it
	}
}

type link struct {
	net.Conn
	links *links
}

func (c *link) Close() error {
	c.links.mu.Lock()
	delete(c.links.conns, c)
	c.links.mu.Unlock()
	return c.Conn.Close()
}
