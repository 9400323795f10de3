package sender

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

func TestSendersShareTheirMetrics(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	next := funcSender{longest: time.Second, send: func(_ context.Context, b Batch) []Result {
		return Fill(b.Messages, Result{Class: NotSent, Code: CodeConnectFailed})
	}}
	a, err := Measure("a", next, reg)
	require.NoError(t, err)
	b, err := Measure("b", next, reg)
	require.NoError(t, err)

	a.Send(t.Context(), batchOf("1", "2"))
	a.Send(t.Context(), batchOf("3"))
	b.Send(t.Context(), batchOf("4"))

	require.NoError(t, testutil.GatherAndCompare(reg, strings.NewReader(`
# HELP schoolbell_attempts_total Messages handed to the sending call, whatever became of them.
# TYPE schoolbell_attempts_total counter
schoolbell_attempts_total{sender="a"} 3
schoolbell_attempts_total{sender="b"} 1
`), "schoolbell_attempts_total"))
	n, err := testutil.GatherAndCount(reg, "schoolbell_send_duration_seconds")
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.Equal(t, time.Second, a.Longest())
}

func TestMetricsAreOptional(t *testing.T) {
	t.Parallel()
	m, err := Measure("a", funcSender{send: func(_ context.Context, b Batch) []Result { return nil }}, nil)
	require.NoError(t, err)
	require.Empty(t, m.Send(t.Context(), batchOf("1")))
	answers, err := m.Ask(t.Context(), []string{"1"})
	require.NoError(t, err)
	require.Equal(t, map[string]Status{"1": StatusUnknown}, answers, "one that cannot be asked knows nothing")
}
