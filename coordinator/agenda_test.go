package coordinator

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var epoch = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)

// placed counts where the agenda's entries are and fails where its books do not
// add up.
func placed(t require.TestingT, a *agenda) (later, ready, running int) {
	running = 0
	bySender := map[string]int{}
	for id, e := range a.entries {
		require.Equal(t, id, e.school)
		switch e.place {
		case placeLater:
			later++
			require.Same(t, e, a.later[e.index])
		case placeReady:
			ready++
			require.Contains(t, a.ready, e)
		case placeRunning:
			running++
			bySender[e.slotOf]++
		}
	}
	require.Len(t, a.later, later, "one entry a school")
	require.Len(t, a.ready, ready, "one entry a school")
	require.Equal(t, running, a.taken)
	require.LessOrEqual(t, a.taken, a.slots)
	require.Equal(t, bySender, a.running)
	return later, ready, running
}

func TestAgendaKeepsItsPromisesUnderAnySequence(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := newAgenda(rapid.IntRange(1, 6).Draw(t, "slots"))
		now := epoch
		schools := rapid.SampledFrom([]string{"A", "B", "C", "D", "E", "F", "G", "H"})
		senders := rapid.SampledFrom([]string{"", "fcm", "relay", "log"})
		span := func(name string) time.Duration {
			return time.Duration(rapid.IntRange(0, 20).Draw(t, name)) * time.Second
		}
		held := map[string]time.Time{} // schools whose wake-ups are held off

		pick := func(place place) string {
			id := schools.Draw(t, "school")
			if e := a.entries[id]; e == nil || e.place != place {
				t.Skip("not there")
			}
			return id
		}
		t.Repeat(map[string]func(*rapid.T){
			"wake": func(t *rapid.T) {
				id := schools.Draw(t, "school")
				at := now.Add(span("in"))
				a.wake(id, senders.Draw(t, "sender"), at, at.Add(-span("due for")))
				e := a.entries[id]
				require.NotNil(t, e)
				due := at
				if due.Before(held[id]) {
					due = held[id]
				}
				switch e.place {
				case placeRunning:
					require.True(t, e.again, "woken during its turn and not looked at again")
					require.False(t, e.againAt.After(due))
				case placeLater:
					require.False(t, e.at.After(due), "looked at later than asked")
					require.False(t, e.at.Before(held[id]), "woken while it cannot send")
				}
			},
			"start": func(t *rapid.T) {
				for _, e := range a.start(now) {
					require.Equal(t, placeRunning, e.place)
					require.False(t, now.Before(held[e.school]), "started while it cannot send")
				}
				if a.taken < a.slots {
					require.Empty(t, a.ready, "a slot is free and a school waits")
				}
				for i := 1; i < len(a.ready); i++ {
					require.False(t, a.ready[i].since.Before(a.ready[i-1].since), "not oldest first")
				}
				if at, ok := a.next(); ok {
					require.True(t, at.After(now), "due and not moved")
				}
				require.Equal(t, len(a.ready) > 0, a.othersWait(now))
			},
			"done": func(t *rapid.T) {
				id := pick(placeRunning)
				again, againAt := a.entries[id].again, a.entries[id].againAt
				next, notFrom := time.Time{}, time.Time{}
				if rapid.Bool().Draw(t, "look again") {
					next = now.Add(span("next"))
					if rapid.Bool().Draw(t, "hold off") {
						notFrom = next
					}
				}
				a.done(id, next, notFrom, now)
				e := a.entries[id]
				delete(held, id)
				if e == nil {
					require.True(t, next.IsZero() && !again, "forgotten though it was to be looked at")
					return
				}
				held[id] = notFrom
				require.Equal(t, placeLater, e.place)
				require.False(t, e.at.Before(notFrom))
				if again {
					require.False(t, e.at.After(latest(againAt, notFrom)), "a wake-up during the turn was lost")
				}
				if !next.IsZero() {
					require.False(t, e.at.After(next))
				}
			},
			"done twice": func(t *rapid.T) {
				id := schools.Draw(t, "school")
				if e := a.entries[id]; e != nil && e.place == placeRunning {
					t.Skip("its turn runs")
				}
				later, ready, running := placed(t, a)
				a.done(id, now, now, now)
				l2, r2, n2 := placed(t, a)
				require.Equal(t, []int{later, ready, running}, []int{l2, r2, n2})
			},
			"time passes": func(t *rapid.T) { now = now.Add(span("by")) },
			"":            func(t *rapid.T) { placed(t, a) },
		})
	})
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// started are the names of the schools that a start takes.
func started(a *agenda, now time.Time) []string {
	var ids []string
	for _, e := range a.start(now) {
		ids = append(ids, e.school)
	}
	return ids
}

