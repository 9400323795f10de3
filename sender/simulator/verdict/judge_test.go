package verdict

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/sender/simulator"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestACleanRunPasses(t *testing.T) {
	t.Parallel()
	v := clean().judge(t)
	require.Empty(t, v.Violations)
	require.True(t, v.OK)
	require.Equal(t, 2, v.Schools)
	require.Equal(t, 2600, v.Accepted)
	require.Equal(t, 2600, v.Arrived)
	require.Zero(t, v.Repeated, "a retry after a definite failure is no repeat")
	restMS := int64(5002)
	require.Equal(t, RuleVerdict{WorstCount: 500, Limit: 500, ShortestRestMS: &restMS, RestMS: 5000, Cycles: 4}, v.Rule)
	require.Equal(t, &Percentiles{P50: 2, P99: 2, Max: 2}, v.ResumeLagMS)
	require.Nil(t, v.RecoveryMS)
	require.InDelta(t, 2600/v.Seconds, v.RatePerSecond, 0.1)
}

// Of a run that was ended early, what still waits is counted and breaks nothing;
// what is lost still does.
func TestAnUnfinishedRunMayLeaveRecipientsWaiting(t *testing.T) {
	t.Parallel()
	r := clean()
	r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" || a.Message == "nA.78" })
	r.states["nA.77"] = Pending
	r.counts = nil
	v := r.judgeBy(t, func(j *Judge) {
		j.cfg.Unfinished = true
		for _, a := range r.arrivals {
			j.Arrival(a)
		}
	})
	require.Equal(t, 1, v.Waiting)
	require.Equal(t, 1, v.Lost)
	require.Len(t, v.Violations, 1)
	require.Contains(t, v.Violations[0], "nA.78 is SUCCESS")
}

