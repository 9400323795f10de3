package relay

import (
	"context"
	"io"
	"log"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

func discardLog() *log.Logger { return log.New(io.Discard, "", 0) }

func TestDefaults(t *testing.T) {
	t.Parallel()
	r, err := New(Config{URL: "https://relay.example/push"}, nil)
	require.NoError(t, err)
	require.Equal(t, 10*time.Second, r.Longest())
	require.Equal(t, 3*time.Second, r.cfg.ConnectTimeout)
	require.Equal(t, 7*time.Second, r.cfg.ReadTimeout)

	r, err = New(Config{URL: "https://relay.example/push", CallTimeout: 300 * time.Millisecond}, nil)
	require.NoError(t, err)
	require.Equal(t, 300*time.Millisecond, r.cfg.ConnectTimeout, "unset ones follow a short call")
	require.Equal(t, 300*time.Millisecond, r.cfg.ReadTimeout)
}

func TestWrongSettingsAreNamedAndNotShown(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t"
	for name, c := range map[string]struct {
		cfg  Config
		says string
	}{
		"no url":            {Config{}, "url"},
		"no scheme":         {Config{URL: "relay.example/" + secret}, "url"},
		"other scheme":      {Config{URL: "ftp://relay.example/" + secret}, "url"},
		"no host":           {Config{URL: "http:///" + secret}, "url"},
		"not a URL":         {Config{URL: "http://relay.example/%zz" + secret}, "url"},
		"password in url":   {Config{URL: "http://u:" + secret + "@relay.example/"}, "url"},
		"status url":        {Config{URL: "http://relay.example", StatusURL: "ftp://" + secret}, "status_url"},
		"token with a line": {Config{URL: "http://relay.example", Token: secret + "\n"}, "token"},
		"negative":          {Config{URL: "http://relay.example", CallTimeout: -1}, "call_timeout"},
		"connect too long":  {Config{URL: "http://relay.example", ConnectTimeout: time.Minute}, "connect_timeout"},
		"read too long":     {Config{URL: "http://relay.example", ReadTimeout: 9 * time.Second, CallTimeout: 8 * time.Second}, "read_timeout"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.cfg.Name = "the-relay"
			_, err := New(c.cfg, nil)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, "the-relay")
			require.NotContains(t, err.Error(), secret)
		})
	}
}

func TestAsk(t *testing.T) {
	t.Parallel()
	url, requests := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if string(body) != `{"ids":["n.1","n.2","n.3","n.4","n.5"]}` || r.Header.Get("Authorization") != "Bearer secret-key" || r.Header.Get("Idempotency-Key") != "" {
			t.Errorf("asked %s with %v", body, r.Header)
		}
		_, _ = io.WriteString(w, `{"results":[{"id":"n.3","status":"unknown"},{"id":"n.2","status":"not_accepted"},{"id":"n.1","status":"accepted"},
			{"id":"n.5","status":"accepted"},{"id":"n.5","status":"not_accepted"},{"id":"stranger","status":"accepted"},
			{"id":"n.4","status":"unknown","status":"accepted"},7]}`)
	})
	r := newRelay(t, "http://relay.invalid", func(cfg *Config) { cfg.StatusURL = url })

	got, err := r.Ask(t.Context(), []string{"n.1", "n.2", "n.3", "n.4", "n.5"})

	require.NoError(t, err)
	require.Equal(t, map[string]sender.Status{
		"n.1": sender.StatusAccepted, "n.2": sender.StatusNotAccepted,
		"n.3": sender.StatusUnknown, "n.4": sender.StatusUnknown, "n.5": sender.StatusUnknown,
	}, got)
	require.EqualValues(t, 1, requests.Load())
}

func TestAskWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	r := newRelay(t, "http://relay.invalid", nil)
	got, err := r.Ask(t.Context(), []string{"n.1"})
	require.NoError(t, err, "nobody to ask is no failure")
	require.Equal(t, map[string]sender.Status{"n.1": sender.StatusUnknown}, got)

	for name, status := range map[string]int{"500": 500, "401": 401, "200 without JSON": 200} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, _ := answering(t, status, nil, "<html>")
			_, err := newRelay(t, url, func(cfg *Config) { cfg.StatusURL = url }).Ask(t.Context(), []string{"n.1"})
			require.Error(t, err)
			require.NotContains(t, err.Error(), "secret-key")
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = newRelay(t, "http://relay.invalid", func(cfg *Config) { cfg.StatusURL = "http://relay.invalid" }).Ask(ctx, []string{"n.1"})
	require.Error(t, err)
}
