package node

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/sender"
	"schoolbell/watchdog"
)

func TestWhatKeepsASenderFromSending(t *testing.T) {
	t.Parallel()
	members := func(silent ...string) []watchdog.Member {
		all := []watchdog.Member{{Instance: "r1"}, {Instance: "r2"}, {Instance: "r3", Unanswered: []string{"other"}}}
		for i := range all {
			for _, s := range silent {
				if all[i].Instance == s {
					all[i].Unanswered = append(all[i].Unanswered, "relay")
				}
			}
		}
		return all
	}
	broken := coordinator.LaneState{Name: "relay", Broken: true, Code: "CONNECT_FAILED", ResumeIn: 7600 * time.Millisecond}
	lowered := sender.RateState{Lowered: true, LowerFor: 42 * time.Second, LowerBy: "QUOTA_EXCEEDED"}
	for name, tc := range map[string]struct {
		lane    coordinator.LaneState
		members []watchdog.Member
		stopped bool
		reason  string
	}{
		"nothing":                 {coordinator.LaneState{Name: "relay"}, members(), false, ""},
		"itself, long ago":        {coordinator.LaneState{Name: "relay"}, members("r1"), false, ""},
		"not let in":              {coordinator.LaneState{Name: "relay", Stopped: true, ResumeIn: time.Minute}, members(), true, "the receiver does not let this sender in; next try in 1m0s"},
		"not let in, with a code": {coordinator.LaneState{Name: "relay", Stopped: true, Code: "UNAUTHENTICATED"}, members(), true, "the receiver does not let this sender in: UNAUTHENTICATED; next try with the next message"},
		"lowered":                 {coordinator.LaneState{Name: "relay", Shared: lowered}, members(), false, "the receiver asks for less: QUOTA_EXCEEDED; the rate is lowered and grows again in 42s"},
		"alone":                   {broken, nil, true, "no answer: CONNECT_FAILED; next try in 8s"},
		"everywhere":              {broken, members("r1", "r2", "r3"), true, "no answer: CONNECT_FAILED; next try in 8s"},
		"here":                    {broken, members("r1"), false, "no answer at 1 of 3 replicas, this one among them: CONNECT_FAILED; next try in 8s"},
		"here, not beaten":        {broken, members("r2"), false, "no answer at 2 of 3 replicas, this one among them: CONNECT_FAILED; next try in 8s"},
		"elsewhere":               {coordinator.LaneState{Name: "relay"}, members("r2", "r3"), false, "no answer at 2 of 3 replicas: r2, r3"},
		"soon":                    {coordinator.LaneState{Name: "relay", Broken: true, Code: "NO_ANSWER", ResumeIn: time.Millisecond}, nil, true, "no answer: NO_ANSWER; next try in 1s"},
		"nothing to try with":     {coordinator.LaneState{Name: "relay", Broken: true, Code: "NO_ANSWER"}, nil, true, "no answer: NO_ANSWER; next try with the next message"},
	} {
		stopped, reason := stateOf(tc.lane, "r1", tc.members)
		require.Equal(t, tc.stopped, stopped, name)
		require.Equal(t, tc.reason, reason, name)
	}
}
