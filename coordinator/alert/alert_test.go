package alert

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/coordinator/hook"
	"schoolbell/school"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var at = time.Date(2026, 3, 2, 1, 0, 0, 0, time.UTC)

// nasty are names that mean something to a chat.
var nasty = []string{
	"@everyone", "<@123>", "<!channel>", "<#C1|x>", "[go](https://evil.example)", "https://evil.example", "**bold** _it_ ~~no~~ `code`",
	"a\nb\r\nc", "> quote", "# head", "||spoiler||", "<t:1:R>", "\u202etxt.exe", "&lt;!here&gt;", strings.Repeat("가", 300), strings.Repeat("😀", 300), "", " ", "\x00",
}

func alertOf(kind Kind, e Event) school.Alert {
	body, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	return school.Alert{ID: 17, Kind: string(kind), Body: body, At: at, Since: at.Add(-90 * time.Minute), Seen: 1234, Attempt: 1}
}

// everyAlert has each kind with each nasty name in each place.
func everyAlert() (all []school.Alert) {
	for _, name := range nasty {
		for _, kind := range Kinds() {
			e := Event{Sender: name, School: name, Code: name, Unregistered: 90, Size: 100}
			if kind == FailuresDigest {
				f := school.Failures{From: at.Add(-time.Hour), Until: at}
				for i := range 60 {
					for range 8 {
						f.Counts = append(f.Counts, school.FailureCount{School: fmt.Sprint("school-", i), Name: name, Code: name, Reason: school.RetriesExhausted, Count: 60 - i})
					}
				}
				e = Event{Failures: digestOf(f)}
			}
			all = append(all, alertOf(kind, e))
		}
	}
	return all
}

var page = "https://bell.example/" + strings.Repeat("p", MaxLink-len("https://bell.example/"))

func TestWhatDiscordGets(t *testing.T) {
	t.Parallel()
	for _, a := range everyAlert() {
		body, err := render(Config{Kind: Discord, Link: page}, a)
		require.NoError(t, err)
		var m struct {
			Content  string
			Mentions map[string][]string `json:"allowed_mentions"`
			Flags    int
		}
		require.NoError(t, json.Unmarshal(body, &m))
		require.Equal(t, map[string][]string{"parse": {}}, m.Mentions, "nobody is called")
		require.Equal(t, 4, m.Flags)
		require.NotEmpty(t, m.Content)
		require.LessOrEqual(t, units(m.Content), 2000)
		text, link, ok := strings.Cut(m.Content, "\n<")
		require.True(t, ok)
		require.Equal(t, page+">", link)
		for _, markup := range []string{"@", "<", "](", "https:", "*", "_", "`", "|", "~", "#"} {
			for i := range len(text) {
				if strings.HasPrefix(text[i:], markup) {
					require.True(t, i > 0 && text[i-1] == '\\', "%q in %q", markup, text)
				}
			}
		}
		require.NotContains(t, text, "\u202e")
	}
}

func TestWhatSlackGets(t *testing.T) {
	t.Parallel()
	for _, a := range everyAlert() {
		body, err := render(Config{Kind: Slack, Link: "https://bell.example/?a=1&b=2|x"}, a)
		require.NoError(t, err)
		var m struct {
			Text   string
			Mrkdwn bool
			Blocks []struct {
				Type string
				Text struct {
					Type, Text string
					Verbatim   bool
				}
			}
		}
		require.NoError(t, json.Unmarshal(body, &m))
		require.False(t, m.Mrkdwn)
		require.Len(t, m.Blocks, 2)
		require.Equal(t, "plain_text", m.Blocks[0].Text.Type, "in which nothing is markup")
		require.LessOrEqual(t, units(m.Blocks[0].Text.Text), 3000)
		for _, text := range []string{m.Text, m.Blocks[0].Text.Text} {
			require.NotEmpty(t, text)
			require.NotContains(t, text, "<")
			require.NotContains(t, text, ">")
			require.NotContains(t, strings.NewReplacer("&amp;", "", "&lt;", "", "&gt;", "").Replace(text), "&")
		}
		require.Equal(t, "<https://bell.example/?a=1&amp;b=2%7Cx|Open the page>", m.Blocks[1].Text.Text)
		require.True(t, m.Blocks[1].Text.Verbatim)
	}
}

