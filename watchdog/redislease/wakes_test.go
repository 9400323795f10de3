package redislease_test

import (
	"context"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/watchdog/redislease"
)

// listener is one replica's subscription.
type listener struct {
	ready chan struct{}
	wakes chan string
}

func (s *server) listen(t *testing.T, client redis.UniversalClient) *listener {
	t.Helper()
	return s.listenLogged(t, client, slog.DiscardHandler)
}

func (s *server) listenLogged(t *testing.T, client redis.UniversalClient, log slog.Handler) *listener {
	t.Helper()
	l := &listener{ready: make(chan struct{}, 100), wakes: make(chan string, 10_000)}
	w := redislease.NewWakes(client, s.keys, slog.New(log))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- w.Subscribe(ctx, func() { l.ready <- struct{}{} }, func(school string) { l.wakes <- school })
	}()
	t.Cleanup(func() {
		cancel()
		before := time.Now()
		require.NoError(t, <-done)
		require.Less(t, time.Since(before), 2*time.Second, "the end of the context must end a blocked read")
	})
	return l
}

func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(20 * time.Second):
		require.Fail(t, "did not come: "+what)
		panic("unreachable")
	}
}

func TestInterleaving19WakeReachesEveryReplica(t *testing.T) {
	t.Parallel()
	wakeReachesEveryReplica(t, startServer(t))
}

func wakeReachesEveryReplica(t *testing.T, s *server) {
	one, two := s.listen(t, s.client), s.listen(t, s.replica())
	receive(t, "one listens", one.ready)
	receive(t, "two listens", two.ready)
	w := redislease.NewWakes(s.client, s.keys, slog.New(slog.DiscardHandler))
	require.NoError(t, w.Wake(t.Context()))
	require.NoError(t, w.Wake(t.Context(), "A", "B.b_b-9"))
	for _, l := range []*listener{one, two} {
		require.Equal(t, "A", receive(t, "a wake", l.wakes))
		require.Equal(t, "B.b_b-9", receive(t, "a wake", l.wakes))
	}
	many := make([]string, 1001)
	for i := range many {
		many[i] = strconv.Itoa(i)
	}
	require.NoError(t, w.Wake(t.Context(), many...))
	var heard []string
	for range many {
		heard = append(heard, receive(t, "a wake", one.wakes))
	}
	// In no order: a Cluster takes each message at another node.
	require.ElementsMatch(t, many, heard)
}

func TestSubscriberComesBackAndSaysSo(t *testing.T) {
	t.Parallel()
	subscriberComesBack(t, startServer(t))
}

func subscriberComesBack(t *testing.T, s *server) {
	l := s.listen(t, s.client)
	w := redislease.NewWakes(s.direct, s.keys, slog.New(slog.DiscardHandler))
	receive(t, "listens", l.ready)
	for name, lose := range map[string]func(){
		"closed": s.closeConns,
		"reset": func() {
			s.each((*local.Proxy).Reset)
			s.each((*local.Proxy).Pass)
		},
		"restarted": func() {
			for _, r := range s.servers() {
				require.NoError(t, r.Restart(context.Background(), false))
			}
		},
	} {
		lose()
		receive(t, "listens again: "+name, l.ready)
		eventually(t, 10*time.Second, "the server takes a message", func() bool { return w.Wake(t.Context(), name) == nil })
		require.Equal(t, name, receive(t, "a wake: "+name, l.wakes))
	}
}

// lines is where a log goes, line by line.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func TestSilentConnectionIsNoticed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	said := make(lines, 100)
	l := s.listenLogged(t, s.client, slog.NewTextHandler(said, nil))
	receive(t, "listens", l.ready)
	require.NoError(t, s.proxy.BlackHole()) // no FIN, no RST: nothing ever comes
	require.Contains(t, receive(t, "the subscriber gives the connection up", said), "event=wake_channel_lost")
	require.NoError(t, s.proxy.Pass())
	receive(t, "listens again", l.ready)
}

func TestWakeFailsWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	wakeFailsWhileAway(t, startServer(t))
}

func wakeFailsWhileAway(t *testing.T, s *server) {
	s.each((*local.Proxy).Refuse)
	s.closeConns()
	w := redislease.NewWakes(s.client, s.keys, slog.New(slog.DiscardHandler))
	require.Error(t, w.Wake(t.Context(), "A"))
}
