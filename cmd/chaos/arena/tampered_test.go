package arena

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

// TestATamperedRunDoesNotPass takes a run in which everything was kept and spoils
// one fact at a time, in the arrival log or in the database: each has to be seen.
func TestATamperedRunDoesNotPass(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 1, Limit: 100, Rest: time.Second, Settings: short()})
	_, err := a.Post(ctx, "A", 250)
	require.NoError(t, err)
	require.NoError(t, a.WaitEnded(ctx))
	v := sound(ctx, t, a)
	require.Equal(t, 2, v.Rule.Cycles)

	exec := func(sql string) func(t *testing.T) {
		return func(t *testing.T) {
			_, err := a.DB.Exec(ctx, sql)
			require.NoError(t, err)
		}
	}
	for _, c := range []struct {
		name   string
		log    func([]simulator.Arrival) []simulator.Arrival
		do     func(t *testing.T)
		undo   func(t *testing.T)
		report string
	}{
		{name: "a recipient never arrives", report: "lost: message",
			log: func(l []simulator.Arrival) []simulator.Arrival { return l[:len(l)-1] }},
		{name: "a rest is short", report: "rule: school A sent attempt 101 of 100",
			log: func(l []simulator.Arrival) []simulator.Arrival {
				l[100].T -= int64(200 * time.Millisecond)
				return l
			}},
		{name: "an attempt above the limit", report: "rule: school A sent attempt 101 of 100",
			log: func(l []simulator.Arrival) []simulator.Arrival {
				l[100].T, l[100].Ended = l[99].T, l[99].Ended
				return l
			}},
		{name: "a message comes twice and nothing explains it", report: "kills and pauses explain 0",
			log: func(l []simulator.Arrival) []simulator.Arrival { return append(l, l[len(l)-1]) }},
		{name: "a message arrives after its batch's deadline", report: "its send_deadline had passed",
			log: func(l []simulator.Arrival) []simulator.Arrival {
				l[len(l)-1].T += int64(time.Minute)
				l[len(l)-1].Ended += int64(time.Minute)
				return l
			}},
		{name: "a former owner's message arrives", report: "a higher fence had arrived",
			log: func(l []simulator.Arrival) []simulator.Arrival {
				l[len(l)-1].Fence--
				return l
			}},
		{name: "a former owner claims", report: "fence: school A",
			do:   exec(`UPDATE push_batches SET fence = fence + 100 WHERE claimed_at = (SELECT min(claimed_at) FROM push_batches)`),
			undo: exec(`UPDATE push_batches SET fence = fence - 100 WHERE claimed_at = (SELECT min(claimed_at) FROM push_batches)`)},
		{name: "a former owner claims before the next one does", report: "had been given at",
			do:   exec(`INSERT INTO arena.terms SELECT 'A', 100, now() - interval '1 hour'`),
			undo: exec(`DELETE FROM arena.terms WHERE fence = 100`)},
		{name: "a notice's counts do not add up", report: "counts: notice",
			do:   exec(`UPDATE push_clusters SET success_count = success_count - 1, permanent_fail_count = permanent_fail_count + 1`),
			undo: exec(`UPDATE push_clusters SET success_count = success_count + 1, permanent_fail_count = permanent_fail_count - 1`)},
		{name: "a recipient is stranded", report: "stranded: 1 recipients",
			do:   exec(`UPDATE push_cluster_tokens SET job_status = 'RETRY_PENDING' WHERE seq = 7`),
			undo: exec(`UPDATE push_cluster_tokens SET job_status = 'SUCCESS' WHERE seq = 7`)},
		{name: "a recipient waits for ever", report: "waiting: message",
			do:   exec(`UPDATE push_cluster_tokens SET job_status = 'RETRY_PENDING', retry_after = now() + interval '1 hour' WHERE seq = 7`),
			undo: exec(`UPDATE push_cluster_tokens SET job_status = 'SUCCESS', retry_after = NULL WHERE seq = 7`)},
	} {
		t.Run(c.name, func(t *testing.T) {
			log := slices.Clone(a.Receiver.Arrivals())
			slices.SortFunc(log, func(x, y simulator.Arrival) int { return int(x.T - y.T) })
			if c.log != nil {
				log = c.log(log)
			}
			if c.do != nil {
				c.do(t)
				defer c.undo(t)
			}
			v, err := a.judge(ctx, log)
			require.NoError(t, err)
			require.False(t, v.OK)
			require.Contains(t, strings.Join(v.Violations, "\n"), c.report)
			for _, d := range v.Details {
				_, err := a.Around(ctx, d, time.Second)
				require.NoError(t, err)
			}
		})
	}
	sound(ctx, t, a)
}