// Each defect alone must be seen, in the number that is there for it.
func TestEachDefectIsReported(t *testing.T) {
	t.Parallel()
	lastOf := func(r *run, school string, cycle int) *simulator.Arrival {
		c := r.cycle(school, cycle)
		return c[len(c)-1]
	}
	for name, c := range map[string]struct {
		spoil func(r *run)
		seen  func(v Verdict) bool
		says  string
	}{
		"one lost": {
			func(r *run) {
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" })
				delete(r.states, "nA.77")
				r.counts = nil
			},
			func(v Verdict) bool { return v.Lost == 1 && v.Arrived == 2599 }, "lost: message nA.77 never arrived",
		},
		"SUCCESS that never arrived": {
			func(r *run) { r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" }) },
			func(v Verdict) bool { return v.Lost == 1 }, "nA.77 is SUCCESS",
		},
		"SUCCESS that was only refused": {
			func(r *run) { r.cycle("A", 0)[76].Answer = "UNAVAILABLE" },
			func(v Verdict) bool { return v.Lost == 1 }, "nA.77 is SUCCESS",
		},
		"FAIL that never arrived": {
			func(r *run) {
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" })
				r.states["nA.77"] = Fail
				r.counts = nil
			},
			func(v Verdict) bool { return v.Lost == 1 }, "nA.77 is FAIL",
		},
		"a retry that never came": {
			func(r *run) {
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.7" && a.Attempt == 2 })
				r.states, r.counts = nil, nil
			},
			func(v Verdict) bool { return v.Lost == 1 }, "nA.7 arrived 1 times",
		},
		"one still waiting": {
			func(r *run) {
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" })
				r.states["nA.77"], r.counts = RetryPending, nil
			},
			func(v Verdict) bool { return v.Waiting == 1 && v.Lost == 0 }, "nA.77 has not come to an end",
		},
		"one waiting that was accepted": {
			func(r *run) { r.states["nA.77"], r.counts = InProgress, nil },
			func(v Verdict) bool { return v.Waiting == 1 }, "nA.77",
		},
		"one that was never accepted for sending": {
			func(r *run) { lastOf(r, "A", 2).Message = "nA.1301" },
			func(v Verdict) bool { return v.Strange == 1 }, "nA.1301",
		},
		"one skipped that arrived": {
			func(r *run) { r.states["nA.77"], r.counts = Skipped, nil },
			func(v Verdict) bool { return v.SkippedButArrived == 1 }, "nA.77",
		},
		"one repeated": {
			func(r *run) { lastOf(r, "A", 2).Message = "nA.5" },
			func(v Verdict) bool { return v.Repeated == 1 && v.RepeatBound == 0 }, "message nA.5 was accepted 2 times",
		},
		"one repeated, and the machine stood still for a moment": {
			func(r *run) {
				lastOf(r, "A", 2).Message = "nA.5"
				r.faults = []Fault{{At: start, Until: start.Add(490 * time.Millisecond), Kind: Stall}}
			},
			func(v Verdict) bool { return v.Repeated == 1 && v.RepeatBound == 0 }, "message nA.5 was accepted 2 times",
		},
		"repeats beyond the bound": {
			func(r *run) {
				for i := range 3 {
					r.cycle("A", 2)[i].Message = fmt.Sprint("nA.", i+10)
				}
				r.states, r.counts = nil, nil
				for i := range r.notices {
					r.notices[i].Maybe = true
				}
				r.faults = []Fault{{At: start.Add(time.Second), Kind: Kill, Target: "replica-9", Unsettled: []int{2}}}
			},
			func(v Verdict) bool { return v.Repeated == 3 && v.RepeatBound == 2 && v.Lost == 0 }, "3 messages were accepted more than once, and kills and pauses explain 2",
		},
		"a repeat after an answer that was not lost, though a later one was": {
			func(r *run) { a := lastOf(r, "A", 2); a.Message, a.Lost = "nA.5", true },
			func(v Verdict) bool { return v.Repeated == 1 && v.RepeatedAfterLoss == 0 }, "nA.5",
		},
		"faults of other kinds excuse no repeat": {
			func(r *run) {
				lastOf(r, "A", 2).Message = "nA.5"
				r.faults = []Fault{{At: start, Kind: "redis-restart", Target: "redis", Unsettled: []int{500}}}
			},
			func(v Verdict) bool { return v.Repeated == 1 && v.RepeatBound == 0 }, "nA.5",
		},
		"501 of 500": {
			func(r *run) {
				extra := *lastOf(r, "A", 0)
				extra.Message, extra.Answer, extra.Batch = "nA.1300", "UNAVAILABLE", "A-extra"
				extra.T = extra.Ended + int64(time.Millisecond)
				extra.Ended = extra.T + int64(time.Millisecond)
				r.arrivals = append(r.arrivals, extra)
				moveAfter(r, "A", extra.T, 10*time.Millisecond)
			},
			func(v Verdict) bool {
				return v.Rule.Violations == 1 && v.Rule.WorstCount == 501 && *v.Rule.ShortestRestMS == 1
			}, "attempt 501 of 500",
		},
		"501 in one batch": {
			func(r *run) {
				extra := *lastOf(r, "A", 0)
				extra.Message, extra.Answer = "nA.1300", "UNAVAILABLE"
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.Rule.Violations == 1 && v.Rule.WorstCount == 501 }, "attempt 501 of 500",
		},
		"a rest that is a millisecond short": {
			func(r *run) { shift(append(r.cycle("B", 1), r.cycle("B", 2)...), -3*time.Millisecond); late(r) },
			func(v Verdict) bool {
				return v.Rule.Violations == 1 && *v.Rule.ShortestRestMS == 4999 && v.Rule.WorstCount == 1000
			}, "school B sent attempt 501 of 500",
		},
		"a rest that is a nanosecond short": {
			func(r *run) {
				shift(append(r.cycle("B", 1), r.cycle("B", 2)...), -2*time.Millisecond-time.Nanosecond)
				late(r)
			},
			func(v Verdict) bool { return v.Rule.Violations == 1 && *v.Rule.ShortestRestMS == 4999 }, "school B",
		},
		"a rest counted from the last call's beginning": {
			func(r *run) { shift(append(r.cycle("B", 1), r.cycle("B", 2)...), -call); late(r) },
			func(v Verdict) bool { return v.Rule.Violations == 1 && *v.Rule.ShortestRestMS == 4922 }, "school B",
		},
		"a rest during which an earlier call still ran": {
			func(r *run) { r.cycle("B", 0)[0].Ended += int64(time.Second) },
			func(v Verdict) bool { return v.Rule.Violations == 1 }, "school B",
		},
		"no rest at all": {
			func(r *run) {
				shift(append(r.cycle("A", 1), r.cycle("A", 2)...), -rest)
				shift(r.cycle("A", 2), -rest)
				late(r)
			},
			func(v Verdict) bool { return v.Rule.Violations == 2 && v.Rule.WorstCount == 1301 }, "school A",
		},
		"late after a higher fence": {
			func(r *run) {
				r.cycle("A", 2)[0].Fence = 2
				r.cycle("A", 2)[0].T -= int64(time.Microsecond)
			},
			func(v Verdict) bool { return v.LateAfterLease == 300 }, "a higher fence had arrived",
		},
		"late after send_deadline": {
			func(r *run) { r.batches[0].SendDeadline = start.Add(-time.Nanosecond) },
			func(v Verdict) bool { return v.LateAfterLease == 200 && v.LateByPause == 0 }, "send_deadline",
		},
		"late, its owner paused, but not on the way": {
			func(r *run) {
				r.batches[0].SendDeadline = start.Add(-time.Nanosecond)
				r.faults = []Fault{
					{At: start.Add(-3 * time.Second), Until: start.Add(-2 * time.Second), Kind: Pause, Target: "replica-1", Unsettled: []int{500}},
					{At: start.Add(-time.Second), Until: start.Add(time.Second), Kind: Pause, Target: "replica-2", Unsettled: []int{500}},
				}
			},
			func(v Verdict) bool { return v.LateAfterLease == 200 && v.LateByPause == 0 }, "send_deadline",
		},
		"late, and the machine stood still for less than that": {
			func(r *run) {
				r.batches[0].ClaimedAt, r.batches[0].SendDeadline = start.Add(-5*time.Second), start.Add(-time.Second)
				r.faults = []Fault{
					{At: start.Add(-6 * time.Second), Until: start.Add(-4500 * time.Millisecond), Kind: Stall},
					{At: start.Add(-2 * time.Second), Until: start.Add(-1501 * time.Millisecond), Kind: Stall},
				}
			},
			func(v Verdict) bool { return v.LateAfterLease == 200 && v.LateByPause == 0 }, "send_deadline",
		},
		"taken over before its time was up, and the machine stood still": {
			func(r *run) {
				for i := range r.cycle("A", 2) {
					r.cycle("A", 2)[i].T += int64(3 * time.Second)
				}
				r.cycle("A", 2)[0].Fence = 2
				r.cycle("A", 2)[0].T -= int64(3 * time.Second)
				r.faults = []Fault{{At: start, Until: start.Add(time.Hour), Kind: Stall}}
			},
			func(v Verdict) bool { return v.LateAfterLease > 0 }, "a higher fence had arrived",
		},
		"more late than a pause explains": {
			func(r *run) {
				r.batches[0].SendDeadline = start.Add(-time.Nanosecond)
				r.faults = []Fault{{At: start.Add(-time.Second), Until: start, Kind: Pause, Target: "replica-1", Unsettled: []int{199}}}
			},
			func(v Verdict) bool { return v.LateByPause == 200 && v.LateBound == 199 }, "200 arrivals of owners that were stopped",
		},
		"a claim after a higher fence's claim": {
			func(r *run) { r.batches[1].Fence = 2 },
			func(v Verdict) bool { return v.FencedWritesTaken > 0 }, "fence: school A",
		},
		"a claim after a higher fence was given": {
			func(r *run) {
				b := r.batches[1]
				r.terms = append(r.terms, Term{School: b.School, Fence: b.Fence + 1, OpenedAt: b.ClaimedAt.Add(-time.Nanosecond)})
			},
			func(v Verdict) bool { return v.FencedWritesTaken > 0 }, "had been given",
		},
		"counts that do not add up": {
			func(r *run) { r.counts[0].Success-- },
			func(v Verdict) bool { return v.CountsWrong == 1 }, "notice nA has 1300",
		},
		"counts of another total": {
			func(r *run) { r.counts[0].Total--; r.counts[0].Success-- },
			func(v Verdict) bool { return v.CountsWrong == 1 }, "accepted with 1300",
		},
		"counts that are not its recipients'": {
			func(r *run) { r.counts[0].Success--; r.counts[0].Fail++ },
			func(v Verdict) bool { return v.CountsWrong == 1 }, "its recipients are",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := clean()
			c.spoil(r)
			v := r.judge(t)
			require.False(t, v.OK)
			require.True(t, c.seen(v), "%+v", v)
			require.Contains(t, strings.Join(v.Violations, "\n"), c.says)
		})
	}
}

