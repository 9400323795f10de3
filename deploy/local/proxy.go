package local

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Proxy stands between clients and one server and injects faults into their
// TCP connections. It passes bytes on until a fault is set; the last one set
// replaces the one before, and Pass ends it. It needs no privileges and does
// not know the protocol.
//
// Its methods may be called from several goroutines, and act on the
// connections that exist as well as on new ones unless they say otherwise.
// They fail only when the proxy is closed, or when it can't have its port back
// after Refuse.
type Proxy struct {
	target string
	addr   string

	mu       sync.Mutex
	fault    fault
	changed  chan struct{} // closed and replaced when the fault changes
	listener net.Listener  // nil while refusing
	links    map[*link]struct{}
	swallow  *swallow
	hold     *hold
	rewrite  func(reply []byte) []byte
	replies  int // swallowed so far
	closed   bool

	wg sync.WaitGroup // the accept loop and the links
}

type faultKind int

const (
	passing faultKind = iota
	delaying
	stalling
	swallowing
	refusing
	resetting
)

type fault struct {
	kind          faultKind
	delay, jitter time.Duration
}

// swallow is the order of SwallowReply.
type swallow struct {
	match func(request []byte) bool
	left  int
}

// hold is the order of HoldRequest.
type hold struct {
	match    func(request []byte) bool
	left     int
	released chan struct{}
}

// StartProxy listens on a free port of 127.0.0.1 for the server at target
// ("host:port"), which need not run yet. The caller closes it.
func StartProxy(target string) (*Proxy, error) {
	if _, _, err := net.SplitHostPort(target); err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	l, err := listen()
	if err != nil {
		return nil, fmt.Errorf("start proxy: %w", err)
	}
	p := &Proxy{
		target:   target,
		addr:     l.Addr().String(),
		changed:  make(chan struct{}),
		listener: l,
		links:    make(map[*link]struct{}),
	}
	p.wg.Go(func() { p.accept(l) })
	return p, nil
}

// Addr is what clients connect to, "127.0.0.1:port". It stays the same.
func (p *Proxy) Addr() string { return p.addr }

// Pass ends the fault, disarms SwallowReply, and lets go of what HoldRequest held.
func (p *Proxy) Pass() error {
	p.mu.Lock()
	p.swallow = nil
	p.letGo()
	p.mu.Unlock()
	return p.set(fault{})
}

// Delay holds each chunk (what one read of at most 32 KiB returns), in both
// directions, for d plus or minus up to jitter, evenly spread. A connection's
// chunks follow one another, so this limits its rate too.
func (p *Proxy) Delay(d, jitter time.Duration) error {
	return p.set(fault{kind: delaying, delay: d, jitter: jitter})
}

// Stall holds everything back, in both directions, for as long as it is set:
// connections open and stay open, and nothing arrives. What was held is
// delivered, late, when it ends: a partition that heals, with TCP's
// retransmissions.
func (p *Proxy) Stall() error { return p.set(fault{kind: stalling}) }

// BlackHole swallows everything in both directions, the end of a connection
// included: connections open and stay open, and nothing ever arrives. When it
// ends, the connections that lost bytes are reset, since their streams have a
// hole; the others go on.
func (p *Proxy) BlackHole() error { return p.set(fault{kind: swallowing}) }

// Refuse closes the listening port: new connections get "connection refused".
// Connections that exist go on; CloseConns ends them.
func (p *Proxy) Refuse() error { return p.set(fault{kind: refusing}) }

// Reset aborts every connection with an RST to both sides, and new ones as
// soon as they are accepted.
func (p *Proxy) Reset() error {
	if err := p.set(fault{kind: resetting}); err != nil {
		return err
	}
	p.cut(true, func(*link) bool { return true })
	return nil
}

// CloseConns ends every connection in order (FIN to both sides). New ones are
// treated as before.
func (p *Proxy) CloseConns() { p.cut(false, func(*link) bool { return true }) }

