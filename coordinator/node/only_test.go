package node

import (
	"context"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/settings"
	"schoolbell/school"
	"schoolbell/sender/simulator"
)

func writeOnly(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "only.txt")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestAListOfDevices(t *testing.T) {
	t.Parallel()
	longest := strings.Repeat("t", 4096)
	for name, tc := range map[string]struct {
		text string
		want []string
		err  string // behind the file's name
	}{
		"lines":                 {"a\n  b:c-d_e \n\n# two more\nf#g # Anna's\nh\t#old\n#a\n", []string{"a", "b:c-d_e", "f#g", "h"}, ""},
		"empty":                 {"", nil, ""},
		"comments":              {"# nobody\n\n   \n\t# yet\n", nil, ""},
		"Windows":               {"\ufeffa\r\n\r\nb\r\n", []string{"a", "b"}, ""},
		"the same twice":        {"a\na\n", []string{"a"}, ""},
		"without an end":        {"a\nb", []string{"a", "b"}, ""},
		"the longest token":     {longest, []string{longest}, ""},
		"a longer one":          {"a\n" + longest + "t\n", nil, ":2: a token is longer than 4,096 bytes"},
		"two in a line":         {"a\n\nb c\n", nil, ":3: a token holds no white space and no control characters; give one token a line, and put # before a comment"},
		"a control":             {"a\x00b\n", nil, ":1: a token holds no white space and no control characters; give one token a line, and put # before a comment"},
		"UTF-16":                {"\xff\xfea\x00\n\x00", nil, ":1: is not UTF-8; save the file as UTF-8"},
		"as large as it may be": {strings.Repeat("#\n", maxOnlyFile/2), nil, ""},
		"too large":             {strings.Repeat("#\n", maxOnlyFile/2) + "#", nil, " is larger than 1 MiB, which is no list of test devices; leave only_tokens_file out to send to everybody"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := writeOnly(t, tc.text)
			got, err := onlyTokens(file)
			if tc.err != "" {
				require.EqualError(t, err, file+tc.err)
				return
			}
			require.NoError(t, err)
			require.NotNil(t, got, "an empty list allows nobody; none allows all")
			require.Len(t, got, len(tc.want))
			for _, token := range tc.want {
				require.True(t, got[token], token)
			}
		})
	}
	_, err := onlyTokens(t.TempDir())
	require.ErrorContains(t, err, "is a directory")
}

