package demo

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator/verdict"
)

func TestWhatAStallIs(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	g := gaps{last: start}
	for _, ms := range []int{20, 40, 159, 279, 299, 1299, 1700, 1720, 2000} {
		g.sign(at(ms))
	}
	require.Equal(t, []verdict.Fault{
		{At: at(179), Until: at(279), Kind: verdict.Stall, Target: "machine"},
		{At: at(319), Until: at(1700), Kind: verdict.Stall, Target: "machine"},
		{At: at(1740), Until: at(2000), Kind: verdict.Stall, Target: "machine"},
	}, g.stalls, "159 is 99 ms late; 1299 and 1700 are one; 1720 came in time")
}

func TestTheMeterEnds(t *testing.T) {
	t.Parallel()
	m, err := newMeter()
	require.NoError(t, err)
	for _, s := range m.close() { // of a machine that is busy
		require.Equal(t, verdict.Stall, s.Kind)
	}
}
