package arena

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

// The mix of answers that an ordinary day brings, and the schedule of retries.
const (
	mixBase       = time.Second
	mixRetries    = 3
	mixRetryAfter = 3 // seconds: longer than the first wait, shorter than the last
)

var mixShares = map[string]float64{"UNREGISTERED": 0.05, "UNAVAILABLE": 0.02, "QUOTA_EXCEEDED": 0.01}

// TestTheMix sends to registered devices while FCM answers with everything that
// it documents for a message and loses some answers. From the receiver's log
// alone follows where each recipient has to end, when it may be tried again at
// the earliest, and which devices are retired.
func TestTheMix(t *testing.T) {
	t.Parallel()
	schools, devices, limit, within := 8, 500, 450, 2*time.Minute
	if *full {
		schools, devices, limit, within = 20, 5000, 5000, 12*time.Minute
	}
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	settings := map[string]string{
		"SCHOOLBELL_DISPATCH_CLAIM_TIMEOUT":   "2s",
		"SCHOOLBELL_SENDERS_FCM_CALL_TIMEOUT": "15s", // no answer is to be late: what is lost here is lost on purpose
		"SCHOOLBELL_LOCK_ETC":                 "20s",
		"SCHOOLBELL_RETRY_BASE":               mixBase.String(),
		"SCHOOLBELL_STOP_TIMEOUT":             "30s",
	}
	if !*full { // one connection a replica: the suite's machine is busy, and how many there are is no matter of answers
		settings["SCHOOLBELL_DISPATCH_BATCH"], settings["SCHOOLBELL_SENDERS_FCM_IN_FLIGHT"] = "50", "100"
	}
	a := open(t, Config{
		Replicas: 3, Limit: limit, Rest: 2 * time.Second, FCM: true, Settings: settings,
		Behaviour: simulator.Behaviour{
			Latency:  simulator.Latency{Base: 40 * time.Millisecond, Spread: 20 * time.Millisecond},
			Outcomes: mixShares, LoseAnswer: 0.005, Reset: 0.002, RetryAfter: mixRetryAfter,
		},
	})
	_, err := a.DB.Exec(ctx, `
INSERT INTO devices (school_id, token_sha, token)
SELECT k.id, sha256(convert_to(k.token, 'UTF8')), k.token
FROM (SELECT format('S%s', lpad(s::text, 2, '0')) AS id, format('device-S%s-%s', lpad(s::text, 2, '0'), lpad(d::text, 7, '0')) AS token
	FROM generate_series(0, $1::integer - 1) s, generate_series(0, $2::integer - 1) d) k`, schools, devices)
	require.NoError(t, err)
	began := time.Now()
	postAll(ctx, t, a, schools, devices)
	require.NoError(t, a.WaitEnded(ctx))
	took := time.Since(began)
	t.Cleanup(func() {
		if t.Failed() {
			tellLate(t, a.Receiver.Arrivals())
		}
	})
	sound(ctx, t, a)

	total := schools * devices
	arrivals := a.Receiver.Arrivals()
	counts := a.Receiver.Counts()
	require.Zero(t, counts.Replays, "one request an attempt")
	require.Zero(t, counts.ProtocolErrors, counts.LastProtocol)
	ways := mixWays(t, arrivals)
	require.Len(t, ways, total, "every message came")
	ended, attempts := mixStates(ctx, t, a, ways)
	require.Equal(t, total, ended["SUCCESS"]+ended["FAIL"]+ended["PERMANENT_FAIL"])

	var claimed int
	require.NoError(t, a.DB.QueryRow(ctx, `SELECT sum(size) FROM push_batches WHERE settled_as <> 'withdrawn'`).Scan(&claimed))
	require.Equal(t, claimed, attempts, "an attempt is one of a batch")
	require.LessOrEqual(t, len(arrivals), claimed, "more requests than attempts")

	gone := map[string]bool{}
	for _, x := range arrivals {
		if x.Answer == "UNREGISTERED" {
			gone[x.TokenSHA] = true
		}
	}
	rows, err := a.DB.Query(ctx, `SELECT encode(substring(token_sha FOR 8), 'hex') FROM devices WHERE retired_at IS NOT NULL`)
	require.NoError(t, err)
	retired, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.ElementsMatch(t, slices.Collect(maps.Keys(gone)), retired, "retired are those that FCM called gone")
	// Five standard deviations about the expected share.
	expected := mixShares["UNREGISTERED"] * float64(len(arrivals))
	require.InDelta(t, expected, len(retired), 5*math.Sqrt(expected))

	t.Logf("%d recipients of %d schools in %s (%.0f/s), %d attempts, %d requests, answers %v, %d of them lost",
		total, schools, took.Round(time.Millisecond), float64(total)/took.Seconds(), attempts, len(arrivals), counts.Answers, counts.Lost)
	t.Logf("ended: %v, %d devices retired", ended, len(retired))
	for _, k := range slices.Sorted(maps.Keys(mixSlack.least)) {
		t.Logf("retries behind %s: %d, the soonest %s after it was allowed", k, mixSlack.n[k], mixSlack.least[k].Round(time.Millisecond))
	}
}

// mixWay is one message's way as the receiver saw it.
type mixWay struct {
	state, reason, code string
	retries, arrivals   int
}

// mixSlack collects how long after its earliest moment each kind of retry came.
var mixSlack = struct {
	sync.Mutex
	least map[string]time.Duration
	n     map[string]int
}{least: map[string]time.Duration{}, n: map[string]int{}}

