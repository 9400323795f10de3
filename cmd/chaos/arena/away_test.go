package arena

import (
	"bytes"
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/deploy/local"
	"schoolbell/sender/simulator"
)

// What a replica says to PostgreSQL is told apart by what is in it: a claim names
// its sender, a record its batch and owner and no sender. Both are one message.
func isClaim(request []byte) bool {
	return len(request) > 300 && bytes.Contains(request, []byte("relay"))
}

func isRecord(owner string) func(request []byte) bool {
	return func(request []byte) bool {
		return len(request) > 300 && bytes.Contains(request, []byte(owner)) && !bytes.Contains(request, []byte("relay"))
	}
}

// unavailable posts a notice that cannot be stored and looks at the answer.
func unavailable(ctx context.Context, t *testing.T, r *Replica) {
	t.Helper()
	body := `{"school":"refused","title":"t","body":"b","recipients":[{"token":"tok-1"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL()+"/v1/notices", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", api.JSON)
	req.Header.Set("Authorization", "Bearer "+Key)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, b.String())
	require.NotEmpty(t, resp.Header.Get("Retry-After"))
	require.Contains(t, b.String(), `"code":"unavailable"`)
}

// batches counts batches by how they were settled.
func batches(ctx context.Context, t *testing.T, a *Arena, school string) map[string]int {
	t.Helper()
	rows, err := a.DB.Query(ctx, `SELECT coalesce(settled_as, 'open') FROM push_batches WHERE school_id = $1`, school)
	require.NoError(t, err)
	defer rows.Close()
	counts := map[string]int{}
	for rows.Next() {
		var as string
		require.NoError(t, rows.Scan(&as))
		counts[as]++
	}
	require.NoError(t, rows.Err())
	return counts
}

// TestTheAnswerOfACommitIsLost cuts off the answer to a claim, and then to a
// record, after PostgreSQL has committed it. Of such a claim nothing is sent and
// it is withdrawn; such a record is made again and counts once.
func TestTheAnswerOfACommitIsLost(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	settings := short()
	settings["SCHOOLBELL_DISPATCH_BATCH"] = "50"
	a := open(t, Config{Replicas: 1, Limit: 1000, Rest: time.Second, Settings: settings, Ways: true,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 20 * time.Millisecond}}})
	proxy := a.Replicas()[0].ToPostgres.proxies[0]

	proxy.SwallowReply(isClaim, 2)
	_, err := a.Post(ctx, "claimed", 300)
	require.NoError(t, err)
	require.NoError(t, a.WaitEnded(ctx))
	require.Equal(t, 2, proxy.Swallowed())
	require.Equal(t, map[string]int{"withdrawn": 2, "recorded": 6}, batches(ctx, t, a, "claimed"))
	withdrawn := map[string]bool{}
	rows, err := a.DB.Query(ctx, `SELECT id FROM push_batches WHERE settled_as = 'withdrawn'`)
	require.NoError(t, err)
	for rows.Next() {
		var id string
		require.NoError(t, rows.Scan(&id))
		withdrawn[id] = true
	}
	require.NoError(t, rows.Err())
	for _, arrival := range a.Receiver.Arrivals() {
		require.False(t, withdrawn[arrival.Batch], "nothing of a claim that may not have committed is sent")
	}

	proxy.SwallowReply(isRecord(a.Replicas()[0].Name), 1)
	_, err = a.Post(ctx, "recorded", 300)
	require.NoError(t, err)
	require.NoError(t, a.WaitEnded(ctx))
	require.Equal(t, 3, proxy.Swallowed())
	require.Equal(t, map[string]int{"recorded": 6}, batches(ctx, t, a, "recorded"))
	require.Zero(t, sound(ctx, t, a).Repeated)
}

// TestPostgresRestartsUnderLoad takes PostgreSQL away while six schools send: at
// once, and with -full in order as well. Replicas refuse notices and keep results meanwhile, and go
// on by themselves.
func TestPostgresRestartsUnderLoad(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 2, Limit: 1000, Rest: time.Second, Settings: short(),
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 150 * time.Millisecond}}})
	modes := []local.Shutdown{local.Immediate}
	if *full {
		modes = append(modes, local.Fast)
	}
	for i, mode := range modes {
		postAll(ctx, t, a, 6, 2000)
		want := int64(i*12_000 + 1500)
		until(ctx, t, "schools send", func() (bool, error) { return a.Receiver.Counts().Accepted >= want, nil })
		require.NoError(t, a.Postgres.Stop(ctx, mode))
		var asking sync.WaitGroup
		for _, r := range a.Replicas() {
			asking.Go(func() { unavailable(ctx, t, r) })
		}
		asking.Wait()
		require.NoError(t, a.Postgres.Restart(ctx, mode))
		a.DB.Reset() // the judge's own connections broke too
		require.NoError(t, a.WaitEnded(ctx))
	}
	require.Zero(t, sound(ctx, t, a).Repeated, "results were kept and recorded; claims whose commit was unknown were withdrawn")
}

// TestStoppedWithoutPostgres stops a replica that cannot record what it has sent.
// It gives up when its time to stop is over, says so, and hangs on nothing. What
// takes its batches over knows that their outcome is unknown: repeated where at
// least once was asked for, ended where at most once was.
func TestStoppedWithoutPostgres(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	settings := short()
	const stop = 10 * time.Second // the least is B + 7 s
	settings["SCHOOLBELL_STOP_TIMEOUT"] = stop.String()
	a := open(t, Config{Replicas: 1, Limit: 1000, Rest: time.Second, Settings: settings, Ways: true,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 600 * time.Millisecond}}})
	r := a.Replicas()[0]
	for school, delivery := range map[string]string{"again": "at_least_once", "never": "at_most_once"} {
		n := smallNotice(school, 100)
		n.Delivery = delivery
		_, err := r.Client().Send(ctx, n, "")
		require.NoError(t, err)
	}
	until(ctx, t, "both schools' batches are on the wire", func() (bool, error) { return a.Receiver.Counts().Requests >= 2, nil })
	require.NoError(t, r.ToPostgres.proxies[0].BlackHole())
	began := time.Now()
	code, err := r.Stop(ctx)
	require.NoError(t, err)
	took := time.Since(began)
	t.Logf("ended with %d after %s", code, took.Round(time.Millisecond))
	require.NotZero(t, code, "what was not recorded is not passed over in silence")
	require.Less(t, took, stop+8*time.Second)
	require.NoError(t, r.ToPostgres.proxies[0].Pass())
	require.Equal(t, map[string]int{"open": 1}, batches(ctx, t, a, "again"))
	require.Equal(t, map[string]int{"open": 1}, batches(ctx, t, a, "never"))

	require.NoError(t, r.Start(ctx))
	require.NoError(t, a.WaitEnded(ctx))
	outcomes := map[string]int{}
	rows, err := a.DB.Query(ctx, `SELECT school_id || ' ' || job_status || ' ' || coalesce(reason, '') || ' ' || attempts FROM push_cluster_tokens`)
	require.NoError(t, err)
	for rows.Next() {
		var of string
		require.NoError(t, rows.Scan(&of))
		outcomes[of]++
	}
	require.NoError(t, rows.Err())
	require.Equal(t, map[string]int{"again SUCCESS  2": 100, "never PERMANENT_FAIL OUTCOME_UNKNOWN 1": 100}, outcomes)
	arrived := map[string]int{}
	for _, arrival := range a.Receiver.Arrivals() {
		arrived[arrival.School]++
	}
	require.Equal(t, map[string]int{"again": 200, "never": 100}, arrived)
}
