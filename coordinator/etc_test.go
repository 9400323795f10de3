package coordinator

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestETCStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	l := newLearnedETC(40*time.Second, 20*time.Second, 60*time.Second)
	require.Equal(t, 40*time.Second, l.of("A"), "nothing learned yet")
	l.took("A", time.Millisecond)
	require.Equal(t, 20*time.Second, l.of("A"))
	l.took("B", time.Hour)
	require.Equal(t, 60*time.Second, l.of("B"))
	require.Equal(t, 40*time.Second, l.of("C"), "learned per school")

	require.Equal(t, 20*time.Second, newLearnedETC(time.Second, 20*time.Second, 60*time.Second).of("A"))
	require.Equal(t, 60*time.Second, newLearnedETC(time.Hour, 20*time.Second, 60*time.Second).of("A"))
}

func TestETCFollowsAMovingAverage(t *testing.T) {
	t.Parallel()
	l := newLearnedETC(40*time.Second, 0, time.Hour)
	l.took("A", 8*time.Second)
	require.Equal(t, 16*time.Second, l.of("A"), "twice a batch")
	l.took("A", 16*time.Second)
	require.Equal(t, 20*time.Second, l.of("A"), "8 + (16 − 8) / 4, twice")
	for range 50 {
		l.took("A", time.Second)
	}
	require.InDelta(t, float64(2*time.Second), float64(l.of("A")), float64(time.Millisecond))
}

func TestETCRemembersABoundedNumberOfSchools(t *testing.T) {
	t.Parallel()
	l := newLearnedETC(40*time.Second, 0, time.Hour)
	for i := range maxLearned + 100 {
		l.took(strconv.Itoa(i), time.Second)
	}
	require.Len(t, l.avgs, maxLearned)
	require.Equal(t, 2*time.Second, l.of(strconv.Itoa(maxLearned+99)), "the newest is kept")
}
