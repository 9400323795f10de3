package school

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	allStates   = []State{Pending, InProgress, Success, Fail, RetryPending, PermanentFail, Skipped}
	allOutcomes = []Outcome{Accepted, Gone, Rejected, Mismatch, Throttled, Unavailable, Unknown, Misconfigured, NotSent, OrphanedUnsure}
	policy      = RetryPolicy{Max: 3, Base: time.Minute}
)

// TestNext has a line for every outcome; each is tried from every state, and
// from those that no outcome may move it must be refused.
func TestNext(t *testing.T) {
	t.Parallel()
	const code = "CODE"
	// The standing before is the second attempt of a recipient that has used one
	// retry and was orphaned twice.
	want := map[Outcome]Change{
		Accepted:       {State: Success},
		Gone:           {State: Fail, Code: code, Retire: true},
		Rejected:       {State: PermanentFail, Code: code, Reason: RejectedReason},
		Mismatch:       {State: PermanentFail, Code: code, Reason: MismatchReason},
		Throttled:      {State: RetryPending, Code: code, Retries: 2, RetryIn: 4 * time.Minute},
		Unavailable:    {State: RetryPending, Code: code, Retries: 2, RetryIn: 2 * time.Minute},
		Unknown:        {State: RetryPending, Code: code, Retries: 2, RetryIn: 2 * time.Minute, Reason: OutcomeUnknown},
		Misconfigured:  {State: RetryPending, Code: code, RetryIn: 5 * time.Second},
		NotSent:        {State: RetryPending, Code: code, RetryIn: 5 * time.Second},
		OrphanedUnsure: {State: RetryPending, Code: code, Orphanings: 3, Reason: OutcomeUnknown},
	}
	require.Len(t, want, len(allOutcomes))
	for _, from := range allStates {
		for _, outcome := range allOutcomes {
			t.Run(fmt.Sprintf("%s %s", from, outcome), func(t *testing.T) {
				t.Parallel()
				s := Standing{State: from, Attempts: 3, Retries: 1, Orphanings: 2}
				got, err := Next(s, Event{Outcome: outcome, Code: code, Delivery: AtLeastOnce}, policy)
				if from != Pending && from != RetryPending {
					require.ErrorContains(t, err, string(from))
					require.Zero(t, got)
					return
				}
				require.NoError(t, err)
				w := want[outcome]
				w.Attempts = 4
				w.Retries = max(w.Retries, 1)
				w.Orphanings = max(w.Orphanings, 2)
				require.Equal(t, w, got)
			})
		}
	}
}

func TestNextRefusesAnOutcomeItDoesNotKnow(t *testing.T) {
	t.Parallel()
	for _, o := range []Outcome{0, -1, OrphanedUnsure + 1} {
		got, err := Next(Standing{State: Pending}, Event{Outcome: o}, policy)
		require.ErrorContains(t, err, "unknown outcome")
		require.Zero(t, got)
		require.Equal(t, fmt.Sprintf("outcome(%d)", int(o)), Outcome(o).String(), "no name of its own")
	}
	require.Len(t, outcomeNames, len(allOutcomes)+1, "every outcome has a name")
}

func TestRetrySchedule(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		event   Event
		retries int
		policy  RetryPolicy
		want    time.Duration
	}{
		"first":                             {Event{Outcome: Unavailable}, 0, policy, time.Minute},
		"second":                            {Event{Outcome: Unavailable}, 1, policy, 2 * time.Minute},
		"third":                             {Event{Outcome: Unavailable}, 2, policy, 4 * time.Minute},
		"throttled doubles, first":          {Event{Outcome: Throttled}, 0, policy, 2 * time.Minute},
		"throttled doubles, third":          {Event{Outcome: Throttled}, 2, policy, 8 * time.Minute},
		"unknown waits as unavailable does": {Event{Outcome: Unknown, Delivery: AtLeastOnce}, 1, policy, 2 * time.Minute},
		"retry-after is a floor":            {Event{Outcome: Throttled, RetryAfter: 30 * time.Minute}, 0, policy, 30 * time.Minute},
		"a shorter retry-after is not":      {Event{Outcome: Throttled, RetryAfter: time.Second}, 0, policy, 2 * time.Minute},
		"retry-after is believed for 1 h":   {Event{Outcome: Unavailable, RetryAfter: 100 * time.Hour}, 0, policy, time.Hour},
		"also where no retry is used":       {Event{Outcome: Misconfigured, RetryAfter: 100 * time.Hour}, 0, policy, time.Hour},
		"jitter lengthens by a fifth":       {Event{Outcome: Unavailable, Jitter: 0.5}, 0, policy, 66 * time.Second},
		"jitter lengthens retry-after":      {Event{Outcome: Unavailable, RetryAfter: 10 * time.Minute, Jitter: 0.5}, 0, policy, 11 * time.Minute},
		"many retries do not overflow":      {Event{Outcome: Throttled}, 62, RetryPolicy{Max: 100, Base: time.Hour}, MaxRetryWait},
		"nor does a shift beyond the word":  {Event{Outcome: Unavailable}, 99, RetryPolicy{Max: 100, Base: time.Minute}, MaxRetryWait},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Next(Standing{State: RetryPending, Retries: c.retries}, c.event, c.policy)
			require.NoError(t, err)
			require.Equal(t, RetryPending, got.State)
			require.Equal(t, c.want, got.RetryIn)
		})
	}
}

