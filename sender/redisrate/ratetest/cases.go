package ratetest

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

func takeOf(school, id string, want int) sender.Take {
	return sender.Take{Sender: "fcm", School: school, ID: id, Want: want, Longest: 19 * time.Second}
}

type seeded struct{ *rand.Rand }

// Seeded is a Source.
func Seeded(seed uint64) Source { return seeded{rand.New(rand.NewPCG(seed, 2))} }

func (s seeded) Intn(n int) int { return s.IntN(n) }

// RunCases runs what a sender's rate promises, each case on a subject of its own.
func RunCases(t *testing.T, subject func(tb testing.TB) Subject) {
	for name, f := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := subject(t)
			s.At(Epoch)
			f(t, s)
		})
	}
}

var (
	plain = sender.Limit{PerMinute: 60_000, Batch: 200}                     // 1,000 a second, at once
	slow  = sender.Limit{PerMinute: 6_000, Batch: 200}                      // a batch every two seconds
	fcm   = sender.Limit{PerMinute: 600_000, Batch: 200, Ramp: time.Minute} // as FCM's default
)

func look(s Subject) sender.RateState { return s.Look(sender.Look{Sender: "fcm"}) }

func full(int, int) int { return 200 }

// begun begins a sender long enough ago that its rate is there.
func begun(s Subject, l sender.Limit) int64 {
	s.Limit(l)
	look(s)
	s.At(Epoch + 10_000)
	return Epoch + 10_000
}

// stopped takes a batch and has it refused.
func stopped(t *testing.T, s Subject) sender.Ticket {
	t.Helper()
	first := s.Take(takeOf("A", "a-1", 100))
	require.Equal(t, sender.Taken, first.Kind)
	r := s.Report(refusal(first))
	require.Equal(t, sender.ChangeStopped, r.Change)
	require.Equal(t, 5*time.Second, r.ProbeIn)
	return first
}

func refusal(t sender.Ticket) sender.Report {
	return sender.Report{Sender: "fcm", Ticket: t.ID, Epoch: t.Epoch, Heard: sender.HeardRefusal, Code: "UNAUTHENTICATED"}
}

func heard(t sender.Ticket, h sender.Heard) sender.Report {
	return sender.Report{Sender: "fcm", Ticket: t.ID, Epoch: t.Epoch, Heard: h}
}

func share(gone []Gone) map[string]int {
	by := map[string]int{}
	for _, g := range gone {
		by[g.School] += g.Size
	}
	return by
}

func sum(gone []Gone) (n int) {
	for _, g := range gone {
		n += g.Size
	}
	return n
}

