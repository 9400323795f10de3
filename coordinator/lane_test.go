package coordinator

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

type mute struct{}

func (mute) Send(context.Context, sender.Batch) []sender.Result { return nil }
func (mute) Longest() time.Duration                             { return time.Second }

func laneOf(t *testing.T, room int) *lane {
	t.Helper()
	l := Lane{Name: "fcm", Sender: mute{}}
	if room > 0 {
		var err error
		l.Room, err = sender.NewRoom(room)
		require.NoError(t, err)
	}
	made, err := newLane(l)
	require.NoError(t, err)
	return made
}

func results(classes ...sender.Class) []sender.Result {
	var rs []sender.Result
	for _, c := range classes {
		rs = append(rs, sender.Result{Class: c})
	}
	return rs
}

// sent asks for a permit, which must be given, and reports the results.
func sent(t *testing.T, l *lane, now time.Time, classes ...sender.Class) change {
	t.Helper()
	p, _, ok := l.permit("A", now)
	require.True(t, ok, "lane is closed")
	c, _ := l.observe("A", p, hear(results(classes...)), 1, now)
	return c
}

func closedFor(t *testing.T, l *lane, now time.Time) time.Duration {
	t.Helper()
	wait, ok := l.open("A", now)
	_, w, allowed := l.permit("A", now)
	l.stepBack("A")
	require.Equal(t, ok, allowed, "open and permit disagree")
	require.Equal(t, wait, w)
	return wait
}

func TestInterleaving17BreakerClosesAfterTwoSilentBatches(t *testing.T) {
	t.Parallel()
	l, now := laneOf(t, 0), epoch
	require.Equal(t, laneSame, sent(t, l, now, sender.Unknown, sender.NotSent))
	require.Zero(t, closedFor(t, l, now), "one silent batch may happen")
	for _, seconds := range []int{1, 2, 4, 8, 16, 32, 60, 60, 60} {
		sent(t, l, now, sender.Unknown)
		pause := time.Duration(seconds) * time.Second
		require.Equal(t, pause, closedFor(t, l, now))
		state := l.state(now)
		require.True(t, state.Broken)
		require.False(t, state.Stopped)
		require.Equal(t, pause, state.ResumeIn)
		require.NotZero(t, closedFor(t, l, now.Add(pause-1)))
		now = now.Add(pause)
	}
	sent(t, l, now, sender.NotSent, sender.Throttled) // one answer among the silent
	require.Zero(t, closedFor(t, l, now))
	sent(t, l, now, sender.Unknown)
	require.Zero(t, closedFor(t, l, now), "the count began anew")
	sent(t, l, now, sender.Unknown)
	require.Equal(t, time.Second, closedFor(t, l, now), "the pause began anew")
}

// TestWhatFollowsSilenceIsAProbe: each attempt costs its school one of its
// cycle, so that nobody pays with a batch for finding out that nobody answers.
func TestWhatFollowsSilenceIsAProbe(t *testing.T) {
	t.Parallel()
	l, now := laneOf(t, 0), epoch
	require.Equal(t, laneSame, sent(t, l, now, sender.NotSent))
	for i := range 10 {
		p, _, ok := l.permit("A", now)
		require.True(t, ok)
		require.Equal(t, permit{most: 1, probe: true, round: p.round}, p, "try %d", i)
		for _, id := range []string{"B", "C", "B"} {
			wait, ok := l.open(id, now)
			require.False(t, ok, "a second probe at once")
			require.Equal(t, probeFirst, wait)
			_, _, ok = l.permit(id, now)
			require.False(t, ok)
		}
		_, ok = l.open("A", now)
		require.True(t, ok, "it has the place")
		c, waiters := l.observe("A", p, hear([]sender.Result{{Class: sender.NotSent, Code: sender.CodeConnectFailed}}), 1, now)
		require.Equal(t, []string{"B", "C"}, waiters)
		require.Equal(t, map[bool]change{true: laneSilent, false: laneSame}[i == 0], c, "said once")
		state := l.state(now)
		require.True(t, state.Broken)
		require.Equal(t, sender.CodeConnectFailed, state.Code)
		now = now.Add(state.ResumeIn)
		state = l.state(now.Add(time.Hour))
		require.True(t, state.Broken, "nobody has answered yet")
		require.Zero(t, state.ResumeIn)
	}
	p, _, ok := l.permit("B", now)
	require.True(t, ok)
	_, ok = l.open("C", now)
	require.False(t, ok)
	c, waiters := l.observe("B", p, hear(results(sender.Rejected)), 1, now)
	require.Equal(t, laneAnswers, c)
	require.Equal(t, []string{"C"}, waiters)
	p, _, ok = l.permit("C", now)
	require.True(t, ok)
	require.Zero(t, p.most)
	require.Equal(t, LaneState{Name: "fcm", Rate: l.state(now).Rate}, l.state(now))

	require.Equal(t, laneSame, sent(t, l, now, sender.Unknown))
	require.Equal(t, laneSame, sent(t, l, now, sender.Accepted), "one silent batch is not worth a word")
}

