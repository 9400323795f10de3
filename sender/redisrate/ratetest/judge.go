package ratetest

import (
	"fmt"
	"time"
)

// Gone is a batch that went out.
type Gone struct {
	At     int64 // ms
	School string
	Size   int
}

// Most is how many messages may go out in any window: what its time is worth at
// the whole rate, and what may be kept: 2 s of the rate, or where that is more a
// batch and a second.
func Most(perMinute, batch int, window time.Duration) int {
	second := float64(perMinute) / 60
	return int(second*window.Seconds() + max(2*second, float64(batch)+second) + 1)
}

// Judge says in words where more went out than may, in any window from one batch
// to another.
func Judge(gone []Gone, perMinute, batch int) []string {
	var wrong []string
	for i := range gone {
		sum := 0
		for _, g := range gone[i:] {
			sum += g.Size
			window := time.Duration(g.At-gone[i].At) * time.Millisecond
			if most := Most(perMinute, batch, window); sum > most {
				wrong = append(wrong, fmt.Sprintf("%d messages in %s from %d on: at most %d may", sum, window, gone[i].At, most))
				break
			}
		}
	}
	return wrong
}

// Crowd is a number of schools that have endless work on one sender, and come as
// they are told and a moment later.
type Crowd struct {
	Schools int
	Want    func(school, turn int) int // messages of a turn
	Late    int64                      // ms: a school comes so much later than it was told at most
	Dead    func(school int, now int64) bool
}

// Run lets the crowd send for so many ms, and returns what went out.
func (c Crowd) Run(src Source, s Subject, limit int, from, ms int64, each func(now int64)) ([]Gone, error) {
	at := make([]int64, c.Schools)
	turns := make([]int, c.Schools)
	for i := range at {
		at[i] = from
	}
	var gone []Gone
	for serial := 0; ; serial++ {
		next := 0
		for i := range at {
			if at[i] < at[next] {
				next = i
			}
		}
		now := at[next]
		if now >= from+ms {
			return gone, nil
		}
		if serial > 1_000_000 {
			return gone, fmt.Errorf("a million takes by %d: nobody waits", now-from)
		}
		if c.Dead != nil && c.Dead(next, now) {
			at[next] = now + 1000
			continue
		}
		if each != nil {
			each(now)
		}
		s.At(now)
		name := fmt.Sprintf("S%d", next)
		t := s.Take(takeOf(name, fmt.Sprintf("%s-%d", name, serial), c.Want(next, turns[next])))
		if t.Size > 0 {
			gone = append(gone, Gone{now, name, t.Size})
			turns[next]++
		}
		at[next] = now + max(1, t.Wait.Milliseconds())
		if c.Late > 0 {
			at[next] += int64(src.Intn(int(c.Late)))
		}
	}
}
