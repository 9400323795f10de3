package arena

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/sender/simulator"
)

var retained = flag.Int("retained", 5_000_000, "recipients that BenchmarkRetention has removed; in thousands")

// BenchmarkRetention is what sending feels of the removal of old recipients (R29):
// a replica sends new notices all the time, first beside old recipients that are
// kept, then while it removes them, until all are gone or for four minutes, and then
// with them gone, in one run on a durable PostgreSQL, as make retention does. The
// ratios are to what went before and after, since a machine that others use as well
// is not the same from one minute to the next.
func BenchmarkRetention(b *testing.B) {
	const (
		schools, notice, each = 8, 5000, 1000
		least, most           = 45 * time.Second, 4 * time.Minute
	)
	ctx, cancel := context.WithTimeout(b.Context(), 20*time.Minute)
	defer cancel()
	a, err := New(ctx, Config{
		Program: program, Replicas: -1, Limit: 1_000_000, Rest: time.Second,
		Within: &Servers{Name: "bell", Redis: localtest.Redis(b), Postgres: localtest.OwnPostgres(b, local.PostgresConfig{
			Settings: map[string]string{"shared_buffers": "1GB", "max_wal_size": "4GB", "wal_compression": "lz4"},
		})},
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 200 * time.Millisecond, Spread: 50 * time.Millisecond}},
		// Minutes are what a schedule can name.
		Settings: map[string]string{"SCHOOLBELL_RETENTION_RECIPIENTS": "1h", "SCHOOLBELL_RETENTION_CRON": "* * * * *"},
	})
	b.Cleanup(func() { require.NoError(b, a.Close()) })
	require.NoError(b, err)
	began := time.Now()
	fillOld(ctx, b, a, *retained/each, each)
	b.Logf("%d old recipients were stored in %s", *retained, time.Since(began).Round(time.Second))
	r, err := a.StartReplica(ctx, nil)
	require.NoError(b, err)

	// New notices, until the end.
	feeding, stop := context.WithCancel(ctx)
	var feeder sync.WaitGroup
	defer func() {
		stop()
		feeder.Wait()
	}()
	var fed error
	feeder.Go(func() { fed = feed(ctx, feeding, a, schools, notice) })

	until(ctx, b, "sending is under way", func() (bool, error) { return a.Receiver.Counts().Accepted > 20_000, nil })
	start := look(ctx, b, a, r)
	wait(ctx, least)
	execute(ctx, b, a, `UPDATE push_clusters SET ended_at = ended_at - interval '1 year' WHERE school_id = 'OLD'`)
	until(ctx, b, "the removal begins", func() (bool, error) { return removed(ctx, b, a) > 0, nil })
	middle := look(ctx, b, a, r)
	deadline := time.After(most)
	for done := false; !done && removed(ctx, b, a) < *retained; {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-deadline:
			done = true
		case <-ctx.Done():
			require.NoError(b, ctx.Err())
		}
	}
	end := look(ctx, b, a, r)
	last := end
	if end.removed == *retained {
		wait(ctx, least)
		last = look(ctx, b, a, r)
	}
	stop()
	feeder.Wait()
	require.NoError(b, fed)

	before, during := start.to(middle), middle.to(end)
	kept := before
	b.Logf("before: %s", before)
	b.Logf("while:  %s, %.0f removed/s, %d of %d", during, during.removed, end.removed, *retained)
	if last.at != end.at {
		after := end.to(last)
		b.Logf("after:  %s", after)
		kept.sent, kept.record = (before.sent+after.sent)/2, (before.record+after.record)/2
	}
	b.ReportMetric(kept.sent, "sent/s-without")
	b.ReportMetric(during.sent, "sent/s-with")
	b.ReportMetric(during.sent/kept.sent, "sent-ratio")
	b.ReportMetric(kept.record*1000, "record-ms-without")
	b.ReportMetric(during.record*1000, "record-ms-with")
	b.ReportMetric(during.record/kept.record, "record-ratio")
	b.ReportMetric(during.removed, "removed/s")
	b.ReportMetric(0, "ns/op") // says nothing here

	// Nothing that is new went with the old.
	require.NoError(b, a.WaitEnded(ctx))
	posted := 0
	for _, p := range a.Accepted() {
		posted += p.Total
	}
	var left int
	require.NoError(b, a.DB.QueryRow(ctx, `SELECT count(*) FROM push_cluster_tokens WHERE school_id <> 'OLD' AND job_status = 'SUCCESS'`).Scan(&left))
	require.Equal(b, posted, left)
}

