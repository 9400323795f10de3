package node

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/web"
	"schoolbell/school"
	"schoolbell/school/store"
)

// gauges are what the stores know and nobody counts: refreshed now and then
// rather than at each scrape, so that a scraper in a hurry does not load the
// database.
type gauges struct {
	stock   stock
	arbiter web.Arbiter
	log     *slog.Logger

	schools    *prometheus.GaugeVec
	recipients *prometheus.GaugeVec
	oldest     prometheus.Gauge
	stranded   prometheus.Gauge
	brakes     prometheus.Gauge
}

// stock is what the gauges read of the store.
type stock interface {
	RecipientCounts(ctx context.Context) (store.RecipientCounts, error)
	Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error)
	OpenBrakes(ctx context.Context) (int, error)
}

const (
	gaugesEvery   = 15 * time.Second
	gaugesTimeout = 10 * time.Second
	gaugesPage    = 1000
)

func newGauges(reg prometheus.Registerer, s stock, arbiter web.Arbiter, log *slog.Logger) *gauges {
	g := &gauges{
		stock: s, arbiter: arbiter, log: log,
		schools: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "schoolbell_schools",
			Help: "Schools by state: paused, resting, sending, waiting_for_slot, waiting_for_retry, idle."}, []string{"state"}),
		recipients: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "schoolbell_recipients",
			Help: "Recipients by what they wait for: waiting, scheduled, retry_waiting, retry_due; and permanent_fail of open notices."}, []string{"state"}),
		oldest: prometheus.NewGauge(prometheus.GaugeOpts{Name: "schoolbell_oldest_waiting_seconds",
			Help: "Age of the oldest due work in the cluster; 0 without any."}),
		stranded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "schoolbell_stranded_recipients",
			Help: "Recipients that no batch covers and no time brings back. Must be 0."}),
		brakes: prometheus.NewGauge(prometheus.GaugeOpts{Name: "schoolbell_brakes_open",
			Help: "Brakes that are on: devices are flagged instead of retired until a person has looked."}),
	}
	reg.MustRegister(g.schools, g.recipients, g.oldest, g.stranded, g.brakes)
	return g
}

// run refreshes until ctx ends. A failure leaves the last values; the part that
// failed shows elsewhere.
func (g *gauges) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		call, cancel := context.WithTimeout(ctx, gaugesTimeout)
		if err := g.refresh(call); err != nil && ctx.Err() == nil {
			g.log.Debug("gauges keep their last values", "event", "gauges_failed", "error", err)
		}
		cancel()
		timer.Reset(gaugesEvery)
	}
}

func (g *gauges) refresh(ctx context.Context) error {
	s, err := g.stock.RecipientCounts(ctx)
	if err != nil {
		return err
	}
	for state, n := range map[string]int{
		"waiting": s.Waiting, "scheduled": s.Scheduled, "retry_waiting": s.RetryWaiting, "retry_due": s.RetryDue, "permanent_fail": s.PermanentFail,
	} {
		g.recipients.WithLabelValues(state).Set(float64(n))
	}
	g.oldest.Set(s.OldestWaiting)
	g.stranded.Set(float64(s.Stranded))
	brakes, err := g.stock.OpenBrakes(ctx)
	if err != nil {
		return err
	}
	g.brakes.Set(float64(brakes))

	states := map[api.SchoolState]int{}
	for after := ""; ; {
		page, err := g.stock.Schools(ctx, after, gaugesPage)
		if err != nil {
			return err
		}
		for i := range page {
			b := &page[i]
			peek, err := g.arbiter.Peek(ctx, b.School.ID)
			if err != nil {
				return err
			}
			states[web.StateOf(b, max(peek.Resting, b.Ledger.Resting), peek.Held)]++
		}
		if len(page) < gaugesPage {
			break
		}
		after = page[len(page)-1].School.ID
	}
	for _, state := range api.SchoolStates() {
		g.schools.WithLabelValues(string(state)).Set(float64(states[state]))
	}
	return nil
}