func TestAgendaStartsOldestWaitingFirst(t *testing.T) {
	t.Parallel()
	a := newAgenda(2)
	a.wake("young", "fcm", epoch, epoch.Add(-time.Second))
	a.wake("old", "fcm", epoch, epoch.Add(-time.Minute))
	a.wake("middle", "fcm", epoch, epoch.Add(-30*time.Second))
	a.wake("not yet", "fcm", epoch.Add(time.Second), epoch.Add(-time.Hour))
	require.Equal(t, []string{"old", "middle"}, started(a, epoch))
	require.True(t, a.othersWait(epoch))
	a.done("old", time.Time{}, time.Time{}, epoch)
	require.Equal(t, []string{"young"}, started(a, epoch))
	require.False(t, a.othersWait(epoch))
}

func TestInterleaving18AgendaGivesASenderHalfTheSlotsWhileAnotherWaits(t *testing.T) {
	t.Parallel()
	a := newAgenda(4)
	for i := range 6 {
		a.wake(fmt.Sprintf("many-%d", i), "many", epoch, epoch.Add(-time.Hour))
	}
	a.wake("few-0", "few", epoch, epoch)
	a.wake("few-1", "few", epoch, epoch)
	a.wake("few-2", "few", epoch, epoch)
	require.ElementsMatch(t, []string{"many-0", "many-1", "few-0", "few-1"}, started(a, epoch))
	a.done("many-0", time.Time{}, time.Time{}, epoch)
	require.Equal(t, []string{"many-2"}, started(a, epoch), "older, and again below its half")
	a.done("few-0", time.Time{}, time.Time{}, epoch)
	require.Equal(t, []string{"few-2"}, started(a, epoch))
	a.done("few-1", time.Time{}, time.Time{}, epoch)
	require.Equal(t, []string{"many-3"}, started(a, epoch), "nobody else waits: no slot stays empty")
}

func TestAgendaCountsASlotToTheSenderItWasTakenFor(t *testing.T) {
	t.Parallel()
	a := newAgenda(4)
	a.wake("A", "relay", epoch, epoch)
	require.Equal(t, []string{"A"}, started(a, epoch))
	a.wake("A", "fcm", epoch, epoch) // its sender is another by now
	a.done("A", time.Time{}, time.Time{}, epoch)
	require.Empty(t, a.running)
	require.Equal(t, []string{"A"}, started(a, epoch))
	require.Equal(t, map[string]int{"fcm": 1}, a.running)
}

func TestAgendaDoesNotLoseAWakeDuringATurn(t *testing.T) {
	t.Parallel()
	a := newAgenda(1)
	a.wake("A", "", epoch, epoch)
	require.Equal(t, []string{"A"}, started(a, epoch))
	a.wake("A", "", epoch.Add(time.Second), epoch)
	a.wake("A", "", epoch, epoch)
	require.Empty(t, started(a, epoch), "one turn a school")
	a.done("A", time.Time{}, time.Time{}, epoch)
	require.Equal(t, []string{"A"}, started(a, epoch))
	a.done("A", time.Time{}, time.Time{}, epoch)
	require.Empty(t, a.entries)
}

func TestAgendaHoldsOffWakesOfASchoolThatCannotSend(t *testing.T) {
	t.Parallel()
	end := epoch.Add(180 * time.Second)
	a := newAgenda(1)
	a.wake("A", "", epoch, epoch)
	started(a, epoch)
	a.wake("A", "", epoch, epoch) // during the turn that filled the cycle
	a.done("A", end.Add(time.Hour), end, epoch)
	a.wake("A", "", epoch.Add(time.Second), epoch)
	require.Empty(t, started(a, end.Add(-1)))
	at, ok := a.next()
	require.True(t, ok)
	require.Equal(t, end, at, "not later than the rest either: the wake-up counts from its end")
	require.Equal(t, []string{"A"}, started(a, end))
}

func TestAgendaStarvesNoSchool(t *testing.T) {
	t.Parallel()
	const schools = 40
	a := newAgenda(3)
	for i := range schools {
		a.wake(fmt.Sprintf("S%02d", i), []string{"fcm", "fcm", "fcm", "relay"}[i%4], epoch, epoch)
	}
	turns, now := map[string]int{}, epoch
	for range 100 * schools {
		for _, id := range started(a, now) {
			turns[id]++
		}
		now = now.Add(time.Millisecond)
		for id, e := range a.entries {
			if e.place == placeRunning {
				a.done(id, now, time.Time{}, now) // more work: the slot goes to others and comes back
				break
			}
		}
	}
	for i := range schools {
		require.Greater(t, turns[fmt.Sprintf("S%02d", i)], 50, "school %d", i)
	}
}
