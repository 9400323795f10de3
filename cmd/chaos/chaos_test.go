package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/cmd/chaos/plan"
	"schoolbell/cmd/chaos/storm"
	"schoolbell/sender/simulator/verdict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// chaos runs the command as it is run from a shell.
func chaos(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	cmd := command()
	var out, said bytes.Buffer
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&said)
	err = cmd.ExecuteContext(ctx)
	return out.String(), said.String(), err
}

// TestAShortRunKeepsEveryPromise is the whole program, small: its output is one
// JSON object of the form that other programs read.
func TestAShortRunKeepsEveryPromise(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stdout, stderr, err := chaos(ctx, "--replicas", "2", "--schools", "4", "--recipients", "4000", "--limit", "400", "--rest", "1s",
		"--unavailable", "0", "--for", "12s", "--faults", "kill,redis-flush,partition-db", "--seed", "1", "--output", "json")
	require.NoError(t, err, "%s\n%s", stderr, stdout)

	dec := json.NewDecoder(strings.NewReader(stdout))
	var object map[string]any
	require.NoError(t, dec.Decode(&object))
	require.False(t, dec.More(), "exactly one object")
	for name, example := range map[string]any{
		"ok": true, "seed": 1.0, "replicas": 1.0, "schools": 1.0, "accepted": 1.0, "arrived": 1.0, "lost": 1.0,
		"repeated": 1.0, "repeat_bound": 1.0, "rule": map[string]any{}, "late_after_lease": 1.0, "fenced_writes_accepted": 1.0,
		"counts_wrong": 1.0, "faults": []any{}, "recovery_ms": map[string]any{}, "resume_lag_ms": map[string]any{},
		"seconds": 1.0, "rate_per_second": 1.0, "violations": []any{},
	} {
		require.Contains(t, object, name)
		require.IsType(t, example, object[name], name)
	}
	rule := object["rule"].(map[string]any)
	for _, name := range []string{"violations", "worst_count", "limit", "shortest_rest_ms", "rest_ms", "cycles"} {
		require.IsType(t, 1.0, rule[name], name)
	}
	for _, dist := range []string{"recovery_ms", "resume_lag_ms"} {
		for _, name := range []string{"p50", "p99", "max"} {
			require.IsType(t, 1.0, object[dist].(map[string]any)[name], name)
		}
	}
	faults := object["faults"].([]any)
	require.GreaterOrEqual(t, len(faults), 3)
	for _, f := range faults {
		require.IsType(t, 1.0, f.(map[string]any)["at_ms"])
		require.IsType(t, "", f.(map[string]any)["kind"])
		require.IsType(t, "", f.(map[string]any)["target"])
	}
	require.Equal(t, true, object["ok"])
	require.Equal(t, 4000.0, object["accepted"])
	require.Equal(t, 4000.0, object["arrived"])
	require.Positive(t, rule["cycles"])
}

// TestAnInterruptEndsTheRun: everything that was started is gone, and nothing is
// judged.
func TestAnInterruptEndsTheRun(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	interrupt := errors.New("interrupt")
	cmd := command()
	var out bytes.Buffer
	cmd.SetArgs([]string{"--for", "1m", "--schools", "3", "--recipients", "3000", "--replicas", "2", "--faults", "kill,pause", "--output", "json"})
	cmd.SetOut(&out)
	cmd.SetErr(writer(func(text string) {
		if strings.Contains(text, "replica-") { // the first fault has begun
			cancel(interrupt)
		}
	}))
	err := cmd.ExecuteContext(ctx)
	require.ErrorIs(t, err, interrupt)
	require.Equal(t, 1, exitCode(err))
	require.Empty(t, out.String())
}

type writer func(string)

func (w writer) Write(p []byte) (int, error) { w(string(p)); return len(p), nil }

