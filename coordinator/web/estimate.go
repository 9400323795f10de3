package web

import (
	"math"
	"time"

	"schoolbell/school"
)

// expectedEnd is when the sending rule lets the last attempt of a notice go, if
// all that waits at its school now goes before it, each call takes no time and
// none fails: the rests are what takes long, and they are known. The zero time:
// nothing of it waits, or nobody knows (the school is paused).
func expectedEnd(now time.Time, p *school.Progress, b *school.Backlog, rule school.Rule) time.Time {
	own := p.Counts.Waiting + p.Counts.RetryPending
	switch {
	case b.School.Paused || !p.EndedAt.IsZero():
		return time.Time{}
	case own == 0 && p.Counts.InProgress == 0:
		return time.Time{}
	case own == 0:
		return now // its last attempts are on their way
	}
	attempts := max(own, b.Waiting+b.RetryDue)
	begin, left := now, rule.Limit-b.Ledger.Attempted
	switch {
	case b.Ledger.Filled:
		begin, left = now.Add(b.Ledger.Resting), rule.Limit
	case left <= 0: // the limit was lowered below what the cycle has used: a rest comes first
		begin, left = now.Add(rule.Rest), rule.Limit
	}
	if p.Notice.ScheduledAt.After(begin) {
		begin = p.Notice.ScheduledAt
	}
	if attempts <= left {
		return begin
	}
	rests := (attempts - left + rule.Limit - 1) / rule.Limit
	return begin.Add(times(rule.Rest, rests))
}

// times multiplies without overflowing.
func times(d time.Duration, n int) time.Duration {
	if d > 0 && time.Duration(n) > math.MaxInt64/d {
		return math.MaxInt64
	}
	return d * time.Duration(n)
}
