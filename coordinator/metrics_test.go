package coordinator_test

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// gathered sums each metric over its labels; of a histogram, its count.
func gathered(t require.TestingT, reg *prometheus.Registry) map[string]float64 {
	families, err := reg.Gather()
	require.NoError(t, err)
	sums := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() == "result" || l.GetName() == "reason" {
					name += "/" + l.GetValue()
				}
			}
			sums[name] += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sums
}

func TestMetricsTellApartWhatHappened(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		n := w.outbox.accept("A", 300)
		w.orphan("A", 50, 0)
		n.recipients[60].disabled = true
		reg := prometheus.NewRegistry()
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			all := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
			if n == 1 {
				all[0].Class, all[1].Class, all[2].Class, all[3].Class = sender.Gone, sender.Rejected, sender.Throttled, sender.Unknown
			}
			return all
		})
		w.script.onCall("claim", at(2, school.ErrFenced))
		w.start("r1", func(c *coordinator.Config, d *coordinator.Deps) {
			c.Limit = 249
			d.Registerer = reg
		})
		w.pass(time.Hour)
		got := gathered(w, reg)
		for name, want := range map[string]float64{
			"schoolbell_results_total/success":        297,
			"schoolbell_results_total/fail":           1,
			"schoolbell_results_total/permanent_fail": 1,
			"schoolbell_results_total/retry":          2,
			"schoolbell_results_total/unknown":        1,
			"schoolbell_skipped_total/DISABLED":       1,
			"schoolbell_claims_fenced_total":          1,
			"schoolbell_orphaned_batches_total":       1,
			"schoolbell_cycles_total":                 1,
			"schoolbell_resume_lag_seconds":           1,
		} {
			require.Equal(w, want, got[name], name)
		}
		require.GreaterOrEqual(w, got["schoolbell_recipients_read_total"], 300.0)
		require.Equal(w, float64(len(w.receiver.of("A"))), got["schoolbell_record_duration_seconds"])
	})
}

func TestStrandedRecipientsAreSaid(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		r := w.start("r1")
		w.outbox.stranded = 3
		require.NoError(w, r.Sweep(w.Context()))
		require.EqualValues(w, 3, w.log.events("stranded_recovered")[0]["recipients"])
	})
}
