package local

import (
	"context"
	"net"
	"sync"
	"time"
)

// mostRequest bounds what SwallowReply's match is shown.
const mostRequest = 1 << 20

// link is one client's connection through a Proxy. The fields below done are
// guarded by the proxy's mutex.
type link struct {
	proxy  *Proxy
	client *net.TCPConn
	done   chan struct{} // closed when the link ends

	server  *net.TCPConn // nil before it has been dialled
	ended   bool
	lost    bool   // bytes, or an end, went into the black hole
	request []byte // since the server's last bytes, while SwallowReply or HoldRequest is armed
	mute    bool   // the server's next bytes are the reply to swallow

	held <-chan struct{} // closed when what is held may go on; nil: nothing is
}

// end closes both sides; the caller holds the proxy's mutex.
func (l *link) end(reset bool) {
	if l.ended {
		return
	}
	l.ended = true
	close(l.done)
	hangUp(l.client, reset)
	if l.server != nil {
		hangUp(l.server, reset)
	}
}

// run carries bytes until both directions have ended.
func (l *link) run() {
	if !l.pass(nil) {
		// A new connection in the black hole: it is open, and that is all.
		l.drain()
		return
	}
	server, err := l.dial()
	if err != nil {
		// What the client of a server that is down would see.
		l.proxy.cut(true, func(other *link) bool { return other == l })
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { l.carry(l.client, server, l.sent, nil) })
	wg.Go(func() { l.carry(server, l.client, l.answered, l.rewriter()) })
	wg.Wait()
}

func (l *link) dial() (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		select {
		case <-l.done:
			cancel()
		case <-ctx.Done():
		}
	})
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", l.proxy.target)
	if err != nil {
		return nil, err
	}
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.server = conn.(*net.TCPConn)
	if l.ended {
		_ = l.server.Close()
	}
	return l.server, nil
}

// carry moves chunks one way. see looks at each that the fault lets through,
// and says whether it may move on; change, if any, makes another of it.
func (l *link) carry(from, to *net.TCPConn, see func(chunk []byte) bool, change func([]byte) []byte) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && l.pass(buf[:n]) && see(buf[:n]) {
			if from == l.client && !l.await() {
				return
			}
			chunk := buf[:n]
			if change != nil {
				chunk = change(chunk)
			}
			if _, err := to.Write(chunk); err != nil {
				l.fail()
				return
			}
		}
		if err == nil {
			continue
		}
		if !l.pass(nil) {
			<-l.done // the end went into the black hole as well
			return
		}
		if err := to.CloseWrite(); err != nil {
			l.fail()
		}
		return
	}
}

func (l *link) rewriter() func([]byte) []byte {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	return l.proxy.rewrite
}

// fail ends the link after one side broke: the other must see it too.
func (l *link) fail() { l.proxy.cut(true, func(other *link) bool { return other == l }) }

// pass waits as the fault demands and says whether the chunk (nil: the end, or
// the beginning) may move on; if not, the link has lost it.
func (l *link) pass(chunk []byte) bool {
	delayed := chunk == nil
	for {
		l.proxy.mu.Lock()
		f, changed := l.proxy.fault, l.proxy.changed
		if f.kind == swallowing {
			l.lost = true
		}
		lost := l.lost
		l.proxy.mu.Unlock()
		switch {
		case lost:
			return false
		case f.kind == stalling:
			select {
			case <-changed:
			case <-l.done:
				return true // nobody is there to see it
			}
		case f.kind == delaying && !delayed:
			delayed = true
			t := time.NewTimer(f.wait())
			select {
			case <-t.C:
			case <-l.done:
				t.Stop()
			}
		default:
			return true
		}
	}
}

// drain reads and forgets until the link ends.
func (l *link) drain() {
	buf := make([]byte, 4<<10)
	for {
		if _, err := l.client.Read(buf); err != nil {
			<-l.done
			return
		}
	}
}

// sent sees what the client sends.
func (l *link) sent(chunk []byte) bool {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	swallow, hold := l.proxy.swallow, l.proxy.hold
	if swallow != nil && (swallow.left <= 0 || l.mute) {
		swallow = nil
	}
	if hold != nil && hold.left <= 0 {
		hold = nil
	}
	if swallow == nil && hold == nil {
		return true
	}
	l.request = append(l.request, chunk...)
	if over := len(l.request) - mostRequest; over > 0 {
		l.request = l.request[over:]
	}
	switch {
	case swallow != nil && swallow.match(l.request):
		swallow.left--
		l.mute = true
	case hold != nil && hold.match(l.request):
		hold.left--
		l.held = hold.released
	default:
		return true
	}
	l.request = nil
	return true
}

// await waits while what the client sent is held back. It is false where the link
// ended meanwhile.
func (l *link) await() bool {
	l.proxy.mu.Lock()
	held := l.held
	l.proxy.mu.Unlock()
	if held == nil {
		return true
	}
	select {
	case <-held:
	case <-l.done:
		return false
	}
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.held = nil
	return true
}

// answered sees what the server sends.
func (l *link) answered([]byte) bool {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.request = nil
	if !l.mute {
		return true
	}
	l.proxy.replies++
	l.end(false)
	return false
}