func TestWhatAProgramGets(t *testing.T) {
	t.Parallel()
	body, err := render(Config{Kind: JSON, Link: "https://bell.example/"}, alertOf(SenderStopped, Event{Sender: "relay", School: "A", Code: "UNAUTHENTICATED"}))
	require.NoError(t, err)
	require.JSONEq(t, `{"version":1,"id":"17","kind":"sender_stopped","at":"2026-03-02T01:00:00Z","since":"2026-03-01T23:30:00Z","seen":1234,
		"text":"Sender relay is stopped since 2026-03-01 23:30 UTC: its receiver does not let it in (UNAUTHENTICATED).\nNothing is sent by it until it is let in; it is probed by itself. Look at its credentials, project and address.\nFound out with school A.",
		"link":"https://bell.example/","sender":"relay","school":"A","code":"UNAUTHENTICATED"}`, string(body))
	for _, a := range everyAlert() {
		body, err := render(Config{Kind: JSON}, a)
		require.NoError(t, err)
		require.True(t, json.Valid(body))
		require.Less(t, len(body), 256<<10)
	}
	_, err = render(Config{Kind: JSON}, school.Alert{Body: []byte(`[`)})
	require.Error(t, err)
}

func TestADigestIsBoundedAndTellsHowManyMore(t *testing.T) {
	t.Parallel()
	f := school.Failures{From: at.Add(-time.Hour), Until: at}
	total := 0
	for i := range 57 {
		f.Counts = append(f.Counts,
			school.FailureCount{School: fmt.Sprintf("s%02d", i), Name: "High", Code: "UNAVAILABLE", Reason: school.RetriesExhausted, Count: 1000 - i},
			school.FailureCount{School: fmt.Sprintf("s%02d", i), Name: "High", Code: "INVALID_ARGUMENT", Reason: school.RejectedReason, Count: 1})
		total += 1001 - i
	}
	d := digestOf(f)
	require.Equal(t, []int{total, 57, 20, 37}, []int{d.Recipients, d.Schools, len(d.Items), d.MoreSchools})
	require.Equal(t, SchoolFailed{School: "s00", Name: "High", Recipients: 1001, Codes: []CodeFailed{
		{"UNAVAILABLE", "RETRIES_EXHAUSTED", 1000}, {"INVALID_ARGUMENT", "REJECTED", 1}}}, d.Items[0])
	text := textOf(alertOf(FailuresDigest, Event{Failures: d}), Event{Failures: d}, time.FixedZone("KST", 9*3600), plain, 100_000)
	lines := strings.Split(text, "\n")
	require.Equal(t, "55,461 recipients of 57 schools failed for good since 2026-03-02 09:00 KST.", lines[0])
	require.Equal(t, "High (s00): UNAVAILABLE RETRIES_EXHAUSTED: 1,000, INVALID_ARGUMENT REJECTED: 1", lines[1])
	require.Equal(t, "and 37 more schools", lines[21])
	short := strings.Split(textOf(alertOf(FailuresDigest, Event{Failures: d}), Event{Failures: d}, time.UTC, plain, 400), "\n")
	require.Less(t, units(strings.Join(short, "\n")), 400)
	require.Equal(t, fmt.Sprintf("and %d more schools", 57-(len(short)-2)), short[len(short)-1], "those that did not fit are among them")
}

// failing is a store that knows of failures.
type failing struct {
	f     school.Failures
	err   error
	told  [][]byte
	moved int
}

func (s *failing) NewFailures(context.Context) (school.Failures, error) { return s.f, s.err }

func (s *failing) TellFailures(_ context.Context, f school.Failures, kind string, body []byte) (bool, error) {
	s.moved++
	if body != nil {
		s.told = append(s.told, body)
	}
	return body != nil, nil
}

func TestADigestOfNothingIsNone(t *testing.T) {
	t.Parallel()
	s := &failing{f: school.Failures{From: at, Until: at.Add(time.Hour)}}
	require.NoError(t, Digest(t.Context(), s))
	require.Equal(t, 1, s.moved)
	require.Empty(t, s.told)
	s.f.Counts = []school.FailureCount{{School: "A", Code: "X", Count: 1}}
	require.NoError(t, Digest(t.Context(), s))
	require.Len(t, s.told, 1)
	s.err = school.ErrUnavailable
	require.ErrorIs(t, Digest(t.Context(), s), school.ErrUnavailable)
	require.Equal(t, 2, s.moved)
}

// states keeps conditions in memory.
type states struct {
	mu    sync.Mutex
	calls []string
	err   error
}

func (s *states) RaiseAlert(_ context.Context, c school.Condition) (bool, error) {
	return s.call(fmt.Sprint("raise ", c.Key, " ", c.Kind, " ", c.Count, " ", c.Remind))
}

func (s *states) EndAlert(_ context.Context, key, kind string, _ []byte) (bool, error) {
	return s.call("end " + key + " " + kind)
}

func (s *states) call(what string) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false, s.err
	}
	s.calls = append(s.calls, what)
	return true, nil
}

