package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve answers every request with h and gives a client for it.
func serve(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	srv := httptest.NewServer(h)
	transport := &http.Transport{}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		srv.Close()
	})
	return &Client{BaseURL: srv.URL + "/", Key: "secret", HTTP: &http.Client{Transport: transport}}
}

func TestCallsAreMadeAsDocumented(t *testing.T) {
	t.Parallel()
	limit := 50
	for name, c := range map[string]struct {
		call        func(ctx context.Context, c *Client) error
		request     string // method and URI
		contentType string
		body        string
	}{
		"send": {func(ctx context.Context, c *Client) error {
			_, err := c.Send(ctx, NoticeRequest{School: "A", Title: "t", Recipients: []Recipient{{Token: "x"}}}, "k")
			return err
		}, "POST /v1/notices", JSON, `{"school":"A","title":"t","recipients":[{"token":"x"}]}`},
		"notice":     {func(ctx context.Context, c *Client) error { _, err := c.Notice(ctx, "7"); return err }, "GET /v1/notices/7", "", ""},
		"odd notice": {func(ctx context.Context, c *Client) error { _, err := c.Notice(ctx, "../x"); return err }, "GET /v1/notices/..%2Fx", "", ""},
		"notices": {func(ctx context.Context, c *Client) error {
			_, err := c.Notices(ctx, NoticeQuery{Page: Page{Cursor: "9", Limit: 5}, School: "A", Status: "PENDING"})
			return err
		}, "GET /v1/notices?cursor=9&limit=5&school=A&status=PENDING", "", ""},
		"all notices": {func(ctx context.Context, c *Client) error { _, err := c.Notices(ctx, NoticeQuery{}); return err }, "GET /v1/notices", "", ""},
		"recipients": {func(ctx context.Context, c *Client) error {
			_, err := c.Recipients(ctx, "7", RecipientQuery{State: "FAIL", Error: "UNREGISTERED"})
			return err
		}, "GET /v1/notices/7/recipients?error=UNREGISTERED&state=FAIL", "", ""},
		"put school": {func(ctx context.Context, c *Client) error {
			_, err := c.PutSchool(ctx, "A", SchoolChange{Limit: &limit})
			return err
		}, "PUT /v1/schools/A", JSON, `{"limit":50}`},
		"school":  {func(ctx context.Context, c *Client) error { _, err := c.School(ctx, "A"); return err }, "GET /v1/schools/A", "", ""},
		"schools": {func(ctx context.Context, c *Client) error { _, err := c.Schools(ctx, Page{Limit: 2}); return err }, "GET /v1/schools?limit=2", "", ""},
		"cluster": {func(ctx context.Context, c *Client) error { _, err := c.Cluster(ctx); return err }, "GET /v1/cluster", "", ""},
		"version": {func(ctx context.Context, c *Client) error { _, err := c.Version(ctx); return err }, "GET /version", "", ""},
		"upload": {func(ctx context.Context, c *Client) error {
			_, err := c.Upload(ctx, NoticeRequest{School: "A", Title: "<t>"}, tokens(2), "k")
			return err
		}, "POST /v1/notices", NDJSON, `{"school":"A","title":"<t>"}` + "\n" + `{"token":"0"}` + "\n" + `{"token":"1"}` + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			asked := make(chan *http.Request, 1)
			bodies := make(chan string, 1)
			client := serve(t, func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				bodies <- string(b)
				asked <- r
				_, _ = io.WriteString(w, `{}`)
			})
			require.NoError(t, c.call(t.Context(), client))
			r := <-asked
			require.Equal(t, c.request, r.Method+" "+r.RequestURI)
			require.Equal(t, c.contentType, r.Header.Get("Content-Type"))
			require.Equal(t, c.body, <-bodies)
			require.Equal(t, "Bearer secret", r.Header.Get("Authorization"))
			if r.Method == http.MethodPost {
				require.Equal(t, "k", r.Header.Get("Idempotency-Key"))
			}
		})
	}
}

// tokens yields n recipients.
func tokens(n int) func(yield func(Recipient, error) bool) {
	return func(yield func(Recipient, error) bool) {
		for i := range n {
			if !yield(Recipient{Token: fmt.Sprint(i)}, nil) {
				return
			}
		}
	}
}

