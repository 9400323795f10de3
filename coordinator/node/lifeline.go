package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/redis/go-redis/v9"

	"schoolbell/school"
	"schoolbell/sender"
)

// ErrKilled ends a Run whose replica was killed.
var ErrKilled = errors.New("replica was killed")

// errCut answers a call whose way was cut. It is of the kind that callers know
// to try again elsewhere, for the one who hears of it before his own connection
// breaks.
var errCut = fmt.Errorf("%w: %w", school.ErrUnavailable, ErrKilled)

// lifeline is what a replica that can be killed inside its process reaches the
// world through: Redis, the database, its receivers, its callers, its log. When
// it is cut, all of that is gone at once, as it is for a process that gets
// SIGKILL: what is on a wire is lost, nothing is recorded, settled or released
// any more, and nobody hears a word. What is left of the replica is goroutines,
// which find this out one by one and end.
//
// A nil lifeline, a replica that ends with its process, is in nobody's way.
type lifeline struct{ ctx context.Context }

// newLifeline is cut when life ends; nil: there is none.
func newLifeline(life context.Context) *lifeline {
	if life == nil {
		return nil
	}
	return &lifeline{ctx: life}
}

// killed is closed when the line is cut; nil where there is none.
func (l *lifeline) killed() <-chan struct{} {
	if l == nil {
		return nil
	}
	return l.ctx.Done()
}

// dead reports whether the line is cut.
func (l *lifeline) dead() bool { return l != nil && l.ctx.Err() != nil }

// bind makes ctx end with the line, too.
func (l *lifeline) bind(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	if l.dead() {
		cancel(ErrKilled) // now, not when a goroutine comes to it
	}
	stop := context.AfterFunc(l.ctx, func() { cancel(ErrKilled) })
	return ctx, func() { stop(); cancel(nil) }
}

// dial makes connections to Redis that break when the line is cut.
func (l *lifeline) dial(where *redis.UniversalOptions) func(ctx context.Context, network, addr string) (net.Conn, error) {
	next := where.Dialer
	if l == nil {
		return next
	}
	if next == nil {
		o := where.Simple()
		o.DialTimeout = redisTimeout
		next = redis.NewDialer(o)
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, done := l.bind(ctx)
		defer done()
		c, err := next(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return l.hang(c), nil
	}
}

// hang closes c when the line is cut, at once where it is.
func (l *lifeline) hang(c net.Conn) net.Conn {
	return &cuttable{Conn: c, line: l, stop: context.AfterFunc(l.ctx, func() { _ = c.Close() })}
}

// cuttable is a connection that hangs on a line.
type cuttable struct {
	net.Conn
	line *lifeline
	stop func() bool
}

// Read and Write end with the line, a moment before the connection is closed:
// what the replica does because it was killed must not get out any more.
func (c *cuttable) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.line.dead() {
		return 0, ErrKilled
	}
	return n, err
}

func (c *cuttable) Write(p []byte) (int, error) {
	if c.line.dead() {
		return 0, ErrKilled
	}
	return c.Conn.Write(p)
}

func (c *cuttable) Close() error {
	c.stop()
	return c.Conn.Close()
}

// listener accepts connections that break when the line is cut. It goes on
// accepting then, only to break them at once: whoever serves it closes it, and
// joins its handlers.
func (l *lifeline) listener(next net.Listener) net.Listener {
	if l == nil {
		return next
	}
	return cuttableListener{next, l}
}

type cuttableListener struct {
	net.Listener
	line *lifeline
}

func (k cuttableListener) Accept() (net.Conn, error) {
	c, err := k.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return k.line.hang(c), nil
}

// handler drops what is logged after the line was cut.
func (l *lifeline) handler(next slog.Handler) slog.Handler {
	if l == nil {
		return next
	}
	return mortal{next, l}
}

type mortal struct {
	slog.Handler
	line *lifeline
}

func (m mortal) Enabled(ctx context.Context, level slog.Level) bool {
	return !m.line.dead() && m.Handler.Enabled(ctx, level)
}

func (m mortal) WithAttrs(attrs []slog.Attr) slog.Handler {
	return mortal{m.Handler.WithAttrs(attrs), m.line}
}

func (m mortal) WithGroup(name string) slog.Handler { return mortal{m.Handler.WithGroup(name), m.line} }

// sender ends the calls under way when the line is cut and lets nothing out
// afterwards.
func (l *lifeline) sender(next sender.Sender) sender.Sender {
	if l == nil {
		return next
	}
	return cuttableSender{next, l}
}

type cuttableSender struct {
	sender.Sender
	line *lifeline
}

func (s cuttableSender) Send(ctx context.Context, b sender.Batch) []sender.Result {
	ctx, done := s.line.bind(ctx)
	defer done()
	// A dead process writes nothing; here the call may hear of its end later.
	gate := b.Gate
	b.Gate = func() error {
		if s.line.dead() {
			return ErrKilled
		}
		if gate == nil {
			return nil
		}
		return gate()
	}
	results := s.Sender.Send(ctx, b)
	if s.line.dead() {
		// An answer that came is lost as well: it is known to no one.
		return sender.Fill(b.Messages, sender.Result{Class: sender.Unknown, Code: sender.CodeCancelled})
	}
	return results
}

func (s cuttableSender) Ask(ctx context.Context, ids []string) (map[string]sender.Status, error) {
	return through(ctx, s.line, func(ctx context.Context) (map[string]sender.Status, error) {
		return sender.Ask(ctx, s.Sender, ids)
	})
}

// through makes a call that ends when the line is cut. What it then brought home
// is lost, whether it was done or not.
func through[T any](ctx context.Context, l *lifeline, call func(ctx context.Context) (T, error)) (T, error) {
	ctx, done := l.bind(ctx)
	defer done()
	var none T
	if l.dead() {
		return none, errCut
	}
	v, err := call(ctx)
	if l.dead() {
		return none, errCut
	}
	return v, err
}

// last is step for a call that is tried again where the store is away: a dead
// replica tries nothing again.
func (l *lifeline) last(ctx context.Context, call func(ctx context.Context) error) error {
	err := l.step(ctx, call)
	if errors.Is(err, ErrKilled) {
		return ErrKilled
	}
	return err
}

// step is through for a call that only fails or not.
func (l *lifeline) step(ctx context.Context, call func(ctx context.Context) error) error {
	_, err := through(ctx, l, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	return err
}