func (s *states) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func TestTheBoardWritesInOrderAndAgainUntilItIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &states{}
		woken := 0
		b := NewBoard(s, func() { woken++ }, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); b.Run(ctx) }()
		b.Raise(SenderMismatch, Event{Sender: "r"}, 3)
		synctest.Wait()
		s.fail(fmt.Errorf("away: %w", school.ErrUnavailable))
		b.Raise(SenderStopped, Event{Sender: "r"}, 1)
		synctest.Wait() // it is tried already
		b.Raise(SenderMismatch, Event{Sender: "r"}, 4)
		b.Raise(SenderMismatch, Event{Sender: "r"}, 5)
		b.End(SenderStopped, SenderResumed, Event{Sender: "r"})
		b.Remind(SenderStopped, Event{Sender: "r"})
		time.Sleep(time.Minute)
		s.fail(nil)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []string{
			"raise sender_id_mismatch/r sender_id_mismatch 3 false",
			"raise sender_stopped/r sender_stopped 1 false",
			"raise sender_id_mismatch/r sender_id_mismatch 9 false",
			"end sender_stopped/r sender_resumed",
			"raise sender_stopped/r sender_stopped 1 true",
		}, s.calls)
		require.Equal(t, 5, woken)

		s.fail(errors.New("cannot be written ever"))
		b.Raise(SenderStopped, Event{Sender: "x"}, 1)
		synctest.Wait()
		s.fail(nil)
		b.Raise(UnregisteredBrake, Event{Sender: "x"}, 1)
		synctest.Wait()
		require.Equal(t, "raise unregistered_brake/x unregistered_brake 1 false", s.calls[len(s.calls)-1], "it blocks nothing behind it")

		s.fail(school.ErrUnavailable)
		for i := range 2 * boardRoom {
			b.Raise(SenderStopped, Event{Sender: fmt.Sprint(i)}, 1)
		}
		require.LessOrEqual(t, len(b.ops), boardRoom, "bounded")
		stopped := time.Now()
		stop()
		<-ended
		require.LessOrEqual(t, time.Since(stopped), boardStop+time.Second)
	})
}

func TestWhatIsLeftIsWrittenAtTheStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &states{}
		b := NewBoard(s, func() {}, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		stop()
		b.Raise(SenderStopped, Event{Sender: "r"}, 1)
		b.Run(ctx)
		require.Len(t, s.calls, 1)
	})
}

// outbox hands out one alert.
type outbox struct {
	mu     sync.Mutex
	alert  *school.Alert
	posted []school.Posted
}

func (o *outbox) ClaimAlerts(context.Context, int, time.Duration) ([]school.Alert, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.alert == nil {
		return nil, nil
	}
	a := *o.alert
	o.alert = nil
	return []school.Alert{a}, nil
}

func (o *outbox) SettleAlert(_ context.Context, _ school.Alert, p school.Posted) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.posted = append(o.posted, p)
	return nil
}

func TestAnAlertIsPostedAndCounted(t *testing.T) {
	t.Parallel()
	var header http.Header
	answer := http.StatusNoContent
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body)
		header = r.Header
		w.WriteHeader(answer)
	}))
	t.Cleanup(server.Close)
	client, err := hook.New(hook.Config{URL: server.URL + "/secret"})
	require.NoError(t, err)
	t.Cleanup(client.Close)
	var log strings.Builder
	reg := prometheus.NewRegistry()
	o := &outbox{}
	pump, err := NewPump(Config{Kind: Discord}, o, client, slog.New(slog.NewTextHandler(&log, nil)), reg)
	require.NoError(t, err)
	for _, answer = range []int{204, 500, 400} {
		a := alertOf(SenderStopped, Event{Sender: "r"})
		o.alert = &a
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); pump.Run(ctx) }()
		n := len(o.posted)
		require.Eventually(t, func() bool { o.mu.Lock(); defer o.mu.Unlock(); return len(o.posted) > n }, time.Minute, time.Millisecond)
		cancel()
		<-ended
	}
	require.Equal(t, "alert-17", header.Get("Idempotency-Key"))
	require.Equal(t, []school.PostState{school.PostSent, school.PostPending, school.PostFailed}, []school.PostState{o.posted[0].State, o.posted[1].State, o.posted[2].State})
	require.Equal(t, 2, strings.Count(log.String(), "event=alert_failed"))
	require.NotContains(t, log.String(), "secret")
	require.NotContains(t, log.String(), server.URL)
	families, err := reg.Gather()
	require.NoError(t, err)
	counts := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if v := m.GetCounter().GetValue(); v > 0 {
				counts[f.GetName()+" "+m.GetLabel()[0].GetValue()+" "+m.GetLabel()[1].GetValue()] = v
			}
		}
	}
	require.Equal(t, map[string]float64{
		"schoolbell_alerts_sent_total sender_stopped sent": 1, "schoolbell_alerts_sent_total sender_stopped retry": 1, "schoolbell_alerts_sent_total sender_stopped refused": 1,
	}, counts)
	_, err = NewPump(Config{Kind: "pager"}, o, client, slog.New(slog.DiscardHandler), nil)
	require.ErrorContains(t, err, `"pager"`)
}
