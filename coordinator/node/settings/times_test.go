package settings

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestMargin(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ etc, want time.Duration }{
		{40 * time.Second, 1200 * time.Millisecond}, // 600 + 500 + 100
		{time.Second, 265 * time.Millisecond},       // 15 + 150 + 100
		{0, 100 * time.Millisecond},
	} {
		require.Equal(t, tc.want, Margin(tc.etc), tc.etc)
	}
}

func TestLeastAndComfortableETCAreTheFirstThatFit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := time.Duration(rapid.Int64Range(0, int64(6*time.Minute)).Draw(t, "b"))
		fits := func(n, etc time.Duration) bool { return etc >= n*(b+Margin(etc)) }
		for n, x := range map[time.Duration]time.Duration{1: LeastETC(b), 2: ComfortableETC(b)} {
			require.True(t, fits(n, x), "%d×: %v does not fit a batch of %v", n, x, b)
			require.False(t, fits(n, x-time.Millisecond), "%d×: a millisecond less than %v fits a batch of %v", n, x, b)
			require.Zero(t, x%time.Millisecond)
		}
	})
}

func TestETC(t *testing.T) {
	t.Parallel()
	fcm := "senders: {f: {kind: fcm}}\n"
	for _, tc := range []struct {
		name, yaml        string
		etc, least, most  time.Duration
		sender, etcOrigin string
	}{
		{"log", "", 40 * time.Second, 11547 * time.Millisecond, 60 * time.Second, "log", "default"},
		{"fcm: the default is stretched", fcm, 40413 * time.Millisecond, 40413 * time.Millisecond, 60 * time.Second, "f", "twice what a batch of senders.f can take"},
		{"fcm: what is set stays", fcm + "lock: {etc: 25s}\n", 25 * time.Second, 25 * time.Second, 60 * time.Second, "f", "schoolbell.yaml:2"},
		{"stretched no further than the most", fcm + "lock: {etc_max: 30s}\n", 30 * time.Second, 30 * time.Second, 30 * time.Second, "f", "lock.etc_max"},
		{"slow call", "senders: {f: {kind: fcm, call_timeout: 40s}}\nstop_timeout: 60s\n", 60 * time.Second, 60 * time.Second, 60 * time.Second, "f", "lock.etc_max"},
		{"test times", "quota: {limit: 50, rest: 200ms}\ndispatch: {claim_timeout: 300ms}\nlock: {etc: 1s}\nstop_timeout: 7600ms\nsenders: {r: {kind: relay, url: 'http://h', call_timeout: 300ms}}\n",
			time.Second, time.Second, 60 * time.Second, "r", "schoolbell.yaml:3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := load(t, world(tc.yaml))
			require.Equal(t, tc.etc, s.Lock.ETC)
			require.Equal(t, tc.etcOrigin, s.Origin("lock.etc").String())
			least, most := s.ETCBounds(tc.sender)
			require.Equal(t, tc.least, least)
			require.Equal(t, tc.most, most)
		})
	}
}

func TestShortRelayCallShortensItsParts(t *testing.T) {
	t.Parallel()
	s := load(t, world("senders: {r: {kind: relay, url: 'http://h', call_timeout: 300ms}}\n"))
	require.Equal(t, 300*time.Millisecond, s.Senders["r"].ConnectTimeout)
	require.Equal(t, 300*time.Millisecond, s.Senders["r"].ReadTimeout)
}

func TestLargestBatch(t *testing.T) {
	t.Parallel()
	require.Equal(t, 400, load(t, world("dispatch: {batch: 400}\n")).Dispatch.Batch)
	require.Equal(t, 1000, load(t, world("dispatch: {batch: 1000}\nsenders: {f: {kind: fcm}}\n")).Dispatch.Batch)
}
