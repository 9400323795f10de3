package relay

import (
	"errors"
	"io"
	"sync"
)

var errSealed = errors.New("relay: the request was given up before it was written")

// sealableBody is a request body that tells for certain whether any of it can
// have left. The transport buffers a request's head and writes it out with the
// body, so as long as the body is unread, no message has left. seal fixes that:
// a transport that comes to read later, in a goroutine of its own, gets an
// error and closes the connection.
type sealableBody struct {
	mu      sync.Mutex
	buf     *buffer // nil once closed
	rest    []byte
	length  int
	started bool
	sealed  bool
}

func newBody(buf *buffer) *sealableBody {
	return &sealableBody{buf: buf, rest: buf.b, length: len(buf.b)}
}

func (b *sealableBody) size() int { return b.length }

// seal reports whether the body is unread, and then keeps it so.
func (b *sealableBody) seal() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.started {
		return false
	}
	b.sealed = true
	return true
}

// Read implements io.Reader.
func (b *sealableBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sealed || b.buf == nil && len(b.rest) > 0 {
		return 0, errSealed
	}
	b.started = true
	if len(b.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close implements io.Closer. The transport closes the body when it will not
// read it again, which may be after the call has returned: only then may the
// buffer serve another request.
func (b *sealableBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buf != nil {
		b.buf.giveBack()
		b.buf = nil
		b.sealed = b.sealed || !b.started
	}
	return nil
}
