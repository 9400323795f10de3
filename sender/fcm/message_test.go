package fcm

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

var noon = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

func encode(t *testing.T, b sender.Batch, m sender.Message) string {
	t.Helper()
	text, err := json.Marshal(message(b, &m, noon))
	require.NoError(t, err)
	return string(text)
}

func TestAPlainMessage(t *testing.T) {
	t.Parallel()
	b := sender.Batch{ID: "b-1", School: "A", Fence: 7}
	c := &sender.Content{Title: "t", Body: "b", Data: map[string]string{"k": "v"}}
	require.JSONEq(t, `{
		"token": "device",
		"notification": {"title": "t", "body": "b"},
		"data": {"k": "v", "schoolbell_school": "A", "schoolbell_notice": "12", "schoolbell_message": "12.3",
			"schoolbell_attempt": "2", "schoolbell_batch": "b-1", "schoolbell_fence": "7"},
		"android": {"notification": {"tag": "12.3"}},
		"apns": {"headers": {"apns-collapse-id": "12.3"}},
		"webpush": {"notification": {"tag": "12.3"}}
	}`, encode(t, b, sender.Message{ID: "12.3", Notice: "12", Token: "device", Content: c, Attempt: 2}))
	require.Equal(t, map[string]string{"k": "v"}, c.Data, "the notice's data is shared and stays")
}

func TestAMessageWithEverything(t *testing.T) {
	t.Parallel()
	badge := 0
	b := sender.Batch{ID: "b-1", School: "A", Fence: 7}
	c := &sender.Content{
		Title: "t", Image: "https://i.example/i.png", Link: "https://l.example/", Priority: sender.Urgent,
		// What counts is how long it is from now, not what our clock says of the moment.
		ExpiresAt: noon.Add(90 * time.Second), ExpiresBy: noon.Add(90*time.Second + time.Millisecond),
	}
	require.JSONEq(t, `{
		"token": "device",
		"notification": {"title": "t", "image": "https://i.example/i.png"},
		"data": {"link": "https://l.example/", "schoolbell_school": "A", "schoolbell_notice": "12", "schoolbell_message": "12.3",
			"schoolbell_attempt": "1", "schoolbell_batch": "b-1", "schoolbell_fence": "7"},
		"android": {"priority": "high", "ttl": "91s", "notification": {"tag": "12.3"}},
		"apns": {"headers": {"apns-collapse-id": "12.3", "apns-priority": "10", "apns-expiration": "1772452890"},
			"payload": {"aps": {"badge": 0, "mutable-content": 1}}},
		"webpush": {"headers": {"Urgency": "high", "TTL": "91"}, "notification": {"tag": "12.3"}, "fcm_options": {"link": "https://l.example/"}}
	}`, encode(t, b, sender.Message{ID: "12.3", Notice: "12", Token: "device", Content: c, Attempt: 1, Badge: &badge, Requeued: 1}))
}

func TestPartsOfAMessage(t *testing.T) {
	t.Parallel()
	b := sender.Batch{ID: "b-1", School: "A"}
	of := func(c *sender.Content) string {
		return encode(t, b, sender.Message{ID: "12.3", Notice: "12", Token: "device", Content: c, Attempt: 1})
	}
	low := of(&sender.Content{Title: "t", Priority: sender.Low})
	require.Contains(t, low, `"priority":"normal"`)
	require.Contains(t, low, `"apns-priority":"5"`)
	require.Contains(t, low, `"Urgency":"low"`)

	require.Contains(t, of(&sender.Content{ExpiresAt: noon, ExpiresBy: noon.Add(-time.Hour)}), `"ttl":"0s"`, "now or never")
	require.Contains(t, of(&sender.Content{ExpiresAt: noon, ExpiresBy: noon.Add(time.Nanosecond)}), `"ttl":"1s"`)
	require.Contains(t, of(&sender.Content{ExpiresAt: noon, ExpiresBy: noon.AddDate(1, 0, 0)}), `"ttl":"2419200s"`, "FCM's longest")

	own := of(&sender.Content{Link: "https://l.example/", Data: map[string]string{"link": "own"}})
	require.Contains(t, own, `"link":"own"`, "the notice's own key stays")
	require.Contains(t, own, `"fcm_options":{"link":"https://l.example/"}`)
	require.NotContains(t, of(&sender.Content{Link: "http://l.example/"}), "fcm_options", "a web push opens https only")
	require.Contains(t, of(&sender.Content{Link: "app://x"}), `"link":"app://x"`)

	forged := of(&sender.Content{Data: map[string]string{"schoolbell_message": "99.1", "schoolbell_school": "Z"}})
	require.NotContains(t, forged, "99.1")
	require.NotContains(t, forged, `"Z"`)
}

func TestTheCollapseIDFits(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("9", 60) + ".1234"
	require.Equal(t, "12.3", collapseID("12.3"))
	require.Equal(t, long[:64], collapseID(long[:64]))
	require.Len(t, collapseID(long), 64)
	require.NotEqual(t, collapseID(long), collapseID(long+"5"))
}

// Nothing that a notice may hold makes the SDK refuse it, or so we think: what
// it does refuse never left and would be refused again.
func TestWhatTheSDKRefuses(t *testing.T) {
	t.Parallel()
	r := receive(t, http1, answering(200, nil, name))
	f := r.open(t, nil)
	b := batchOf("12.1", "12.2")
	b.Messages[0].Content = &sender.Content{Title: "t", Image: "not a url with token-of-12.1"}
	got := f.Send(t.Context(), b)
	require.Equal(t, sender.Result{ID: "12.1", Class: sender.Rejected, Code: codePayload, Detail: "the Firebase SDK refuses the message unsent"}, got[0])
	require.Equal(t, sender.Accepted, got[1].Class)
	require.EqualValues(t, 1, r.requests.Load())
}

func TestTheRequest(t *testing.T) {
	t.Parallel()
	for _, dry := range []bool{false, true} {
		var path string
		var header http.Header
		var body []byte
		r := receive(t, h2c, func(w http.ResponseWriter, req *http.Request) {
			path, header = req.Method+" "+req.URL.Path, req.Header.Clone()
			body, _ = io.ReadAll(req.Body)
			_, _ = io.WriteString(w, name)
		})
		f := r.open(t, func(c *Config) { c.Project, c.DryRun = "my-project", dry })
		require.Equal(t, sender.Accepted, sendOne(t, t.Context(), f).Class)
		require.Equal(t, "POST /v1/projects/my-project/messages:send", path)
		require.NotContains(t, header, "Authorization", "without credentials none is sent")
		var req struct {
			ValidateOnly bool `json:"validate_only"`
			Message      struct{ Token string }
		}
		require.NoError(t, json.Unmarshal(body, &req))
		require.Equal(t, dry, req.ValidateOnly)
		require.Equal(t, "token-of-12.1", req.Message.Token)
	}
}
