package node

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/sender"
)

// silent is a sender that answers whatever comes, and says whether it was told
// that the call had ended.
type silent struct {
	ended bool
	gate  error
}

func (s *silent) Send(ctx context.Context, b sender.Batch) []sender.Result {
	s.ended, s.gate = ctx.Err() != nil, b.Gate()
	return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
}

func (*silent) Longest() (none time.Duration) { return none }

// TestInterleaving22ACutLineIsCutAtOnce: what a replica does because it was killed, a moment
// later, does not get out, whether or not the goroutines that close its
// connections have run by then.
func TestInterleaving22ACutLineIsCutAtOnce(t *testing.T) {
	t.Parallel()
	life, kill := context.WithCancel(context.Background())
	line := newLifeline(life)
	here, there := net.Pipe()
	defer func() { require.NoError(t, there.Close()) }()
	conn := line.hang(here)
	var log events
	logger := slog.New(line.handler(log.logger().Handler())).With("event", "alive").WithGroup("more")
	logger.Info("alive", "n", 1)
	s := &silent{}
	calls := 0
	call := func(ctx context.Context) error { calls++; return ctx.Err() }
	require.NoError(t, line.step(t.Context(), call))
	line.sender(s).Send(t.Context(), sender.Batch{Messages: []sender.Message{{ID: "1.1"}}})
	require.NoError(t, s.gate)
	shut := errors.New("the lease is gone")
	line.sender(s).Send(t.Context(), sender.Batch{Messages: []sender.Message{{ID: "1.1"}}, Gate: func() error { return shut }})
	require.ErrorIs(t, s.gate, shut)

	kill()
	_, err := conn.Write([]byte("x"))
	require.ErrorIs(t, err, ErrKilled)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, ErrKilled)
	require.NoError(t, conn.Close())
	results := line.sender(s).Send(t.Context(), sender.Batch{Messages: []sender.Message{{ID: "1.1"}}})
	require.True(t, s.ended)
	require.ErrorIs(t, s.gate, ErrKilled)
	require.Len(t, results, 1)
	require.Equal(t, sender.Unknown, results[0].Class, "an answer that came is known to nobody")
	err = line.step(t.Context(), call)
	require.ErrorIs(t, err, ErrKilled)
	require.ErrorIs(t, err, school.ErrUnavailable)
	require.Equal(t, 1, calls, "the dead call nobody")
	logger.Info("dead", "n", 2)
	require.Len(t, log.lines(t), 1)
	require.Equal(t, []string{"alive"}, log.names(t))
}

// TestNoLine: a replica that ends with its process goes straight to its parts.
func TestNoLine(t *testing.T) {
	t.Parallel()
	var d Deps
	line := newLifeline(d.Life)
	require.Nil(t, line)
	require.Nil(t, line.killed())
	require.False(t, line.dead())
	s := &silent{}
	require.Same(t, s, line.sender(s))
	require.Nil(t, line.listener(nil))
	require.Nil(t, line.outbox(nil))
}