// TestAnAnswerToAnotherOpensTheLaneForAll: what was on the wire before is as good
// as the probe.
func TestAnAnswerToAnotherOpensTheLaneForAll(t *testing.T) {
	t.Parallel()
	l := laneOf(t, 0)
	early, _, _ := l.permit("early", epoch)
	sent(t, l, epoch, sender.Unknown)
	probe, _, ok := l.permit("A", epoch)
	require.True(t, ok && probe.probe)
	_, ok = l.open("B", epoch)
	require.False(t, ok)
	c, waiters := l.observe("early", early, hear(results(sender.Accepted)), 1, epoch)
	require.Equal(t, laneSame, c)
	require.Equal(t, []string{"B"}, waiters)
	_, ok = l.open("B", epoch)
	require.True(t, ok)
	_, waiters = l.observe("A", probe, hear(results(sender.Unknown)), 1, epoch)
	require.Empty(t, waiters)
	require.Zero(t, closedFor(t, l, epoch), "the count began anew")
	p, _, _ := l.permit("B", epoch)
	require.True(t, p.probe, "and the probe's silence is the first of it")
}

// TestAClosedGateSaysNothingOfTheReceiver: a lease that ended is no silence.
func TestAClosedGateSaysNothingOfTheReceiver(t *testing.T) {
	t.Parallel()
	l := laneOf(t, 0)
	gone := sender.Result{Class: sender.NotSent, Code: sender.CodeGateClosed}
	for range 3 {
		p, _, ok := l.permit("A", epoch)
		require.True(t, ok)
		require.Zero(t, p.most)
		l.observe("A", p, hear([]sender.Result{gone, gone}), 1, epoch)
		require.False(t, l.doubted(epoch))
	}
	p, _, _ := l.permit("A", epoch)
	l.observe("A", p, hear([]sender.Result{gone, {Class: sender.Unknown, Code: sender.CodeNoAnswer}}), 1, epoch)
	require.True(t, l.doubted(epoch))

	// A probe that came to nothing is for the next to make.
	p, _, _ = l.permit("A", epoch)
	require.True(t, p.probe)
	l.open("B", epoch)
	_, waiters := l.observe("A", p, hear([]sender.Result{gone}), 1, epoch)
	require.Equal(t, []string{"B"}, waiters)
	_, ok := l.open("B", epoch)
	require.True(t, ok)
}

func TestBreakerDoesNotLengthenForBatchesThatWereOnTheWire(t *testing.T) {
	t.Parallel()
	l, now := laneOf(t, 0), epoch
	var wire []permit
	for range 64 {
		p, _, ok := l.permit("A", now)
		require.True(t, ok)
		wire = append(wire, p)
	}
	for _, p := range wire {
		l.observe("A", p, hear(results(sender.Unknown)), 1, now)
	}
	require.Equal(t, time.Second, closedFor(t, l, now), "64 schools saw one and the same silence")
	now = now.Add(time.Second)
	sent(t, l, now, sender.Unknown)
	require.Equal(t, 2*time.Second, closedFor(t, l, now))
}

func TestEveryAnswerKeepsTheBreakerOpen(t *testing.T) {
	t.Parallel()
	for _, class := range sender.Classes() {
		if class == sender.Unknown || class == sender.NotSent || class == sender.Misconfigured {
			continue
		}
		l := laneOf(t, 0)
		for range 5 {
			require.Equal(t, laneSame, sent(t, l, epoch, sender.Unknown, class))
			p, _, _ := l.permit("A", epoch)
			require.Zero(t, p.most)
		}
		require.Zero(t, closedFor(t, l, epoch), class)
	}
}

func TestStoppedSenderIsProbedWithOneMessage(t *testing.T) {
	t.Parallel()
	l, now := laneOf(t, 0), epoch
	require.Equal(t, laneStopped, sent(t, l, now, sender.Accepted, sender.Misconfigured))
	for i, seconds := range []int{5, 10, 20, 40, 80, 160, 300, 300} {
		pause := time.Duration(seconds) * time.Second
		require.Equal(t, pause, closedFor(t, l, now), "probe %d", i)
		require.True(t, l.state(now).Stopped)
		require.False(t, l.state(now).Broken)
		now = now.Add(pause)
		p, _, ok := l.permit("A", now)
		require.True(t, ok)
		require.Equal(t, permit{most: 1, probe: true, round: p.round}, p)
		_, wait, ok := l.permit("B", now)
		require.False(t, ok, "a second probe at once")
		require.Equal(t, probeFirst, wait)
		_, ok = l.open("C", now)
		require.False(t, ok)
		class := sender.Misconfigured
		if i%2 == 1 {
			class = sender.Unknown // away on top: that is no way in either
		}
		c, waiters := l.observe("A", p, hear(results(class)), 1, now)
		require.Equal(t, laneSame, c)
		require.Equal(t, []string{"B", "C"}, waiters)
	}
	now = now.Add(5 * time.Minute)
	require.Equal(t, laneResumed, sent(t, l, now, sender.Gone))
	p, _, ok := l.permit("A", now)
	require.True(t, ok)
	require.Zero(t, p.most)
	require.False(t, l.state(now).Stopped)
	require.Equal(t, laneStopped, sent(t, l, now, sender.Misconfigured))
	require.Equal(t, 5*time.Second, closedFor(t, l, now), "the pause began anew")
}

