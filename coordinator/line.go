package coordinator

import (
	"context"
	"math/rand/v2"
	"time"

	"schoolbell/sender"
)

const (
	// sendersWatch is how often what the cluster knows of each sender is looked at:
	// so long after a stop that another replica found does this one believe in it,
	// at most, where it sends nothing that would tell.
	sendersWatch = time.Second
	// sendersIdle is the same for a replica that has nothing to do, where no sender is
	// stopped as far as it knows.
	sendersIdle = 5 * time.Second
	// lineLook is how long a school that waits for its place is not looked at: the
	// rate may have been raised, or what Redis knew of the place lost.
	lineLook = 10 * time.Second
	// reportTimeout is short: the batch's results are still to be recorded.
	reportTimeout = time.Second
)

// longest is B, the longest that a batch may take from before its reservation.
func (t *turn) longest() time.Duration { return t.c.cfg.ClaimTimeout + t.lane.sender.Longest() }

// take takes the batch's part of the sender's rate, and learns whether the sender
// is stopped. Who has to wait has reserved and claimed nothing; done ends the turn,
// with lock and slot (R9).
func (t *turn) take(ctx context.Context, p *permit, id string, want int) (size int, v verdict, done bool, err error) {
	l := t.lane
	if l.local {
		return want, verdict{}, false, nil
	}
	// What is taken and not sent is lost to all: not more than the cycle has left.
	if left := t.rule.Limit - t.floor.Attempted; !t.floor.Filled && left > 0 {
		want = min(want, left)
	}
	call, cancel := context.WithTimeout(ctx, arbiterTimeout)
	defer cancel()
	k, err := t.c.rates.Take(call, sender.Take{Sender: l.name, School: t.school, ID: id, Want: want, Longest: t.longest(), Believed: l.refusedWith()})
	t.point(Metered)
	if err != nil {
		return 0, verdict{kind: verdictFailed}, true, err
	}
	now := time.Now()
	switch k.Kind {
	case sender.Taken:
		t.ticket, t.ticked = k, now
		t.c.lookAt(l.name, l.taken(t.school, p, k, now))
		return k.Size, verdict{}, false, nil
	case sender.TakeStopped:
		l.stop(k.Code, k.Wait, k.Stopped, now)
		return 0, verdict{kind: verdictLater, look: true, wait: k.Wait}, true, nil
	}
	if k.Joined {
		t.c.metrics.rateWait.WithLabelValues(l.name).Add(k.Wait.Seconds())
	}
	l.crowd(now)
	wait := min(k.Wait, lineLook)
	return 0, verdict{kind: verdictLater, look: true, wait: wait, hold: wait}, true, nil
}

// inLine reports whether the school waits for its place in the sender's line, and
// when it is to be looked at: a look spares a lock and a term.
func (t *turn) inLine(ctx context.Context, l *lane) (verdict, bool) {
	if l.local || !l.crowded(time.Now()) {
		return verdict{}, false
	}
	call, cancel := context.WithTimeout(ctx, arbiterTimeout)
	defer cancel()
	state, err := t.c.rates.Look(call, sender.Look{Sender: l.name, School: t.school, Believed: l.refusedWith()})
	t.point(Sighted)
	if err != nil || !state.Placed || state.PlaceIn == 0 {
		return verdict{}, false // the turn finds out
	}
	wait := min(state.PlaceIn, lineLook)
	return verdict{kind: verdictLater, look: true, wait: wait, hold: wait}, true
}

// putBack gives a probe back that the turn did not use.
func (t *turn) putBack(ctx context.Context) {
	if !t.ticket.Probe {
		return
	}
	_ = t.c.guard("give a probe back", func() error {
		t.report(ctx, sender.HeardNothing, "", 0)
		return nil
	})
}

// observe lets the lane learn from a batch, and the other replicas where it is
// something for all.
func (t *turn) observe(ctx context.Context, p permit, results []sender.Result) {
	now := time.Now()
	h := hear(results)
	change, waiters := t.lane.observe(t.school, p, h, len(results), now)
	// Who found the school held waits for the end of its lease, unless told.
	t.tell = t.tell || t.lane.doubted(now)
	t.emitMisfits(results)
	switch {
	case t.lane.local:
		state := t.lane.state(now)
		switch change {
		case laneStopped:
			t.c.senderStopped(t.lane.name, t.school, state.Code, state.ResumeIn)
		case laneResumed:
			t.c.senderResumed(t.lane.name, state.StoppedFor)
		}
	case t.ticket.Probe || h.of == sender.HeardRefusal || h.of == sender.HeardThrottled:
		waiters = append(waiters, t.report(ctx, h.of, h.code, h.retryAfter)...)
	}
	switch change {
	case laneSilent:
		state := t.lane.state(now)
		t.c.log.Warn("nobody answers at this sender's receiver: it is probed with one message at a time", "event", "sender_unanswered",
			"sender", t.lane.name, "code", state.Code, "next_try_ms", state.ResumeIn.Milliseconds())
	case laneAnswers:
		t.c.log.Info("this sender's receiver answers again", "event", "sender_answered", "sender", t.lane.name)
	case laneSame, laneStopped, laneResumed:
	}
	t.c.lookAt(t.lane.name, waiters)
	t.ticket = sender.Ticket{}
}

