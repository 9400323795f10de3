package coordinator_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

func (w *world) room(n int) *sender.Room {
	w.Helper()
	room, err := sender.NewRoom(n)
	require.NoError(w, err)
	return room
}

func TestInterleaving18WaitingForRoomHoldsNoSlotLeaseOrClaim(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		room := w.room(200)
		relay := newReceiver(w.script)
		r := w.start("r1", slots(2), func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes[0].Room = room
			d.Lanes = append(d.Lanes, coordinator.Lane{Name: "relay", Sender: relay})
		})
		w.receiver.takes(10 * time.Second)
		for _, id := range []string{"first", "second", "third"} {
			w.outbox.accept(id, 200)
			r.Wake(id)
			w.pass(time.Millisecond)
		}
		require.Equal(w, 1, r.Working(), "the one that sends")
		require.Equal(w, steps(begins, "release"), w.script.of("second"), "neither reserved nor claimed")
		require.Empty(w, w.arbiter.heldBy("second"))

		w.outbox.put(school.School{ID: "other", Sender: "relay"})
		w.outbox.accept("other", 200)
		r.Wake("other")
		w.pass(time.Millisecond)
		require.Len(w, relay.of("other"), 1, "a sender without room keeps no slot from another")

		w.pass(time.Minute)
		require.Equal(w, []string{"first", "second", "third"}, w.order(), "first come, first served")
		for i := 1; i < 3; i++ {
			require.Zero(w, gap(w.receiver.of(""), i), "room that is free is used at once")
		}
		require.Zero(w, room.InUse())
	})
}

func TestATicketIsGivenBackWhereTheSchoolCannotUseIt(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(w *world){
		"held by another replica": func(w *world) { w.arbiter.lock("waits", "other", time.Hour) },
		"resting by now": func(w *world) {
			s, _, err := w.arbiter.state("waits").Reconcile(time.Now().UnixMilli(), school.Ledger{Cycle: 1, Attempted: limit, Filled: true, Resting: rest}, school.Rule{Limit: limit, Rest: rest})
			require.NoError(w, err)
			w.arbiter.set("waits", s)
		},
		"the arbiter is away": func(w *world) {
			w.script.onCall("peek", func() fault { return at(w.script.count("peek")+1, errAway) }())
		},
		"paused":           func(w *world) { w.outbox.put(school.School{ID: "waits", Paused: true}) },
		"another sender's": func(w *world) { w.outbox.put(school.School{ID: "waits", Sender: "relay"}) },
		"a panic":          func(w *world) { w.script.onCall("open", panics(w.script.count("open")+1)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				room := w.room(200)
				r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) {
					d.Lanes[0].Room = room
					d.Lanes = append(d.Lanes, coordinator.Lane{Name: "relay", Sender: newReceiver(w.script)})
				})
				w.receiver.takes(10 * time.Second)
				w.outbox.accept("sends", 200)
				w.outbox.accept("waits", 200)
				r.Wake("sends")
				w.pass(time.Second)
				r.Wake("waits")
				w.pass(time.Second)
				change(w)
				w.pass(8 * time.Second)
				w.pass(400 * time.Millisecond)
				require.Equal(w, []string{"sends"}, w.order())
				require.Zero(w, room.InUse())
				require.Equal(w, 0, r.Lanes()[0].InFlight)
			})
		})
	}
}

func TestATicketIsNotKeptThroughARest(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		room := w.room(200)
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes[0].Room = room })
		w.receiver.takes(10 * time.Second)
		w.outbox.accept("sends", 200)
		w.outbox.accept("waits", 200)
		r.Wake("sends")
		w.pass(time.Second)
		r.Wake("waits")
		w.pass(time.Second)
		// Another replica fills the cycle meanwhile, and a wake-up finds it resting.
		s, _, err := w.arbiter.state("waits").Reconcile(time.Now().UnixMilli(), school.Ledger{Cycle: 1, Attempted: limit, Filled: true, Resting: rest}, school.Rule{Limit: limit, Rest: rest})
		require.NoError(w, err)
		w.arbiter.set("waits", s)
		r.Wake("waits")
		w.pass(10 * time.Second)
		require.Zero(w, room.InUse(), "the ticket came while the school rests")
		w.pass(rest)
		require.Equal(w, []string{"sends", "waits"}, w.order())
	})
}

