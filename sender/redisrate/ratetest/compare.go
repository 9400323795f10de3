package ratetest

import (
	"fmt"
	"time"

	"schoolbell/sender"
)

// Source decides what happens: a seed or a property test.
type Source interface {
	// Intn is 0 or more and less than n.
	Intn(n int) int
}

// Compare lets the same random things happen to the model and to s, and returns
// the first difference.
func Compare(src Source, s Subject, steps int) error {
	limits := []sender.Limit{
		{PerMinute: 6000, Batch: 200}, {PerMinute: 600_000, Batch: 200, Ramp: time.Minute}, {Batch: 200},
		{PerMinute: 60, Batch: 200}, {PerMinute: 100_000_000, Batch: 1000, Ramp: time.Minute}, {PerMinute: 90_000, Batch: 50, Ramp: 10 * time.Second},
	}
	pure := NewPure()
	both := func(f func(Subject)) { f(pure); f(s) }
	pick := src.Intn(len(limits))
	both(func(s Subject) { s.Limit(limits[pick]); s.At(Epoch) })
	limit, now := limits[pick], Epoch
	var tickets []sender.Ticket
	var takes []sender.Take
	for i := range steps {
		switch src.Intn(20) {
		case 0:
			now += int64(src.Intn(400_000))
		case 1:
			now -= int64(src.Intn(4_000_000))
		case 2:
			now += int64(src.Intn(30_000))
		default:
			now += int64(src.Intn(1500))
		}
		both(func(s Subject) { s.At(now) })
		school := string(rune('A' + src.Intn(8)))
		if src.Intn(4) == 0 {
			school += "-1.x" // what a pattern would take for something else
		}
		what, want, got := "", any(nil), any(nil)
		switch k := src.Intn(60); {
		case k < 36:
			t := sender.Take{Sender: "fcm", School: school, ID: fmt.Sprintf("id-%d", i), Want: 1 + src.Intn(limit.Batch),
				Longest: time.Duration(1+src.Intn(20_000)) * time.Millisecond}
			if len(takes) > 0 && src.Intn(8) == 0 {
				if again := takes[max(0, len(takes)-1-src.Intn(80))]; again.Want <= limit.Batch {
					t = again
				}
			}
			if src.Intn(5) == 0 {
				t.Believed = "UNAUTHENTICATED"
			}
			takes = append(takes, t)
			ticket := pure.Take(t)
			if ticket.Kind == sender.Taken {
				tickets = append(tickets, ticket)
			}
			what, want, got = fmt.Sprintf("%+v", t), ticket, s.Take(t)
		case k < 50:
			if len(tickets) == 0 {
				continue
			}
			of := tickets[max(0, len(tickets)-1-src.Intn(3))]
			r := sender.Report{Sender: "fcm", School: school, Ticket: of.ID, Epoch: of.Epoch, Code: "QUOTA_EXCEEDED",
				Heard: []sender.Heard{sender.HeardRefusal, sender.HeardThrottled, sender.HeardAnswer, sender.HeardAnswer, sender.HeardSilence, sender.HeardNothing}[src.Intn(6)],
				Age:   time.Duration(src.Intn(20_000)) * time.Millisecond}
			if src.Intn(3) == 0 {
				r.RetryAfter = time.Duration(src.Intn(90)) * time.Second
			}
			what, want, got = fmt.Sprintf("%+v", r), pure.Report(r), s.Report(r)
		case k < 58:
			l := sender.Look{Sender: "fcm", School: school}
			if src.Intn(5) == 0 {
				l.Believed = "UNAUTHENTICATED"
			}
			what, want, got = fmt.Sprintf("%+v", l), pure.Look(l), s.Look(l)
		case k < 59:
			both(Subject.Forget)
			continue
		default:
			limit = limits[src.Intn(len(limits))]
			both(func(s Subject) { s.Limit(limit) })
			continue
		}
		if want != got {
			return fmt.Errorf("step %d at %d, %s with %+v:\nmodel %+v\n  got %+v\n line %s", i, now, what, limit, want, got, pure)
		}
	}
	return nil
}
