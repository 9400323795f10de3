package coordinator

import (
	"context"
	"fmt"

	"schoolbell/school"
	"schoolbell/sender"
)

// askFirst asks the receiver about those of the next batch whose last outcome is
// unknown, where it can be asked, before they are sent again (R25). What it took
// is written as accepted and leaves the page; asking is no attempt. A receiver
// that does not answer leaves things as they were: the messages are sent again.
func (t *turn) askFirst(ctx context.Context) error {
	asker, ok := t.lane.sender.(sender.StatusAsker)
	if !ok {
		return nil
	}
	var ids []string
	index := map[string]int{}
	for i, n := t.next, 0; i < len(t.page.Work) && n < t.c.cfg.Batch; i++ {
		w := &t.page.Work[i]
		if !w.Sendable() {
			continue
		}
		n++
		// A requeued message shares its id with the one before it.
		if w.Uncertain && w.Requeued == 0 {
			id := school.MessageID(w.Notice.ID, w.Seq)
			ids, index[id] = append(ids, id), i
		}
		w.Uncertain = false // asked once
	}
	if len(ids) == 0 {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, t.lane.sender.Longest())
	defer cancel()
	answers, err := asker.Ask(call, ids)
	t.point(Asked)
	t.lease.Progress()
	if err != nil {
		t.c.log.Debug("the receiver could not be asked about unknown messages: they are sent again", "event", "status_unknown", "school", t.school, "sender", t.lane.name, "error", err)
		return nil
	}
	var confirmed []school.Recorded
	taken := map[int]bool{}
	for _, id := range ids {
		if answers[id] != sender.StatusAccepted {
			continue
		}
		w := &t.page.Work[index[id]]
		change, err := school.Confirm(w.Standing)
		if err != nil {
			continue // never handed over: whatever the receiver means, it is not this
		}
		confirmed = append(confirmed, school.Recorded{Notice: w.Notice.ID, Seq: w.Seq, Change: change})
		taken[index[id]] = true
	}
	if len(confirmed) == 0 {
		return nil
	}
	store, cancelStore := context.WithTimeout(ctx, storeTimeout)
	defer cancelStore()
	err = t.c.queue.Confirm(store, t.term, confirmed)
	t.point(Confirmed)
	if err != nil {
		return fmt.Errorf("confirm recipients of school %s: %w", t.school, err)
	}
	rest := make([]school.Work, 0, len(t.page.Work)-t.next-len(taken))
	for i := t.next; i < len(t.page.Work); i++ {
		if !taken[i] {
			rest = append(rest, t.page.Work[i])
		}
	}
	t.page.Work, t.next, t.used = rest, 0, true
	t.c.log.Info("messages of unknown outcome had been taken", "event", "unknown_confirmed", "school", t.school, "sender", t.lane.name, "recipients", len(confirmed))
	return nil
}
