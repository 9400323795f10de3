package sender

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Measured counts what is handed to a sender and how long its calls take.
// Results are counted where they are recorded, not here.
type Measured struct {
	next     Sender
	attempts prometheus.Counter
	duration prometheus.Observer
}

// Measure puts metrics before next, labelled with the sender's name:
// attempts_total counts every message handed over, whatever becomes of it (R2),
// send_duration_seconds observes every call. Several senders share reg; a nil
// reg registers nothing.
func Measure(name string, next Sender, reg prometheus.Registerer) (*Measured, error) {
	m, err := newMetrics(reg)
	if err != nil {
		return nil, fmt.Errorf("metrics of sender %s: %w", name, err)
	}
	return &Measured{
		next:     next,
		attempts: m.attempts.WithLabelValues(name),
		duration: m.duration.WithLabelValues(name),
	}, nil
}

// Send hands the batch to the sender behind.
func (m *Measured) Send(ctx context.Context, batch Batch) []Result {
	// Counted before the call: a call that never returns was an attempt too.
	m.attempts.Add(float64(len(batch.Messages)))
	begin := time.Now()
	results := m.next.Send(ctx, batch)
	m.duration.Observe(time.Since(begin).Seconds())
	return results
}

// Longest is that of the sender behind.
func (m *Measured) Longest() time.Duration { return m.next.Longest() }

// Ask asks the sender behind.
func (m *Measured) Ask(ctx context.Context, ids []string) (map[string]Status, error) {
	return Ask(ctx, m.next, ids)
}

type metrics struct {
	attempts *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// newMetrics registers the collectors, or finds those that another sender of
// the same replica has registered.
func newMetrics(reg prometheus.Registerer) (metrics, error) {
	m := metrics{
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "schoolbell", Name: "attempts_total",
			Help: "Messages handed to the sending call, whatever became of them.",
		}, []string{"sender"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "schoolbell", Name: "send_duration_seconds",
			Help:    "How long one sending call (a batch) took.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 15, 30},
		}, []string{"sender"}),
	}
	if reg == nil {
		return m, nil
	}
	var err error
	if m.attempts, err = registered(reg, m.attempts); err != nil {
		return metrics{}, err
	}
	if m.duration, err = registered(reg, m.duration); err != nil {
		return metrics{}, err
	}
	return m, nil
}

func registered[C prometheus.Collector](reg prometheus.Registerer, c C) (C, error) {
	err := reg.Register(c)
	var known prometheus.AlreadyRegisteredError
	if errors.As(err, &known) {
		if existing, ok := known.ExistingCollector.(C); ok {
			return existing, nil
		}
	}
	return c, err
}
