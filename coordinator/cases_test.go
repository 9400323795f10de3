package coordinator_test

import (
	"encoding/json"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/school/quota/quotatest"
	"schoolbell/sender"
)

// TestTheRulesCasesHoldForWholeTurns runs the cases of the sending rule, each an
// input and its only right sequence of batches, through whole replicas: agenda,
// lock, store, rule and sender together.
func TestTheRulesCasesHoldForWholeTurns(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../school/quota/testdata/rule.json")
	require.NoError(t, err)
	var cases []quotatest.Case
	require.NoError(t, json.Unmarshal(raw, &cases))
	require.NotEmpty(t, cases)
	for _, c := range cases {
		if slices.ContainsFunc(c.Ends, func(e struct {
			Call    int
			AfterMS int64 `json:"after_ms"`
			How     string
		}) bool {
			return e.How == "killed"
		}) {
			continue // a process that dies leaves orphans: see the tests of the takeover
		}
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) { w.runCase(c) })
		})
	}
}

func (w *world) runCase(c quotatest.Case) {
	ms := func(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
	or := func(n, otherwise int64) int64 {
		if n == 0 {
			return otherwise
		}
		return n
	}
	set := func(limit, restMS int64) {
		l, r := int(limit), ms(restMS)
		w.outbox.put(school.School{ID: "A", Limit: &l, Rest: &r})
	}
	once := func(cfg *coordinator.Config, _ *coordinator.Deps) {
		cfg.Batch, cfg.Retry = c.Batch, school.RetryPolicy{Max: 0, Base: time.Minute}
	}
	replicas := map[string]*replica{"": w.start("r1", once)}
	for _, in := range c.Waiting {
		if replicas[in.Replica] == nil {
			replicas[in.Replica] = w.start(in.Replica, once)
		}
	}

	// What came about before 0, under the settings of that time.
	was := or(int64(c.LimitWas), int64(c.Limit))
	if used := int64(c.Start.Attempted); used > was {
		was = used + 1 // of a time before that
	}
	set(was, or(c.RestWasMS, c.RestMS))
	w.receiver.takes(0)
	if c.Start.Attempted > 0 {
		w.used(replicas[""], "A", c.Start.Attempted)
	}
	ended := time.UnixMilli(w.arbiter.state("A").LastEnd)
	set(int64(c.Limit), c.RestMS)
	if c.Start.LastEndMS != nil {
		require.LessOrEqual(w, *c.Start.LastEndMS, int64(-60_000), "a minute passes in used")
		w.pass(time.Until(ended.Add(-ms(*c.Start.LastEndMS))))
	}
	cycle := w.arbiter.state("A").Cycle

	// From 0 on.
	zero := time.Now()
	w.receiver.takes(ms(c.CallMS))
	w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
		for _, e := range c.Ends {
			if e.Call == n-1 {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE"})
			}
		}
		return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
	})
	w.receiver.mu.Lock()
	w.receiver.calls = map[int]time.Duration{}
	for _, e := range c.Ends {
		w.receiver.calls[e.Call+1] = ms(e.AfterMS)
	}
	w.receiver.mu.Unlock()
	for _, in := range c.Waiting {
		w.pass(time.Until(zero.Add(ms(in.AtMS))))
		n := w.outbox.accept("A", in.N)
		for i := range in.Disabled {
			n.recipients[i*in.N/in.Disabled].disabled = true
		}
		replicas[in.Replica].Wake("A")
	}
	w.pass(time.Hour)

	as := w.receiver.of("A")
	var got, want [][2]int64
	for i, a := range as {
		at := a.start.Sub(zero).Milliseconds()
		if i < len(c.Batches) && at > c.Batches[i][0] && at <= c.Batches[i][0]+preferredLead {
			at = c.Batches[i][0] // later by a scheduling delay, never earlier
		}
		got = append(got, [2]int64{at, int64(len(a.ids))})
	}
	want = append(want, c.Batches...)
	require.Equal(w, want, got)
	state := w.arbiter.state("A")
	require.Equal(w, c.State.Attempted, state.Attempted)
	require.Equal(w, c.State.CycleDelta, state.Cycle-cycle)
	require.Equal(w, c.State.Attempted, w.outbox.ledger("A").Attempted, "the ledger knows the same")
	states := w.outbox.states("A")
	if c.State.SkippedDisabled != nil {
		require.Equal(w, *c.State.SkippedDisabled, states[school.Skipped])
	}
	if c.State.Success != nil {
		require.Equal(w, *c.State.Success, states[school.Success])
	}
	if c.State.NextEligibleMS != nil {
		require.Equal(w, *c.State.NextEligibleMS, state.Next-zero.UnixMilli())
	}
	w.judge("A", max(c.Limit, c.LimitWas), min(ms(c.RestMS), ms(or(c.RestWasMS, c.RestMS))))
}

// preferredLead is by how much, in ms, a replica that is not preferred comes later.
const preferredLead = 30
