// Package verdict judges a run from outside: from the receiver's arrival log
// first, and from what the run says of itself only where the log cannot know
// (which recipients were accepted, how they ended, what was broken when).
//
// It never looks at the clock and never asks a running system. Where the log
// leaves room for two readings, the sending side gets the benefit only of what
// the receiver saw: an attempt that the receiver never saw does not count, and
// an abandoned call ends when its request had been read. There is no tolerance
// besides: a rest that is a millisecond short is a violation.
//
// # What the numbers mean
//
//   - accepted: recipients that were accepted for sending.
//   - arrived: distinct message ids that the receiver accepted.
//   - lost: accepted recipients that the receiver never accepted and whose final
//     state does not say why (see why in delivery.go).
//   - repeated: messages accepted more than once. A retry after a definite
//     failure is none, nor is a requeue.
//   - repeat_bound: sizes of the batches unsettled at each kill or pause, and of
//     those that a process could not record while it alone was cut off from the
//     database, so that another took them over. Repeats beyond it break
//     the run, except where the receiver itself lost the answer to every earlier
//     acceptance (repeated_after_lost_answer).
//   - recovery_ms: from a fault to the next send. Of a kill or pause, for each
//     school that had a batch in the target's hands: to the next owner's first
//     arrival. Of a cut-off process: to the first arrival of a batch that was
//     claimed after the fault, for each such school. Of anything else: to the
//     first such arrival of any school.
//   - rule: see rule.go.
//   - late_after_lease: arrivals after their batch's send_deadline, or after a
//     higher fence of that school had arrived.
//   - late_by_pause: those of them that a pause of their owner explains, or the
//     machine's standing still for as long as they came late.
//   - fenced_writes_accepted: batches claimed after a higher fence's claim, or
//     where it is known when fences rose, after a higher fence was given.
//   - counts_wrong: notices whose counts do not add up with their recipients.
package verdict

import (
	"slices"
	"time"
)

// Verdict is the judgement of a run. Its JSON form is what tools print.
type Verdict struct {
	OK       bool  `json:"ok"`
	Seed     int64 `json:"seed"`
	Replicas int   `json:"replicas"`
	Schools  int   `json:"schools"`

	Accepted int `json:"accepted"`
	Arrived  int `json:"arrived"`
	Lost     int `json:"lost"`
	Waiting  int `json:"waiting"`   // accepted recipients whose state has not ended
	Strange  int `json:"strangers"` // messages that arrived and were never accepted for sending

	Repeated           int `json:"repeated"`
	RepeatBound        int `json:"repeat_bound"`
	RepeatedAfterLoss  int `json:"repeated_after_lost_answer"` // part of Repeated, no fault of the sender
	SkippedButArrived  int `json:"skipped_but_arrived"`
	LateAfterLease     int `json:"late_after_lease"`
	LateByPause        int `json:"late_by_pause"` // part of LateAfterLease: the owner was stopped between claim and arrival
	LateBound          int `json:"late_bound"`    // sizes of the batches unsettled at each pause, or open during a stall
	FencedWritesTaken  int `json:"fenced_writes_accepted"`
	CountsWrong        int `json:"counts_wrong"`
	UnansweredArrivals int `json:"unanswered_arrivals"` // still being answered when the log ended

	Rule RuleVerdict `json:"rule"`

	Stalls StallVerdict `json:"stalls"`

	Faults      []FaultLine  `json:"faults"`
	RecoveryMS  *Percentiles `json:"recovery_ms"`   // from a fault to the next send; null without any
	ResumeLagMS *Percentiles `json:"resume_lag_ms"` // from a rest's end to the next first attempt; null without any

	Seconds       float64 `json:"seconds"`
	RatePerSecond float64 `json:"rate_per_second"` // arrived / seconds

	Violations []string `json:"violations"` // one line each, at most maxViolations and a last one that counts the rest

	// Details are the same lines with what is known of each apart from its words.
	Details []Violation `json:"-"`
}

// Violation is a promise that was broken.
type Violation struct {
	Text    string
	School  string    // "" where it is of no school
	Message string    // "" where it is of no one message
	At      time.Time // zero where it has no moment
}

// RuleVerdict is the judgement of the sending rule, over all schools.
type RuleVerdict struct {
	Violations     int    `json:"violations"`
	WorstCount     int    `json:"worst_count"` // most attempts of a school between two silences of at least its rest
	Limit          int    `json:"limit"`
	ShortestRestMS *int64 `json:"shortest_rest_ms"` // rounded down, of the rest with the least to spare; null where no cycle was full
	RestMS         int64  `json:"rest_ms"`
	Cycles         int    `json:"cycles"` // full cycles after which the school went on: rests that were measured
}

// StallVerdict sums up when the machine gave the run no time.
type StallVerdict struct {
	Count     int   `json:"count"`
	LongestMS int64 `json:"longest_ms"`
	TotalMS   int64 `json:"total_ms"`
}

// FaultLine is a fault as the verdict shows it.
type FaultLine struct {
	AtMS    int64  `json:"at_ms"` // after the start of the run
	UntilMS int64  `json:"until_ms,omitempty"`
	Kind    string `json:"kind"`
	Target  string `json:"target"`
	Detail  string `json:"detail,omitempty"`

	NextSendMS *float64 `json:"next_send_ms,omitempty"` // the longest of its times in recovery_ms
}

// Percentiles sums up durations, in milliseconds.
type Percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// percentiles takes the smallest value that at least that share is not above.
func percentiles(d []time.Duration) *Percentiles {
	if len(d) == 0 {
		return nil
	}
	slices.Sort(d)
	at := func(percent int) float64 {
		i := max((len(d)*percent+99)/100-1, 0)
		return float64(d[i]) / float64(time.Millisecond)
	}
	return &Percentiles{P50: at(50), P99: at(99), Max: at(100)}
}

// maxViolations bounds the lines; a run that is broken is broken enough.
const maxViolations = 100