// fillOld stores ended notices as they lie after their day: vacuumed, and on the
// disk. Tokens are as long as FCM's.
func fillOld(ctx context.Context, b *testing.B, a *Arena, notices, each int) {
	b.Helper()
	execute(ctx, b, a, `
INSERT INTO push_clusters (id, school_id, title, body, total_count, success_count, frontier, job_status, due_at, first_send_at, last_send_at, ended_at)
SELECT g, 'OLD', 'Old', 'Old', $2::integer, $2, $2, 'COMPLETED', now(), now(), now(), now() FROM generate_series(1, $1::integer) g`, notices, each)
	execute(ctx, b, a, `
INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, job_status, attempts, processed_at)
SELECT c, s, 'OLD', 'old-' || c || '-' || s || repeat('x', 130), 'SUCCESS', 1, now()
FROM generate_series(1, $1::integer) c, generate_series(1, $2::integer) s`, notices, each)
	execute(ctx, b, a, `VACUUM (ANALYZE) push_cluster_tokens, push_clusters`)
	execute(ctx, b, a, `CHECKPOINT`)
}

// feed keeps every school's backlog between half a notice and one and a half, until
// feeding ends.
func feed(ctx, feeding context.Context, a *Arena, schools, n int) error {
	for feeding.Err() == nil {
		for i := range schools {
			school := fmt.Sprintf("S%02d", i)
			var waiting int
			err := a.DB.QueryRow(ctx, `SELECT coalesce(sum(waiting_count), 0) FROM push_clusters WHERE school_id = $1 AND ended_at IS NULL`, school).Scan(&waiting)
			if err == nil && waiting < n/2 {
				_, err = a.Post(ctx, school, n)
			}
			if err != nil {
				return fmt.Errorf("feed school %s: %w", school, err)
			}
		}
		wait(feeding, 20*time.Millisecond)
	}
	return nil
}

// counts are what a moment of the run is known by.
type counts struct {
	at      time.Time
	sent    int64
	removed int
	records map[string]float64 // the histogram of records, by what follows its name
}

func look(ctx context.Context, b *testing.B, a *Arena, r *Replica) counts {
	b.Helper()
	c := counts{removed: removed(ctx, b, a), records: map[string]float64{}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL()+"/metrics", nil)
	require.NoError(b, err)
	resp, err := httpClient.Do(req)
	require.NoError(b, err)
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), "schoolbell_record_duration_seconds_"); ok {
			name, value, _ := strings.Cut(text, " ")
			c.records[name], err = strconv.ParseFloat(value, 64)
			require.NoError(b, err)
		}
	}
	c.at, c.sent = time.Now(), a.Receiver.Counts().Accepted
	return c
}

// share is a part of the run: per second, and seconds that a record took on average.
type share struct {
	took                  time.Duration
	sent, removed, record float64
	within                string // of how many records in a hundred took at most how long
}

func (c counts) to(d counts) share {
	seconds := d.at.Sub(c.at).Seconds()
	of := func(name string) float64 { return d.records[name] - c.records[name] }
	s := share{
		took: d.at.Sub(c.at), sent: float64(d.sent-c.sent) / seconds, removed: float64(d.removed-c.removed) / seconds,
		record: of("sum") / of("count"),
	}
	for _, le := range []string{"0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1"} {
		s.within += fmt.Sprintf(", %.1f%% ≤ %ss", 100*of(`bucket{le="`+le+`"}`)/of("count"), le)
	}
	return s
}

func (s share) String() string {
	return fmt.Sprintf("%s, %.0f sent/s, record %.1f ms on average%s", s.took.Round(time.Second), s.sent, 1000*s.record, s.within)
}

// removed are the old recipients that are gone.
func removed(ctx context.Context, b *testing.B, a *Arena) (n int) {
	b.Helper()
	require.NoError(b, a.DB.QueryRow(ctx, `SELECT coalesce(sum(purged_seq), 0) FROM push_clusters WHERE school_id = 'OLD'`).Scan(&n))
	return n
}

func execute(ctx context.Context, b *testing.B, a *Arena, sql string, args ...any) {
	b.Helper()
	_, err := a.DB.Exec(ctx, sql, args...)
	require.NoError(b, err)
}