// SwallowReply makes the replies to the next n requests that match get lost:
// the request reaches the server, the server's answer is thrown away as soon
// as it comes, and the connection is closed. The client can't know whether its
// request was executed; it was. It works along with the fault that is set,
// until n have matched or Pass.
//
// match is called with what the client has sent on a connection since the last
// bytes from the server, at most 1 MiB; with a client that waits for answers
// that is one request. From the match on nothing more from the server reaches
// the client on that connection, so with a client that pipelines, the replies
// before and after get lost too. match must not call the proxy.
func (p *Proxy) SwallowReply(match func(request []byte) bool, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallow = &swallow{match: match, left: n}
}

// HoldRequest makes the next n requests that match come late: each is held back,
// with all that its client sends after it on that connection, until Pass delivers
// it, also if the client has given it up and hung up meanwhile. It works along
// with the fault that is set. match is called as by SwallowReply.
func (p *Proxy) HoldRequest(match func(request []byte) bool, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.letGo()
	p.hold = &hold{match: match, left: n, released: make(chan struct{})}
}

// letGo lets go of what is held; the caller holds the mutex.
func (p *Proxy) letGo() {
	if p.hold != nil {
		close(p.hold.released)
		p.hold = nil
	}
}

// Rewrite changes what the server says before the client gets it, chunk by chunk
// (what one read of at most 32 KiB returns): for servers that tell their clients
// where the others are, so that these are reached through proxies as well. It
// stays for the proxy's life. rewrite must not call the proxy.
func (p *Proxy) Rewrite(rewrite func(reply []byte) []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rewrite = rewrite
}

// Swallowed is how many replies SwallowReply has thrown away so far.
func (p *Proxy) Swallowed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.replies
}

// RequestContains matches a request that contains the text, in upper or lower
// case, such as "EVALSHA" or a part of a key.
func RequestContains(text string) func(request []byte) bool {
	want := bytes.ToUpper([]byte(text))
	return func(request []byte) bool { return bytes.Contains(bytes.ToUpper(request), want) }
}

// Conns is the number of connections that clients have open.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Close ends the listener and every connection, and waits for their
// goroutines.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.letGo()
	p.mu.Unlock()
	p.CloseConns()
	p.wg.Wait()
	return nil
}

func (p *Proxy) set(f fault) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("proxy to %s: %w", p.target, os.ErrClosed)
	}
	if f.kind == refusing {
		if p.listener != nil {
			_ = p.listener.Close()
			p.listener = nil
		}
	} else if p.listener == nil {
		l, err := p.listenAgain()
		if err != nil {
			return fmt.Errorf("proxy to %s: %w", p.target, err)
		}
		p.listener = l
		p.wg.Go(func() { p.accept(l) })
	}
	if p.fault.kind == swallowing && f.kind != swallowing {
		for l := range p.links {
			if l.lost {
				l.end(true)
			}
		}
	}
	p.fault = f
	close(p.changed)
	p.changed = make(chan struct{})
	return nil
}

func (p *Proxy) listenAgain() (net.Listener, error) {
	for i := 1; ; i++ {
		l, err := net.Listen("tcp4", p.addr)
		if err == nil || !errors.Is(err, syscall.EADDRINUSE) || i == portAttempts {
			return l, err
		}
		time.Sleep(time.Duration(i) * 10 * time.Millisecond)
	}
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Out of descriptors, or a connection that died in the queue.
			time.Sleep(time.Millisecond)
			continue
		}
		p.admit(conn.(*net.TCPConn))
	}
}

// admit gives a connection a link of its own.
func (p *Proxy) admit(conn *net.TCPConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.fault.kind == resetting {
		hangUp(conn, !p.closed)
		return
	}
	l := &link{proxy: p, client: conn, done: make(chan struct{})}
	p.links[l] = struct{}{}
	p.wg.Go(func() {
		l.run()
		p.mu.Lock()
		l.end(false)
		delete(p.links, l)
		p.mu.Unlock()
	})
}

// cut ends the links that the condition picks.
func (p *Proxy) cut(reset bool, picked func(*link) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if picked(l) {
			l.end(reset)
		}
	}
}

func (f fault) wait() time.Duration {
	d := f.delay
	if f.jitter > 0 {
		d += time.Duration(rand.Int64N(int64(2*f.jitter)+1)) - f.jitter
	}
	return max(d, 0)
}

// hangUp closes a connection, with an RST if asked.
func hangUp(conn *net.TCPConn, reset bool) {
	if reset {
		_ = conn.SetLinger(0)
	}
	_ = conn.Close()
}
