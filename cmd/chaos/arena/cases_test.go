package arena

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

type noticeCase struct {
	Name        string          `json:"name"`
	Body        json.RawMessage `json:"body"`
	Raw         string          `json:"raw"`
	ContentType string          `json:"content_type"`
	Status      int             `json:"status"`
	Code        string          `json:"code"`
	Field       string          `json:"field"`
	Then        map[string]int  `json:"then"`
}

// TestEveryNoticeCaseGetsItsAnswer sends each case to a real replica and looks
// at what it stored.
func TestEveryNoticeCaseGetsItsAnswer(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 1, Limit: 500, Rest: time.Second, Settings: short()})
	f, err := os.Open("../../../coordinator/web/testdata/notices.ndjson")
	require.NoError(t, err)
	defer f.Close()
	accepted := 0
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var c noticeCase
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		body := c.Raw
		if body == "" {
			body = strings.ReplaceAll(string(c.Body), `"@5000"`, `"`+strings.Repeat("a", 5000)+`"`)
		}
		contentType := c.ContentType
		if contentType == "" {
			contentType = api.JSON
		}
		status, answer := post(ctx, t, a, contentType, strings.NewReader(body))
		require.Equal(t, c.Status, status, "%s: %s", c.Name, answer)
		if c.Status != http.StatusAccepted {
			var e api.ErrorBody
			require.NoError(t, json.Unmarshal(answer, &e))
			require.Equal(t, c.Code, string(e.Error.Code), c.Name)
			require.Equal(t, c.Field, e.Error.Field, c.Name)
			continue
		}
		accepted++
		var got api.Accepted
		require.NoError(t, json.Unmarshal(answer, &got))
		n, err := a.Alive().Client().Notice(ctx, got.ID)
		require.NoError(t, err)
		if want, ok := c.Then["total"]; ok {
			require.Equal(t, want, n.Counts.Total, c.Name)
		}
		if want, ok := c.Then["skipped.duplicate"]; ok {
			require.Equal(t, want, n.Counts.Skipped.Duplicate, c.Name)
		}
	}
	require.Positive(t, accepted)
	var stored int
	require.NoError(t, a.DB.QueryRow(ctx, `SELECT count(*) FROM push_clusters`).Scan(&stored))
	require.Equal(t, accepted, stored, "what was refused left nothing")
}

// TestBrokenUploadStoresNothing breaks a line in the middle of 10,000, and hands
// in one recipient more than a notice may have.
func TestBrokenUploadStoresNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	a := open(t, Config{Replicas: 1, Limit: 500, Rest: time.Second, Settings: short()})
	lines := func(n int, broken int) io.Reader {
		r, w := io.Pipe()
		go func() {
			out := bufio.NewWriterSize(w, 1<<16)
			fmt.Fprintln(out, `{"school":"A","title":"t","body":"b"}`)
			for i := range n {
				if i == broken {
					fmt.Fprintln(out, `{"token":7}`)
					continue
				}
				fmt.Fprintf(out, "{\"token\":\"tok-%d\"}\n", i)
			}
			_ = w.CloseWithError(out.Flush())
		}()
		return r
	}
	for _, c := range []struct {
		name      string
		n, broken int
		status    int
		field     string
	}{
		{"a broken line", 10_000, 5_000, http.StatusBadRequest, "recipients[5000].token"},
		{"one too many", 1_000_001, -1, http.StatusRequestEntityTooLarge, "recipients"},
	} {
		status, answer := post(ctx, t, a, api.NDJSON, lines(c.n, c.broken))
		require.Equal(t, c.status, status, "%s: %s", c.name, answer)
		var e api.ErrorBody
		require.NoError(t, json.Unmarshal(answer, &e))
		require.Contains(t, e.Error.Field, c.field, c.name)
	}
	for _, table := range []string{"push_clusters", "push_cluster_tokens", "schools"} {
		var n int
		require.NoError(t, a.DB.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&n))
		require.Zero(t, n, table)
	}
}

func post(ctx context.Context, t *testing.T, a *Arena, contentType string, body io.Reader) (int, []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.Alive().URL()+"/v1/notices", body)
	require.NoError(t, err)
	req.Header.Set("Content-Type", contentType)
	req.Header.Set("Authorization", "Bearer "+Key)
	resp, err := httpClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, b.Bytes()
}
