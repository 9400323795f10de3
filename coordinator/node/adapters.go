package node

import (
	"context"
	"errors"
	"time"

	"schoolbell/coordinator"
	"schoolbell/watchdog"
)

// holder joins the scheduler's view of a lock with the watchdog's: neither
// knows the other, and only the signatures differ.
type holder struct{ keeper *watchdog.Keeper }

var _ coordinator.Holder = holder{}

func (h holder) Hold(ctx context.Context, schoolID string, etc time.Duration, fn func(ctx context.Context, l coordinator.Lease) error) error {
	err := h.keeper.Hold(ctx, schoolID, etc, func(ctx context.Context, l *watchdog.Lease) error { return fn(ctx, l) })
	var busy *watchdog.BusyError
	if errors.As(err, &busy) {
		return &coordinator.BusyError{Owner: busy.Owner, Remaining: busy.Remaining}
	}
	return err
}
