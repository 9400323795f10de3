package coordinator_test

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/sender"
)

// holdsATime says by which way a time.Time can be reached from a type, but for
// what is shown to people and never computed with.
func holdsATime(t reflect.Type, seen map[reflect.Type]bool) string {
	if t == reflect.TypeFor[time.Time]() {
		return t.String()
	}
	if seen[t] {
		return ""
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Chan:
		return holdsATime(t.Elem(), seen)
	case reflect.Map:
		return holdsATime(t.Key(), seen) + holdsATime(t.Elem(), seen)
	case reflect.Func:
		for i := range t.NumIn() {
			if way := holdsATime(t.In(i), seen); way != "" {
				return way
			}
		}
		for i := range t.NumOut() {
			if way := holdsATime(t.Out(i), seen); way != "" {
				return way
			}
		}
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() {
				if way := holdsATime(f.Type, seen); way != "" {
					return t.Name() + "." + f.Name + " " + way
				}
			}
		}
	}
	return ""
}

// TestInterleaving05NoAbsoluteTimeCrosses looks at all that the arbiter takes and
// answers, and at all of the store that reaches it: what one clock calls a moment
// means nothing to another.
func TestInterleaving05NoAbsoluteTimeCrosses(t *testing.T) {
	t.Parallel()
	for _, port := range []reflect.Type{reflect.TypeFor[coordinator.Budget](), reflect.TypeFor[coordinator.Holder](), reflect.TypeFor[coordinator.Lease]()} {
		for i := range port.NumMethod() {
			m := port.Method(i)
			for _, part := range signature(m.Type) {
				require.Empty(t, holdsATime(part, map[reflect.Type]bool{}), "%s.%s", port.Name(), m.Name)
			}
		}
	}
	for _, crosses := range []reflect.Type{reflect.TypeFor[school.Ledger](), reflect.TypeFor[school.OpenBatch](), reflect.TypeFor[school.Orphans](),
		reflect.TypeFor[school.Grant](), reflect.TypeFor[school.Rule](), reflect.TypeFor[school.BatchRecord](), reflect.TypeFor[school.Due]()} {
		require.Empty(t, holdsATime(crosses, map[reflect.Type]bool{}), crosses.Name())
	}
	require.Equal(t, "noted.At time.Time", holdsATime(reflect.TypeFor[func([]*noted)](), map[reflect.Type]bool{}), "it finds one")
}

type noted struct{ At time.Time }

// signature is what a method takes and returns, but for its context and error.
func signature(m reflect.Type) (parts []reflect.Type) {
	for i := range m.NumIn() {
		if m.In(i) != reflect.TypeFor[context.Context]() {
			parts = append(parts, m.In(i))
		}
	}
	for i := range m.NumOut() {
		parts = append(parts, m.Out(i))
	}
	return parts
}

// TestInterleaving15ThePolicyIsTheNotices: one batch, whose answer never came, of
// two notices of which one is sent at most once.
func TestInterleaving15ThePolicyIsTheNotices(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			class := sender.Accepted
			if n == 1 {
				class = sender.Unknown
			}
			return sender.Fill(b.Messages, sender.Result{Class: class})
		})
		r := w.start("r1")
		again := w.outbox.accept("A", 3)
		once := w.outbox.accept("A", 2, func(n *school.Notice) { n.Delivery = school.AtMostOnce })
		r.Wake("A")
		w.pass(time.Hour)
		require.Equal(w, 5, w.sizes("A")[0], "both in one batch")
		require.Equal(w, 2, again.recipients[0].Attempts)
		require.Equal(w, school.Success, again.recipients[0].State)
		require.Equal(w, []any{school.PermanentFail, school.OutcomeUnknown, 1},
			[]any{once.recipients[0].State, once.recipients[0].reason, once.recipients[0].Attempts})
	})
}

// TestInterleaving15AnUrgentNoticeGoesIntoTheNextBatch: the page was read before
// it came, and nobody needs to be told of it.
func TestInterleaving15AnUrgentNoticeGoesIntoTheNextBatch(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		of := map[int]map[string]int{} // batch, notice: messages
		w.receiver.answers(func(n int, b sender.Batch) []sender.Result {
			of[n] = map[string]int{}
			for i := range b.Messages {
				of[n][b.Messages[i].Notice]++
			}
			if n == 2 {
				w.outbox.accept("A", 50, func(n *school.Notice) { n.Priority = school.Urgent })
			}
			return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
		})
		r := w.start("r1")
		w.outbox.accept("A", 1000)
		r.Wake("A")
		w.pass(time.Hour)
		require.Equal(w, []int{200, 200, 200, 200, 200, 50}, w.sizes("A"), "its attempts are the school's, and none is lost")
		require.Equal(w, map[string]int{"2": 50, "1": 150}, of[3])
	})
}

// TestInterleaving15AStreamOfUrgentNoticesStopsNoSchool: one comes behind each page.
func TestInterleaving15AStreamOfUrgentNoticesStopsNoSchool(t *testing.T) {
	t.Parallel()
	inWorld(t, func(w *world) {
		w.script.onCall("claim", func(_ context.Context, n int) error {
			if n < 40 {
				w.outbox.accept("A", 1, func(n *school.Notice) { n.Priority = school.Urgent })
			}
			return nil
		})
		r := w.start("r1")
		w.outbox.accept("A", 1000)
		r.Wake("A")
		w.pass(time.Hour)
		require.NotContains(w, w.log.String(), "turn_failed")
		require.Equal(w, map[school.State]int{school.Success: 1039}, w.outbox.states("A"))
	})
}

// TestInterleaving16ASchoolIsTakenOnlyWhileTheStoreAnswered: within 2 s before, or
// now.
func TestInterleaving16ASchoolIsTakenOnlyWhileTheStoreAnswered(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		since time.Duration // that the store answered last
		asked int
		taken bool
	}{
		{"just before", 1900 * time.Millisecond, 0, true},
		{"too long ago, and it does not answer", 2100 * time.Millisecond, 1, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			inWorld(t, func(w *world) {
				r := w.start("r1")
				require.NoError(w, r.Tick(w.Context())) // the store answers
				time.Sleep(tc.since)
				w.script.forget()
				w.outbox.accept("A", 1)
				began := time.Now()
				w.script.onCall("ping", func(ctx context.Context, _ int) error { // and hangs from now on
					<-ctx.Done()
					return ctx.Err()
				})
				r.Wake("A")
				w.pass(400 * time.Millisecond)
				require.Equal(w, tc.asked, w.script.count("ping"))
				require.Equal(w, tc.taken, w.script.count("hold") == 1)
				w.pass(5 * time.Second)
				require.Equal(w, tc.taken, w.script.count("hold") == 1, "%s later", time.Since(began))
				w.script.onCall("ping", nil)
				w.pass(time.Minute)
				require.Equal(w, []int{1}, w.sizes("A"))
			})
		})
	}
}
