package fcm

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// assumedStreams is how many streams net/http takes a receiver to allow until
	// that has said so itself.
	assumedStreams = 100

	// settleTime is how long a fresh connection whose receiver has not said how
	// many streams it takes carries one request only. The word comes with the
	// handshake's answer, unless the machine or the way is slow.
	settleTime = 100 * time.Millisecond

	// dialPause is how long a failed dial speaks for the next ones.
	dialPause = 250 * time.Millisecond

	// recheck is how often those who wait look for room by themselves: not all
	// that makes room tells.
	recheck = 50 * time.Millisecond
)

var errPoolClosed = errors.New("fcm: the sender is closed")

// pool keeps the HTTP/2 connections to one receiver, as few as carry what is in
// flight: the first that has room takes the next request, and another is made
// only when none has, one at a time. It sends a request on one connection, once.
//
// net/http's own pool dials once a waiting request (50 dials to use one
// connection) and repeats requests by its own judgement.
type pool struct {
	dial    func(context.Context) (*http.ClientConn, error)
	metrics *metrics

	waiters atomic.Int32  // length of queue, for the hooks of connections
	kick    chan struct{} // capacity 1: something changed
	stop    context.CancelFunc
	running sync.WaitGroup // the loop and a dial

	mu      sync.Mutex
	links   []*link
	queue   []*waiter // first come, first served
	dialing bool
	failed  error // of the last dial, until
	until   time.Time
	closed  bool
}

// link is one connection.
type link struct {
	conn    *http.ClientConn
	born    time.Time
	used    bool // by its first request
	settled bool

	inUse   int   // requests on it whose answers have not been read
	answers int64 // so far
	// silent: a request's time ran out and nothing was answered since it began.
	// The way to the receiver may be gone without a word, so nothing new is
	// given to it; with its last request it is closed.
	silent bool
}

// streams tells how many requests the connection takes at once, and whether the
// receiver has said so itself: it answered, or its word differs from what is
// assumed without it.
func (l *link) streams() (most int, said bool) {
	before := l.conn.InFlight()
	most = l.conn.Available() + before
	return most, l.settled || most != assumedStreams && l.conn.InFlight() == before
}

type waiter struct{ got chan grant } // capacity 1

// grant is room for one request on a connection, or why there is none.
type grant struct {
	link   *link
	before int64 // answers that the connection had given
	err    error
}

func newPool(dial func(context.Context) (*http.ClientConn, error), m *metrics) *pool {
	ctx, stop := context.WithCancel(context.Background())
	p := &pool{dial: dial, metrics: m, kick: make(chan struct{}, 1), stop: stop}
	p.running.Go(func() { p.run(ctx) })
	return p
}

// RoundTrip implements http.RoundTripper. It waits for room as long as the
// request's context lets it.
func (p *pool) RoundTrip(req *http.Request) (*http.Response, error) {
	g := p.take(req.Context())
	if g.err != nil {
		_ = req.Body.Close()
		return nil, g.err
	}
	l := g.link
	resp, err := l.conn.RoundTrip(req)
	p.ended(l, err == nil, req.Context().Err() != nil && err != nil, g.before)
	if err != nil {
		p.leave(l)
		return nil, err
	}
	resp.Body = &leavingBody{ReadCloser: resp.Body, leave: sync.OnceFunc(func() { p.leave(l) })}
	return resp, nil
}

// leavingBody is an answer's body; with its end the request leaves the connection.
type leavingBody struct {
	io.ReadCloser
	leave func()
}

func (b *leavingBody) Close() error {
	defer b.leave()
	return b.ReadCloser.Close()
}

// take waits for room for one request.
func (p *pool) take(ctx context.Context) grant {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return grant{err: errPoolClosed}
	}
	if len(p.queue) == 0 {
		if g, ok := p.room(); ok {
			defer p.mu.Unlock()
			return g
		}
	}
	if len(p.links) == 0 && p.failed != nil && time.Now().Before(p.until) {
		defer p.mu.Unlock()
		return grant{err: p.failed}
	}
	w := &waiter{got: make(chan grant, 1)}
	p.queue = append(p.queue, w)
	p.waiters.Store(int32(len(p.queue)))
	p.mu.Unlock()
	p.wake()

	select {
	case g := <-w.got:
		return g
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.queue, w); i >= 0 {
		p.queue = slices.Delete(p.queue, i, i+1)
		p.waiters.Store(int32(len(p.queue)))
		return grant{err: context.Cause(ctx)}
	}
	if g := <-w.got; g.link != nil { // served at the same moment
		g.link.inUse--
		defer p.wake()
	}
	return grant{err: context.Cause(ctx)}
}

