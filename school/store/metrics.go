package store

import (
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/school"
)

type metrics struct {
	registerer prometheus.Registerer
	collectors []prometheus.Collector

	countsRepaired prometheus.Counter
	brakesEngaged  prometheus.Counter
	retired        prometheus.Counter
	flagged        prometheus.Counter
	removed        *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, pools map[string]func() poolStats) (*metrics, error) {
	m := &metrics{
		registerer: reg,
		countsRepaired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "schoolbell_counts_repaired_total",
			Help: "Notices whose counters did not agree with their recipients and were put right by the sweep. Must stay 0.",
		}),
		removed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_retention_removed_total",
			Help: "Rows that were removed because what they are about ended longer ago than they are kept, by table.",
		}, []string{"table"}),
	}
	m.brakesEngaged = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "schoolbell_brakes_engaged_total",
		Help: "Brakes engaged by a batch of which an unusual share was unregistered.",
	})
	m.retired = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "schoolbell_devices_retired_total",
		Help: "Registered devices retired because their receiver does not know them any more.",
	})
	m.flagged = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "schoolbell_devices_flagged_total",
		Help: "Registered devices flagged instead of retired, while a brake was on.",
	})
	m.purged(school.Purged{}) // so that all tables are there from the start
	m.collectors = []prometheus.Collector{m.countsRepaired, m.removed, m.brakesEngaged, m.retired, m.flagged, &poolCollector{
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

// count notes what a record did to devices, and says of a brake that it is on:
// what it keeps from happening nobody would see.
func (m *metrics) count(log *slog.Logger, r *school.BatchRecord, o *outcomes, g gone) {
	m.retired.Add(float64(g.retired))
	m.flagged.Add(float64(g.flagged))
	if !g.engaged {
		return
	}
	m.brakesEngaged.Inc()
	unregistered := 0
	for _, retire := range o.retire {
		if retire {
			unregistered++
		}
	}
	log.Warn("an unusual share of a batch is unregistered: devices are flagged and none is retired until the brake is confirmed or cleared",
		"event", "brake_engaged", "school", r.School, "batch_id", r.Batch, "unregistered", unregistered, "batch", len(r.Results))
}

// purged counts what was removed.
func (m *metrics) purged(p school.Purged) {
	for table, n := range map[string]int{
		"push_cluster_tokens": p.Recipients, "push_batches": p.Batches, "push_batch_ranges": p.Ranges, "push_fallbacks": p.Fallbacks,
	} {
		m.removed.WithLabelValues(table).Add(float64(n))
	}
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
