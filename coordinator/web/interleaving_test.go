package web

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestInterleaving19TheAgendaIsWokenAfterTheCommit: a wake-up before it would find
// nothing, and one for what was not stored would be for nothing.
func TestInterleaving19TheAgendaIsWokenAfterTheCommit(t *testing.T) {
	t.Parallel()
	const body = `{"school":"A","title":"t","body":"b","recipients":[{"token":"a"}]}`
	w := newWorld(t, nil)
	var early []string
	w.store.onAccept = func(context.Context) error {
		w.waker.mu.Lock()
		defer w.waker.mu.Unlock()
		early = append(early, w.waker.woken...)
		return nil
	}
	require.Equal(t, http.StatusAccepted, w.do(http.MethodPost, "/v1/notices", "application/json", strings.NewReader(body)).Code)
	require.Empty(t, early)
	require.Equal(t, []string{"A"}, w.waker.woken)

	w.store.onAccept = func(context.Context) error { return errors.New("rolled back") }
	require.Equal(t, http.StatusInternalServerError, w.do(http.MethodPost, "/v1/notices", "application/json", strings.NewReader(body)).Code)
	require.Equal(t, []string{"A"}, w.waker.woken)
}
