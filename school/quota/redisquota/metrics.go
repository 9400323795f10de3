package redisquota

import (
	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/school"
)

type metrics struct {
	rebuilds prometheus.Counter
	reserve  *prometheus.CounterVec
	settle   *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		rebuilds: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "schoolbell_quota_rebuilds_total",
			Help: "Quotas that had lost data, or whose rest was out of reach, and were restored from the ledger.",
		}),
		reserve: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_quota_reserve_total",
			Help: "Reservations by answer.",
		}, []string{"result"}),
		settle: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "schoolbell_quota_settle_total",
			Help: "Settlements by answer: dup was settled before, late is of an older cycle, unknown was lost.",
		}, []string{"result"}),
	}
	for _, k := range []school.GrantKind{
		school.Granted, school.Resting, school.NotOwner, school.LeaseShort, school.NeedRebuild, school.BatchSettled,
	} {
		m.reserve.WithLabelValues(grantResult(k))
	}
	m.reserve.WithLabelValues("error")
	for _, r := range []string{"ok", "late", "dup", "unknown", "error"} {
		m.settle.WithLabelValues(r)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.rebuilds, m.reserve, m.settle} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func grantResult(k school.GrantKind) string {
	switch k {
	case school.Granted:
		return "granted"
	case school.Resting:
		return "resting"
	case school.NotOwner:
		return "not_owner"
	case school.LeaseShort:
		return "lease_short"
	case school.NeedRebuild:
		return "need_rebuild"
	case school.BatchSettled:
		return "settled"
	}
	return "unknown"
}
