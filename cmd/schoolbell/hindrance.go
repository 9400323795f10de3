package main

import (
	"fmt"
	"time"

	"schoolbell/coordinator/api"
)

// hindrances tells in lines for people what keeps a notice from moving: each
// once, and never more than a line in lineEvery.
type hindrances struct {
	zone *time.Location

	kind  string    // what was said last; empty: nothing, or it has passed
	until time.Time // of a rest, when it ends
	at    time.Time // when a line was said
}

// sameRest is how far apart two looks may put the end of one rest: a replica
// works it out from what is left.
const sameRest = time.Second

// look returns the line to say now, empty where there is none. still is for how
// long the notice's counts have not moved.
func (h *hindrances) look(now time.Time, n api.Notice, s api.School, still time.Duration) string {
	kind, text, until := string(s.State), "", time.Time{}
	switch {
	case n.ScheduledAt != nil && n.ScheduledAt.After(now):
		kind, text = "scheduled", fmt.Sprintf("notice %s is scheduled for %s", n.ID, soon(*n.ScheduledAt, now, h.zone))
	case s.State == api.Paused:
		text = fmt.Sprintf("school %s is paused", visible(n.School))
	case s.State == api.Resting && s.NextEligibleAt != nil && s.InProgress == 0: // until its last batch has ended the rest is only estimated
		until = *s.NextEligibleAt
		text = fmt.Sprintf("school %s rests until %s", visible(n.School), soon(until, now, h.zone))
	case s.Degraded:
		kind, text = "degraded", "Redis does not answer the replica: nothing is sent until it does"
	case s.State == api.WaitingForRetry:
		text = fmt.Sprintf("what is left of school %s waits for its retry", visible(n.School))
	case s.State == api.WaitingForSlot && still >= lineEvery: // between two batches everybody is, for a moment
		text = fmt.Sprintf("school %s waits for its turn", visible(n.School))
	default:
		h.kind = ""
		return ""
	}
	same := kind == h.kind && until.Sub(h.until).Abs() <= sameRest
	if same || !h.at.IsZero() && now.Sub(h.at) < lineEvery {
		return ""
	}
	h.kind, h.until, h.at = kind, until, now
	if kind == "scheduled" {
		return text
	}
	return fmt.Sprintf("%s (%d of %d sent)", text, ended(n.Counts), n.Total)
}

// soon writes a time for people in their zone: of today without its date.
func soon(t, now time.Time, zone *time.Location) string {
	t, now = t.In(zone), now.In(zone)
	if t.Format(time.DateOnly) == now.Format(time.DateOnly) {
		return t.Format(time.TimeOnly)
	}
	return t.Format("2006-01-02 15:04:05 MST")
}
