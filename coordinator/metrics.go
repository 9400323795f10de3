package coordinator

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/school"
)

type metrics struct {
	read         prometheus.Counter
	results      *prometheus.CounterVec
	skipped      *prometheus.CounterVec
	cycles       prometheus.Counter
	resumeLag    prometheus.Histogram
	firstSendLag prometheus.Histogram
	record       prometheus.Histogram
	fenced       prometheus.Counter
	orphaned     prometheus.Counter
	rateWait     *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	lag := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	m := &metrics{
		read: prometheus.NewCounter(prometheus.CounterOpts{Name: "schoolbell_recipients_read_total",
			Help: "Recipients read from the outbox by turns."}),
		results: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "schoolbell_results_total",
			Help: "Outcomes of attempts: success, fail, retry, permanent_fail, unknown (counted besides what follows from it)."}, []string{"sender", "result"}),
		skipped: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "schoolbell_skipped_total",
			Help: "Recipients never handed over, by reason, as turns met them."}, []string{"reason"}),
		cycles: prometheus.NewCounter(prometheus.CounterOpts{Name: "schoolbell_cycles_total",
			Help: "Cycles opened after a rest."}),
		resumeLag: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "schoolbell_resume_lag_seconds",
			Help: "From the end of a rest to the reservation that opens the next cycle.", Buckets: lag}),
		firstSendLag: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "schoolbell_first_send_lag_seconds",
			Help: "From a notice's commit, or the time it was scheduled for, to the start of its first send; a rest or a wait for a slot in between counts.", Buckets: lag}),
		record: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "schoolbell_record_duration_seconds",
			Help: "From a batch's results to their record, tries included.", Buckets: lag}),
		fenced: prometheus.NewCounter(prometheus.CounterOpts{Name: "schoolbell_claims_fenced_total",
			Help: "Steps that the store refused because a newer owner holds the school."}),
		orphaned: prometheus.NewCounter(prometheus.CounterOpts{Name: "schoolbell_orphaned_batches_total",
			Help: "Batches of dead owners that were taken over."}),
		rateWait: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "schoolbell_sender_rate_wait_seconds_total",
			Help: "For how long schools were told to wait for their sender's rate, each wait once."}, []string{"sender"}),
	}
	if reg != nil {
		reg.MustRegister(m.read, m.results, m.skipped, m.cycles, m.resumeLag, m.firstSendLag, m.record, m.fenced, m.orphaned, m.rateWait)
	}
	return m
}

// watchLane shows a lane as it is at each scrape.
func watchLane(reg prometheus.Registerer, l *lane, members Members) {
	if reg == nil {
		return
	}
	value := func(name, help string, of func(LaneState) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: prometheus.Labels{"sender": l.name}},
			func() float64 { return of(l.state(time.Now())) })
	}
	gauge := func(name, help string, is func(LaneState) bool) prometheus.Collector {
		return value(name, help, func(s LaneState) float64 {
			if is(s) {
				return 1
			}
			return 0
		})
	}
	reg.MustRegister(
		gauge("schoolbell_sender_stopped", "1 while the sender is stopped: its receiver does not let it in, or answers none of the living replicas.",
			func(s LaneState) bool { return s.Stopped || s.Broken && members.OthersUnanswered(s.Name) }),
		gauge("schoolbell_sender_unanswered", "1 while the receiver does not answer this replica, which then tries one message at a time.",
			func(s LaneState) bool { return s.Broken }),
	)
	if l.local {
		return
	}
	reg.MustRegister(
		value("schoolbell_sender_rate_per_minute", "Messages that the sender may send a minute now, in the whole cluster; 0: no limit.",
			func(s LaneState) float64 { return float64(s.Shared.PerMinute) }),
		value("schoolbell_sender_rate_used_per_minute", "Messages that the whole cluster took of the sender's rate lately, a minute.",
			func(s LaneState) float64 { return float64(s.Shared.Used) }),
		value("schoolbell_sender_rate_waiting", "Schools that wait for the sender's rate.",
			func(s LaneState) float64 { return float64(s.Shared.Waiting) }),
		gauge("schoolbell_sender_rate_lowered", "1 while the rate is lower than its setting because the receiver asked for less.",
			func(s LaneState) bool { return s.Shared.Lowered }),
	)
}

func (m *metrics) countSkips(work []school.Work) {
	for i := range work {
		if work[i].Skip != "" && !work[i].Settled {
			m.skipped.WithLabelValues(string(work[i].Skip)).Inc()
		}
	}
}

func (m *metrics) countResult(senderName string, o school.Outcome, c school.Change) {
	if o == school.Unknown {
		m.results.WithLabelValues(senderName, "unknown").Inc()
	}
	switch c.State {
	case school.Success:
		m.results.WithLabelValues(senderName, "success").Inc()
	case school.Fail:
		m.results.WithLabelValues(senderName, "fail").Inc()
	case school.RetryPending:
		m.results.WithLabelValues(senderName, "retry").Inc()
	case school.PermanentFail:
		m.results.WithLabelValues(senderName, "permanent_fail").Inc()
	}
}
