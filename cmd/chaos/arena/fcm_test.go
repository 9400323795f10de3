package arena

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

// full runs the FCM scenario with 50,000 messages, as make acceptance does, and
// goes through what Redis may do several times, as make chaos does. The
// receiver is in the test's process: with the race detector on, and two cores
// for everything, it would be the receiver that is tried, not the replicas.
var full = flag.Bool("full", false, "the FCM scenario with 50,000 messages instead of 5,000, and more rounds of what Redis, PostgreSQL and clocks may do")

// TestFCMWithAKilledOwner sends messages as FCM gets them: over HTTP/2 and TLS,
// one request each, with devices that are gone, an FCM that is unavailable,
// answers that get lost, and a replica that dies in the midst of it.
func TestFCMWithAKilledOwner(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	const schools = 20
	devices := 250
	if *full {
		devices = 2500
	}
	a := open(t, Config{
		Replicas: 3, Limit: 5000, Rest: 2 * time.Second, FCM: true,
		Settings: map[string]string{
			"SCHOOLBELL_DISPATCH_CLAIM_TIMEOUT":   "2s",
			"SCHOOLBELL_SENDERS_FCM_CALL_TIMEOUT": "10s",
			"SCHOOLBELL_LOCK_ETC":                 "14s",
			"SCHOOLBELL_RETRY_BASE":               "1s",
			"SCHOOLBELL_STOP_TIMEOUT":             "30s",
		},
		Behaviour: simulator.Behaviour{
			Latency:  simulator.Latency{Base: 80 * time.Millisecond, Spread: 40 * time.Millisecond},
			Outcomes: map[string]float64{"UNREGISTERED": 0.02, "UNAVAILABLE": 0.01}, LoseAnswer: 0.002,
		},
	})
	began := time.Now()
	posting := make(chan struct{})
	go func() {
		defer close(posting)
		postAll(ctx, t, a, schools, devices)
	}()
	until(ctx, t, "a third has arrived", func() (bool, error) { return a.Receiver.Counts().Arrivals > int64(schools*devices/3), nil })
	var owner string
	until(ctx, t, "a replica holds a batch", func() (bool, error) {
		err := a.DB.QueryRow(ctx, `SELECT coalesce((SELECT owner FROM push_batches WHERE settled_at IS NULL ORDER BY claimed_at DESC LIMIT 1), '')`).Scan(&owner)
		return owner != "", err
	})
	dials := map[string]int{owner: dialsOf(ctx, t, a.Owner(owner))}
	require.NoError(t, a.Owner(owner).Kill())
	<-posting
	require.NoError(t, a.WaitEnded(ctx))
	t.Logf("%d messages in %s, the last %s", schools*devices, time.Since(began).Round(time.Millisecond), owner+" was killed")
	sound(ctx, t, a)

	// A request an attempt: the receiver saw each of a batch's messages once.
	counts := a.Receiver.Counts()
	require.Zero(t, counts.Replays)
	require.Zero(t, counts.ProtocolErrors, counts.LastProtocol)
	type attempt struct{ message, batch string }
	seen := map[attempt]bool{}
	last := map[string]simulator.Arrival{}
	for _, x := range a.Receiver.Arrivals() {
		require.Equal(t, "fcm", x.Kind)
		require.False(t, seen[attempt{x.Message, x.Batch}], "%s came twice in batch %s", x.Message, x.Batch)
		seen[attempt{x.Message, x.Batch}] = true
		// What replaces the first push on the screen is the same in a repeat.
		require.Equal(t, x.Message, x.Tag)
		require.Equal(t, x.Message, x.CollapseID)
		require.Empty(t, x.CollapseKey)
		last[x.Message] = x
	}
	rows, err := a.DB.Query(ctx, `SELECT sum(size) FROM push_batches`)
	require.NoError(t, err)
	claimed, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	require.GreaterOrEqual(t, claimed, counts.Requests, "more requests than attempts")

	// Every recipient ended as its last answer says.
	states, err := a.DB.Query(ctx, `SELECT cluster_id::text || '.' || seq, job_status FROM push_cluster_token_states`)
	require.NoError(t, err)
	var id, state string
	ended := map[string]int{}
	_, err = pgx.ForEachRow(states, []any{&id, &state}, func() error {
		ended[state]++
		x, came := last[id]
		require.True(t, came, "%s never arrived and is %s", id, state)
		want := "SUCCESS"
		switch {
		case x.Answer == "UNREGISTERED":
			want = "FAIL"
		case !x.Accepted() || x.Lost:
			want = "PERMANENT_FAIL" // after its last retry
		}
		require.Equal(t, want, state, "%s: %+v", id, x)
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, schools*devices, ended["SUCCESS"]+ended["FAIL"]+ended["PERMANENT_FAIL"])
	// Five standard deviations about the expected share.
	expected := 0.02 * float64(schools*devices)
	require.InDelta(t, expected, ended["FAIL"], 5*math.Sqrt(expected))
	t.Logf("%v, requests %d", ended, counts.Requests)

	for _, r := range a.Replicas() {
		if r.Alive() {
			dials[r.Name] = dialsOf(ctx, t, r)
		}
	}
	t.Logf("connections made: %v", dials)
	for name, n := range dials {
		require.LessOrEqual(t, n, 10, name)
	}
}

// dialsOf is how many connections to FCM a replica has begun to make.
func dialsOf(ctx context.Context, t *testing.T, r *Replica) int {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL()+"/metrics", nil)
	require.NoError(t, err)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), `schoolbell_fcm_dials_total{sender="fcm"} `); ok {
			n, err := strconv.Atoi(value)
			require.NoError(t, err)
			return n
		}
	}
	require.FailNow(t, fmt.Sprintf("%s does not tell its connections", r.Name))
	return 0
}
