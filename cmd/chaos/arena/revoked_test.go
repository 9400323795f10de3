package arena

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/sender/simulator"
)

// logs keeps what replicas log, by event.
type logs struct {
	mu  sync.Mutex
	buf strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) events(name, sender string) (found []map[string]any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		var one map[string]any
		if json.Unmarshal([]byte(line), &one) == nil && one["event"] == name && one["sender"] == sender {
			found = append(found, one)
		}
	}
	return found
}

// behave changes how a receiver answers, as somebody at its side would.
func behave(ctx context.Context, t *testing.T, r *Receiver, behaviour string) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, strings.TrimSuffix(r.URL(), "/relay")+"/_sim/behaviour", strings.NewReader(behaviour))
	require.NoError(t, err)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Less(t, resp.StatusCode, 300)
}

func metric(ctx context.Context, t *testing.T, r *Replica, line string) bool {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL()+"/metrics", nil)
	require.NoError(t, err)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return strings.Contains(string(text), line+"\n")
}

func senderOf(ctx context.Context, t *testing.T, r *Replica, name string) api.Sender {
	t.Helper()
	c, err := r.Client().Cluster(ctx)
	require.NoError(t, err)
	i := slices.IndexFunc(c.Senders, func(s api.Sender) bool { return s.Name == name })
	require.GreaterOrEqual(t, i, 0)
	return c.Senders[i]
}

// TestRevokedCredentialsStopOneSender takes a sender's credentials away in the
// middle of a run and gives them back. Two senders, each with a rate of its own,
// serve as many schools; the other one's schools do not notice, and keep to their
// rate.
func TestRevokedCredentialsStopOneSender(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	const schools, devices, perMinute, batch = 5, 1200, 36_000, 200
	other, err := newReceiver(simulator.Behaviour{Latency: simulator.Latency{Base: 30 * time.Millisecond}}, false)
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() }) // the replicas end first
	settings := short()
	for name, value := range map[string]string{
		"SENDERS_OTHER_KIND": "relay", "SENDERS_OTHER_URL": other.URL(), "SENDERS_OTHER_CALL_TIMEOUT": "1s",
		"SENDERS_OTHER_RATE_PER_MINUTE": fmt.Sprint(perMinute), "SENDERS_RELAY_RATE_PER_MINUTE": fmt.Sprint(perMinute),
		"DEFAULT_SENDER": "relay",
	} {
		settings["SCHOOLBELL_"+name] = value
	}
	log := &logs{}
	a := open(t, Config{Replicas: 3, Limit: 5000, Rest: time.Second, Settings: settings, Log: log,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 30 * time.Millisecond}}})
	sender := "other"
	for i := range schools {
		_, err := a.Replicas()[0].Client().PutSchool(ctx, fmt.Sprintf("other-%d", i), api.SchoolChange{Sender: &sender})
		require.NoError(t, err)
	}
	var posting sync.WaitGroup
	for i := range schools {
		for _, kind := range []string{"other", "relay"} {
			posting.Go(func() {
				_, err := a.Post(ctx, fmt.Sprintf("%s-%d", kind, i), devices)
				require.NoError(t, err)
			})
		}
	}
	posting.Wait()
	until(ctx, t, "a quarter has arrived", func() (bool, error) { return a.Receiver.Counts().Arrivals > schools*devices/4, nil })

	behave(ctx, t, a.Receiver, `{"latency":"30ms","outcomes":{"AUTH":1}}`)
	revoked := time.Now().UnixNano()
	until(ctx, t, "every replica shows it", func() (bool, error) {
		for _, r := range a.Replicas() {
			if senderOf(ctx, t, r, "relay").State != "stopped" {
				return false, nil
			}
		}
		return true, nil
	})
	stopped := time.Now()
	for _, r := range a.Replicas() {
		s := senderOf(ctx, t, r, "relay")
		require.Equal(t, "stopped", s.State)
		require.Contains(t, s.Reason, s.Stop.Code)
		require.NotEmpty(t, s.Stop.Code)
		require.Equal(t, perMinute, s.RatePerMinute)
		require.Equal(t, "running", senderOf(ctx, t, r, "other").State)
		ready, err := r.Client().Ready(ctx)
		require.NoError(t, err)
		require.True(t, ready.Ready, "notices are taken")
		require.Contains(t, ready.Degraded, "sender relay")
		require.Equal(t, "stopped", ready.Checks["sender relay"])
		require.True(t, metric(ctx, t, r, `schoolbell_sender_stopped{sender="relay"} 1`))
		require.True(t, metric(ctx, t, r, `schoolbell_sender_stopped{sender="other"} 0`))
	}
	for name, stopped := range map[string]bool{"relay-0": true, "other-0": false} {
		school, err := a.Replicas()[2].Client().School(ctx, name)
		require.NoError(t, err)
		require.Equal(t, stopped, school.SenderStopped, name)
	}
	shown, err := a.tell(ctx, "HGET schoolbell:{sender:relay}:rate state")
	require.NoError(t, err)
	require.Equal(t, "stopped", shown, "Redis says it")
	going := other.Counts().Arrivals
	until(ctx, t, "the first probe was refused", func() (bool, error) {
		return senderOf(ctx, t, a.Replicas()[0], "relay").Stop.NextProbeSeconds > 5.5, nil
	})
	require.Greater(t, other.Counts().Arrivals, going, "the other sender's schools go on")
	restored := time.Now()
	behave(ctx, t, a.Receiver, `{"latency":"30ms"}`)
	until(ctx, t, "it goes on", func() (bool, error) { return senderOf(ctx, t, a.Replicas()[1], "relay").State == "running", nil })
	require.Less(t, time.Since(restored), time.Minute)
	t.Logf("stopped %s, went on %s after it was let in", restored.Sub(stopped).Round(time.Millisecond), time.Since(restored).Round(time.Millisecond))
	require.NoError(t, a.WaitEnded(ctx))

	// What came after the credentials were taken away: of each school at most the
	// batch that was on its way, and one probe.
	refused := map[string]map[string]int{}
	for _, x := range a.Receiver.Arrivals() {
		if x.Answer != "401" {
			continue
		}
		require.Greater(t, x.T, revoked-int64(time.Second))
		if refused[x.School] == nil {
			refused[x.School] = map[string]int{}
		}
		refused[x.School][x.Batch]++
	}
	batches, probes := 0, 0
	for school, of := range refused {
		whole := 0
		for _, n := range of {
			if n == 1 {
				probes++
			} else {
				whole++
			}
		}
		require.LessOrEqual(t, whole, 1, school)
		batches += whole
	}
	require.Positive(t, batches)
	require.Equal(t, 1, probes, "one in the whole cluster")
	var retries int
	require.NoError(t, a.DB.QueryRow(ctx, `SELECT max(retry_count) FROM push_cluster_tokens`).Scan(&retries))
	require.Zero(t, retries, "nobody's retries are used")
	require.Len(t, log.events("sender_stopped", "relay"), 1)
	require.Len(t, log.events("sender_resumed", "relay"), 1)
	require.Empty(t, log.events("sender_stopped", "other"))

	arrivals := append(a.Receiver.Arrivals(), other.Arrivals()...)
	v, err := a.judge(ctx, arrivals)
	require.NoError(t, err)
	require.Empty(t, v.Violations)
	require.Zero(t, v.Lost)
	require.Zero(t, v.Repeated)
	require.Equal(t, 2*schools*devices, v.Arrived)

	keptItsRate(t, other.Arrivals(), perMinute, batch)
}