// What is no defect must not be taken for one.
func TestWhatIsAllowedPasses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(r *run)
		also   func(v Verdict) bool
	}{
		"repeats of a killed owner's batches": {
			func(r *run) {
				for i := range 3 {
					r.cycle("A", 2)[i].Message = fmt.Sprint("nA.", i+10)
				}
				for i := range r.notices {
					r.notices[i].Maybe = true
				}
				r.states, r.counts = nil, nil
				r.faults = []Fault{{At: start.Add(10 * time.Millisecond), Kind: Kill, Target: "replica-1"}}
			},
			func(v Verdict) bool { return v.Repeated == 3 && v.RepeatBound == 400 }, // the first batch of each school
		},
		"fences that were given in order": {
			func(r *run) {
				for _, b := range r.batches {
					r.terms = append(r.terms, Term{School: b.School, Fence: b.Fence, OpenedAt: b.ClaimedAt.Add(-time.Millisecond)})
				}
			},
			func(v Verdict) bool { return v.FencedWritesTaken == 0 },
		},
		"repeats of batches that a process cut off from the database had": {
			func(r *run) {
				for i := range r.batches {
					r.batches[i].TakenOver = true
				}
				for i := range 3 {
					r.cycle("A", 2)[i].Message = fmt.Sprint("nA.", i+10)
				}
				for i := range r.notices {
					r.notices[i].Maybe = true
				}
				r.states, r.counts = nil, nil
				at := start.Add(10 * time.Millisecond)
				r.faults = []Fault{
					{At: at, Until: at.Add(time.Millisecond), Kind: PartitionDB, Target: "replica-1"},
					{At: at, Until: at.Add(time.Millisecond), Kind: PartitionRedis, Target: "replica-1"}, // explains nothing
				}
			},
			func(v Verdict) bool { return v.Repeated == 3 && v.RepeatBound == 400 && v.LateBound == 0 },
		},
		"a repeat after the receiver lost the answer": {
			func(r *run) {
				r.cycle("A", 0)[4].Lost = true
				extra := *r.cycle("A", 0)[4]
				last := r.of("A")
				extra.T, extra.Ended, extra.Attempt, extra.Batch, extra.Lost = last[len(last)-1].T, last[len(last)-1].Ended, 2, "A-b8", false
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.Repeated == 1 && v.RepeatedAfterLoss == 1 },
		},
		"a repeat that the receiver dropped": {
			func(r *run) {
				extra := *r.cycle("A", 0)[4]
				last := r.of("A")
				extra.T, extra.Ended, extra.Attempt, extra.Batch, extra.Repeat = last[len(last)-1].T, last[len(last)-1].Ended, 2, "A-b8", true
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.Repeated == 0 },
		},
		"a requeue": {
			func(r *run) {
				extra := *r.cycle("A", 0)[4]
				last := r.of("A")
				extra.T, extra.Ended, extra.Attempt, extra.Batch, extra.Requeued = last[len(last)-1].T, last[len(last)-1].Ended, 2, "A-b8", 1
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.Repeated == 0 && v.Arrived == 2600 },
		},
		"one that arrived by its requeue": {
			func(r *run) {
				a := r.cycle("A", 0)[4]
				a.Answer = "INVALID_ARGUMENT"
				extra := *a
				last := r.of("A")
				extra.T, extra.Ended, extra.Attempt, extra.Batch, extra.Requeued, extra.Answer = last[len(last)-1].T, last[len(last)-1].Ended, 2, "A-b8", 1, "200"
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.Arrived == 2600 && v.Lost == 0 },
		},
		"states that say why": {
			func(r *run) {
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" || a.Message == "nA.78" })
				r.states["nA.77"], r.states["nA.78"], r.states["nA.79"] = Skipped, PermanentFail, Fail
				r.counts = nil
				for _, a := range r.of("A") {
					if a.Message == "nA.79" {
						a.Answer = "UNREGISTERED"
					}
				}
			},
			func(v Verdict) bool { return v.Lost == 0 && v.Arrived == 2597 },
		},
		"no states, and the receiver said why": {
			func(r *run) {
				r.states, r.counts = nil, nil
				r.cycle("A", 0)[76].Answer = "UNREGISTERED"
			},
			func(v Verdict) bool { return v.Lost == 0 && v.Arrived == 2599 },
		},
		"a notice that nobody knows to be accepted": {
			func(r *run) {
				r.notices[0].Maybe = true
				r.without(func(a simulator.Arrival) bool { return a.Message == "nA.77" })
				r.states, r.counts = nil, nil
			},
			func(v Verdict) bool { return v.Lost == 0 && v.Accepted == 1300 },
		},
		"late because its owner was paused on the way": {
			func(r *run) {
				r.batches[0].SendDeadline = start.Add(-time.Nanosecond)
				r.faults = []Fault{{At: start.Add(-time.Microsecond), Until: start, Kind: Pause, Target: "replica-1", Unsettled: []int{200}}}
			},
			func(v Verdict) bool {
				return v.LateAfterLease == 200 && v.LateByPause == 200 && v.Rule.WorstCount == 500
			},
		},
		"late because the machine stood still for as long": {
			func(r *run) {
				r.batches[0].ClaimedAt, r.batches[0].SendDeadline = start.Add(-5*time.Second), start.Add(-time.Second)
				r.faults = []Fault{
					{At: start.Add(-6 * time.Second), Until: start.Add(-4500 * time.Millisecond), Kind: Stall},
					{At: start.Add(-2 * time.Second), Until: start.Add(-1500 * time.Millisecond), Kind: Stall},
				}
			},
			func(v Verdict) bool {
				return v.LateAfterLease == 200 && v.LateByPause == 200 && v.LateBound == 200 && v.RepeatBound == 200 && // a quarter of its batch's time

					v.Stalls == StallVerdict{Count: 2, LongestMS: 1500, TotalMS: 2000} && len(v.Faults) == 2 && v.RecoveryMS == nil
			},
		},
		"one that came during the rest because its owner was paused on the way": {
			func(r *run) {
				extra := *r.cycle("A", 0)[limit-1]
				extra.T += int64(time.Second)
				extra.Ended += int64(time.Second)
				extra.Message, extra.Answer, extra.Batch = "nA.1300", "UNAVAILABLE", "A-paused"
				r.arrivals = append(r.arrivals, extra)
				r.batches = append(r.batches, Batch{
					ID: "A-paused", School: "A", Owner: "replica-1", Fence: 1, Size: 1,
					ClaimedAt: start, SendDeadline: start.Add(time.Millisecond), SettledAt: start.Add(time.Minute),
				})
				r.faults = []Fault{{At: start.Add(time.Microsecond), Until: start.Add(time.Second), Kind: Pause, Target: "replica-1", Unsettled: []int{1}}}
			},
			func(v Verdict) bool { return v.LateByPause == 1 && v.Rule.WorstCount == 500 && v.Rule.Cycles == 4 },
		},
		"an arrival that was still being answered": {
			func(r *run) {
				last := r.of("A")[len(r.of("A"))-1]
				extra := *last
				extra.Message, extra.Answer, extra.Ended, extra.Requeued = "nA.5", "", 0, 1
				r.arrivals = append(r.arrivals, extra)
			},
			func(v Verdict) bool { return v.UnansweredArrivals == 1 },
		},
		"a silence below the limit": {
			func(r *run) { shift(r.cycle("A", 2), time.Hour); late(r) },
			func(v Verdict) bool { return v.Rule.WorstCount == 500 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := clean()
			c.change(r)
			v := r.judge(t)
			require.Empty(t, v.Violations)
			require.True(t, v.OK)
			require.True(t, c.also(v), "%+v", v)
		})
	}
}