func TestRoomIsFreeWhenTheCallEndsNotWhenItIsRecorded(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		room := w.room(200)
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes[0].Room = room })
		w.script.onCall("record", slow(1, 10*time.Second))
		w.outbox.accept("A", 200)
		r.Wake("A")
		w.pass(time.Second)
		require.Zero(w, room.InUse())
	})
}

func TestInterleaving17ASilentReceiverClosesTheLaneForItsSchools(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var silent atomic.Bool
		silent.Store(true)
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			if silent.Load() {
				return sender.Fill(b.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed})
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		r := w.start("r1")
		for i := range 20 {
			id := fmt.Sprintf("school-%d", i)
			w.outbox.accept(id, 1000)
			r.Wake(id)
		}
		w.pass(500 * time.Millisecond)
		require.InDelta(w, 20, len(w.receiver.of("")), 1, "what was on the wire, and one message that nobody answers")
		state := r.Lanes()[0]
		require.True(w, state.Broken)
		require.False(w, state.Stopped)
		require.LessOrEqual(w, state.ResumeIn, time.Second)
		w.pass(30 * time.Second)
		require.LessOrEqual(w, len(w.receiver.of("")), 20+6, "1, 2, 4, 8 … s apart")
		silent.Store(false)
		w.pass(time.Hour)
		for i := range 20 {
			require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states(fmt.Sprintf("school-%d", i)))
		}
		require.False(w, r.Lanes()[0].Broken)
	})
}

func TestAStoppedSenderIsProbedAndResumes(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		var refused atomic.Bool
		refused.Store(true)
		w.receiver.answers(func(_ int, b sender.Batch) []sender.Result {
			if refused.Load() {
				return sender.Fill(b.Messages, sender.Result{Class: sender.Misconfigured, Code: "UNAUTHENTICATED"})
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		r := w.start("r1", slots(1))
		w.tick(r, 10*time.Second)
		n := w.outbox.accept("A", 1000)
		w.outbox.accept("B", 1000)
		r.Wake("A", "B")
		w.pass(20 * time.Minute)
		as := w.receiver.of("")
		require.Equal(w, 200, len(as[0].ids))
		for i := 1; i < len(as); i++ {
			require.Len(w, as[i].ids, 1, "a probe is one message")
			wait := min(5*time.Second<<(i-1), 5*time.Minute)
			require.GreaterOrEqual(w, gap(as, i), wait-time.Millisecond, "the arbiter counts whole ones")
			require.LessOrEqual(w, gap(as, i), wait+5*time.Second)
		}
		require.True(w, r.Lanes()[0].Stopped)
		require.Len(w, w.log.events("sender_stopped"), 1)
		require.Less(w, w.script.count("hold"), 3*len(as), "the lock is left alone while the sender is closed")

		refused.Store(false)
		w.pass(time.Hour)
		require.False(w, r.Lanes()[0].Stopped)
		require.Len(w, w.log.events("sender_resumed"), 1)
		require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("A"))
		require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("B"))
		require.Zero(w, n.recipients[0].Retries, "nobody's retries are used")
	})
}

func TestAProbeIsNotLostWithItsTurn(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"ensure", "reserve", "claim", "send", "record"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
					class := sender.Accepted
					if n == 1 {
						class = sender.Misconfigured
					}
					return sender.Fill(b.Messages, sender.Result{Class: class, Code: "UNAUTHENTICATED"})
				})
				w.script.onCall(op, panics(2)) // in the turn of the first probe
				r := w.start("r1")
				w.outbox.accept("A", 1000)
				r.Wake("A")
				w.pass(10 * time.Minute)
				require.Equal(w, map[school.State]int{school.Success: 1000}, w.outbox.states("A"))
				require.False(w, r.Lanes()[0].Stopped)
			})
		})
	}
}

