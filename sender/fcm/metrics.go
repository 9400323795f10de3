package fcm

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics tell how the way to FCM is doing; what becomes of messages is counted
// by their caller.
type metrics struct {
	connections      prometheus.Gauge
	dials            prometheus.Counter
	tokens, noTokens prometheus.Counter
	repeats          prometheus.Counter
}

// newMetrics registers the collectors, or finds those that another sender of
// the same replica has registered. A nil reg registers nothing.
func newMetrics(name string, reg prometheus.Registerer) (*metrics, error) {
	connections := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "schoolbell", Name: "fcm_connections",
		Help: "Open HTTP/2 connections to FCM.",
	}, []string{"sender"})
	dials := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "schoolbell", Name: "fcm_dials_total",
		Help: "Connections to FCM that were begun, whatever became of them.",
	}, []string{"sender"})
	tokens := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "schoolbell", Name: "fcm_token_refreshes_total",
		Help: "Fetches of an access token: ok, failed.",
	}, []string{"sender", "result"})
	repeats := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "schoolbell", Name: "fcm_repeats_refused_total",
		Help: "Requests that the Firebase SDK wanted to send again by itself. None left; there should be none.",
	}, []string{"sender"})
	if reg != nil {
		var errs [4]error
		connections, errs[0] = registered(reg, connections)
		dials, errs[1] = registered(reg, dials)
		tokens, errs[2] = registered(reg, tokens)
		repeats, errs[3] = registered(reg, repeats)
		if err := errors.Join(errs[:]...); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return &metrics{
		connections: connections.WithLabelValues(name),
		dials:       dials.WithLabelValues(name),
		tokens:      tokens.WithLabelValues(name, "ok"),
		noTokens:    tokens.WithLabelValues(name, "failed"),
		repeats:     repeats.WithLabelValues(name),
	}, nil
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