func TestBatchesOnTheWireDoNotLengthenAStop(t *testing.T) {
	t.Parallel()
	l, now := laneOf(t, 0), epoch
	var wire []permit
	for range 10 {
		p, _, _ := l.permit("A", now)
		wire = append(wire, p)
	}
	c, _ := l.observe("A", wire[0], hear(results(sender.Misconfigured)), 1, now)
	require.Equal(t, laneStopped, c)
	for i, p := range wire[1:] {
		// What was accepted went out before, and says nothing of now.
		class := []sender.Class{sender.Unknown, sender.Misconfigured, sender.Accepted}[i%3]
		c, _ := l.observe("A", p, hear(results(class)), 1, now)
		require.Equal(t, laneSame, c)
	}
	require.Equal(t, 5*time.Second, closedFor(t, l, now))
}

func TestAStopHonoursRetryAfter(t *testing.T) {
	t.Parallel()
	l := laneOf(t, 0)
	p, _, _ := l.permit("A", epoch)
	l.observe("A", p, hear([]sender.Result{{Class: sender.Misconfigured, RetryAfter: time.Minute}}), 1, epoch)
	require.Equal(t, time.Minute, closedFor(t, l, epoch))
}

func TestAProbeThatWasNotUsedGoesToTheNext(t *testing.T) {
	t.Parallel()
	l := laneOf(t, 0)
	sent(t, l, epoch, sender.Misconfigured)
	now := epoch.Add(probeFirst)
	_, ok := l.open("A", now)
	require.True(t, ok)
	_, _, ok = l.permit("B", now)
	require.False(t, ok)
	require.Empty(t, l.stepBack("B"), "it has no place to give back")
	_, _, ok = l.permit("C", now)
	require.False(t, ok)
	require.Equal(t, []string{"B", "C"}, l.stepBack("A"))
	require.Empty(t, l.stepBack("A"))
	p, _, ok := l.permit("C", now)
	require.True(t, ok)
	require.True(t, p.probe)
}

func TestAPermitThatIsNoProbeFreesNoProbe(t *testing.T) {
	t.Parallel()
	for _, class := range []sender.Class{sender.Misconfigured, sender.Unknown} {
		l := laneOf(t, 0)
		early, _, _ := l.permit("A", epoch)
		sent(t, l, epoch, class)
		now := epoch.Add(probeFirst)
		_, _, ok := l.permit("B", now)
		require.True(t, ok)
		l.observe("A", early, hear(results(class)), 1, now)
		_, ok = l.open("C", now)
		require.False(t, ok)
	}
}

func TestTicketsAreGivenFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := laneOf(t, 200)
		leave, ok := l.enter("sending", 200)
		require.True(t, ok)
		got := make(chan string, 10)
		for _, id := range []string{"first", "second", "third"} {
			go func() {
				if l.await(t.Context(), id, 200) {
					got <- id
				}
			}()
			synctest.Wait() // in line before the next one comes
		}
		require.False(t, l.await(t.Context(), "second", 200), "a school stands in line once")
		_, ok = l.enter("small", 1)
		require.False(t, ok)
		leave()
		leave() // twice is once
		for _, id := range []string{"first", "second", "third"} {
			synctest.Wait()
			require.Len(t, got, 1)
			require.Equal(t, id, <-got)
			_, ok = l.enter("small", 1)
			require.False(t, ok, "overtaken")
			require.False(t, l.await(t.Context(), id, 200), "it has its ticket")
			leave, ok = l.enter(id, 200)
			require.True(t, ok)
			_, ok = l.enter(id, 1)
			require.False(t, ok, "a ticket is good for one batch")
			leave()
		}
		require.Zero(t, l.room.InUse())
	})
}

func TestNoTicketLeaks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := laneOf(t, 200)
		require.True(t, l.await(t.Context(), "unused", 500), "what can never fit is cut to what does")
		require.Equal(t, 200, l.room.InUse())
		l.drop("unused")
		l.drop("unused")
		require.Zero(t, l.room.InUse())

		require.True(t, l.await(t.Context(), "A", 100))
		require.True(t, l.await(t.Context(), "B", 100))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan bool, 1)
		go func() { ended <- l.await(ctx, "C", 100) }()
		synctest.Wait()
		cancel()
		require.False(t, <-ended)
		require.Empty(t, l.awaiting)
		l.dropAll()
		require.Zero(t, l.room.InUse())
		require.Zero(t, l.state(epoch).InFlight)
	})
}

func TestALaneWithoutARoomLetsEverythingIn(t *testing.T) {
	t.Parallel()
	l := laneOf(t, 0)
	for range 100 {
		_, ok := l.enter("A", 200)
		require.True(t, ok)
	}
	l.drop("A")
	l.dropAll()
}

func TestALaneNeedsANameAndASender(t *testing.T) {
	t.Parallel()
	for _, l := range []Lane{{}, {Name: "fcm"}, {Sender: mute{}}} {
		_, err := newLane(l)
		require.Error(t, err)
	}
}
