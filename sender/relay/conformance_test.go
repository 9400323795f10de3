package relay

import (
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
	"schoolbell/sender/sendertest"
	"schoolbell/sender/simulator"
)

// against is a relay before a simulator.
func against(t *testing.T, b simulator.Behaviour) (*Relay, *simulator.Engine) {
	t.Helper()
	engine, err := simulator.New(simulator.Config{Keep: true, Token: "secret-key", Behaviour: b})
	require.NoError(t, err)
	server := httptest.NewServer(engine)
	t.Cleanup(func() {
		engine.Stop()
		server.Close()
		require.NoError(t, engine.Close())
	})
	return newRelay(t, server.URL+"/relay", func(cfg *Config) { cfg.StatusURL = server.URL + "/status" }), engine
}

func TestContract(t *testing.T) {
	t.Parallel()
	unknown := func(code string) sendertest.Reply { return sendertest.Reply{Class: sender.Unknown, Code: code} }
	whole := func(class sender.Class, code string) sendertest.Reply {
		return sendertest.Reply{Class: class, Code: code, Whole: true}
	}
	replies := map[string]sendertest.Reply{
		"unregistered-": {Class: sender.Gone, Code: "UNREGISTERED"},
		"unavailable-":  {Class: sender.Unavailable, Code: "UNAVAILABLE"},
		"internal-":     {Class: sender.Unavailable, Code: "INTERNAL"},
		"quota-":        {Class: sender.Throttled, Code: "QUOTA_EXCEEDED"},
		"mismatch-":     {Class: sender.Mismatch, Code: "SENDER_ID_MISMATCH"},
		"invalid-":      {Class: sender.Rejected, Code: "INVALID_ARGUMENT"},
		"thirdparty-":   {Class: sender.Mismatch, Code: "THIRD_PARTY_AUTH_ERROR"},
		"strange-":      {Class: sender.Rejected, Code: "STRANGE_ERROR"},
		"missing-":      unknown(sender.CodeResultMissing),
		"duplicate-":    unknown(sender.CodeResultDuplicate),
		"badstatus-":    unknown(sender.CodeResultMalformed),
		"extra-":        {Class: sender.Accepted},
		"auth-":         whole(sender.Misconfigured, "HTTP_401"),
		"forbidden-":    whole(sender.Misconfigured, "HTTP_403"),
		"throttled-":    whole(sender.Throttled, "QUOTA_EXCEEDED"),
		"busy-":         whole(sender.Unavailable, "UNAVAILABLE"),
		"down-":         whole(sender.Unknown, "HTTP_503"),
		"error-":        whole(sender.Unknown, "HTTP_500"),
		"redirect-":     whole(sender.Unknown, "HTTP_307"),
		"garbage-":      whole(sender.Unknown, sender.CodeBadAnswer),
		"truncated-":    whole(sender.Unknown, sender.CodeBadAnswer),
		"reset-":        whole(sender.Unknown, sender.CodeNoAnswer),
		"loseanswer-":   whole(sender.Unknown, sender.CodeNoAnswer),
	}
	sendertest.Run(t, func(t *testing.T) sendertest.Subject {
		r, engine := against(t, simulator.Behaviour{})
		t.Cleanup(func() {
			c := engine.Counts()
			require.Zero(t, c.Replays, "a request left twice")
			require.Zero(t, c.ProtocolErrors, c.LastProtocol)
		})
		return sendertest.Subject{Sender: r, Replies: replies, Hang: "hang-"}
	})
}

// What the sender says must never claim more than the receiver did.
func TestResultsAgreeWithTheReceiver(t *testing.T) {
	t.Parallel()
	r, engine := against(t, simulator.Behaviour{
		Reset: 0.1, LoseAnswer: 0.1,
		Outcomes: map[string]float64{
			"UNREGISTERED": 0.1, "UNAVAILABLE": 0.1, "MISSING": 0.05, "DUPLICATE": 0.05, "BAD_STATUS": 0.05, "EXTRA": 0.05,
			"DOWN": 0.05, "BUSY": 0.05, "THROTTLED": 0.05, "TRUNCATED": 0.05, "GARBAGE": 0.05,
		},
	})
	got := map[string]sender.Result{}
	for i := range 120 {
		b := sendertest.Batch("n"+string(rune('A'+i%26))+string(rune('a'+i/26)), 20, nil)
		for _, result := range r.Send(t.Context(), b) {
			got[result.ID] = result
		}
	}
	arrived, classes := map[string]bool{}, map[sender.Class]int{}
	for _, a := range engine.Arrivals() {
		result := got[a.Message]
		arrived[a.Message] = true
		classes[result.Class]++
		switch {
		case result.Class == sender.Accepted:
			require.True(t, a.Accepted(), "%s: accepted, but the receiver says %s", a.Message, a.Answer)
		case !result.MayHaveArrived():
			require.False(t, a.Accepted(), "%s: %v, but the receiver took it", a.Message, result.Class)
		}
	}
	for id, result := range got {
		require.Equal(t, !arrived[id], result.Class == sender.NotSent, id)
	}
	for _, class := range []sender.Class{sender.Accepted, sender.Gone, sender.Unavailable, sender.Throttled, sender.Unknown} {
		require.Positive(t, classes[class], "%s never came up", class)
	}

	// Asking tells those that arrived from those that did not.
	var unknown []string
	for id, result := range got {
		if result.Class == sender.Unknown {
			unknown = append(unknown, id)
		}
	}
	answers, err := r.Ask(t.Context(), unknown)
	require.NoError(t, err)
	accepted := map[string]bool{}
	for _, a := range engine.Arrivals() {
		if a.Accepted() {
			accepted[a.Message] = true
		}
	}
	for _, id := range unknown {
		want := sender.StatusNotAccepted
		if accepted[id] {
			want = sender.StatusAccepted
		}
		require.Equal(t, want, answers[id], id)
	}
}
