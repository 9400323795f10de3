package coordinator

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRateIsTheMeanOfTheLastWholeSeconds(t *testing.T) {
	t.Parallel()
	var r rate
	require.Zero(t, r.perSecond(epoch))
	for s := range 30 {
		for range 4 {
			r.add(epoch.Add(time.Duration(s)*time.Second), 25)
		}
	}
	now := epoch.Add(30 * time.Second)
	require.InDelta(t, 100, r.perSecond(now), 0.001)
	r.add(now, 1_000_000)
	require.InDelta(t, 100, r.perSecond(now), 0.001, "the running second is left out")
	require.InDelta(t, 50, newRate(epoch, 100, 5).perSecond(epoch.Add(5*time.Second)), 0.001)
	require.Zero(t, newRate(epoch, 100, 5).perSecond(epoch.Add(time.Hour)))
	require.Zero(t, newRate(epoch, 100, 5).perSecond(epoch.Add(16*time.Second)))
}

// newRate has counted n messages in each of some seconds from begin.
func newRate(begin time.Time, n, seconds int) *rate {
	var r rate
	for s := range seconds {
		r.add(begin.Add(time.Duration(s)*time.Second), n)
	}
	return &r
}
