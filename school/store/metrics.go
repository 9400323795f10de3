package store

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	registerer prometheus.Registerer
	collectors []prometheus.Collector

	countsRepaired prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, pools map[string]func() poolStats) (*metrics, error) {
	m := &metrics{
		registerer: reg,
		countsRepaired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "schoolbell_counts_repaired_total",
			Help: "Notices whose counters did not agree with their recipients and were put right by the sweep. Must stay 0.",
		}),
	}
	m.collectors = []prometheus.Collector{m.countsRepaired, &poolCollector{
		pools: pools,
		acquired: prometheus.NewDesc("schoolbell_db_pool_acquired_conns",
			"Connections in use.", []string{"pool"}, nil),
		idle: prometheus.NewDesc("schoolbell_db_pool_idle_conns",
			"Connections not in use.", []string{"pool"}, nil),
		max: prometheus.NewDesc("schoolbell_db_pool_max_conns",
			"Connections the pool may open.", []string{"pool"}, nil),
		waits: prometheus.NewDesc("schoolbell_db_pool_waits_total",
			"Acquisitions that had to wait for a connection.", []string{"pool"}, nil),
		waited: prometheus.NewDesc("schoolbell_db_pool_acquire_seconds_total",
			"Time spent acquiring connections.", []string{"pool"}, nil),
	}}
	if reg == nil {
		return m, nil
	}
	for i, c := range m.collectors {
		if err := reg.Register(c); err != nil {
			m.collectors = m.collectors[:i]
			m.unregister()
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) unregister() {
	if m.registerer == nil {
		return
	}
	for _, c := range m.collectors {
		m.registerer.Unregister(c)
	}
}

// poolStats are what a pool of connections tells of itself.
type poolStats struct {
	acquired, idle, max int
	waits               int64
	waited              time.Duration
}

func pgxStats(p *pgxpool.Pool) func() poolStats {
	return func() poolStats {
		s := p.Stat()
		return poolStats{
			acquired: int(s.AcquiredConns()), idle: int(s.IdleConns()), max: int(s.MaxConns()),
			waits: s.EmptyAcquireCount(), waited: s.AcquireDuration(),
		}
	}
}

// poolCollector reads the pools' own statistics when it is scraped.
type poolCollector struct {
	pools                              map[string]func() poolStats
	acquired, idle, max, waits, waited *prometheus.Desc
}

func (c *poolCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.acquired, c.idle, c.max, c.waits, c.waited} {
		ch <- d
	}
}

func (c *poolCollector) Collect(ch chan<- prometheus.Metric) {
	for name, stats := range c.pools {
		s := stats()
		ch <- prometheus.MustNewConstMetric(c.acquired, prometheus.GaugeValue, float64(s.acquired), name)
		ch <- prometheus.MustNewConstMetric(c.idle, prometheus.GaugeValue, float64(s.idle), name)
		ch <- prometheus.MustNewConstMetric(c.max, prometheus.GaugeValue, float64(s.max), name)
		ch <- prometheus.MustNewConstMetric(c.waits, prometheus.CounterValue, float64(s.waits), name)
		ch <- prometheus.MustNewConstMetric(c.waited, prometheus.CounterValue, s.waited.Seconds(), name)
	}
}
