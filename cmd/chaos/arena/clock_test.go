package arena

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

// resting waits until the school has sent a whole cycle and rests.
func resting(ctx context.Context, t *testing.T, a *Arena, school string, limit int) {
	t.Helper()
	until(ctx, t, school+" rests", func() (bool, error) {
		var full bool
		err := a.DB.QueryRow(ctx, `SELECT attempted >= $2 AND next_eligible_at IS NOT NULL
				AND NOT EXISTS (SELECT FROM push_batches b WHERE b.school_id = $1 AND b.settled_at IS NULL)
			FROM school_terms WHERE school_id = $1`, school, limit).Scan(&full)
		return full, err
	})
}

// TestRedisClockAlone steps Redis's wall clock by an hour, both ways and back,
// while a school rests and while it sends; without -full only back and forward
// again, where Redis believes in a rest of an hour. The rest is kept, from the ledger or
// from Redis, whichever knows better, and no school stands still.
func TestRedisClockAlone(t *testing.T) {
	const limit, rest = 200, 2 * time.Second
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	settings := short()
	settings["SCHOOLBELL_DISPATCH_BATCH"] = "50"
	a := open(t, Config{Replicas: 2, Limit: limit, Rest: rest, Settings: settings, Clocks: true,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 50 * time.Millisecond}}})
	was := time.Duration(0)
	steps := []time.Duration{-time.Hour, 0}
	if *full {
		steps = append(steps, time.Hour, 0)
	}
	for i, to := range steps {
		for _, when := range []string{"rests", "sends"} {
			school := fmt.Sprintf("%d-%s", i, when)
			_, err := a.Post(ctx, school, 2*limit)
			require.NoError(t, err)
			if when == "rests" {
				resting(ctx, t, a, school, limit)
			} else {
				until(ctx, t, school+" sends", func() (bool, error) {
					var n int
					err := a.DB.QueryRow(ctx, `SELECT count(*) FROM push_batches WHERE school_id = $1`, school).Scan(&n)
					return n >= 2, err
				})
			}
			stepped := time.Now()
			require.NoError(t, a.clock.Set(to))
			require.NoError(t, a.WaitEnded(ctx))
			took := time.Since(stepped)
			t.Logf("from %s to %s while a school %s: ended after %s", was, to, when, took.Round(time.Millisecond))
			require.Less(t, took, 20*time.Second, "a clock that jumped costs no more than a lease and a rest")
			if when == "rests" { // and back again, so that both see the step
				require.NoError(t, a.clock.Set(was))
			}
		}
		was = to
	}
	sound(ctx, t, a)
}

// TestReplicasClocks steps the wall clocks of two of three replicas, one forward
// and one back: what a replica believes of the time of day decides nothing.
func TestReplicasClocks(t *testing.T) {
	const limit = 300
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a := open(t, Config{Program: programWithPoints, Replicas: 3, Limit: limit, Rest: time.Second, Settings: short(), Wall: true,
		Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 50 * time.Millisecond}}})
	postAll(ctx, t, a, 6, 3*limit)
	until(ctx, t, "several schools send", func() (bool, error) { return a.Receiver.Counts().Accepted >= 600, nil })
	for i, by := range []time.Duration{time.Hour, -time.Hour} {
		require.NoError(t, a.Replicas()[i].clock.Set(by))
	}
	require.NoError(t, a.WaitEnded(ctx))
	for i := range 2 {
		require.NoError(t, a.Replicas()[i].clock.Set(0))
	}
	postAll(ctx, t, a, 6, limit)
	require.NoError(t, a.WaitEnded(ctx))
	v := sound(ctx, t, a)
	require.Zero(t, v.Repeated, "a step ends leases early, and what was sent is recorded")
}