func TestErrorsAreTyped(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status      int
		contentType string
		retryAfter  string
		body        string
		want        Error
		temporary   bool
	}{
		"ours": {400, JSON, "", `{"error":{"code":"invalid_argument","message":"is required","field":"title","request_id":"r"}}`,
			Error{Code: InvalidArgument, Message: "is required", Field: "title", RequestID: "r", Status: 400}, false},
		"under way": {409, JSON + "; charset=utf-8", "1", `{"error":{"code":"conflict","message":"m"}}`,
			Error{Code: Conflict, Message: "m", RequestID: "header", Status: 409, RetryAfter: time.Second}, true},
		"conflict": {409, JSON, "", `{"error":{"code":"conflict","message":"m"}}`,
			Error{Code: Conflict, Message: "m", RequestID: "header", Status: 409}, false},
		"a code of a later version": {418, JSON, "", `{"error":{"code":"teapot","message":"m"}}`,
			Error{Code: "teapot", Message: "m", RequestID: "header", Status: 418}, false},
		"a proxy's page": {502, "text/html", "30", `<html>`,
			Error{Code: Unavailable, Message: "the answer was not schoolbell's: 502 Bad Gateway", RequestID: "header", Status: 502, RetryAfter: 30 * time.Second}, true},
		"a proxy's date": {503, "text/html", "Wed, 21 Oct 2015 07:28:00 GMT", ``,
			Error{Code: Unavailable, Message: "the answer was not schoolbell's: 503 Service Unavailable", RequestID: "header", Status: 503}, true},
		"JSON of another": {404, JSON, "", `{"message":"x"}`,
			Error{Code: NotFound, Message: "the answer was not schoolbell's: 404 Not Found", RequestID: "header", Status: 404}, false},
		"JSON broken off": {500, JSON, "", `{"error":{"code":"internal"`,
			Error{Code: Internal, Message: "the answer was not schoolbell's: 500 Internal Server Error", RequestID: "header", Status: 500}, false},
		"a redirect without a place": {304, "", "", ``,
			Error{Code: Internal, Message: "the answer was not schoolbell's: 304 Not Modified", RequestID: "header", Status: 304}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("X-Request-Id", "header")
				w.Header().Set("Content-Type", c.contentType)
				if c.retryAfter != "" {
					w.Header().Set("Retry-After", c.retryAfter)
				}
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			})
			_, err := client.Notice(t.Context(), "1")
			var e *Error
			require.True(t, errors.As(err, &e), "%v", err)
			require.Equal(t, c.want, *e)
			require.Equal(t, c.temporary, e.Temporary())
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func TestNoAnswerIsNoApiError(t *testing.T) {
	t.Parallel()
	client := serve(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	_, err := client.Notice(t.Context(), "1")
	var e *Error
	require.False(t, errors.As(err, &e))
	require.ErrorContains(t, err, "GET /v1/notices/1")
	require.NotContains(t, err.Error(), "secret")

	client = serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200) })
	_, err = client.Notice(t.Context(), "1")
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = (&Client{BaseURL: "http://[::1"}).Notice(t.Context(), "1")
	require.ErrorContains(t, err, "GET /v1/notices/1")
}

func TestReadyIsReadAlsoWhereItIsNot(t *testing.T) {
	t.Parallel()
	status, body := 503, `{"ready":false,"draining":true,"checks":{"database":"ok"},"degraded":[]}`
	client := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", JSON)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
	got, err := client.Ready(t.Context())
	require.NoError(t, err)
	require.Equal(t, Ready{Draining: true, Checks: map[string]string{"database": "ok"}, Degraded: []string{}}, got)
	body = `{"error":{"code":"unavailable"}}` // of something in between
	_, err = client.Ready(t.Context())
	require.Error(t, err)
	status = 404
	_, err = client.Ready(t.Context())
	require.Error(t, err)
}

// TestUploadThatIsRefused: an endless upload is never whole in memory, its
// encoder ends with it, and the reason is the server's, not the broken pipe's.
func TestUploadThatIsRefused(t *testing.T) {
	t.Parallel()
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.CopyN(io.Discard, r.Body, 1000)
		_ = http.NewResponseController(w).EnableFullDuplex()
		body, _ := json.Marshal(ErrorBody{Error{Code: InvalidArgument, Field: "recipients[3].token"}})
		w.Header().Set("Content-Type", JSON)
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = w.Write(body)
		_ = http.NewResponseController(w).Flush()
		_, _ = io.Copy(io.Discard, r.Body) // until the client has seen it
	})
	_, err := client.Upload(t.Context(), NoticeRequest{School: "A", Title: "t"}, func(yield func(Recipient, error) bool) {
		for yield(Recipient{Token: strings.Repeat("t", 1000)}, nil) { // endless
		}
	}, "")
	var e *Error
	require.True(t, errors.As(err, &e), "%v", err)
	require.Equal(t, "recipients[3].token", e.Field)
}

func TestUploadWhoseSequenceFails(t *testing.T) {
	t.Parallel()
	read := make(chan error, 1)
	client := serve(t, func(_ http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		read <- err
	})
	broken := errors.New("row 2 of the file has no token")
	_, err := client.Upload(t.Context(), NoticeRequest{School: "A", Title: "t"}, func(yield func(Recipient, error) bool) {
		_ = yield(Recipient{Token: "1"}, nil) && yield(Recipient{}, broken)
	}, "")
	require.ErrorIs(t, err, broken)
	require.Error(t, <-read, "the server must not take it for the end")

	_, err = client.Upload(t.Context(), NoticeRequest{Recipients: []Recipient{{Token: "x"}}}, tokens(1), "")
	var e *Error
	require.True(t, errors.As(err, &e))
	require.Equal(t, "recipients", e.Field)
}

func TestEveryCodeHasItsStatus(t *testing.T) {
	t.Parallel()
	seen := make(map[int]Code)
	for c, s := range statuses {
		require.Equal(t, s, c.Status())
		require.Empty(t, seen[s], "two codes for %d", s)
		seen[s] = c
		require.Equal(t, c, codeOf(s))
	}
	require.Equal(t, 500, Code("later").Status())
	require.Equal(t, InvalidArgument, codeOf(418))
	require.Equal(t, Unavailable, codeOf(504))
}
