package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/demo"
	"schoolbell/school"
	"schoolbell/sender/simulator/verdict"
)

func sound() verdict.Verdict {
	rest := int64(5003)
	return verdict.Verdict{
		OK: true, Replicas: 3, Schools: 12, Accepted: 24000, Arrived: 24000, Repeated: 40, RepeatBound: 200,
		Rule:        verdict.RuleVerdict{WorstCount: 500, Limit: 500, ShortestRestMS: &rest, RestMS: 5000, Cycles: 36},
		Faults:      []verdict.FaultLine{{AtMS: 2000, Kind: verdict.Kill, Target: "replica-1"}, {AtMS: 5000, Kind: verdict.Kill, Target: "replica-2"}},
		RecoveryMS:  &verdict.Percentiles{P50: 6100, P99: 6201.25, Max: 6201.25},
		ResumeLagMS: &verdict.Percentiles{P50: 12, P99: 31, Max: 40.5},
		Seconds:     21.5, RatePerSecond: 1116.3, Violations: []string{},
	}
}

func TestDemo(t *testing.T) {
	t.Parallel()
	s := newStage()
	var got demo.Config
	s.replica.demo = func(_ context.Context, cfg demo.Config) (verdict.Verdict, error) {
		got = cfg
		cfg.Watch(demo.Progress{Planned: 24000, Replicas: 3, Alive: 3, Address: "127.0.0.1:8080"})
		cfg.Watch(demo.Progress{Elapsed: 5200 * time.Millisecond, Accepted: 24000, Planned: 24000, Arrived: 6000, PerSecond: 1200.4, Alive: 2, Replicas: 3, Kills: 1,
			Schools: map[api.SchoolState]int{api.Resting: 9, api.WaitingForSlot: 3}, Address: "127.0.0.1:8080"})
		return sound(), nil
	}
	require.Equal(t, exitDone, s.run("demo"), s.err.String())
	require.Equal(t, "the first replica answers on http://127.0.0.1:8080\n"+
		"5.2s: 6000 of 24000 sent, 1200/s, 2 of 3 replicas, 1 killed, 9 resting, 3 waiting for slot\n", s.err.String())
	require.Equal(t, `24000 messages for 12 schools through 3 replicas in 21.5 s, 1116 a second, 2 killed

                                 PROMISED     RECEIVER SAW
accepted messages that arrived   24000        24000
lost                             0            0
sent twice                       at most 200  40
most attempts between two rests  at most 500  500
shortest rest                    at least 5s  5.003s
rests that were kept             36           36
sent after losing the lock       0            0
claims of a former owner         0            0
notices whose counts are wrong   0            0
resumed after a rest's end                    p50 12ms, p99 31ms, max 40.5ms
taken over after a kill                       p50 6.1s, p99 6.2013s, max 6.2013s

Every promise was kept.
`, s.out.String())
	got.Watch = nil
	require.Equal(t, "v1.2.3", got.Version.Version)
	got.Version = api.Version{}
	require.Equal(t, demo.Config{Schools: 12, Recipients: 24000, Replicas: 3, Limit: 500, Rest: 5 * time.Second, Listen: ":8080", Latency: got.Latency}, got)

	require.Equal(t, exitDone, s.run("demo", "--output", "json", "--kill-every", "3s", "--duration", "1m", "--http", "127.0.0.1:0"))
	var printed verdict.Verdict
	require.NoError(t, json.Unmarshal(s.out.Bytes(), &printed), "exactly one object on stdout")
	require.Equal(t, sound(), printed)
	require.Equal(t, 3*time.Second, got.KillEvery)
	require.Equal(t, time.Minute, got.Duration)
}