func TestTheLogSaysTheSameInAnyOrder(t *testing.T) {
	t.Parallel()
	r := clean()
	for _, a := range r.cycle("A", 1)[:3] {
		a.Answer, a.Ended = "", 0 // still being answered
	}
	want := r.judge(t)
	require.Equal(t, 3, want.UnansweredArrivals)
	log := r.log()
	require.Equal(t, want, r.judgeBy(t, func(j *Judge) { require.NoError(t, j.ReadLog(log)) }))
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(r.arrivals), func(i, k int) { r.arrivals[i], r.arrivals[k] = r.arrivals[k], r.arrivals[i] })
	got := r.judge(t)
	slices.Sort(got.Violations) // they come as messages were first heard of
	got.Details, want.Details = nil, nil
	require.Equal(t, want, got)
}

func TestSchoolsMayHaveTheirOwnRule(t *testing.T) {
	t.Parallel()
	r := clean()
	j, err := New(Config{Rule: Rule{Limit: limit, Rest: rest}, Rules: map[string]Rule{"B": {Limit: 499, Rest: rest}}})
	require.NoError(t, err)
	require.NoError(t, j.ReadLog(r.log()))
	v := j.Verdict()
	require.Equal(t, 2, v.Rule.Violations)
	require.Contains(t, v.Violations[0], "school B sent attempt 500 of 499")
}

