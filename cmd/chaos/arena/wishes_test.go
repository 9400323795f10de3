package arena

import (
	"iter"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/sender/simulator"
)

// TestAnUrgentNoticeGoesAhead: a big notice is under way, and an urgent one comes.
// From its answer on nothing more of the big one is claimed before all of it; the
// big one is then cancelled, and everything has a known outcome.
func TestAnUrgentNoticeGoesAhead(t *testing.T) {
	t.Parallel()
	a := open(t, Config{Replicas: 2, Limit: 500, Rest: 5 * time.Second, Settings: short(),
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 300 * time.Millisecond}}})
	big, err := a.Post(t.Context(), "A", 100_000)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return a.Receiver.Counts().Distinct >= 200 }, time.Minute, 5*time.Millisecond)
	n := notice("A")
	n.Priority, n.Delivery = "urgent", "at_most_once"
	urgent, err := a.PostNotice(t.Context(), n, Devices("A", 50), 50)
	require.NoError(t, err)
	client := a.Replicas()[0].Client()
	require.Eventually(t, func() bool {
		got, err := client.Notice(t.Context(), urgent.ID)
		return err == nil && got.Status == "COMPLETED"
	}, time.Minute, 20*time.Millisecond)

	rows, err := a.DB.Query(t.Context(), `SELECT id FROM push_batches WHERE claimed_at > $1`, urgent.At)
	require.NoError(t, err)
	later := map[string]bool{}
	var id string
	_, err = pgx.ForEachRow(rows, []any{&id}, func() error { later[id] = true; return nil })
	require.NoError(t, err)
	urgents, batches := 0, map[string]bool{}
	for _, x := range a.Receiver.Arrivals() { // as they came
		switch {
		case x.Notice == urgent.ID:
			urgents++
			batches[x.Batch] = true
		case later[x.Batch]:
			require.Equal(t, 50, urgents, "message %s of batch %s, claimed after the urgent notice was accepted", x.Message, x.Batch)
		}
	}
	require.Equal(t, 50, urgents)
	require.Len(t, batches, 1, "they fit into one batch")

	got, err := client.Cancel(t.Context(), big.ID)
	require.NoError(t, err)
	require.Equal(t, "CANCELLED", got.Closing)
	require.NoError(t, a.WaitEnded(t.Context()))
	got, err = client.Notice(t.Context(), big.ID)
	require.NoError(t, err)
	require.Equal(t, "CANCELLED", got.Status)
	require.Equal(t, got.Total, got.Success+got.Skipped.Cancelled)
	require.Positive(t, got.Skipped.Cancelled)
	v, err := a.Verdict(t.Context())
	require.NoError(t, err)
	require.Empty(t, v.Violations)

	// The judge finds one of at most once that comes twice.
	arrivals := a.Receiver.Arrivals()
	i := slices.IndexFunc(arrivals, func(x simulator.Arrival) bool { return x.Notice == urgent.ID })
	v, err = a.judge(t.Context(), append(arrivals, arrivals[i]))
	require.NoError(t, err)
	require.Contains(t, v.Violations, "at most once: message "+arrivals[i].Message+" was taken twice")
}

// TestNoticesExpireWhateverHoldsThemUp: a rest that outlives them, a pause, a retry
// that is not due yet, and Redis away. What was never handed over is SKIPPED; what
// was and waits for a retry has failed, with its last code.
func TestNoticesExpireWhateverHoldsThemUp(t *testing.T) {
	t.Parallel()
	settings := short()
	settings["SCHOOLBELL_RETRY_BASE"] = "1m"
	a := open(t, Config{Replicas: 1, Limit: 50, Rest: 5 * time.Minute, Settings: settings})
	client := a.Replicas()[0].Client()
	post := func(school string, in time.Duration, recipients iter.Seq2[api.Recipient, error], n int) string {
		t.Helper()
		req := notice(school)
		at := time.Now().Add(in)
		req.ExpiresAt = &at
		p, err := a.PostNotice(t.Context(), req, recipients, n)
		require.NoError(t, err)
		return p.ID
	}
	_, err := client.PutSchool(t.Context(), "paused", api.SchoolChange{})
	require.NoError(t, err)
	s, err := client.PauseSchool(t.Context(), "paused")
	require.NoError(t, err)
	require.Equal(t, api.Paused, s.State)
	rest := post("rest", 15*time.Second, Devices("rest", 80), 80)
	paused := post("paused", 15*time.Second, Devices("paused", 7), 7)
	retry := post("retry", 15*time.Second, func(yield func(api.Recipient, error) bool) { yield(api.Recipient{Token: "unavailable-1"}, nil) }, 1)
	require.Eventually(t, func() bool {
		n, err := client.Notice(t.Context(), rest)
		m, err2 := client.Notice(t.Context(), retry)
		return err == nil && err2 == nil && n.Success == 50 && m.RetryPending == 1
	}, 30*time.Second, 20*time.Millisecond)
	require.NoError(t, a.Redis.Close())
	away := post("away", 8*time.Second, Devices("away", 9), 9)
	require.NoError(t, a.WaitEnded(t.Context()))
	for id, want := range map[string]api.Counts{
		rest: {Total: 80, Success: 50, Skipped: api.Skipped{Expired: 30}}, paused: {Total: 7, Skipped: api.Skipped{Expired: 7}},
		retry: {Total: 1, PermanentFail: 1}, away: {Total: 9, Skipped: api.Skipped{Expired: 9}},
	} {
		n, err := client.Notice(t.Context(), id)
		require.NoError(t, err)
		require.Equal(t, []any{want, "COMPLETED", "EXPIRED"}, []any{n.Counts, n.Status, n.Closing}, n.School)
	}
	rows, err := client.Recipients(t.Context(), retry, api.RecipientQuery{})
	require.NoError(t, err)
	require.Equal(t, []any{"PERMANENT_FAIL", "EXPIRED", "UNAVAILABLE", 1}, []any{rows.Items[0].State, rows.Items[0].Reason, rows.Items[0].ErrorCode, rows.Items[0].Attempts})
	_, err = client.Retry(t.Context(), retry)
	require.ErrorContains(t, err, "the notice has expired")
	s, err = client.ResumeSchool(t.Context(), "paused")
	require.NoError(t, err)
	require.Zero(t, s.Waiting)
}
