package relay

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

// FuzzResults: whatever a relay answers, every message has one result, and it
// is accepted only if the relay said so of it once, and nothing else.
func FuzzResults(f *testing.F) {
	for _, s := range []string{
		`{"results":[{"id":"a","status":"ok"},{"id":"b","status":"error","code":"UNREGISTERED"}]}`,
		`{"results":[{"id":"a","status":"ok"},{"id":"a","status":"ok"}]}`,
		`{"results":[{"id":"a","status":"error","code":"QUOTA_EXCEEDED","retry_after_seconds":1e300},{"id":7},null]}`,
		`{"results":[{"ID":"a","status":"ok","id":"b"}]}`, `{"results":[{"id":"a","status":"error","status":"ok"}]}`, `{"results":null}`, `[]`, `{`,
	} {
		f.Add([]byte(s))
	}
	r, err := New(Config{Name: "r", URL: "http://127.0.0.1:1"}, nil)
	require.NoError(f, err)
	f.Cleanup(r.Close)
	messages := []sender.Message{{ID: "a"}, {ID: "b"}, {ID: "c"}}
	f.Fuzz(func(t *testing.T, body []byte) {
		var said struct {
			Results []map[string]any `json:"results"`
		}
		_ = json.Unmarshal(body, &said)
		ok, mentioned := map[string]int{}, map[string]int{}
		for _, one := range said.Results {
			var id, status string
			id, _ = one["id"].(string)
			status, _ = one["status"].(string)
			mentioned[id]++
			if status == "ok" {
				ok[id]++
			}
		}
		results := r.results(messages, body)
		require.Len(t, results, len(messages))
		for i, got := range results {
			require.Equal(t, messages[i].ID, got.ID)
			require.LessOrEqual(t, got.RetryAfter, sender.MaxRetryAfter)
			require.GreaterOrEqual(t, int64(got.RetryAfter), int64(0))
			if got.Code != "" {
				require.True(t, sender.ValidCode(got.Code), got.Code)
			}
			if got.Class != sender.Accepted {
				continue
			}
			if ok[got.ID] != 1 || mentioned[got.ID] != 1 {
				t.Fatalf("%s is accepted, and the relay did not say so once: %s", got.ID, body)
			}
		}
	})
}

// FuzzStatuses: an id that was not asked for gets no answer, and none is known
// to have arrived unless the relay says so.
func FuzzStatuses(f *testing.F) {
	for _, s := range []string{
		`{"results":[{"id":"a","status":"accepted"},{"id":"b","status":"not_accepted"},{"id":"z","status":"accepted"}]}`,
		`{"results":[{"id":"a","status":"accepted"},{"id":"a","status":"accepted"}]}`, `{"results":[{"id":"a","status":"accepted"}]}`, `{"results":[{"id":"b","status":"not_accepted"}]}`, `{"results":[null]}`, `7`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		answers := map[string]sender.Status{"a": sender.StatusUnknown, "b": sender.StatusUnknown}
		err := decodeStatuses(body, answers)
		require.Len(t, answers, 2)
		for id, status := range answers {
			if status == sender.StatusUnknown {
				continue
			}
			require.NoError(t, err, "an answer that cannot be read tells nothing")
			require.True(t, json.Valid(body))
			require.Contains(t, string(body), status.String(), id)
		}
	})
}
