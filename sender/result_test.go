package sender

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestClassNames(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, c := range Classes() {
		require.True(t, c.Valid())
		require.NotContains(t, c.String(), "class(")
		require.False(t, seen[c.String()], "%s twice", c)
		seen[c.String()] = true
	}
	require.Len(t, seen, 9)
	require.False(t, Class(0).Valid())
	require.Equal(t, "class(0)", Class(0).String())
	require.Equal(t, "class(10)", Class(10).String())
}

func TestUncertain(t *testing.T) {
	t.Parallel()
	for _, c := range Classes() {
		require.Equal(t, c == Unknown, Result{Class: c}.Uncertain(), c)
		require.Equal(t, c == Unknown || c == Accepted, Result{Class: c}.MayHaveArrived(), c)
	}
	require.True(t, Result{Class: Unavailable, OutcomeUnknown: true}.Uncertain())
	require.True(t, Result{}.Uncertain(), "no class is no knowledge")
}

func TestParseRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 9, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		header string
		want   time.Duration
		ok     bool
	}{
		{"", 0, false},
		{"30", 30 * time.Second, true},
		{" 30 ", 30 * time.Second, true},
		{"0", 0, true},
		{"3600", time.Hour, true},
		{"3601", time.Hour, true},
		{"99999999999999999999999", time.Hour, true},
		{"-1", 0, false},
		{"+5", 0, false},
		{"1.5", 0, false},
		{"soon", 0, false},
		{now.Add(90 * time.Second).Format(http.TimeFormat), 90 * time.Second, true},
		{now.Add(-time.Minute).Format(http.TimeFormat), 0, true},
		{now.Add(48 * time.Hour).Format(http.TimeFormat), time.Hour, true},
	} {
		got, ok := ParseRetryAfter(http.Header{"Retry-After": {c.header}, "Date": {now.Format(http.TimeFormat)}})
		require.Equal(t, c.ok, ok, "%q", c.header)
		require.Equal(t, c.want, got, "%q", c.header)
	}
	got, ok := ParseRetryAfter(http.Header{"Retry-After": {now.Add(time.Hour).Format(http.TimeFormat)}})
	require.True(t, ok, "it was said")
	require.Zero(t, got, "but not when")
}

func TestRetryAfterStaysInBounds(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		header := rapid.OneOf(rapid.String(), rapid.StringMatching(`[0-9]{1,40}`)).Draw(t, "header")
		got, ok := ParseRetryAfter(http.Header{"Retry-After": {header}, "Date": {time.Unix(0, 0).UTC().Format(http.TimeFormat)}})
		if got < 0 || got > MaxRetryAfter || !ok && got != 0 {
			t.Fatalf("%q: %v %v", header, got, ok)
		}
	})
}

func TestValidCode(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"UNREGISTERED", "HTTP_503", "A", strings.Repeat("A", 64)} {
		require.True(t, ValidCode(s), s)
	}
	for _, s := range []string{"", "unregistered", "1A", "_A", "A B", "A\n", "A-B", "dEviCe:APA91b", "Ä", strings.Repeat("A", 65)} {
		require.False(t, ValidCode(s), s)
	}
}