var cases = map[string]func(t *testing.T, s Subject){
	"it begins with nothing": func(t *testing.T, s Subject) {
		s.Limit(plain)
		k := s.Take(takeOf("A", "1", 200))
		require.Equal(t, sender.TakeLater, k.Kind)
		require.Equal(t, 200*time.Millisecond, k.Wait)
		require.True(t, k.Joined)
		s.At(Epoch + 199)
		k = s.Take(takeOf("A", "2", 200))
		require.Equal(t, time.Millisecond, k.Wait)
		require.False(t, k.Joined, "it has its place")
		s.At(Epoch + 200)
		require.Equal(t, 200, s.Take(takeOf("A", "3", 200)).Size)
	},
	"it holds two seconds of its rate": func(t *testing.T, s Subject) {
		s.Limit(plain)
		look(s)
		s.At(Epoch + 3_600_000)
		taken := 0
		for i := range 20 {
			taken += s.Take(takeOf(fmt.Sprint("S", i), fmt.Sprint(i), 200)).Size
		}
		require.Equal(t, 2000, taken)
	},
	"a batch that is more than two seconds' worth goes out all the same": func(t *testing.T, s Subject) {
		now := begun(s, sender.Limit{PerMinute: 60, Batch: 200})
		k := s.Take(takeOf("A", "1", 200))
		require.Equal(t, 198*time.Second, k.Wait, "two of them were there")
		s.At(now + 198_000)
		require.Equal(t, 200, s.Take(takeOf("A", "2", 200)).Size)
	},
	"no limit refuses nothing": func(t *testing.T, s Subject) {
		s.Limit(sender.Limit{Batch: 200})
		for i := range 100 {
			require.Equal(t, 200, s.Take(takeOf("A", fmt.Sprint(i), 200)).Size)
		}
		require.Zero(t, look(s).PerMinute)
		require.Equal(t, 120_000, look(s).Used)
	},
	"a repeat takes nothing": func(t *testing.T, s Subject) {
		begun(s, plain)
		first := s.Take(takeOf("A", "1", 200))
		for range 50 {
			require.Equal(t, first, s.Take(takeOf("A", "1", 200)))
		}
		for i := range 9 {
			require.Equal(t, 200, s.Take(takeOf("B", fmt.Sprint("b", i), 200)).Size)
		}
		require.Equal(t, sender.TakeLater, s.Take(takeOf("B", "c", 200)).Kind)
		require.Equal(t, s.Take(takeOf("C", "d", 200)).Wait, s.Take(takeOf("C", "d", 200)).Wait)
		require.Equal(t, 2, look(s).Waiting)
	},
	"who was refused goes before who comes later": func(t *testing.T, s Subject) {
		s.Limit(slow)
		waits := map[string]time.Duration{}
		for _, id := range []string{"A", "B", "C"} {
			waits[id] = s.Take(takeOf(id, id, 200)).Wait
		}
		require.Equal(t, map[string]time.Duration{"A": 2 * time.Second, "B": 4 * time.Second, "C": 6 * time.Second}, waits)
		s.At(Epoch + 2_100)
		require.Equal(t, sender.TakeLater, s.Take(takeOf("late", "l", 1)).Kind, "what is there is A's")
		require.Equal(t, sender.TakeLater, s.Take(takeOf("B", "b", 200)).Kind)
		require.Equal(t, 200, s.Take(takeOf("A", "a", 200)).Size)
		require.Equal(t, 5910*time.Millisecond, s.Take(takeOf("A", "a2", 200)).Wait, "and then behind all who wait")
		s.At(Epoch + 4_000)
		require.Equal(t, 200, s.Take(takeOf("B", "b2", 200)).Size)
	},
	"a place is for what was asked for, and for more where nobody waits": func(t *testing.T, s Subject) {
		s.Limit(plain)
		s.Take(takeOf("A", "1", 10))
		s.Take(takeOf("B", "2", 100))
		s.At(Epoch + 60)
		require.Equal(t, 10, s.Take(takeOf("A", "3", 200)).Size, "B waits")
		s.At(Epoch + 210)
		require.Equal(t, 200, s.Take(takeOf("B", "4", 200)).Size)
	},
	"a place that nobody comes for ends, and the others do not wait for it": func(t *testing.T, s Subject) {
		s.Limit(slow)
		s.Take(takeOf("dead", "1", 200))
		s.Take(takeOf("B", "2", 200))
		s.At(Epoch + 4_000)
		require.Equal(t, 200, s.Take(takeOf("B", "3", 200)).Size)
		require.True(t, !s.Look(sender.Look{Sender: "fcm", School: "dead"}).Placed)
		k := s.Take(takeOf("dead", "4", 200))
		require.Equal(t, sender.TakeLater, k.Kind)
		require.True(t, k.Joined, "at the end of the line, as anybody")
	},
	"whoever comes for the school has its place": func(t *testing.T, s Subject) {
		s.Limit(slow)
		s.Take(takeOf("A", "of-one-replica", 200))
		s.At(Epoch + 2_900)
		require.Equal(t, 200, s.Take(takeOf("A", "of-another", 200)).Size)
	},
	"the rate is kept, well used, and fairly shared": func(t *testing.T, s Subject) {
		for i, l := range []sender.Limit{plain, slow, {PerMinute: 30_000, Batch: 200}} {
			s.Forget()
			s.Limit(l)
			const schools = 6
			from := Epoch + int64(i)*1_000_000
			gone, err := Crowd{Schools: schools, Want: full, Late: 60}.Run(Seeded(uint64(i)), s, l.PerMinute, from, 60_000, nil)
			require.NoError(t, err)
			require.Empty(t, Judge(gone, l.PerMinute, 200))
			require.Greater(t, float64(sum(gone)), .9*float64(l.PerMinute), "well used: %+v", l)
			for name, n := range share(gone) {
				require.InDelta(t, float64(sum(gone))/schools, n, 400, "%s of %+v", name, l)
			}
		}
	},
	"a small school waits its turn and no longer": func(t *testing.T, s Subject) {
		s.Limit(plain)
		gone, err := Crowd{Schools: 6, Late: 20, Want: func(school, _ int) int {
			if school == 0 {
				return 3
			}
			return 200
		}}.Run(Seeded(1), s, plain.PerMinute, Epoch, 30_000, nil)
		require.NoError(t, err)
		last, most := Epoch, int64(0)
		for _, g := range gone {
			if g.School == "S0" {
				most, last = max(most, g.At-last), g.At
			}
		}
		require.LessOrEqual(t, most, int64(1300), "five batches, of 200 ms each")
	},
	"a dead replica's schools cost the others nothing for long": func(t *testing.T, s Subject) {
		s.Limit(plain)
		gone, err := Crowd{Schools: 12, Want: full, Late: 20, Dead: func(school int, now int64) bool {
			return school >= 6 && now > Epoch+10_000 && now < Epoch+40_000
		}}.Run(Seeded(3), s, plain.PerMinute, Epoch, 60_000, nil)
		require.NoError(t, err)
		require.Empty(t, Judge(gone, plain.PerMinute, 200))
		require.Greater(t, sum(gone), 53_000)
		late := map[string]int{}
		for _, g := range gone {
			if g.At > Epoch+45_000 {
				late[g.School] += g.Size
			}
		}
		require.Len(t, late, 12, "and they come back")
		for name, n := range late {
			require.InDelta(t, 15_000/12, n, 450, name)
		}
	},
	"a clock that goes back keeps nobody waiting": func(t *testing.T, s Subject) {
		now := begun(s, plain)
		for i := range 10 {
			require.Equal(t, 200, s.Take(takeOf("A", fmt.Sprint(i), 200)).Size)
		}
		k := s.Take(takeOf("A", "x", 200))
		require.Equal(t, 200*time.Millisecond, k.Wait)
		s.At(now - 3_600_000)
		require.Equal(t, 200*time.Millisecond, s.Take(takeOf("A", "y", 200)).Wait)
		s.At(now - 3_600_000 + 200)
		require.Equal(t, 200, s.Take(takeOf("A", "z", 200)).Size)

		k = s.Take(takeOf("B", "stops", 1))
		s.At(now - 3_600_000 + 201)
		k = s.Take(takeOf("B", "stops", 1))
		s.Report(refusal(k))
		s.At(now - 7_200_000)
		require.Equal(t, 5*time.Second, look(s).ProbeIn)
		require.Equal(t, 5*time.Second, s.Take(takeOf("C", "asks", 1)).Wait)
		s.At(now - 7_200_000 + 5_000)
		require.True(t, s.Take(takeOf("B", "probe", 1)).Probe)
	},
	"a clock that goes on grants two seconds' worth and no more": func(t *testing.T, s Subject) {
		s.Limit(plain)
		for i := range 30 {
			s.Take(takeOf(fmt.Sprint("S", i), fmt.Sprint(i), 200))
		}
		s.At(Epoch + 86_400_000)
		taken := 0
		for i := range 30 {
			taken += s.Take(takeOf(fmt.Sprint("S", i), fmt.Sprint("again", i), 200)).Size
		}
		require.LessOrEqual(t, taken, 2000)
		require.Positive(t, taken)
	},
	"what is out of use comes to its rate over a minute": func(t *testing.T, s Subject) {
		s.Limit(fcm)
		require.Equal(t, 60_000, look(s).PerMinute, "it begins with a tenth")
		sent := func(from int64) (first, last int) {
			gone, err := Crowd{Schools: 20, Want: full, Late: 5}.Run(Seeded(1), s, fcm.PerMinute, from, 62_000, nil)
			require.NoError(t, err)
			require.Empty(t, Judge(gone, fcm.PerMinute, 200))
			for _, g := range gone {
				switch {
				case g.At < from+2_000:
					first += g.Size
				case g.At >= from+60_000:
					last += g.Size
				}
			}
			return first, last
		}
		first, last := sent(Epoch)
		require.LessOrEqual(t, first, 3_000)
		require.Greater(t, last, 18_000)
		require.Equal(t, 600_000, look(s).PerMinute)
		s.At(Epoch + 62_000 + 30_000)
		require.InDelta(t, 330_000, look(s).PerMinute, 15_000, "half of the way back after half a minute")
		s.At(Epoch + 600_000)
		require.Equal(t, 60_000, look(s).PerMinute)
		first, _ = sent(Epoch + 600_000)
		require.LessOrEqual(t, first, 5_000)
	},
	"a small rate has no ramp": func(t *testing.T, s Subject) {
		s.Limit(sender.Limit{PerMinute: 12_000, Batch: 200, Ramp: time.Minute})
		require.Equal(t, 12_000, look(s).PerMinute)
	},
	"throttling lowers the rate for a while, once for what was on the way": func(t *testing.T, s Subject) {
		now := begun(s, plain)
		var way []sender.Ticket
		for i := range 8 {
			way = append(way, s.Take(takeOf(fmt.Sprint("S", i), fmt.Sprint(i), 200)))
		}
		s.At(now + 500)
		throttled := func(k sender.Ticket, age, wish time.Duration) sender.Reported {
			return s.Report(sender.Report{Sender: "fcm", Ticket: k.ID, Epoch: k.Epoch, Heard: sender.HeardThrottled, Code: "QUOTA_EXCEEDED", Age: age, RetryAfter: wish})
		}
		r := throttled(way[0], 500*time.Millisecond, 0)
		require.True(t, r.Lowered)
		require.Equal(t, 30_000, r.PerMinute)
		require.True(t, throttled(way[0], 600*time.Millisecond, 0).Lowered, "a repeat has the same answer")
		for _, k := range way[1:] {
			r := throttled(k, 500*time.Millisecond, 0)
			require.False(t, r.Lowered)
			require.Equal(t, 30_000, r.PerMinute)
		}
		state := look(s)
		require.True(t, state.Lowered)
		require.Equal(t, time.Minute, state.LowerFor)
		require.Equal(t, "QUOTA_EXCEEDED", state.LowerBy)
		s.At(now + 1_000)
		require.False(t, throttled(way[7], time.Second, 90*time.Second).Lowered)
		require.Equal(t, 90*time.Second, look(s).LowerFor, "it may ask for longer")
		s.At(now + 91_000)
		require.Equal(t, 30_000, look(s).PerMinute)
		s.At(now + 91_000 + 60_000)
		require.Equal(t, 42_000, look(s).PerMinute, "a fifth of the whole in a minute")
		s.At(now + 91_000 + 150_000)
		require.Equal(t, 60_000, look(s).PerMinute)
		require.False(t, look(s).Lowered)
		for i := range 10 {
			k := s.Take(takeOf("A", fmt.Sprint("more", i), 1))
			throttled(k, 0, time.Second)
			s.At(now + 241_000 + int64(i+1)*100)
		}
		require.Equal(t, 3_720, look(s).PerMinute, "never to nothing")
	},
	"a sender without a limit is lowered from what it used": func(t *testing.T, s Subject) {
		s.Limit(sender.Limit{Batch: 200})
		var k sender.Ticket
		for i := range 50 {
			s.At(Epoch + int64(i)*200)
			k = s.Take(takeOf("A", fmt.Sprint(i), 200)) // 60,000 a minute
		}
		r := s.Report(sender.Report{Sender: "fcm", Ticket: k.ID, Epoch: k.Epoch, Heard: sender.HeardThrottled, RetryAfter: 10 * time.Second})
		require.True(t, r.Lowered)
		require.InDelta(t, 30_000, r.PerMinute, 1_000)
		require.Equal(t, sender.TakeLater, s.Take(takeOf("A", "n", 200)).Kind, "with nothing")
		s.At(Epoch + 10_000 + 10_000 + 160_000)
		require.Zero(t, look(s).PerMinute)
		require.Zero(t, look(s).Waiting)
		require.Equal(t, 200, s.Take(takeOf("A", "m", 200)).Size)
	},
	"a stopped sender is probed by one at a time, after longer and longer": func(t *testing.T, s Subject) {
		now := begun(s, plain)
		stopped(t, s)
		for i, seconds := range []int64{5, 10, 20, 40, 80, 160, 300, 300} {
			state := look(s)
			require.True(t, state.Stopped && !state.Probing)
			require.Equal(t, "UNAUTHENTICATED", state.Code)
			require.Equal(t, time.Duration(seconds)*time.Second, state.ProbeIn)
			s.At(now + seconds*1000 - 1)
			k := s.Take(takeOf("B", fmt.Sprint("early", i), 200))
			require.Equal(t, sender.TakeStopped, k.Kind)
			require.Equal(t, time.Millisecond, k.Wait)
			now += seconds * 1000
			s.At(now)
			probe := s.Take(takeOf("B", fmt.Sprint("probe", i), 200))
			require.Equal(t, 1, probe.Size)
			require.True(t, probe.Probe)
			require.Equal(t, probe, s.Take(takeOf("B", fmt.Sprint("probe", i), 200)), "a repeat")
			for _, other := range []string{"C", "D"} {
				k := s.Take(takeOf(other, fmt.Sprint(other, i), 200))
				require.Equal(t, sender.TakeStopped, k.Kind, "a second probe")
				require.Equal(t, 5*time.Second, k.Wait)
			}
			require.True(t, look(s).Probing)
			r := refusal(probe)
			if i%2 == 1 {
				r.Heard = sender.HeardSilence // away on top
			}
			require.Equal(t, sender.ChangeProbing, s.Report(r).Change)
			require.Equal(t, sender.ChangeNone, s.Report(r).Change, "a repeat")
		}
		now += 300_000
		s.At(now)
		probe := s.Take(takeOf("C", "last", 200))
		s.At(now + 100)
		r := s.Report(heard(probe, sender.HeardAnswer))
		require.Equal(t, sender.ChangeResumed, r.Change)
		require.Equal(t, 1_215_000*time.Millisecond+100*time.Millisecond, r.Stopped)
		require.Equal(t, sender.ChangeResumed, s.Report(heard(probe, sender.HeardAnswer)).Change, "a repeat has the same answer")
		require.False(t, look(s).Stopped)
		k := s.Take(takeOf("A", "on", 200))
		require.Equal(t, 200, k.Size)
		require.False(t, k.Probe)
		require.Equal(t, 5*time.Second, s.Report(refusal(k)).ProbeIn, "the pause begins anew")
	},
	"what was on the way when it stopped says nothing": func(t *testing.T, s Subject) {
		now := begun(s, plain)
		early := s.Take(takeOf("E", "early", 100))
		slowest := s.Take(takeOf("F", "slowest", 100))
		first := stopped(t, s)
		require.Equal(t, sender.ChangeStopped, s.Report(refusal(first)).Change, "a repeat has the same answer")
		require.Equal(t, sender.ChangeNone, s.Report(refusal(early)).Change)
		require.Equal(t, sender.ChangeNone, s.Report(heard(early, sender.HeardAnswer)).Change, "an answer to what went out before")
		require.Equal(t, 5*time.Second, look(s).ProbeIn)
		s.At(now + 5_000)
		probe := s.Take(takeOf("E", "probe", 100))
		require.Equal(t, sender.ChangeResumed, s.Report(heard(probe, sender.HeardThrottled)).Change)
		require.Equal(t, sender.ChangeNone, s.Report(refusal(slowest)).Change, "it went out before the stop that is over")
		require.False(t, look(s).Stopped)
	},
	"a stop honours what the receiver asks for": func(t *testing.T, s Subject) {
		begun(s, plain)
		r := refusal(s.Take(takeOf("A", "1", 1)))
		r.RetryAfter = time.Minute
		require.Equal(t, time.Minute, s.Report(r).ProbeIn)
		require.Equal(t, time.Minute, s.Take(takeOf("A", "2", 1)).Wait)
	},
	"a probe that is not used, or whose replica dies, goes to the next": func(t *testing.T, s Subject) {
		now := begun(s, plain)
		stopped(t, s)
		s.At(now + 5_000)
		probe := s.Take(takeOf("B", "b", 200))
		require.Equal(t, sender.ChangeNone, s.Report(heard(probe, sender.HeardNothing)).Change)
		dead := s.Take(takeOf("C", "c", 200))
		require.True(t, dead.Probe)
		s.At(now + 5_000 + 18_999)
		require.Equal(t, time.Millisecond, s.Take(takeOf("D", "d", 200)).Wait)
		s.At(now + 5_000 + 19_000)
		require.True(t, s.Take(takeOf("D", "d2", 200)).Probe)
		require.Equal(t, sender.ChangeNone, s.Report(heard(dead, sender.HeardAnswer)).Change, "it is too late to say anything")
	},
	"a repeat after a stop does not go out": func(t *testing.T, s Subject) {
		begun(s, plain)
		require.Equal(t, 200, s.Take(takeOf("B", "b", 200)).Size)
		stopped(t, s)
		require.Equal(t, sender.TakeStopped, s.Take(takeOf("B", "b", 200)).Kind)
	},
	"a stop that was lost is found again with one message": func(t *testing.T, s Subject) {
		begun(s, plain)
		stopped(t, s)
		s.Forget()
		believes := takeOf("A", "2", 200)
		believes.Believed = "UNAUTHENTICATED"
		k := s.Take(believes)
		require.True(t, k.Probe)
		require.Equal(t, 1, k.Size)
		require.Equal(t, sender.TakeStopped, s.Take(takeOf("B", "3", 200)).Kind)
		require.Equal(t, sender.ChangeProbing, s.Report(refusal(k)).Change)
		require.Equal(t, 10*time.Second, look(s).ProbeIn)
		s.Forget()
		require.True(t, s.Look(sender.Look{Sender: "fcm", Believed: "UNAUTHENTICATED"}).Stopped, "a look is enough")
		require.True(t, s.Take(takeOf("A", "4", 10)).Probe)
		s.Forget()
		k = s.Take(takeOf("A", "5", 1)) // nobody knows
		require.Equal(t, sender.TakeLater, k.Kind)
	},
	"a refusal of what was granted before everything was lost stops the sender": func(t *testing.T, s Subject) {
		begun(s, plain)
		k := s.Take(takeOf("A", "1", 200))
		s.Forget()
		require.Equal(t, sender.ChangeStopped, s.Report(refusal(k)).Change)
	},
	"numbers stay exact": func(t *testing.T, s Subject) {
		l := sender.Limit{PerMinute: 100_000_000, Batch: 1000}
		s.Limit(l)
		const hour = 3_600_000
		var gone []Gone
		for i := range int64(8) {
			g, err := Crowd{Schools: 3, Want: func(int, int) int { return 1000 }}.Run(Seeded(1), s, l.PerMinute, Epoch+i*hour, 30, nil)
			require.NoError(t, err)
			gone = append(gone, g...)
		}
		require.Empty(t, Judge(gone, l.PerMinute, 1000))
		require.NotEmpty(t, gone)
	},
}
