package logsender

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender"
	"schoolbell/sender/sendertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lines is a log that may be written and read at once.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestContract(t *testing.T) {
	t.Parallel()
	sendertest.Run(t, func(t *testing.T) sendertest.Subject {
		out := new(lines)
		s, err := New("log", slog.New(slog.NewTextHandler(out, nil)))
		require.NoError(t, err)
		return sendertest.Subject{Sender: s, Logged: out.String}
	})
}

func TestOneLineANotice(t *testing.T) {
	t.Parallel()
	out := new(lines)
	s, err := New("log", slog.New(slog.NewTextHandler(out, nil)))
	require.NoError(t, err)
	b := sendertest.Batch("n1", 3, nil)
	b.Messages = append(b.Messages, sendertest.Batch("n2", 2, nil).Messages...)

	require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), s.Send(t.Context(), b))

	got := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, got, 2)
	require.Contains(t, got[0], "sender=log event=messages_logged school=A batch=n1 notice=n1 messages=3 first=n1.1 last=n1.3")
	require.Contains(t, got[1], "notice=n2 messages=2 first=n2.1 last=n2.2")
	_, err = New("log", nil)
	require.Error(t, err)
}