func TestDemoFails(t *testing.T) {
	t.Parallel()
	s := newStage()
	broken := sound()
	broken.OK, broken.Lost, broken.Violations = false, 2, []string{"lost: message 1.2 never arrived", "lost: message 1.3 never arrived", "c", "d"}
	s.replica.demo = func(context.Context, demo.Config) (verdict.Verdict, error) { return broken, nil }
	require.Equal(t, exitFailed, s.run("demo"))
	require.Equal(t, "schoolbell: a promise was broken: lost: message 1.2 never arrived; lost: message 1.3 never arrived; c; and 1 more\n", s.err.String())
	require.Contains(t, s.out.String(), "BROKEN lost: message 1.2 never arrived\n")
	require.NotContains(t, s.out.String(), "Every promise")
	require.Equal(t, exitFailed, s.run("demo", "--output", "json"))
	require.True(t, json.Valid(s.out.Bytes()), "the object is there all the same")
	require.Equal(t, 1, strings.Count(s.err.String(), "\n"))

	s.replica.demo = func(context.Context, demo.Config) (verdict.Verdict, error) {
		return verdict.Verdict{}, errors.New("demo: no space left on device")
	}
	s.failed(t, exitFailed, "demo: no space left on device", "demo")

	s.replica.demo = demo.Run // what cannot be run begins nothing
	for _, tc := range []struct{ args, want string }{
		{"--schools 0", "demo: 0 schools: give 1 to 10000"},
		{"--recipients 11", "demo: 11 recipients for 12 schools: give at least one each, and 10000000 at most"},
		{"--replicas 0", "demo: 0 replicas: give 1 to 50"},
		{"--limit 0", "demo: limit 0: give 1 to 1000000"},
		{"--rest 0", "demo: rest 0s: give 1ms to 168h"},
		{"--kill-every 1ms", "demo: a kill every 1ms: give 0 or at least 500ms, in which a replica can start"},
		{"--duration -1s", "demo: duration -1s is negative"},
		{"--http here", `demo: address "here": give host:port or :port`},
		{"--http 0.0.0.0:80", `demo: address "0.0.0.0:80": the demonstration asks for no key, so only this machine may reach it; give 127.0.0.1:port or :port`},
		{"--output xml", `--output "xml" is not text or json`},
	} {
		s.failed(t, exitUsage, tc.want+" (see schoolbell demo --help)", append([]string{"demo"}, strings.Fields(tc.args)...)...)
	}
}

// generous is an arbiter that grants twice what the rule allows.
type generous struct{ coordinator.Budget }

func (g generous) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	r.Rule.Limit *= 2
	return g.Budget.Reserve(ctx, r)
}

func (g generous) Reconcile(ctx context.Context, id string, l school.Ledger, r school.Rule) error {
	r.Limit *= 2
	return g.Budget.Reconcile(ctx, id, l, r)
}

// TestDemoSeesABrokenRule runs it with an arbiter that breaks the rule.
func TestDemoSeesABrokenRule(t *testing.T) {
	t.Parallel()
	s := newStage()
	s.replica.demo = func(ctx context.Context, cfg demo.Config) (verdict.Verdict, error) {
		cfg.Budget = func(b coordinator.Budget) coordinator.Budget { return generous{b} }
		return demo.Run(ctx, cfg)
	}
	require.Equal(t, exitFailed, s.run("demo", "--schools", "2", "--recipients", "80", "--limit", "20", "--rest", "2s", "--http", "127.0.0.1:0"))
	require.Contains(t, s.err.String(), "schoolbell: a promise was broken: rule: school school-")
	require.Contains(t, s.out.String(), "BROKEN rule: school school-")
	require.Regexp(t, `most attempts between two rests +at most 20 +40\n`, s.out.String())
}

// TestDemoOnATerminal draws a bar that is gone at the end.
func TestDemoOnATerminal(t *testing.T) {
	t.Parallel()
	s := newStage()
	s.terminal = true
	s.replica.demo = func(_ context.Context, cfg demo.Config) (verdict.Verdict, error) {
		for i := range 3 {
			cfg.Watch(demo.Progress{Planned: 100 * (i + 1), Arrived: 60 * i, Alive: 3, Replicas: 3, Schools: map[api.SchoolState]int{api.Resting: 7}, Address: "127.0.0.1:1", Moved: true})
		}
		return sound(), nil
	}
	require.Equal(t, exitDone, s.run("demo"))
	shown := s.err.String()
	require.Contains(t, shown, "the address asked for is taken; a free port is used\nthe first replica answers on http://127.0.0.1:1\n")
	require.Contains(t, shown, "3/3 replicas   0 sending   7 resting")
	require.Contains(t, shown, "60/200")
	last := shown[strings.LastIndex(shown, "\r"):]
	require.Empty(t, strings.TrimSpace(last), "the bar is taken away")
}
