package arena

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// programs are built once for all tests: as released, and with the points at
// which a process can be made to die.
var program, programWithPoints string

func TestMain(m *testing.M) {
	code := 1
	if err := build(); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = localtest.Run(m)
	}
	if builder != nil {
		_ = builder.Close()
	}
	os.Exit(code)
}

var builder *local.Builder

func build() (err error) {
	if builder, err = local.NewBuilder(false); err != nil {
		return err
	}
	ctx := context.Background()
	if program, err = builder.Build(ctx, "schoolbell/cmd/schoolbell"); err != nil {
		return err
	}
	programWithPoints, err = builder.Build(ctx, "schoolbell/cmd/schoolbell", "failpoints")
	return err
}

// short are times that make rests, leases and retries happen within a test:
// B = 0.7 s + 1.7 s, lease = 1.5 × 3 s. Most of it is the call's: one that a busy
// machine gives no time is repeated, a claim is only put off.
func short() map[string]string {
	return map[string]string{
		"SCHOOLBELL_DISPATCH_CLAIM_TIMEOUT":     "700ms",
		"SCHOOLBELL_SENDERS_RELAY_CALL_TIMEOUT": "1700ms",
		"SCHOOLBELL_LOCK_ETC":                   "3s",
		"SCHOOLBELL_LOCK_ETC_MAX":               "3s",
		"SCHOOLBELL_STOP_TIMEOUT":               "15s",
		"SCHOOLBELL_RETRY_BASE":                 "1s",
	}
}

const lease = 4500 * time.Millisecond

func open(t *testing.T, cfg Config) *Arena {
	t.Helper()
	if cfg.Program == "" {
		cfg.Program = program
	}
	cfg.Fast = true
	var log strings.Builder
	if cfg.Log != nil {
		cfg.Log = io.MultiWriter(&log, cfg.Log)
	} else {
		cfg.Log = &log
	}
	began := time.Now()
	a, err := New(t.Context(), cfg)
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			name := strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())
			path := fmt.Sprintf("%s/%s.log", os.TempDir(), name)
			_ = os.WriteFile(path, []byte(log.String()), 0o600)
			t.Logf("the replicas' log is in %s", path)
		}
		t.Logf("%s: %s in all", t.Name(), time.Since(began).Round(time.Millisecond))
	})
	require.NoError(t, err)
	return a
}