// mixWays follows each message through its answers: where they lead, and that no
// retry came before its time.
func mixWays(t *testing.T, arrivals []simulator.Arrival) map[string]mixWay {
	t.Helper()
	of := map[string][]simulator.Arrival{}
	seen := map[[2]string]bool{}
	for _, x := range arrivals {
		require.Equal(t, "fcm", x.Kind)
		require.False(t, seen[[2]string{x.Message, x.Batch}], "%s came twice in batch %s", x.Message, x.Batch)
		seen[[2]string{x.Message, x.Batch}] = true
		of[x.Message] = append(of[x.Message], x)
	}
	ways := map[string]mixWay{}
	early := 0
	for id, all := range of {
		slices.SortFunc(all, func(x, y simulator.Arrival) int { return cmp.Compare(x.Attempt, y.Attempt) })
		var w mixWay
		var before simulator.Arrival
		for i, x := range all {
			require.Empty(t, w.state, "%s came again after %s: %+v", id, w.state, x)
			if i > 0 {
				require.Greater(t, x.Attempt, before.Attempt, id)
				wait := mixWait(before, w.retries-1)
				slack := time.Duration(x.T-before.Ended) - wait
				if slack < 0 {
					t.Errorf("%s came %s after the end of its attempt %d (%s), %s too soon", id, time.Duration(x.T-before.Ended), before.Attempt, before.Answer, -slack)
					if early++; early > 20 {
						t.FailNow()
					}
				}
				noteMix(before, w.retries, slack)
			}
			w.arrivals++
			w.next(t, x)
			before = x
		}
		require.NotEmpty(t, w.state, "%s waits for a retry after %+v", id, before)
		ways[id] = w
	}
	return ways
}

// next is what an answer makes of a message whose notice is at least once.
func (w *mixWay) next(t *testing.T, x simulator.Arrival) {
	t.Helper()
	reason := "OUTCOME_UNKNOWN"
	switch {
	case x.Accepted() && !x.Lost:
		w.state, w.code, w.reason = "SUCCESS", "", ""
		return
	case x.Answer == "UNREGISTERED":
		w.state, w.code, w.reason = "FAIL", x.Answer, ""
		return
	case x.Answer == "QUOTA_EXCEEDED":
		w.code, reason = x.Answer, "RETRIES_EXHAUSTED"
	case x.Answer == "UNAVAILABLE": // FCM has been seen to deliver and say so
		w.code = x.Answer
	case x.Lost, x.Answer == "reset":
		w.code = "NO_ANSWER"
	default:
		t.Fatalf("an answer that was not asked for: %+v", x)
	}
	if w.retries == mixRetries {
		w.state, w.reason = "PERMANENT_FAIL", reason
		return
	}
	w.retries++
}

// mixWait is the least wait behind an answer, after so many retries.
func mixWait(x simulator.Arrival, retries int) time.Duration {
	wait := mixBase << retries
	if x.Answer == "QUOTA_EXCEEDED" {
		wait *= 2
	}
	return max(wait, time.Duration(x.RetryAfter)*time.Second)
}

func noteMix(before simulator.Arrival, retry int, slack time.Duration) {
	what := before.Answer
	if before.Lost {
		what = "a lost answer"
	}
	k := fmt.Sprintf("%s, retry %d", what, retry)
	mixSlack.Lock()
	defer mixSlack.Unlock()
	if least, known := mixSlack.least[k]; !known || slack < least {
		mixSlack.least[k] = slack
	}
	mixSlack.n[k]++
}

// mixStates compares what SQL says of each recipient with its way, and sums up
// states and attempts.
func mixStates(ctx context.Context, t *testing.T, a *Arena, ways map[string]mixWay) (ended map[string]int, attempts int) {
	t.Helper()
	rows, err := a.DB.Query(ctx, `SELECT cluster_id::text || '.' || seq, job_status, coalesce(reason, ''), coalesce(error_code, ''), attempts, retry_count FROM push_cluster_tokens`)
	require.NoError(t, err)
	ended = map[string]int{}
	wrong := 0
	var id, state, reason, code string
	var tries, retries int
	_, err = pgx.ForEachRow(rows, []any{&id, &state, &reason, &code, &tries, &retries}, func() error {
		ended[state]++
		attempts += tries
		w := ways[id]
		if got := (mixWay{state, reason, code, retries, w.arrivals}); got != w || tries < w.arrivals {
			t.Errorf("%s is %+v after %d attempts; by its answers it has to be %+v", id, got, tries, w)
			if wrong++; wrong > 20 {
				return fmt.Errorf("and more")
			}
		}
		return nil
	})
	require.NoError(t, err)
	return ended, attempts
}

// tellLate shows what took the receiver, or the way to it, unusually long.
func tellLate(t *testing.T, arrivals []simulator.Arrival) {
	t.Helper()
	of := map[string][]simulator.Arrival{}
	for _, x := range arrivals {
		of[x.Message] = append(of[x.Message], x)
	}
	for id, all := range of {
		for i := 1; i < len(all); i++ {
			if all[i-1].Accepted() && !all[i-1].Lost {
				t.Logf("%s: %+v, and again %+v", id, all[i-1], all[i])
			}
		}
	}
	for _, x := range arrivals {
		if d := time.Duration(x.Ended - x.T); d > time.Second {
			t.Logf("answered after %s: %+v", d, x)
		}
	}
}