// room finds a connection that takes one more request. The caller holds mu.
//
// The room is counted here and not reserved with net/http. There, the request
// whose turn it is waits until streams and reservations leave a place, and whoever
// has a reservation waits for the turn: where the receiver takes fewer streams
// than was assumed, or a request came without a reservation, they wait for each
// other for good.
func (p *pool) room() (grant, bool) {
	for _, l := range p.links {
		if l.silent || l.conn.Err() != nil || l.conn.Available() == 0 {
			continue
		}
		most, said := l.streams()
		if l.inUse >= most || !said && l.used && time.Since(l.born) < settleTime {
			continue
		}
		l.used = true
		l.inUse++
		return grant{link: l, before: l.answers}, true
	}
	return grant{}, false
}

// ended notes how a request on the connection ended: with an answer, or because
// its time was up. The receiver's settings were ahead of either.
func (p *pool) ended(l *link, answered, late bool, before int64) {
	p.mu.Lock()
	fresh := !l.settled
	l.settled = true
	switch {
	case answered:
		l.answers++
		l.silent = false
	case late && l.answers == before:
		l.silent = true
	}
	p.mu.Unlock()
	if fresh {
		p.wake()
	}
}

// leave takes a request off its connection.
func (p *pool) leave(l *link) {
	p.mu.Lock()
	l.inUse--
	given := l.silent && l.inUse == 0
	p.mu.Unlock()
	if given {
		_ = l.conn.Close() // nobody is on it
	}
	if p.waiters.Load() > 0 {
		p.wake()
	}
}

// wake has the loop look again. It is called from within net/http, too, and
// never blocks.
func (p *pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// run serves those who wait, until ctx ends.
func (p *pool) run(ctx context.Context) {
	look := time.NewTimer(0)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.kick:
		case <-look.C:
		}
		if p.serve(ctx) {
			look.Reset(recheck)
		} else {
			look.Stop()
		}
	}
}

// serve gives room to those who wait, in their order, and begins a dial where
// there is none. It reports whether somebody still waits.
func (p *pool) serve(ctx context.Context) (waiting bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links = slices.DeleteFunc(p.links, func(l *link) bool { return l.conn.Err() != nil })
	p.metrics.connections.Set(float64(len(p.links)))
	for len(p.queue) > 0 {
		g, ok := p.room()
		if !ok {
			break
		}
		p.queue[0].got <- g
		p.queue = p.queue[1:]
	}
	p.waiters.Store(int32(len(p.queue)))
	if len(p.queue) == 0 {
		return false
	}
	now := time.Now()
	settling := slices.ContainsFunc(p.links, func(l *link) bool {
		_, said := l.streams()
		return !said && now.Sub(l.born) < settleTime
	})
	if !p.dialing && !settling && !now.Before(p.until) {
		p.dialing = true
		p.running.Go(func() { p.connect(ctx) })
	}
	return true
}

// connect makes one more connection. Where it fails and there is no other, all
// who wait are told; otherwise they go on waiting for room.
func (p *pool) connect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	p.metrics.dials.Inc()
	conn, err := p.dial(ctx)

	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.wake()
	p.dialing = false
	switch {
	case err == nil && p.closed:
		_ = conn.Close()
	case err == nil:
		p.failed, p.until = nil, time.Time{}
		p.links = append(p.links, &link{conn: conn, born: time.Now()})
		conn.SetStateHook(func(conn *http.ClientConn) {
			if p.waiters.Load() > 0 || conn.Err() != nil {
				p.wake()
			}
		})
	default:
		p.failed, p.until = err, time.Now().Add(dialPause)
		if len(p.links) == 0 {
			p.dismiss(err)
		}
	}
}

// dismiss tells all who wait. The caller holds mu.
func (p *pool) dismiss(err error) {
	for _, w := range p.queue {
		w.got <- grant{err: err}
	}
	p.queue = nil
	p.waiters.Store(0)
}

// close ends all connections, and with them what is still on them.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	links := p.links
	p.links = nil
	p.dismiss(errPoolClosed)
	p.metrics.connections.Set(0)
	p.mu.Unlock()
	p.stop()
	for _, l := range links {
		_ = l.conn.Close() // it is gone either way
	}
	p.running.Wait()
}