// TestEnds covers what an outcome comes to besides the usual.
func TestEnds(t *testing.T) {
	t.Parallel()
	last := Standing{State: RetryPending, Attempts: 3, Retries: 3}
	orphaned := Standing{State: RetryPending, Attempts: 9, Orphanings: MaxOrphanings - 1}
	for name, c := range map[string]struct {
		from  Standing
		event Event
		want  Change
	}{
		"the last retry failed":                {last, Event{Outcome: Unavailable, Code: "UNAVAILABLE"}, Change{State: PermanentFail, Attempts: 4, Retries: 3, Code: "UNAVAILABLE", Reason: RetriesExhausted}},
		"the last retry was throttled":         {last, Event{Outcome: Throttled}, Change{State: PermanentFail, Attempts: 4, Retries: 3, Reason: RetriesExhausted}},
		"the last retry is unknown":            {last, Event{Outcome: Unknown, Delivery: AtLeastOnce}, Change{State: PermanentFail, Attempts: 4, Retries: 3, Reason: OutcomeUnknown}},
		"the last retry was accepted":          {last, Event{Outcome: Accepted}, Change{State: Success, Attempts: 4, Retries: 3}},
		"not sent after the last retry":        {last, Event{Outcome: NotSent}, Change{State: RetryPending, Attempts: 4, Retries: 3, RetryIn: 5 * time.Second}},
		"orphaned after the last retry":        {last, Event{Outcome: OrphanedUnsure, Delivery: AtLeastOnce}, Change{State: RetryPending, Attempts: 4, Retries: 3, Orphanings: 1, Reason: OutcomeUnknown}},
		"orphaned too often":                   {orphaned, Event{Outcome: OrphanedUnsure, Delivery: AtLeastOnce}, Change{State: PermanentFail, Attempts: 10, Orphanings: MaxOrphanings, Reason: OutcomeUnknown}},
		"at most once, unknown":                {Standing{State: Pending}, Event{Outcome: Unknown, Delivery: AtMostOnce}, Change{State: PermanentFail, Attempts: 1, Reason: OutcomeUnknown}},
		"at most once, orphaned":               {Standing{State: Pending}, Event{Outcome: OrphanedUnsure, Delivery: AtMostOnce}, Change{State: PermanentFail, Attempts: 1, Orphanings: 1, Reason: OutcomeUnknown}},
		"at most once, definitely refused":     {Standing{State: Pending}, Event{Outcome: Throttled, Delivery: AtMostOnce}, Change{State: RetryPending, Attempts: 1, Retries: 1, RetryIn: 2 * time.Minute}},
		"at most once, never left":             {Standing{State: Pending}, Event{Outcome: NotSent, Delivery: AtMostOnce}, Change{State: RetryPending, Attempts: 1, RetryIn: 5 * time.Second}},
		"cancelled, would retry":               {Standing{State: Pending}, Event{Outcome: Unavailable, Code: "UNAVAILABLE", Closing: Cancelled}, Change{State: PermanentFail, Attempts: 1, Retries: 1, Code: "UNAVAILABLE", Reason: Cancelled}},
		"expired, not sent":                    {Standing{State: Pending}, Event{Outcome: NotSent, Closing: Expired}, Change{State: PermanentFail, Attempts: 1, Reason: Expired}},
		"cancelled, orphaned":                  {Standing{State: Pending}, Event{Outcome: OrphanedUnsure, Delivery: AtLeastOnce, Closing: Cancelled}, Change{State: PermanentFail, Attempts: 1, Orphanings: 1, Reason: Cancelled}},
		"cancelled, accepted: it was sent":     {Standing{State: Pending}, Event{Outcome: Accepted, Closing: Cancelled}, Change{State: Success, Attempts: 1}},
		"cancelled, gone: the device is known": {Standing{State: Pending}, Event{Outcome: Gone, Closing: Cancelled}, Change{State: Fail, Attempts: 1, Retire: true}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := Next(c.from, c.event, policy)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
	got, err := Next(Standing{State: Pending}, Event{Outcome: Unavailable}, RetryPolicy{Max: 0, Base: time.Minute})
	require.NoError(t, err)
	require.Equal(t, Change{State: PermanentFail, Attempts: 1, Reason: RetriesExhausted}, got, "no retries at all")
}

func TestRequeue(t *testing.T) {
	t.Parallel()
	for _, from := range allStates {
		got, err := Requeue(Standing{State: from, Attempts: 4, Retries: 3, Orphanings: 2})
		if from != PermanentFail {
			require.ErrorContains(t, err, string(from))
			require.Zero(t, got)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Change{State: RetryPending, Attempts: 4}, got, "at once, with its retries anew")
	}
}

func TestFinal(t *testing.T) {
	t.Parallel()
	var final []State
	for _, s := range append(allStates, "", "SENT") {
		if s.Final() {
			final = append(final, s)
		}
	}
	require.ElementsMatch(t, []State{Success, Fail, PermanentFail, Skipped}, final)
}

// TestWalk follows one recipient through any outcomes: it is always in a state
// that is known, leaves a final one only by a requeue, uses at most the retries
// it has, is never sent early, and comes to an end.
func TestWalk(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := RetryPolicy{Max: rapid.IntRange(0, 6).Draw(t, "max"), Base: time.Duration(rapid.Int64Range(1, int64(3*time.Hour)).Draw(t, "base"))}
		delivery := rapid.SampledFrom([]Delivery{AtLeastOnce, AtMostOnce}).Draw(t, "delivery")
		closing := Reason("")
		s := Standing{State: Pending}
		used := 0 // outcomes that used a retry since the last requeue
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if s.State.Final() {
				for _, o := range allOutcomes {
					_, err := Next(s, Event{Outcome: o, Delivery: delivery}, p)
					require.Error(t, err, "an outcome moved %s", s.State)
				}
				c, err := Requeue(s)
				if s.State != PermanentFail {
					require.Error(t, err)
					return
				}
				require.NoError(t, err)
				require.Equal(t, s.Attempts, c.Attempts, "its attempts happened")
				s, used = Standing{State: c.State, Attempts: c.Attempts}, 0
				closing = ""
				continue
			}
			if closing == "" && rapid.IntRange(0, 9).Draw(t, "closes") == 0 {
				closing = rapid.SampledFrom([]Reason{Cancelled, Expired}).Draw(t, "closing")
			}
			e := Event{
				Outcome: rapid.SampledFrom(allOutcomes).Draw(t, "outcome"), Code: "CODE", Closing: closing, Delivery: delivery,
				RetryAfter: time.Duration(rapid.Int64Range(0, int64(3*time.Hour)).Draw(t, "retry_after")),
				Jitter:     rapid.Float64Range(0, 0.999).Draw(t, "jitter"),
			}
			c, err := Next(s, e, p)
			require.NoError(t, err)
			require.Contains(t, []State{Success, Fail, RetryPending, PermanentFail}, c.State, "a recipient that was handed over")
			require.Equal(t, s.Attempts+1, c.Attempts, "every hand-over counts, once")
			require.LessOrEqual(t, c.Retries-s.Retries, 1)
			require.GreaterOrEqual(t, c.Retries, s.Retries)
			require.LessOrEqual(t, c.Retries, p.Max)
			require.LessOrEqual(t, c.Orphanings, MaxOrphanings)
			unsure := e.Outcome == Unknown || e.Outcome == OrphanedUnsure
			require.Equal(t, c.State == PermanentFail || c.State == RetryPending && unsure, c.Reason != "", "a reason goes with PERMANENT_FAIL, and with a retry of what may have arrived")
			if c.State == RetryPending && unsure {
				require.Equal(t, OutcomeUnknown, c.Reason)
			}
			require.Equal(t, e.Outcome == Accepted, c.State == Success)
			require.Equal(t, e.Outcome == Gone, c.State == Fail)
			require.Equal(t, c.State == Fail, c.Retire)
			if c.State == RetryPending {
				require.Empty(t, closing, "a closed notice takes no more attempts")
				require.False(t, delivery == AtMostOnce && (e.Outcome == Unknown || e.Outcome == OrphanedUnsure), "it may have arrived")
				if e.Outcome != OrphanedUnsure {
					require.GreaterOrEqual(t, c.RetryIn, min(e.RetryAfter, MaxRetryAfter), "earlier than the receiver asked for")
					require.LessOrEqual(t, c.RetryIn, (MaxRetryWait/5)*6, "longer than the schedule")
				}
			} else {
				require.Zero(t, c.RetryIn)
			}
			if c.Retries > s.Retries {
				used++
			}
			require.Equal(t, used, c.Retries, "a retry was counted twice or not at all")
			s = Standing{State: c.State, Attempts: c.Attempts, Retries: c.Retries, Orphanings: c.Orphanings}
		}
	})
}

func TestConfirm(t *testing.T) {
	t.Parallel()
	for _, from := range allStates {
		s := Standing{State: from, Attempts: 2, Retries: 1, Orphanings: 1}
		got, err := Confirm(s)
		if from != RetryPending {
			require.ErrorContains(t, err, string(from))
			require.Zero(t, got)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Change{State: Success, Attempts: 2, Retries: 1, Orphanings: 1}, got, "asking is no attempt")
	}
	_, err := Confirm(Standing{State: RetryPending})
	require.Error(t, err, "never handed over")
}
