package coordinator_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// TestNoFaultBreaksTheRuleOrLosesARecipient runs three replicas against parts
// that fail, lose answers, dawdle, panic and forget at random, with replicas
// that come and go, and judges from what the receiver saw.
func TestNoFaultBreaksTheRuleOrLosesARecipient(t *testing.T) {
	t.Parallel()
	for seed := range uint64(8) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) { w.chaos(seed) })
		})
	}
}

func (w *world) chaos(seed uint64) {
	const (
		schools = 5
		most    = 300
		pause   = 40 * time.Second
	)
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 1))
	draw := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return random.IntN(n)
	}
	ops := []string{
		"peek", "work in", "hold", "open", "bind", "takeover", "reconcile", "page", "skip", "ensure", "reserve",
		"check", "claim", "send", "record", "settle", "withdraw", "release", "extend", "rebuild", "tell", "due", "ping",
	}
	faults := func(op string) error {
		switch d := draw(1000); {
		case d < 25:
			return errAway
		case d < 28:
			return errOther
		case d < 30:
			return school.ErrCommitUnknown
		case d < 36:
			time.Sleep(time.Duration(draw(6000)) * time.Millisecond)
		case d < 40 && !slices.Contains([]string{"due", "tell", "extend"}, op): // these are no part of a turn
			panic("chaos")
		}
		return nil
	}
	for _, op := range ops {
		w.script.onCall(op, func(context.Context, int) error {
			err := faults(op)
			if op == "claim" && err == errOther {
				return school.ErrStalePage
			}
			return err
		})
	}
	for _, op := range []string{"open", "reserve", "claim"} { // answers that are lost
		w.script.onReturn(op, func(context.Context, int) error {
			if draw(100) == 0 {
				return school.ErrCommitUnknown
			}
			return nil
		})
	}
	w.receiver.takes(300 * time.Millisecond)
	w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
		all := sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		if draw(8) == 0 {
			c := sender.Classes()[draw(len(sender.Classes()))]
			if c != sender.Misconfigured {
				all[draw(len(all))].Class = c
			}
		}
		return all
	})

	settings := func(c *coordinator.Config, d *coordinator.Deps) {
		c.Limit, c.Rest, c.Slots, c.Batch = most, pause, 2, 80
	}
	names := []string{"r1", "r2", "r3"}
	replicas := map[string]*replica{}
	for _, name := range names {
		replicas[name] = w.start(name, settings)
		w.tick(replicas[name], 10*time.Second)
	}
	recipients := 0
	for range 300 {
		id := fmt.Sprintf("school-%d", draw(schools))
		switch draw(20) {
		case 0:
			w.arbiter.flush()
		case 1:
			name := names[draw(3)]
			w.halt(replicas[name])
			replicas[name] = w.start(name, settings)
			w.tick(replicas[name], 10*time.Second)
		case 2:
			w.arbiter.takeAway(id)
		case 3, 4, 5, 6, 7, 8:
			n := 1 + draw(200)
			recipients += n
			notice := w.outbox.accept(id, n)
			if draw(3) == 0 {
				w.outbox.mu.Lock()
				notice.recipients[draw(n)].disabled = true
				w.outbox.mu.Unlock()
			}
			replicas[names[draw(3)]].Wake(id)
		}
		w.pass(time.Duration(draw(4000)) * time.Millisecond)
	}
	for _, op := range ops {
		w.script.onCall(op, nil)
		w.script.onReturn(op, nil)
	}
	w.receiver.answers(nil)
	w.pass(time.Hour)

	final := 0
	for i := range schools {
		id := fmt.Sprintf("school-%d", i)
		w.judge(id, most, pause)
		for state, n := range w.outbox.states(id) {
			require.True(w, state.Final(), "%s: %d recipients are %s", id, n, state)
			final += n
		}
		require.Zero(w, w.outbox.unsettled(id))
		require.Empty(w, w.arbiter.heldBy(id))
		as := w.receiver.of(id)
		for j := 1; j < len(as); j++ {
			require.GreaterOrEqual(w, as[j].fence, as[j-1].fence, "a send of an older fence after a newer one's")
		}
	}
	require.Equal(w, recipients, final)
	for _, r := range replicas {
		require.Zero(w, r.Working())
	}
}

// takeAway gives the lock of the school, where it is held, to another for 5 s
// without telling the holder, as a lock server does that lost its data.
func (a *arbiter) takeAway(schoolID string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.held(schoolID) != nil {
		a.locks[schoolID] = &lock{owner: "other", acquisition: "foreign", fence: 1 << 40, expires: time.Now().Add(5 * time.Second)}
	}
}