func TestWrongUsage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, says string }{
		{"--replicas 0", "--replicas is 0: from 1 to 20"},
		{"--schools -1", "--schools is -1"},
		{"--recipients 5", "at least one for each of the 20 schools"},
		{"--limit 0", "--limit is 0"},
		{"--rest 1ms", "--rest is 1ms: from 100ms"},
		{"--for 1s", "--for is 1s: from 5s"},
		{"--for soon", "soon"},
		{"--faults earthquake", `--faults: fault "earthquake" is none of kill, pause`},
		{"--redis memcached", `--redis is "memcached"`},
		{"--redis single --faults redis-failover", "redis-failover needs sentinel"},
		{"--output xml", `--output is "xml"`},
		{"--mutate nothing", `--mutate is "nothing": one of no-provisional-rest`},
		{"--scenario comedy", `--scenario is "comedy": one of pause, takeover`},
		{"--unavailable 2", "--unavailable is 2"},
		{"--delivery once", "--delivery is \"once\": at_least_once or at_most_once"},
		{"--strange", "unknown flag"},
		{"argument", "unknown command"},
	} {
		_, _, err := chaos(t.Context(), strings.Fields(c.args)...)
		require.ErrorContains(t, err, c.says, c.args)
		if c.args != "argument" {
			require.Equal(t, 2, exitCode(err), c.args)
		}
	}
}

func TestHelpExplainsEverything(t *testing.T) {
	t.Parallel()
	help, _, err := chaos(t.Context(), "--help")
	require.NoError(t, err)
	for _, e := range plan.Catalogue() {
		require.Contains(t, help, "  "+string(e.Kind)+" ")
		require.Contains(t, help, e.What)
	}
	for _, s := range storm.Scenarios() {
		require.Contains(t, help, s.What)
	}
	for _, m := range mutations() {
		require.Contains(t, help, m.what)
	}
	list, _, err := chaos(t.Context(), "--list-faults")
	require.NoError(t, err)
	require.Len(t, strings.Split(strings.TrimSpace(list), "\n"), len(plan.Catalogue()))
}

// TestWhatWasBrokenIsShownWithWhatHappenedAroundIt also looks at the exit code.
func TestWhatWasBrokenIsShownWithWhatHappenedAroundIt(t *testing.T) {
	t.Parallel()
	rest, took := int64(4999), 12.5
	res := storm.Result{
		Verdict: verdict.Verdict{
			Seed: 7, Rule: verdict.RuleVerdict{Violations: 1, Limit: 500, WorstCount: 1000, RestMS: 5000, ShortestRestMS: &rest},
			Faults:     []verdict.FaultLine{{Kind: "kill", Target: "replica-1"}, {Kind: "kill", Target: "replica-2", NextSendMS: &took}},
			Violations: []string{"rule: school S01 sent too early"},
		},
		Timeline: []storm.Event{{At: 1500 * time.Millisecond, What: "kill of replica-1"}},
		Around:   map[string][]string{"rule: school S01 sent too early": {"10:00:00  replica-1 claims batch 7"}},
	}
	var text, object bytes.Buffer
	require.ErrorIs(t, options{output: outputText}.show(res, &text), errBroken)
	require.Contains(t, text.String(), "1.5s  kill of replica-1")
	require.Contains(t, text.String(), "BROKEN rule: school S01 sent too early\n       10:00:00  replica-1 claims batch 7")
	require.Contains(t, text.String(), "at least 5s")
	require.Contains(t, text.String(), "4.999s")
	require.NotContains(t, text.String(), "Every promise was kept")
	require.ErrorIs(t, options{output: outputJSON}.show(res, &object), errBroken)
	require.Equal(t, 1, strings.Count(object.String(), "\n"))
	require.Equal(t, 1, exitCode(errBroken))

	res.Verdict.OK, res.Verdict.Violations = true, []string{}
	text.Reset()
	require.NoError(t, options{output: outputText}.show(res, &text))
	require.Contains(t, text.String(), "Every promise was kept.")
}
