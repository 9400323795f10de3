package watchdog

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	held      prometheus.Gauge
	acquire   *prometheus.CounterVec
	extend    *prometheus.CounterVec
	remaining prometheus.Histogram
	lost      *prometheus.CounterVec
}

// newMetrics builds the metrics and registers them unless reg is nil.
func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		held: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "schoolbell_locks_held",
			Help: "Locks that this replica holds.",
		}),
		acquire: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_lock_acquire_total",
			Help: "Attempts to take a lock, by result: ok, busy, stale, error.",
		}, []string{"result"}),
		extend: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_lease_extend_total",
			Help: "Lease extensions, by result: ok, lost, late (answered after the local end), error (unknown, tried again).",
		}, []string{"result"}),
		remaining: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "schoolbell_lease_remaining_seconds",
			Help:    "What was left before the lease's local end when an extension was answered.",
			Buckets: []float64{0, 0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 20, 30, 40, 60},
		}),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_lease_lost_total",
			Help: "Leases that ended before their work, by cause: lost, expired, no_progress, max_hold.",
		}, []string{"cause"}),
	}
	// Each result is there from the start, so that a rate over it is 0 and not absent.
	for _, r := range []string{"ok", "busy", "stale", "error"} {
		m.acquire.WithLabelValues(r)
	}
	for _, r := range []string{"ok", "lost", "late", "error"} {
		m.extend.WithLabelValues(r)
	}
	for _, c := range []error{ErrLeaseLost, ErrLeaseExpired, ErrNoProgress, ErrMaxHold} {
		m.lost.WithLabelValues(causeLabel(c))
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.held, m.acquire, m.extend, m.remaining, m.lost} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// causeLabel names why a lease ended, for metrics and logs.
func causeLabel(cause error) string {
	switch {
	case errors.Is(cause, ErrLeaseLost):
		return "lost"
	case errors.Is(cause, ErrLeaseExpired):
		return "expired"
	case errors.Is(cause, ErrNoProgress):
		return "no_progress"
	case errors.Is(cause, ErrMaxHold):
		return "max_hold"
	default:
		return "other"
	}
}
