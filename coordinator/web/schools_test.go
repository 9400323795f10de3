package web

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// TestState tries every combination of what the state is made of against the
// order in which the states hold.
func TestState(t *testing.T) {
	t.Parallel()
	bools := []bool{false, true}
	seen := make(map[api.SchoolState]int)
	for _, paused := range bools {
		for _, rests := range bools {
			for _, held := range bools {
				for _, waiting := range bools {
					for _, retryDue := range bools {
						for _, inProgress := range bools {
							for _, retryWaiting := range bools {
								for _, scheduled := range bools {
									one := func(b bool) int {
										if b {
											return 1
										}
										return 0
									}
									b := school.Backlog{School: school.School{Paused: paused}, Waiting: one(waiting), RetryDue: one(retryDue),
										InProgress: one(inProgress), RetryWaiting: one(retryWaiting), Scheduled: one(scheduled)}
									want := api.Idle
									for _, rule := range []struct {
										holds bool
										state api.SchoolState
									}{ // from the last to the first
										{retryWaiting, api.WaitingForRetry}, {waiting || retryDue || inProgress, api.WaitingForSlot},
										{held, api.Sending}, {rests, api.Resting}, {paused, api.Paused},
									} {
										if rule.holds {
											want = rule.state
										}
									}
									got := StateOf(&b, time.Duration(one(rests)), held)
									require.Equal(t, want, got, "%+v resting %v held %v", b, rests, held)
									seen[got]++
								}
							}
						}
					}
				}
			}
		}
	}
	for _, s := range stateNames() {
		require.NotZero(t, seen[api.SchoolState(s)], s)
	}
	require.Len(t, seen, len(stateNames()))
}

func TestSchool(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.Senders = []string{"fcm", "log"} })
	requireError(t, w.get("/v1/schools/A"), api.NotFound, "")
	requireError(t, w.get("/v1/schools/A%7D"), api.NotFound, "")
	put := func(id, body string) *http.Response {
		return w.do(http.MethodPut, "/v1/schools/"+id, api.JSON, strings.NewReader(body)).Result()
	}
	require.Equal(t, http.StatusCreated, put("A", `{"name":"한빛초","limit":50,"rest_seconds":0.2,"sender":"fcm"}`).StatusCode)
	require.Equal(t, http.StatusOK, put("A", `{"name":"한빛초등학교"}`).StatusCode)
	require.Equal(t, []string{"A", "A"}, w.waker.woken)
	requireError(t, w.do(http.MethodPut, "/v1/schools/A", api.JSON, strings.NewReader(`{"sender":"sms"}`)), api.InvalidArgument, "sender")
	requireError(t, w.do(http.MethodPut, "/v1/schools/A%7D", api.JSON, strings.NewReader(`{}`)), api.InvalidArgument, "id")
	require.Equal(t, http.StatusCreated, put("a%2Eb", `{}`).StatusCode)
	requireAnswer[api.School](t, w.get("/v1/schools/a.b"), http.StatusOK)
	requireError(t, w.get("/v1/schools/%2541"), api.NotFound, "")

	require.JSONEq(t, `{"id":"A","name":"한빛초등학교","sender":"fcm","sender_stopped":true,"state":"idle","limit":50,"rest_seconds":0.2,"attempted":0,"cycle":0,
		"next_eligible_at":null,"resting_seconds":0,"lock":null,"waiting":0,"in_progress":0,"retry_due":0,"retry_waiting":0,"scheduled":0,
		"oldest_waiting_seconds":0,"created_at":"2026-03-02T09:00:00Z"}`, w.get("/v1/schools/A").Body.String())

	w.store.set(func(f *fakeStore) {
		b := f.schools["A"]
		b.Waiting, b.OldestWaitingFor = 7, 1500*time.Millisecond
		b.Ledger = school.Ledger{Cycle: 3, Attempted: 40}
	})
	w.arbiter.peeks["A"] = school.Peek{Known: true, Attempted: 45, Limit: 50, Cycle: 4, Held: true, Owner: "one", Fence: 9, LeaseLeft: 2500 * time.Millisecond}
	got := requireAnswer[api.School](t, w.get("/v1/schools/A"), http.StatusOK)
	require.Equal(t, api.Sending, got.State)
	require.Equal(t, 45, got.Attempted)
	require.EqualValues(t, 4, got.Cycle)
	require.Equal(t, &api.Lock{Owner: "one", Fence: 9, ExpiresInSeconds: 2.5}, got.Lock)
	require.Equal(t, 1.5, got.OldestWaitingSeconds)
	require.False(t, got.Degraded)

	// Redis has forgotten the school: the ledger answers.
	w.store.set(func(f *fakeStore) { f.schools["A"].Ledger.Resting = 2 * time.Second })
	w.arbiter.peeks["A"] = school.Peek{}
	got = requireAnswer[api.School](t, w.get("/v1/schools/A"), http.StatusOK)
	require.Equal(t, api.Resting, got.State)
	require.Equal(t, 40, got.Attempted)
	require.Equal(t, 2.0, got.RestingSeconds)
	require.Equal(t, testNow.Add(2*time.Second), *got.NextEligibleAt)
	require.False(t, got.Degraded)

	// Redis knows less than the ledger: the rest that is longer holds.
	w.arbiter.peeks["A"] = school.Peek{Known: true, Resting: time.Second}
	got = requireAnswer[api.School](t, w.get("/v1/schools/A"), http.StatusOK)
	require.Equal(t, 2.0, got.RestingSeconds)

	// Redis is away: the same, and said so.
	w.arbiter.err = errors.New("dial tcp: connection refused")
	got = requireAnswer[api.School](t, w.get("/v1/schools/A"), http.StatusOK)
	require.Equal(t, api.Resting, got.State)
	require.Equal(t, 40, got.Attempted)
	require.True(t, got.Degraded)
}