func TestWhatCannotBeJoinedIsRefused(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		good := func() (coordinator.Config, coordinator.Deps) {
			return coordinator.Config{Instance: "r1", DefaultSender: "fcm"}, coordinator.Deps{
				Queue: w.outbox, Budget: w.arbiter, Rates: w.rates, Holder: &holder{}, Members: members{w, "r1"}, Peers: &peers{},
				Lanes: []coordinator.Lane{{Name: "fcm", Sender: w.receiver}}, Log: discard(),
			}
		}
		_, err := coordinator.New(good())
		require.NoError(w, err)
		for name, breakIt := range map[string]func(*coordinator.Config, *coordinator.Deps){
			"no instance":           func(c *coordinator.Config, _ *coordinator.Deps) { c.Instance = "" },
			"no default sender":     func(c *coordinator.Config, _ *coordinator.Deps) { c.DefaultSender = "" },
			"default not a sender":  func(c *coordinator.Config, _ *coordinator.Deps) { c.DefaultSender = "relay" },
			"batch above page":      func(c *coordinator.Config, _ *coordinator.Deps) { c.Page, c.Batch = 100, 101 },
			"negative batch":        func(c *coordinator.Config, _ *coordinator.Deps) { c.Batch = -1 },
			"negative slots":        func(c *coordinator.Config, _ *coordinator.Deps) { c.Slots = -1 },
			"headroom of the limit": func(c *coordinator.Config, _ *coordinator.Deps) { c.Headroom = 5000 },
			"no rest":               func(c *coordinator.Config, _ *coordinator.Deps) { c.Rest = time.Microsecond },
			"least ETC above most":  func(c *coordinator.Config, _ *coordinator.Deps) { c.ETCLeast = 2 * time.Minute },
			"retry without base":    func(c *coordinator.Config, _ *coordinator.Deps) { c.Retry.Max = 3 },
			"negative claim time":   func(c *coordinator.Config, _ *coordinator.Deps) { c.ClaimTimeout = -1 },
			"negative pace":         func(c *coordinator.Config, _ *coordinator.Deps) { c.Pace = -1 },
			"negative stop":         func(c *coordinator.Config, _ *coordinator.Deps) { c.StopTimeout = -1 },
			"no queue":              func(_ *coordinator.Config, d *coordinator.Deps) { d.Queue = nil },
			"no log":                func(_ *coordinator.Config, d *coordinator.Deps) { d.Log = nil },
			"two of one name":       func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes = append(d.Lanes, d.Lanes[0]) },
			"a sender without name": func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes = append(d.Lanes, coordinator.Lane{}) },
		} {
			cfg, deps := good()
			breakIt(&cfg, &deps)
			_, err := coordinator.New(cfg, deps)
			require.Error(w, err, name)
		}
	})
}

// Who is not on the list costs nothing: no permit, no reservation, no claim.
func TestOnlyListedDevicesAreSentTo(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		only := func(token string) bool { return token == secretToken+"-mine" }
		r := w.start("r1", func(_ *coordinator.Config, d *coordinator.Deps) { d.Lanes[0].Only = only })
		n := w.outbox.accept("A", 2500)
		n.recipients[1200].token = secretToken + "-mine"
		n.recipients[1300].token, n.recipients[1300].disabled = secretToken+"-mine", true
		r.Wake("A")
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Success: 1, school.Skipped: 2499}, w.outbox.states("A"))
		sent := w.receiver.of("A")
		require.Len(w, sent, 1)
		require.Equal(w, []string{"1.1201"}, sent[0].ids)
		require.Equal(w, school.NotAllowed, n.recipients[0].reason)
		require.Equal(w, school.Disabled, n.recipients[1300].reason, "off is off, listed or not")
		require.Equal(w, 1, w.outbox.ledger("A").Attempted, "of the cycle")
		require.Equal(w, 1, w.script.count("reserve"))

		w.outbox.accept("B", 300)
		r.Wake("B")
		w.pass(time.Minute)
		require.Equal(w, map[school.State]int{school.Skipped: 300}, w.outbox.states("B"))
		require.Empty(w, w.sizes("B"))
		require.Zero(w, w.outbox.ledger("B").Attempted)
		require.Equal(w, 1, w.script.count("reserve"))
	})
}

// One that was handed over before the list came is no SKIPPED any more, and is
// not handed over again.
func TestARetryOfADeviceThatIsNotListedEnds(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.answer = func(_ int, b sender.Batch) []sender.Result {
			return sender.Fill(b.Messages, sender.Result{Class: sender.Unavailable, Code: "UNAVAILABLE"})
		}
		first := w.start("r1")
		n := w.outbox.accept("A", 3)
		first.Wake("A")
		w.pass(10 * time.Second)
		w.halt(first)
		w.pass(10 * time.Minute)
		w.start("r2", func(_ *coordinator.Config, d *coordinator.Deps) {
			d.Lanes[0].Only = func(string) bool { return false }
		})
		w.pass(10 * time.Second)
		require.Len(w, w.sizes("A"), 1)
		require.Equal(w, map[school.State]int{school.PermanentFail: 3}, w.outbox.states("A"))
		require.Equal(w, school.NotAllowed, n.recipients[0].reason)
	})
}
