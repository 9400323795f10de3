package web

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// TestCases runs the requests and answers that the API was specified by.
func TestCases(t *testing.T) {
	t.Parallel()
	f, err := os.Open("testdata/notices.ndjson")
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	type testCase struct {
		Name        string          `json:"name"`
		Body        json.RawMessage `json:"body"`
		Raw         string          `json:"raw"`
		ContentType string          `json:"content_type"`
		Status      int             `json:"status"`
		Code        api.Code        `json:"code"`
		Field       string          `json:"field"`
		Then        map[string]int  `json:"then"`
	}
	count := 0
	for lines := bufio.NewScanner(f); lines.Scan(); count++ {
		var c testCase
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			body := c.Raw
			if body == "" {
				body = strings.ReplaceAll(string(c.Body), `"@5000"`, `"`+strings.Repeat("x", 5000)+`"`)
			}
			contentType := c.ContentType
			if contentType == "" {
				contentType = api.JSON
			}
			rec := w.do(http.MethodPost, "/v1/notices", contentType, strings.NewReader(body))
			require.Equal(t, c.Status, rec.Code, rec.Body.String())
			accepts, _, kept := w.store.counts()
			if c.Status != http.StatusAccepted {
				requireError(t, rec, c.Code, c.Field)
				require.Zero(t, accepts, "the store heard of a request that was refused")
				require.Empty(t, w.waker.woken)
				return
			}
			got := requireAnswer[api.Accepted](t, rec, http.StatusAccepted)
			require.Equal(t, "PENDING", got.Status)
			require.Equal(t, 1, kept)
			require.Equal(t, []string{"A"}, w.waker.woken)

			notice := w.get("/v1/notices/" + got.ID)
			require.Equal(t, http.StatusOK, notice.Code)
			var tree map[string]any
			require.NoError(t, json.Unmarshal(notice.Body.Bytes(), &tree))
			for path, want := range c.Then {
				var at any = tree
				for part := range strings.SplitSeq(path, ".") {
					at = at.(map[string]any)[part]
				}
				require.EqualValues(t, want, at, path)
			}
			var sent struct{ Title, Body string }
			require.NoError(t, json.Unmarshal([]byte(body), &sent))
			require.Equal(t, sent.Title, tree["title"])
			require.Equal(t, sent.Body, tree["body"])
		})
	}
	require.Equal(t, 19, count, "cases read: "+strconv.Itoa(count))
}
