package hook

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newClient(t *testing.T, cfg Config, h http.HandlerFunc) *Client {
	t.Helper()
	if h != nil {
		server := httptest.NewServer(h)
		t.Cleanup(server.Close)
		cfg.URL = server.URL + "/secret"
	}
	c, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func TestAPostIsMadeAsDocumented(t *testing.T) {
	t.Parallel()
	for token, want := range map[string]string{"": "", "tok": "Bearer tok"} {
		got := make(chan *http.Request, 1)
		body := make(chan string, 1)
		c := newClient(t, Config{Token: token}, func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			got <- r
			body <- string(text)
			w.WriteHeader(http.StatusNoContent)
		})
		require.Equal(t, Answer{Fate: Taken}, c.Post(t.Context(), "7.1.sms", []byte(`{"a":1}`)))
		r := <-got
		require.Equal(t, "POST /secret", r.Method+" "+r.URL.Path)
		require.Equal(t, []string{"7.1.sms", "application/json", want}, []string{r.Header.Get("Idempotency-Key"), r.Header.Get("Content-Type"), r.Header.Get("Authorization")})
		require.Equal(t, `{"a":1}`, <-body)
		require.EqualValues(t, 7, r.ContentLength)
	}
}

func TestWhatAnAnswerMeans(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		header map[string]string
		want   Answer
	}{
		"taken":                {202, nil, Answer{Fate: Taken}},
		"nothing to say":       {204, map[string]string{"Retry-After": "9"}, Answer{Fate: Taken}},
		"not this one":         {422, nil, Answer{Fate: Refused, Code: "HTTP_422"}},
		"malformed":            {400, nil, Answer{Fate: Refused, Code: "HTTP_400"}},
		"too large":            {413, nil, Answer{Fate: Refused, Code: "HTTP_413"}},
		"wrong token":          {401, nil, Answer{Fate: Delayed, Code: "HTTP_401"}},
		"wrong address":        {404, nil, Answer{Fate: Delayed, Code: "HTTP_404"}},
		"under way":            {409, nil, Answer{Fate: Delayed, Code: "HTTP_409"}},
		"broken":               {500, nil, Answer{Fate: Delayed, Code: "HTTP_500"}},
		"too fast":             {429, map[string]string{"Retry-After": "3"}, Answer{Fate: Delayed, Code: "HTTP_429", Wait: 3 * time.Second}},
		"too fast, as Discord": {429, map[string]string{"Retry-After": "0.75"}, Answer{Fate: Delayed, Code: "HTTP_429", Wait: 750 * time.Millisecond}},
		"for a year":           {503, map[string]string{"Retry-After": "1e99"}, Answer{Fate: Delayed, Code: "HTTP_503", Wait: time.Hour}},
		"in the past":          {503, map[string]string{"Retry-After": "-5"}, Answer{Fate: Delayed, Code: "HTTP_503"}},
		"no number":            {503, map[string]string{"Retry-After": "NaN"}, Answer{Fate: Delayed, Code: "HTTP_503"}},
		"soon":                 {503, map[string]string{"Retry-After": "soon"}, Answer{Fate: Delayed, Code: "HTTP_503"}},
		"by its clock": {503, map[string]string{"Date": "Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT"},
			Answer{Fate: Delayed, Code: "HTTP_503", Wait: 30 * time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := newClient(t, Config{}, func(w http.ResponseWriter, _ *http.Request) {
				for k, v := range c.header {
					w.Header().Set(k, v)
				}
				w.WriteHeader(c.status)
			})
			require.Equal(t, c.want, client.Post(t.Context(), "", nil))
		})
	}
}

// TestARedirectIsNotFollowed: the post would go to an address that nobody set.
func TestARedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	var arrived atomic.Int64
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived.Add(1) }))
	t.Cleanup(elsewhere.Close)
	for _, status := range []int{301, 302, 303, 307, 308} {
		c := newClient(t, Config{Token: "tok"}, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL, status)
		})
		require.Equal(t, Delayed, c.Post(t.Context(), "", []byte("x")).Fate)
	}
	require.Zero(t, arrived.Load())
}

func TestNoAnswerIsTold(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	gone := newClient(t, Config{URL: "http://" + l.Addr().String()}, nil)
	require.Equal(t, Answer{Fate: Delayed, Code: CodeConnectFailed}, gone.Post(t.Context(), "", nil))

	slow := newClient(t, Config{Timeout: 50 * time.Millisecond}, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadAll(r.Body) // only then the server hears that its caller has gone
		<-r.Context().Done()
	})
	require.Equal(t, Answer{Fate: Delayed, Code: CodeTimeout}, slow.Post(t.Context(), "", nil))

	// The connection breaks when the post is there: once, although the transport
	// repeats by itself whatever has an Idempotency-Key, if it can.
	var posts atomic.Int64
	cut := newClient(t, Config{}, func(w http.ResponseWriter, r *http.Request) {
		if posts.Add(1) == 1 {
			return // so that the next one uses a connection that was used before
		}
		_, _ = io.ReadAll(r.Body)
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.Close()
		}
	})
	require.Equal(t, Taken, cut.Post(t.Context(), "k", []byte("x")).Fate)
	require.Equal(t, Answer{Fate: Delayed, Code: CodeNoAnswer}, cut.Post(t.Context(), "k", []byte("x")))
	require.EqualValues(t, 2, posts.Load())
}

func TestAnAddressIsNotQuoted(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"", "://secret", "ftp://secret", "http:///secret", "secret", "http://h/\x7fsecret"} {
		_, err := New(Config{URL: address})
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestItsOwnWayToAConnection(t *testing.T) {
	t.Parallel()
	var dialled atomic.Int64
	c := newClient(t, Config{Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialled.Add(1)
		return (&net.Dialer{}).DialContext(ctx, network, addr)
	}}, func(http.ResponseWriter, *http.Request) {})
	require.Equal(t, Taken, c.Post(t.Context(), "", []byte(strings.Repeat("x", 1000))).Fate)
	require.EqualValues(t, 1, dialled.Load())
}