func TestRecoveryIsMeasuredToTheNextOwnersFirstArrival(t *testing.T) {
	t.Parallel()
	r := clean()
	killed := start.Add(time.Second)
	for _, a := range append(r.cycle("A", 1), r.cycle("A", 2)...) {
		a.Fence = 2
	}
	r.batches = nil
	r.faults = []Fault{{At: killed, Kind: Kill, Target: "replica-1", Schools: []string{"A", "B", "none"}, Unsettled: []int{}}}
	v := r.judge(t)
	require.Empty(t, v.Violations)
	want := float64(time.Duration(r.cycle("A", 1)[0].T-killed.UnixNano())) / 1e6
	require.Equal(t, &Percentiles{P50: want, P99: want, Max: want}, v.RecoveryMS, "B went on under the same owner")
	require.Equal(t, []FaultLine{{AtMS: 1000, Kind: "kill", Target: "replica-1", NextSendMS: &want}}, v.Faults)
}

func TestRecoveryOfAStoreIsMeasuredToTheNextClaimsFirstArrival(t *testing.T) {
	t.Parallel()
	r := clean()
	broken := r.batches[1].ClaimedAt.Add(-time.Nanosecond)
	r.faults = []Fault{{At: broken, Until: broken.Add(time.Second), Kind: "redis-restart", Target: "redis", Detail: "with-data"}}
	v := r.judge(t)
	require.Empty(t, v.Violations)
	require.Zero(t, v.RepeatBound)
	var first int64
	for _, a := range r.arrivals {
		for _, b := range r.batches {
			if a.Batch == b.ID && b.ClaimedAt.After(broken) && a.T > broken.UnixNano() && (first == 0 || a.T < first) {
				first = a.T
			}
		}
	}
	want := float64(first-broken.UnixNano()) / 1e6
	require.Equal(t, &Percentiles{P50: want, P99: want, Max: want}, v.RecoveryMS)
	require.Equal(t, "with-data", v.Faults[0].Detail)
	require.Equal(t, v.Faults[0].AtMS+1000, v.Faults[0].UntilMS)
}