// report tells the cluster what the batch in hand found out, and people where that
// changed something. It returns who is to be looked at now.
func (t *turn) report(ctx context.Context, h sender.Heard, code string, retryAfter time.Duration) (waiters []string) {
	call, cancel := detached(ctx, reportTimeout)
	defer cancel()
	r, err := t.c.rates.Report(call, sender.Report{
		Sender: t.lane.name, School: t.school, Ticket: t.ticket.ID, Epoch: t.ticket.Epoch,
		Heard: h, Code: code, RetryAfter: retryAfter, Age: time.Since(t.ticked),
	})
	t.point(Reported)
	t.ticket.Probe = false
	if err != nil {
		// This replica's own lane knows; the others find out by themselves.
		t.c.log.Warn("what a batch found out about its sender could not be told to the other replicas", "event", "sender_report_failed", "sender", t.lane.name, "error", err)
		return nil
	}
	now := time.Now()
	switch r.Change {
	case sender.ChangeStopped:
		t.lane.stop(code, r.ProbeIn, 0, now)
		t.c.senderStopped(t.lane.name, t.school, code, r.ProbeIn)
	case sender.ChangeProbing:
		t.lane.stop(code, r.ProbeIn, t.lane.state(now).StoppedFor, now)
		t.c.log.Debug("a probe of a stopped sender was not let in", "event", "sender_probed", "sender", t.lane.name, "code", code, "next_probe_ms", r.ProbeIn.Milliseconds())
	case sender.ChangeResumed:
		waiters = t.lane.resume()
		t.c.senderResumed(t.lane.name, r.Stopped)
	case sender.ChangeNone:
	}
	if r.Lowered {
		t.c.log.Warn("the receiver asks for less: this sender's rate is lowered for a while", "event", "sender_rate_lowered",
			"sender", t.lane.name, "code", code, "per_minute", r.PerMinute)
	}
	return waiters
}

func (c *Coordinator) senderStopped(name, schoolID, code string, probeIn time.Duration) {
	c.log.Error("the receiver does not let this sender in: it stops and probes by itself", "event", "sender_stopped",
		"sender", name, "school", schoolID, "code", code, "next_probe_ms", probeIn.Milliseconds())
	c.emit(func(e Events) {
		e.SenderStopped(SenderStopped{Sender: name, School: schoolID, Code: code, ProbeIn: probeIn})
	})
}

func (c *Coordinator) senderResumed(name string, stopped time.Duration) {
	c.log.Info("the receiver lets this sender in again", "event", "sender_resumed", "sender", name, "stopped_ms", stopped.Milliseconds())
	c.emit(func(e Events) { e.SenderResumed(SenderResumed{Sender: name, Stopped: stopped}) })
}

// watchSenders keeps what the lanes know of their senders' state in the cluster up
// to date, until ctx ends: a stop that another replica found, and its end.
func (c *Coordinator) watchSenders(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		again := sendersIdle
		if c.Working() > 0 {
			again = sendersWatch
		}
		for _, l := range c.lanes {
			if l.local {
				continue
			}
			c.lookAtSender(ctx, l)
			if l.refusedWith() != "" || l.crowded(time.Now()) {
				again = sendersWatch
			}
		}
		timer.Reset(again - rand.N(again/10)) // not all replicas at once
	}
}

func (c *Coordinator) lookAtSender(ctx context.Context, l *lane) {
	call, cancel := context.WithTimeout(ctx, sendersWatch)
	defer cancel()
	asked := time.Now()
	var state sender.RateState
	if err := c.guard("look at a sender", func() (err error) {
		state, err = c.rates.Look(call, sender.Look{Sender: l.name, Believed: l.refusedWith()})
		return err
	}); err != nil {
		return // whoever sends meets it as well, and says so
	}
	c.lookAt(l.name, l.adopt(state, asked, time.Now()))
}