// postAll hands in one notice of n devices for each of the schools, three at a
// time.
func postAll(ctx context.Context, t *testing.T, a *Arena, schools, n int) {
	t.Helper()
	var wg sync.WaitGroup
	errs := make(chan error, schools)
	room := make(chan struct{}, 3)
	for i := range schools {
		wg.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			if _, err := a.Post(ctx, fmt.Sprintf("S%02d", i), n); err != nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}

// sound fails the test unless everything that was promised held.
func sound(ctx context.Context, t *testing.T, a *Arena) verdict.Verdict {
	t.Helper()
	v, err := a.Verdict(ctx)
	require.NoError(t, err)
	shown, err := json.Marshal(v)
	require.NoError(t, err)
	t.Logf("verdict: %s", shown)
	for _, line := range v.Violations {
		t.Errorf("violation: %s", line)
	}
	require.True(t, v.OK)
	return v
}

// until polls a condition that another process makes true.
func until(ctx context.Context, t testing.TB, what string, cond func() (bool, error)) {
	t.Helper()
	for {
		ok, err := cond()
		require.NoError(t, err, what)
		if ok {
			return
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			require.FailNow(t, "did not happen in time: "+what)
		}
	}
}

// TestKilledOwnerLosesNothing is the scenario that the project exists for:
// 20 schools, 100,000 devices, three replicas, the owner of the 127th batch dies.
func TestKilledOwnerLosesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	settings := short()
	settings["SCHOOLBELL_DISPATCH_BATCH"] = "400"
	a := open(t, Config{Replicas: 3, Limit: 2000, Rest: 2 * time.Second, Settings: settings,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 50 * time.Millisecond}}})
	posting := make(chan struct{})
	go func() {
		defer close(posting)
		postAll(ctx, t, a, 20, 5000)
	}()
	until(ctx, t, "126 batches have arrived", func() (bool, error) { return a.Receiver.Counts().Requests >= 126, nil })
	var owner string
	until(ctx, t, "a replica holds a batch", func() (bool, error) {
		rows, err := a.DB.Query(ctx, `SELECT owner FROM push_batches WHERE settled_at IS NULL ORDER BY claimed_at DESC LIMIT 1`)
		if err != nil {
			return false, err
		}
		defer rows.Close()
		if rows.Next() {
			return true, rows.Scan(&owner)
		}
		return false, rows.Err()
	})
	victim := a.Owner(owner)
	require.NotNil(t, victim)
	require.NoError(t, victim.Kill())
	killed := time.Now()
	<-posting
	require.Len(t, a.Accepted(), 20)

	// What is waiting, in progress and done is known exactly, by SQL and by the API.
	states, err := a.States(ctx)
	require.NoError(t, err)
	total := 0
	for _, n := range states {
		total += n
	}
	require.Equal(t, 100_000, total)
	t.Logf("right after the kill: %v", states)
	for _, p := range a.Accepted() {
		n, err := a.Alive().Client().Notice(ctx, p.ID)
		require.NoError(t, err)
		c := n.Counts
		require.Equal(t, p.Total, c.Waiting+c.InProgress+c.RetryPending+c.Success+c.RetrySuccess+c.Fail+c.RetryFail+c.PermanentFail+c.Skipped.Duplicate, "counts add up")
	}

	require.NoError(t, a.WaitEnded(ctx))
	t.Logf("ended %s after the kill", time.Since(killed).Round(time.Millisecond))
	v := sound(ctx, t, a)
	require.Positive(t, v.Rule.Cycles, "several cycles happened")
	require.NotNil(t, v.RecoveryMS)
	t.Logf("the schools that the killed replica held were sending again after %+v ms (lease %s)", *v.RecoveryMS, lease)
	require.LessOrEqual(t, v.RecoveryMS.Max, float64((lease + time.Second).Milliseconds()))
}

// TestPausedOwnerComesBackTooLate stops the owner of a batch for two leases. Its
// schools go on without it, and what it still does when it goes on changes
// nothing.
func TestPausedOwnerComesBackTooLate(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 3, Limit: 1000, Rest: time.Second, Settings: short(),
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 60 * time.Millisecond, Spread: 40 * time.Millisecond}}})
	postAll(ctx, t, a, 12, 5000)
	var owner string
	until(ctx, t, "a replica holds a batch", func() (bool, error) {
		err := a.DB.QueryRow(ctx, `SELECT coalesce((SELECT owner FROM push_batches WHERE settled_at IS NULL ORDER BY claimed_at DESC LIMIT 1), '')`).Scan(&owner)
		return owner != "", err
	})
	resume, err := a.Owner(owner).Pause()
	require.NoError(t, err)
	at := time.Now()
	until(ctx, t, "two leases have passed", func() (bool, error) { return time.Since(at) >= 2*lease, nil })
	require.NoError(t, resume())
	require.NoError(t, a.WaitEnded(ctx))
	v := sound(ctx, t, a)
	require.NotNil(t, v.RecoveryMS)
	t.Logf("the schools of the stopped replica were sending again after %+v ms (lease %s)", *v.RecoveryMS, lease)
}

func TestRedisFlushedFiveTimes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 2, Limit: 500, Rest: time.Second, Settings: short(),
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 20 * time.Millisecond}}})
	postAll(ctx, t, a, 8, 3000)
	for i := range 5 {
		want := int64(i+1) * 3000
		until(ctx, t, "enough has arrived for the next flush", func() (bool, error) { return a.Receiver.Counts().Accepted >= want, nil })
		require.NoError(t, a.FlushRedis(ctx))
	}
	require.NoError(t, a.WaitEnded(ctx))
	sound(ctx, t, a)
}