// TestManySchoolsWithoutRedis: a long list does not ask a Redis that is away
// again for each school.
func TestManySchoolsWithoutRedis(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.store.set(func(f *fakeStore) {
		for i := range 1000 {
			id := fmt.Sprintf("S%04d", i)
			f.schools[id] = &school.Backlog{School: school.School{ID: id}}
		}
	})
	list := requireAnswer[api.List[api.School]](t, w.get("/v1/schools?limit=1000"), http.StatusOK)
	require.Len(t, list.Items, 1000)
	require.Equal(t, 1000, w.arbiter.asked)
	for i, s := range list.Items {
		require.Equal(t, fmt.Sprintf("S%04d", i), s.ID, "in order")
		require.Equal(t, 5000, s.Limit)
		require.Equal(t, 180.0, s.RestSeconds)
	}
	w.arbiter.asked, w.arbiter.err = 0, errors.New("away")
	list = requireAnswer[api.List[api.School]](t, w.get("/v1/schools?limit=1000"), http.StatusOK)
	require.LessOrEqual(t, w.arbiter.asked, peeks)
	require.True(t, list.Items[999].Degraded)
}

func TestExpectedEnd(t *testing.T) {
	t.Parallel()
	now := testNow
	rule := school.Rule{Limit: 5000, Rest: 180 * time.Second}
	for name, c := range map[string]struct {
		counts    school.Counts
		b         school.Backlog
		scheduled time.Duration
		rule      *school.Rule
		want      time.Duration // from now; -1: unknown
	}{
		"nothing waits":                    {school.Counts{Success: 5}, school.Backlog{}, 0, nil, -1},
		"the last are on their way":        {school.Counts{InProgress: 5}, school.Backlog{}, 0, nil, 0},
		"within the cycle":                 {school.Counts{Waiting: 200}, school.Backlog{Waiting: 200, Ledger: school.Ledger{Attempted: 4800}}, 0, nil, 0},
		"one beyond the cycle":             {school.Counts{Waiting: 201}, school.Backlog{Waiting: 201, Ledger: school.Ledger{Attempted: 4800}}, 0, nil, 180 * time.Second},
		"a full cycle from nothing":        {school.Counts{Waiting: 5000}, school.Backlog{}, 0, nil, 0},
		"two cycles and one":               {school.Counts{Waiting: 10001}, school.Backlog{}, 0, nil, 360 * time.Second},
		"retries wait too":                 {school.Counts{Waiting: 5000, RetryPending: 1}, school.Backlog{}, 0, nil, 180 * time.Second},
		"resting":                          {school.Counts{Waiting: 5000}, school.Backlog{Ledger: school.Ledger{Attempted: 5000, Filled: true, Resting: 105 * time.Second}}, 0, nil, 105 * time.Second},
		"resting, and one more":            {school.Counts{Waiting: 5001}, school.Backlog{Ledger: school.Ledger{Attempted: 5000, Filled: true, Resting: 105 * time.Second}}, 0, nil, 285 * time.Second},
		"rested":                           {school.Counts{Waiting: 5000}, school.Backlog{Ledger: school.Ledger{Attempted: 5000, Filled: true}}, 0, nil, 0},
		"the limit was lowered":            {school.Counts{Waiting: 10}, school.Backlog{Ledger: school.Ledger{Attempted: 100}}, 0, &school.Rule{Limit: 50, Rest: time.Second}, time.Second},
		"others wait at the school":        {school.Counts{Waiting: 10}, school.Backlog{Waiting: 4991, RetryDue: 10}, 0, nil, 180 * time.Second},
		"scheduled":                        {school.Counts{Waiting: 5001}, school.Backlog{}, time.Hour, nil, time.Hour + 180*time.Second},
		"scheduled within the rest":        {school.Counts{Waiting: 5000}, school.Backlog{Ledger: school.Ledger{Filled: true, Resting: 105 * time.Second}}, time.Minute, nil, 105 * time.Second},
		"scheduled in the past":            {school.Counts{Waiting: 1}, school.Backlog{}, -time.Hour, nil, 0},
		"paused":                           {school.Counts{Waiting: 1}, school.Backlog{School: school.School{Paused: true}}, 0, nil, -1},
		"one a week, a million: no answer": {school.Counts{Waiting: 1_000_000}, school.Backlog{}, 0, &school.Rule{Limit: 1, Rest: school.MaxRest}, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := school.Progress{Counts: c.counts}
			if c.scheduled != 0 {
				p.Notice.ScheduledAt = now.Add(c.scheduled)
			}
			r := rule
			if c.rule != nil {
				r = *c.rule
			}
			got := expectedEnd(now, &p, &c.b, r)
			if c.want < 0 {
				require.Zero(t, got)
				return
			}
			require.Equal(t, now.Add(c.want), got)
		})
	}
	require.Zero(t, expectedEnd(now, &school.Progress{Counts: school.Counts{Waiting: 1}, EndedAt: now}, &school.Backlog{}, rule))
}

func TestExpectedEndIsShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.Equal(t, http.StatusAccepted, w.post(small).Code)
	w.store.set(func(f *fakeStore) { f.schools["A"].Ledger = school.Ledger{Filled: true, Resting: time.Minute} })
	got := requireAnswer[api.Notice](t, w.get("/v1/notices/1"), http.StatusOK)
	require.Equal(t, testNow.Add(time.Minute), *got.ExpectedEndAt)
	require.Equal(t, "b", got.Body)
	require.Equal(t, testNow, got.CreatedAt)
	require.Nil(t, got.FirstSendAt)
}

func TestCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	require.JSONEq(t, `{"replicas":[{"instance":"one","version":"v1","since":"2026-03-02T09:00:00Z","schools_held":2,"rate_per_second":0,"self":true}],
		"senders":[{"name":"log","kind":"log","state":"running","reason":"","rate_per_minute":0,"rate_per_second":0,
			"rate_now_per_minute":0,"rate_used_per_minute":0,"schools_waiting":0,"rate_lowered":false},
		{"name":"fcm","kind":"fcm","state":"stopped","reason":"authentication","rate_per_minute":600000,"rate_per_second":0,
			"rate_now_per_minute":60000,"rate_used_per_minute":12000,"schools_waiting":3,"rate_lowered":true,
			"stop":{"code":"UNAUTHENTICATED","seconds":90,"next_probe_seconds":2.5}}]}`, w.get("/v1/cluster").Body.String())
	w = newWorld(t, func(_ *Config, d *Deps) { d.Cluster = fakeCluster{err: errors.New("away")} })
	got := requireAnswer[api.Cluster](t, w.get("/v1/cluster"), http.StatusOK)
	require.True(t, got.Degraded)
	require.Len(t, got.Replicas, 1)
}
