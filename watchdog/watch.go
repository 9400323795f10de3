package watchdog

import (
	"context"
	"log/slog"
	"time"
)

// watch is the watchdog: it extends the lease at each tick, and after a failure
// soon again, until ctx ends, the gate is closed, or the work may not go on.
func (l *Lease) watch(ctx context.Context) {
	timer := time.NewTimer(l.untilDue())
	defer timer.Stop()
	for failures := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-l.ended:
			return
		case <-l.kick:
		case <-timer.C:
			if wait := l.untilDue(); wait > 0 { // extended in the meantime by another way
				failures = 0
				timer.Reset(wait)
				continue
			}
		}
		switch now := l.keeper.now().at; {
		case now.Sub(l.began)-time.Duration(l.advanced.Load()) > max(l.keeper.cfg.ProgressWithin, TickFor(l.etc)):
			_ = l.end(ErrNoProgress)
			return
		case now.Sub(l.began) > l.maxHold():
			l.retire(ErrMaxHold)
			return
		}

		if err := l.renew(ctx, l.planAfter(l.timeout)); err == nil {
			failures = 0
		} else {
			select {
			case <-ctx.Done(): // a call that the end of the work cut off is no failure
				return
			case <-l.ended:
				return
			default:
			}
			failures++
			wait := l.backoff(failures, err)
			l.planAfter(wait)
			level := slog.LevelWarn
			if failures > 1 { // one line for a row of failures
				level = slog.LevelDebug
			}
			l.event(ctx, level, "lease not extended", "lease_extend_failed",
				slog.Any("error", err), slog.Int64("left_ms", l.Left().Milliseconds()), slog.Int64("again_in_ms", wait.Milliseconds()))
		}
		timer.Reset(l.untilDue())
	}
}

// planAfter notes that the watchdog will be awake after wait, and returns how
// often the lease was renewed so far.
func (l *Lease) planAfter(wait time.Duration) (renewals int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = l.keeper.now().at.Add(wait)
	return l.renewals
}

// untilDue returns how long the watchdog may sleep.
func (l *Lease) untilDue() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.due.Sub(l.keeper.now().at)
}

func (l *Lease) maxHold() time.Duration {
	if l.keeper.cfg.MaxHold > 0 {
		return l.keeper.cfg.MaxHold
	}
	return 20 * l.etc
}