// TestTrials tries senders safely, as a first deployment does (R44): a relay for
// listed devices, an FCM that is to check messages and deliver none, and one
// whose list is empty.
func TestTrials(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	h := newWebhook(t, nil)
	s := srv.withFallback("one", h)
	relay := s.Senders[settings.KindRelay]
	relay.OnlyTokensFile = writeOnly(t, "# mine\ndevice-A-3\ndevice-A-250 # the tablet\nnowhere\n")
	fcm := settings.NewSender(settings.KindFCM)
	fcm.Endpoint, fcm.Project, fcm.CallTimeout = strings.TrimSuffix(srv.relay, "/relay"), "p", relay.CallTimeout
	dry, nobody := fcm, fcm
	dry.DryRun = true
	nobody.OnlyTokensFile = writeOnly(t, "")
	s.Senders = map[string]settings.Sender{settings.KindRelay: relay, "dry": dry, "nobody": nobody}
	var log events
	one := run(t, s, Deps{Log: log.logger()})

	for school, sender := range map[string]string{"B": "dry", "C": "nobody"} {
		_, err := one.client.PutSchool(t.Context(), school, api.SchoolChange{Sender: &sender})
		require.NoError(t, err)
	}
	counts := map[string]api.Notice{}
	for _, school := range []string{"A", "B", "C"} {
		n := notice(school, 300)
		n.Recipients[5].Token, n.Recipients[5].Ref = "unregistered-"+school, "member-17"
		n.Recipients[6].Token, n.Recipients[7].Token = "invalid-"+school, "payload-"+school
		n.Fallback = &api.Fallback{SMS: "please call"}
		a, err := one.client.Send(t.Context(), n, "")
		require.NoError(t, err)
		eventually(t, "it ends", func() bool {
			n, err := one.client.Notice(t.Context(), a.ID)
			require.NoError(t, err)
			counts[school] = n
			return n.EndedAt != nil
		})
	}
	require.Equal(t, 2, counts["A"].Success)
	require.Equal(t, 298, counts["A"].Skipped.NotAllowed)
	require.Equal(t, 297, counts["B"].Success)
	require.Equal(t, 2, counts["B"].PermanentFail)
	failed, err := one.client.Recipients(t.Context(), counts["B"].ID, api.RecipientQuery{State: "PERMANENT_FAIL"})
	require.NoError(t, err)
	seen := map[int][2]string{}
	for _, r := range failed.Items {
		seen[r.Seq] = [2]string{r.Reason, r.ErrorCode}
	}
	require.Equal(t, map[int][2]string{7: {"REJECTED", "INVALID_ARGUMENT"}, 8: {"REJECTED", "INVALID_PAYLOAD"}}, seen, "a device and a message that FCM refuses are told apart")
	require.Equal(t, 1, counts["B"].Fail, "validation finds that a device is gone")
	require.Equal(t, 300, counts["C"].Skipped.NotAllowed)
	for school, attempted := range map[string]int{"A": 2, "B": 300, "C": 0} {
		got, err := one.client.School(t.Context(), school)
		require.NoError(t, err)
		require.Equal(t, attempted, got.Attempted, school)
	}

	arrived := map[string][]string{}
	for _, a := range srv.receiver.Arrivals() {
		arrived[a.School] = append(arrived[a.School], a.Answer)
		require.Equal(t, a.School == "B", a.ValidateOnly)
	}
	require.Equal(t, []string{simulator.AnswerAccepted, simulator.AnswerAccepted}, arrived["A"])
	require.Len(t, arrived["B"], 300)
	require.NotContains(t, arrived["B"], simulator.AnswerAccepted)
	require.Empty(t, arrived["C"])
	require.EqualValues(t, 2, srv.receiver.Counts().Accepted, "all that a device can have shown")

	// Nobody was to be reached, so nobody is told otherwise.
	conn, err := pgx.Connect(t.Context(), srv.database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()
	var fallbacks int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM push_fallbacks`).Scan(&fallbacks))
	require.Zero(t, fallbacks)

	cluster, err := one.client.Cluster(t.Context())
	require.NoError(t, err)
	shown := map[string][2]any{}
	for _, sender := range cluster.Senders {
		var only any
		if sender.OnlyTokens != nil {
			only = *sender.OnlyTokens
		}
		shown[sender.Name] = [2]any{sender.DryRun, only}
	}
	require.Equal(t, map[string][2]any{"relay": {false, 3}, "dry": {true, nil}, "nobody": {false, 0}}, shown)

	told := map[string]any{}
	for _, line := range log.lines(t) {
		switch line["event"] {
		case "sender_dry_run":
			told["dry "+line["sender"].(string)] = true
		case "sender_limited":
			told["only "+line["sender"].(string)] = line["devices"]
		}
		require.NotContains(t, line, "token")
	}
	require.Equal(t, map[string]any{"dry dry": true, "only relay": 3.0, "only nobody": 0.0}, told)
	require.NotContains(t, log.text.String(), "device-A-3", "no token in the log")
}

// TestWhatFitsIsTaken finds how much of each part of a notice is accepted: so
// much is taken by FCM as well, whose simulator counts bytes by itself, and a
// byte more is refused with the part named.
func TestWhatFitsIsTaken(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	s := srv.settings("one")
	fcm := settings.NewSender(settings.KindFCM)
	fcm.Endpoint, fcm.Project, fcm.CallTimeout = strings.TrimSuffix(srv.relay, "/relay"), "p", 3*time.Second
	s.Senders, s.DefaultSender = map[string]settings.Sender{"fcm": fcm}, "fcm"
	one := run(t, s, Deps{})
	const site = "https://example.org/"
	for part, tc := range map[string]struct {
		field string
		make  func(n *api.NoticeRequest, size int)
	}{
		"body":   {"body", func(n *api.NoticeRequest, size int) { n.Body = strings.Repeat("b", size) }},
		"hangul": {"title", func(n *api.NoticeRequest, size int) { n.Title = strings.Repeat("가", size) }},
		"body, link": {"body", func(n *api.NoticeRequest, size int) {
			n.Link, n.Body = site+strings.Repeat("l", 1000), strings.Repeat("<", size)
		}},
		"body, image": {"body", func(n *api.NoticeRequest, size int) {
			n.Image, n.Body = site+strings.Repeat("i", 1000), strings.Repeat("&", size)
		}},
		"data": {"data", func(n *api.NoticeRequest, size int) { n.Data = map[string]string{"k": strings.Repeat("\"", size)} }},
		"own data": {"recipients[0].data", func(n *api.NoticeRequest, size int) {
			n.Data, n.Link = map[string]string{"k": strings.Repeat("v", 500)}, site
			n.Recipients[0].Data = map[string]string{"k": "", "own": strings.Repeat("o", size)}
		}},
		"own link": {"recipients[0].data", func(n *api.NoticeRequest, size int) {
			n.Link, n.Recipients[0].Data = site+strings.Repeat("l", 1000), map[string]string{"link": strings.Repeat("o", size)}
		}},
	} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			var err error
			most := sort.Search(school.MaxPayload, func(size int) bool {
				n := notice("A", 1)
				n.Priority = "normal"
				n.ScheduledAt = new(time.Time)
				*n.ScheduledAt = time.Now().Add(time.Hour) // the tries are not sent
				tc.make(&n, size)
				_, err = one.client.Send(t.Context(), n, "")
				return err != nil
			}) - 1
			require.Greater(t, most, 500)
			n := notice("A", 1)
			tc.make(&n, most+1)
			_, err = one.client.Send(t.Context(), n, "")
			var refused *api.Error
			require.ErrorAs(t, err, &refused)
			require.Equal(t, tc.field, refused.Field)

			n = notice("A", 1)
			tc.make(&n, most)
			a, err := one.client.Send(t.Context(), n, "")
			require.NoError(t, err)
			eventually(t, "it ends", func() bool {
				got, err := one.client.Notice(t.Context(), a.ID)
				require.NoError(t, err)
				if got.EndedAt != nil {
					require.Equal(t, 1, got.Success)
				}
				return got.EndedAt != nil
			})
			require.Zero(t, srv.receiver.Counts().ProtocolErrors, srv.receiver.Counts().LastProtocol)
		})
	}
}