// A violation says of which school it is, and when it was, so that what happened
// around it can be shown.
func TestAViolationSaysWhereAndWhen(t *testing.T) {
	t.Parallel()
	r := clean()
	r.without(func(a simulator.Arrival) bool { return a.Message == "nA.78" })
	r.cycle("B", 1)[0].T -= int64(100 * time.Millisecond)
	at := r.cycle("B", 1)[0].T
	v := r.judge(t)
	require.Len(t, v.Details, len(v.Violations))
	for i, d := range v.Details {
		require.Equal(t, v.Violations[i], d.Text)
	}
	require.Equal(t, "B", v.Details[0].School)
	require.True(t, v.Details[0].At.Equal(time.Unix(0, at)), v.Details[0])
	last := v.Details[len(v.Details)-1]
	require.Equal(t, "nA.78", last.Message)
	require.Equal(t, "A", last.School)
}

func TestALogThatIsNotExactIsRefused(t *testing.T) {
	t.Parallel()
	first := `{"n":1,"t_ns":1,"kind":"relay","school":"A","notice":"n","message":"n.1","token_sha":"","batch":"b","fence":1,"attempt":1}`
	second := strings.Replace(first, `}`, `,"answer":"200","ended_ns":2}`, 1)
	for name, c := range map[string]struct{ log, says string }{
		"cut off":              {first + "\n" + second[:40], "line 2"},
		"answer without one":   {second, "waits for none"},
		"answered twice":       {first + "\n" + second + "\n" + second, "line 3"},
		"a hole":               {strings.Replace(first, `"n":1`, `"n":2`, 1), "arrival 2 comes after 0"},
		"no end":               {first + "\n" + strings.Replace(second, `"ended_ns":2`, `"ended_ns":0`, 1), "ended_ns"},
		"a line without bound": {strings.Repeat("x", maxLine+1), "longer"},
	} {
		j, err := New(Config{Rule: Rule{Limit: 1, Rest: 1}})
		require.NoError(t, err)
		require.ErrorContains(t, j.ReadLog(strings.NewReader(c.log)), c.says, name)
	}
	j, err := New(Config{Rule: Rule{Limit: 1, Rest: 1}})
	require.NoError(t, err)
	require.NoError(t, j.ReadLog(strings.NewReader(first+"\n"+second+"\n")))
	require.NoError(t, j.ReadLog(strings.NewReader(first+"\n"+second+"\n")), "another receiver's log")
}

