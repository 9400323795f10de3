//go:build failpoints

package node

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStepsLikeASystemClock(t *testing.T) {
	now := time.Now()
	for _, by := range []time.Duration{time.Hour, -time.Hour, 0} {
		then := stepped(now, int64(by/time.Second))
		require.Equal(t, by, then.Round(0).Sub(now.Round(0)), "the wall clock steps")
		require.Zero(t, then.Sub(now), "the monotonic one does not")
		require.Equal(t, now.Nanosecond(), then.Nanosecond())
		require.Equal(t, now.Location(), then.Location())
	}
}

func TestClockFollowsItsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "clock")
	t.Setenv(clockFile, path)
	now := wallClock()
	off := func() time.Duration { return now().Round(0).Sub(time.Now().Round(0)).Round(time.Minute) }
	require.Zero(t, off(), "no file yet")
	for _, c := range []struct {
		text string
		want time.Duration
	}{{"+3600s\n", time.Hour}, {"-1h", -time.Hour}, {"half written", -time.Hour}, {"0s", 0}} {
		require.NoError(t, os.WriteFile(path, []byte(c.text), 0o600))
		require.Eventually(t, func() bool { return off() == c.want }, 5*time.Second, clockEvery, c.text)
	}
}
