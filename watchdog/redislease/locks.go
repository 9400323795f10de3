package redislease

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"schoolbell/scripts"
	"schoolbell/watchdog"
)

// Locks is a watchdog.Backend in Redis. It is safe for concurrent use.
type Locks struct {
	client                         redis.UniversalClient
	keys                           scripts.Keys
	acquire, bind, extend, release scripts.Script
	clock                          serverClock
}

var _ watchdog.Backend = (*Locks)(nil)

// NewLocks returns the locks behind client, which should come from NewClient and
// stays the caller's.
func NewLocks(client redis.UniversalClient, keys scripts.Keys) *Locks {
	return &Locks{
		client: client, keys: keys,
		acquire: scripts.Acquire(), bind: scripts.Bind(), extend: scripts.Extend(), release: scripts.Release(),
	}
}

// Acquire implements watchdog.Backend. The server refuses the request when its
// own clock is past what this process believes it to be plus r.Patience; where
// that belief was wrong, the refusal corrects it and the request is made once
// more. The first request of a process costs this second round trip.
func (l *Locks) Acquire(ctx context.Context, r watchdog.Request) error {
	lease, etc, err := wholeMillis(r.Lease, r.ETC)
	if err != nil {
		return fmt.Errorf("acquire lock: %w", err)
	}
	for range 2 {
		notAfter := l.clock.now().Add(r.Patience).UnixMilli()
		reply, err := l.run(ctx, l.acquire, r.Name, r.Owner, r.Acquisition, lease, etc, notAfter)
		switch {
		case err != nil:
			return err
		case reply.status == "OK", reply.status == "OK_AGAIN":
			return nil
		case reply.status == "BUSY" && len(reply.more) >= 2:
			owner, _ := reply.more[1].(string)
			left, _ := reply.more[0].(int64)
			return &watchdog.BusyError{Owner: owner, Remaining: time.Duration(left) * time.Millisecond}
		case reply.status != "STALE":
			return reply.unexpected(l.acquire)
		}
	}
	return watchdog.ErrStale
}

// Bind implements watchdog.Backend.
func (l *Locks) Bind(ctx context.Context, name, acquisition string, fence int64) error {
	return l.own(ctx, l.bind, "LOST", watchdog.ErrLeaseLost, name, acquisition, fence)
}

// Extend implements watchdog.Backend.
func (l *Locks) Extend(ctx context.Context, name, acquisition string, lease time.Duration, renewal int64) error {
	ms, _, err := wholeMillis(lease, 0)
	if err != nil {
		return fmt.Errorf("extend lock: %w", err)
	}
	return l.own(ctx, l.extend, "LOST", watchdog.ErrLeaseLost, name, acquisition, ms, renewal)
}

// Release implements watchdog.Backend.
func (l *Locks) Release(ctx context.Context, name, acquisition string) error {
	return l.own(ctx, l.release, "NOT_HELD", watchdog.ErrNotHeld, name, acquisition)
}

// own runs a script that answers OK to the owner and otherwise to anybody else.
func (l *Locks) own(ctx context.Context, s scripts.Script, otherwise string, sentinel error, name, acquisition string, args ...any) error {
	reply, err := l.run(ctx, s, name, append([]any{acquisition}, args...)...)
	switch {
	case err != nil:
		return err
	case reply.status == "OK":
		return nil
	case reply.status != otherwise:
		return reply.unexpected(s)
	}
	if len(reply.more) > 0 && reply.more[0] != "" {
		return fmt.Errorf("held by %q: %w", reply.more[0], sentinel)
	}
	return fmt.Errorf("gone: %w", sentinel)
}

// reply is what every lock script returns: a status, the server's time, and more.
type reply struct {
	status string
	more   []any
}

func (r reply) unexpected(s scripts.Script) error {
	return fmt.Errorf("%s: unexpected answer %q", s.Name, r.status)
}

// run runs a lock script on the lock of name.
func (l *Locks) run(ctx context.Context, s scripts.Script, name string, args ...any) (reply, error) {
	values, err := evaluate(ctx, l.client, s, l.keys.Lock(name), args...)
	received := time.Now()
	if err != nil {
		return reply{}, err
	}
	if len(values) < 2 {
		return reply{}, fmt.Errorf("%s: answer of %d values", s.Name, len(values))
	}
	status, ok := values[0].(string)
	now, isNumber := values[1].(int64)
	if !ok || !isNumber {
		return reply{}, fmt.Errorf("%s: answer begins with %T, %T", s.Name, values[0], values[1])
	}
	l.clock.learn(received, time.UnixMilli(now))
	return reply{status: status, more: values[2:]}, nil
}

// evaluate runs a script on one key by its SHA, and by its source where the
// server does not know it (after SCRIPT FLUSH, a restart, a failover).
func evaluate(ctx context.Context, c redis.UniversalClient, s scripts.Script, key string, args ...any) ([]any, error) {
	cmd := do(ctx, c, append([]any{"evalsha", s.SHA, 1, key}, args...)...)
	if redis.HasErrorPrefix(cmd.Err(), "NOSCRIPT") {
		cmd = do(ctx, c, append([]any{"eval", s.Source, 1, key}, args...)...)
	}
	values, err := cmd.Slice()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Name, classify(err))
	}
	return values, nil
}

// classify marks the errors that say at once that the connection or the role of
// the server changed.
func classify(err error) error {
	_, moved := redis.IsMovedError(err)
	_, ask := redis.IsAskError(err)
	switch {
	case moved, ask,
		redis.IsReadOnlyError(err), redis.IsMasterDownError(err), redis.IsLoadingError(err),
		redis.IsClusterDownError(err), redis.IsTryAgainError(err),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%w: %w", watchdog.ErrServerChanged, err)
	}
	return err
}

// wholeMillis returns both durations in milliseconds; Redis knows no less.
func wholeMillis(lease, etc time.Duration) (int64, int64, error) {
	if lease < time.Millisecond {
		return 0, 0, fmt.Errorf("lease %s is below a millisecond", lease)
	}
	return lease.Milliseconds(), etc.Milliseconds(), nil
}

// serverClock believes what time it is at the server. With a Cluster it is the
// time of the node that answered last; nodes differ by less than what a request
// may be late without harm, and a wrong belief costs one refused request.
type serverClock struct {
	mu     sync.Mutex
	at     time.Time // local, monotonic
	server time.Time // at that moment, late by the answer's way
}

// learn takes an answer that was received at local and says server.
func (c *serverClock) learn(local, server time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at, c.server = local, server
}

// now returns the server's time, late rather than early; before the first answer
// the epoch, which every server refuses and thereby corrects.
func (c *serverClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at.IsZero() {
		return time.UnixMilli(0)
	}
	return c.server.Add(time.Since(c.at))
}