func TestWhatIsToldTwiceOrMakesNoSenseIsRefused(t *testing.T) {
	t.Parallel()
	for _, r := range []Rule{{}, {Limit: 1}, {Rest: 1}, {Limit: -1, Rest: 1}} {
		_, err := New(Config{Rule: r})
		require.Error(t, err)
		_, err = New(Config{Rule: Rule{Limit: 1, Rest: 1}, Rules: map[string]Rule{"A": r}})
		require.ErrorContains(t, err, "school A")
	}
	j, err := New(Config{Rule: Rule{Limit: 1, Rest: 1}})
	require.NoError(t, err)
	require.NoError(t, j.AcceptNotice(Notice{ID: "n", Total: 1}))
	require.Error(t, j.AcceptNotice(Notice{ID: "n", Total: 1}))
	require.Error(t, j.AcceptNotice(Notice{}))
	require.NoError(t, j.Batch(Batch{ID: "b"}))
	require.Error(t, j.Batch(Batch{ID: "b"}))
	require.Error(t, j.Batch(Batch{}))
	_, err = ParseState("DONE")
	require.Error(t, err)
	state, err := ParseState("PERMANENT_FAIL")
	require.NoError(t, err)
	require.Equal(t, PermanentFail, state)
}

func TestTheJSONIsWhatToolsRead(t *testing.T) {
	t.Parallel()
	j, err := New(Config{Rule: Rule{Limit: 500, Rest: rest}, Seed: 1, Replicas: 3})
	require.NoError(t, err)
	b, err := json.Marshal(j.Verdict())
	require.NoError(t, err)
	require.JSONEq(t, `{"ok":true,"seed":1,"replicas":3,"schools":0,"accepted":0,"arrived":0,"lost":0,"waiting":0,"strangers":0,
		"repeated":0,"repeat_bound":0,"repeated_after_lost_answer":0,"skipped_but_arrived":0,
		"rule":{"violations":0,"worst_count":0,"limit":500,"shortest_rest_ms":null,"rest_ms":5000,"cycles":0},
		"late_after_lease":0,"late_by_pause":0,"late_bound":0,"fenced_writes_accepted":0,"counts_wrong":0,"unanswered_arrivals":0,
		"stalls":{"count":0,"longest_ms":0,"total_ms":0},"faults":[],"recovery_ms":null,"resume_lag_ms":null,"seconds":0,"rate_per_second":0,"violations":[]}`, string(b))
}

func TestPercentiles(t *testing.T) {
	t.Parallel()
	var d []time.Duration
	for i := 100; i >= 1; i-- {
		d = append(d, time.Duration(i)*time.Millisecond)
	}
	require.Equal(t, &Percentiles{P50: 50, P99: 99, Max: 100}, percentiles(d))
	require.Equal(t, &Percentiles{P50: 3, P99: 3, Max: 3}, percentiles([]time.Duration{3 * time.Millisecond}))
	require.Nil(t, percentiles(nil))
	require.EqualValues(t, -1, floorMS(-time.Nanosecond))
	require.EqualValues(t, 4999, floorMS(5*time.Second-time.Nanosecond))
}

func TestABrokenRunDoesNotFillTheScreen(t *testing.T) {
	t.Parallel()
	r := clean()
	r.arrivals = r.arrivals[:1]
	r.states, r.counts = nil, nil
	v := r.judge(t)
	require.Len(t, v.Violations, maxViolations+1)
	require.Equal(t, "and 2499 more", v.Violations[maxViolations])
	require.Equal(t, 2599, v.Lost)
}

func BenchmarkJudge(b *testing.B) {
	log := clean().log().Bytes()
	b.SetBytes(int64(len(log)))
	b.ReportAllocs()
	for b.Loop() {
		j, err := New(Config{Rule: Rule{Limit: limit, Rest: rest}})
		if err != nil {
			b.Fatal(err)
		}
		if err := j.ReadLog(bytes.NewReader(log)); err != nil {
			b.Fatal(err)
		}
		if v := j.Verdict(); !v.OK {
			b.Fatal(v.Violations)
		}
	}
}