func TestRollingRestartLosesNoRequestAndNoMessage(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	settings := short()
	// As long as a load balancer may go on sending after it last looked.
	settings["SCHOOLBELL_STOP_DELAY"] = "2s"
	a := open(t, Config{Replicas: 3, Limit: 1000, Rest: time.Second, Settings: settings,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 30 * time.Millisecond}}})
	stop := make(chan struct{})
	var posters sync.WaitGroup
	for p := range 4 {
		posters.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				// A load balancer sends to replicas that say they are ready, and to
				// them alone; nothing that it sends may be refused.
				if _, err := a.PostReady(ctx, fmt.Sprintf("S%d-%d", p, i%5), 50); err != nil {
					t.Errorf("a request was refused: %v", err)
					return
				}
			}
		})
	}
	for _, r := range a.Replicas() {
		code, err := r.Stop(ctx)
		require.NoError(t, err)
		require.Zero(t, code, "a graceful stop ends with 0")
		require.NoError(t, r.Start(ctx))
	}
	close(stop)
	posters.Wait()
	require.NoError(t, a.WaitEnded(ctx))
	require.Zero(t, sound(ctx, t, a).Repeated)
}

func TestRedisCLIShowsTheTruthInWords(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 1, Limit: 400, Rest: 20 * time.Second, Settings: short(),
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 400 * time.Millisecond}}})
	cli := func(args ...string) string {
		host, port, _ := strings.Cut(a.Redis.Addr(), ":")
		out, err := exec.CommandContext(ctx, "redis-cli", append([]string{"-h", host, "-p", port}, args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
		return string(out)
	}
	hash := func(key string) map[string]string {
		fields := strings.Split(strings.TrimSuffix(cli("HGETALL", key), "\n"), "\n")
		m := map[string]string{}
		for i := 0; i+1 < len(fields); i += 2 {
			m[fields[i]] = fields[i+1]
		}
		return m
	}
	_, err := a.Post(ctx, "A", 600)
	require.NoError(t, err)
	var lock map[string]string
	until(ctx, t, "the school is held and sends", func() (bool, error) {
		lock = hash("schoolbell:{A}:lock")
		return lock["batch"] != "" && lock["fence"] != "", nil
	})
	require.Equal(t, "replica-1", lock["owner"])
	for _, field := range []string{"acq", "fence", "acquired_at", "expires_at", "etc_ms", "renewals"} {
		require.NotEmpty(t, lock[field], field)
	}
	_, err = time.Parse(time.RFC3339, lock["expires_at"])
	require.NoError(t, err)
	quota := hash("schoolbell:{A}:quota")
	require.Equal(t, "400", quota["limit"])
	require.Equal(t, "20000", quota["rest_ms"])

	until(ctx, t, "the school rests", func() (bool, error) {
		return cli("EXISTS", "schoolbell:{A}:lock") == "0\n" && hash("schoolbell:{A}:quota")["nextEligibleAt"] != "", nil
	})
	quota = hash("schoolbell:{A}:quota")
	require.Equal(t, "400", quota["attempted"], "attempted stays at the limit through the rest")
	at, err := time.Parse(time.RFC3339, quota["nextEligibleAt"])
	require.NoError(t, err)
	require.InDelta(t, 20, time.Until(at).Seconds(), 3)
	require.NotEmpty(t, quota["nextEligibleMs"])
	require.NotEmpty(t, quota["cycle"])
	require.NotEmpty(t, quota["inc"])
	keys := cli("--scan", "--pattern", "schoolbell:*")
	require.Contains(t, keys, "schoolbell:{A}:quota")
	require.Contains(t, keys, "schoolbell:replica:replica-1")
	replica := hash("schoolbell:replica:replica-1")
	for _, field := range []string{"since", "version", "address", "schools_held", "heartbeat_at"} {
		require.NotEmpty(t, replica[field], field)
	}
}
