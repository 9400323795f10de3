package fcm

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
	"schoolbell/sender/sendertest"
	"schoolbell/sender/simulator"
)

// simulated is a simulator with the configuration that reaches it.
type simulated struct {
	*simulator.Engine
	cfg Config
}

func simulate(t *testing.T, p protocol, with simulator.Config) *simulated {
	t.Helper()
	with.Keep = true
	engine, err := simulator.New(with)
	require.NoError(t, err)
	certificate, authority, err := simulator.SelfSigned("127.0.0.1")
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := simulator.NewServer(engine, certificate)
	served := make(chan error, 1)
	s := &simulated{Engine: engine, cfg: Config{Name: "test", Project: "p", Endpoint: "http://" + listener.Addr().String()}}
	if p == h2TLS {
		block, _ := pem.Decode(authority)
		ca, err := x509.ParseCertificate(block.Bytes)
		require.NoError(t, err)
		s.cfg.RootCAs = x509.NewCertPool()
		s.cfg.RootCAs.AddCert(ca)
		s.cfg.Endpoint = "https://" + listener.Addr().String()
		go func() { served <- server.ServeTLS(listener, "", "") }()
	} else {
		s.cfg.PriorKnowledge = p == h2c
		go func() { served <- server.Serve(listener) }()
	}
	t.Cleanup(func() {
		require.NoError(t, engine.Close())
		require.NoError(t, server.Close())
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("serve: %v", err)
		}
	})
	return s
}

// credentialsFile is a service account whose tokens the simulator gives.
func (s *simulated) credentialsFile(t *testing.T) string {
	t.Helper()
	text, err := simulator.ServiceAccount("p", s.cfg.Endpoint+"/token")
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "account.json")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

func TestFCMKeepsTheContract(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			sendertest.Run(t, func(t *testing.T) sendertest.Subject {
				s := simulate(t, p, simulator.Config{Behaviour: simulator.Behaviour{RetryAfter: 3}})
				var said logged
				s.cfg.InFlight = 300 // the suite has 400 in flight
				f, err := New(s.cfg, said.logger(), nil)
				require.NoError(t, err)
				t.Cleanup(f.Close)
				return sendertest.Subject{
					Sender: f, Hang: "hang-", Logged: said.String,
					Replies: map[string]sendertest.Reply{
						"unregistered-": {Class: sender.Gone, Code: "UNREGISTERED"},
						"unavailable-":  {Class: sender.Unavailable, Code: "UNAVAILABLE", OutcomeUnknown: true},
						"internal-":     {Class: sender.Unavailable, Code: "INTERNAL", OutcomeUnknown: true},
						"falsealarm-":   {Class: sender.Unavailable, Code: "UNAVAILABLE", OutcomeUnknown: true},
						"quota-":        {Class: sender.Throttled, Code: "QUOTA_EXCEEDED"},
						"mismatch-":     {Class: sender.Mismatch, Code: "SENDER_ID_MISMATCH"},
						"invalid-":      {Class: sender.Rejected, Code: "INVALID_ARGUMENT"},
						"payload-":      {Class: sender.Rejected, Code: "INVALID_PAYLOAD"},
						"thirdparty-":   {Class: sender.Mismatch, Code: "THIRD_PARTY_AUTH_ERROR"},
						"strange-":      {Class: sender.Rejected, Code: "STRANGE_ERROR"},
						"missing-":      {Class: sender.Unknown, Code: "BAD_ANSWER"},
						"badstatus-":    {Class: sender.Unknown, Code: "BAD_ANSWER"},
						"garbage-":      {Class: sender.Unknown, Code: "BAD_ANSWER"},
						"truncated-":    {Class: sender.Unknown, Code: "NO_ANSWER"},
						"reset-":        {Class: sender.Unknown, Code: "NO_ANSWER"},
						"loseanswer-":   {Class: sender.Unknown, Code: "NO_ANSWER"},
						"auth-":         {Class: sender.Misconfigured, Code: "UNAUTHENTICATED"},
						"forbidden-":    {Class: sender.Misconfigured, Code: "SERVICE_DISABLED"},
						"throttled-":    {Class: sender.Throttled, Code: "QUOTA_EXCEEDED"},
						"busy-":         {Class: sender.Unavailable, Code: "HTTP_503", OutcomeUnknown: true},
						"error-":        {Class: sender.Unavailable, Code: "HTTP_500", OutcomeUnknown: true},
						"redirect-":     {Class: sender.Unknown, Code: "HTTP_307"},
					},
				}
			})
		})
	}
}

func TestOneRequestAMessageWhateverHappens(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			s := simulate(t, p, simulator.Config{Behaviour: simulator.Behaviour{
				Latency: simulator.Latency{Base: 4 * time.Millisecond, Spread: 3 * time.Millisecond}, LoseAnswer: 0.05, Reset: 0.05,
				Outcomes: map[string]float64{"UNAVAILABLE": 0.1, "INTERNAL": 0.05, "UNREGISTERED": 0.05, "CUT": 0.001, "GOAWAY": 0.005, "TRUNCATED": 0.02, "FALSE_ALARM": 0.02},
			}})
			f := open(t, s.cfg, nil)
			known := map[string]sender.Result{}
			for i := range 10 {
				b := sendertest.Batch("n"+string(rune('a'+i)), 200, nil)
				for _, r := range f.Send(t.Context(), b) {
					known[r.ID] = r
				}
			}
			counts := s.Counts()
			require.Zero(t, counts.Replays, "a request came twice")
			require.Zero(t, counts.Repeated)
			arrived := map[string]simulator.Arrival{}
			for _, a := range s.Arrivals() {
				arrived[a.Message] = a
			}
			classes := map[sender.Class]int{}
			for id, r := range known {
				classes[r.Class]++
				a, came := arrived[id]
				switch r.Class {
				case sender.Accepted:
					require.True(t, came && a.Accepted() && !a.Lost, id)
				case sender.NotSent:
					require.False(t, came && a.Accepted(), "%s is not sent and arrived: %+v", id, r)
				case sender.Gone:
					require.Equal(t, "UNREGISTERED", a.Answer, id)
				}
			}
			require.Positive(t, classes[sender.Unknown])
			require.Positive(t, classes[sender.Unavailable])
			require.Greater(t, classes[sender.Accepted], 500)
		})
	}
}