// keptItsRate judges, from what a receiver saw, whether a sender kept to its rate,
// used it, and shared it among its schools.
func keptItsRate(t *testing.T, arrivals []simulator.Arrival, perMinute, batch int) {
	t.Helper()
	slices.SortFunc(arrivals, func(x, y simulator.Arrival) int { return int(x.T - y.T) })
	second := perMinute / 60
	// What was taken may be on its way for a moment, and so arrive closer together.
	const window, onItsWay = 5 * time.Second, time.Second
	most := second*int((window+onItsWay)/time.Second) + max(2*second, batch+second)
	worst, from := 0, 0
	for to := range arrivals {
		for arrivals[to].T-arrivals[from].T > int64(window) {
			from++
		}
		worst = max(worst, to-from+1)
	}
	took := time.Duration(arrivals[len(arrivals)-1].T - arrivals[0].T)
	used := float64(len(arrivals)) / took.Seconds() / float64(second)
	// Shares count while every school has work: who was handed in first began first.
	first, last := map[string]int64{}, map[string]int64{}
	for _, x := range arrivals {
		if first[x.School] == 0 {
			first[x.School] = x.T
		}
		last[x.School] = x.T
	}
	began, ended := slices.Max(slices.Collect(maps.Values(first))), slices.Min(slices.Collect(maps.Values(last)))
	shares, sum := map[string]int{}, 0
	for _, x := range arrivals {
		if x.T >= began && x.T < ended {
			shares[x.School]++
			sum++
		}
	}
	t.Logf("at most %d of %d messages in %s; %.0f %% of the rate used; shared %v while all had work", worst, most, window, 100*used, shares)
	require.LessOrEqual(t, worst, most)
	require.Greater(t, used, .6)
	for school := range first {
		// A batch more or less at each end, and a place that a busy machine came too late for.
		require.InDelta(t, sum/len(first), shares[school], float64(3*batch), school)
	}
}
