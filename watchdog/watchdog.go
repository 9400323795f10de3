// Package watchdog holds a lock while work runs, and tells the work for how
// long it may trust the lock.
//
// Keeper.Hold takes the lock, starts a watchdog goroutine that keeps its lease
// alive, runs the work under a context that ends with the lease, and returns
// after the work and the watchdog have ended and the lock was given back. The
// work looks at the gate, Lease.Check, before every send. A Roster is the list
// of the replicas that live.
//
// What holds at any time:
//
//   - The trust in a lease is counted from before the last call that was
//     answered, by three clocks, with a margin taken off: it ends before the
//     lease can have ended at the server (R12).
//   - A trust that has ended is never revived, whatever is answered later.
//   - A renewal that fails is unknown, and tried again until the trust ends. A
//     lock seen with another owner, or gone, is lost: the gate closes at once.
//   - The watchdog has ended before the lock is given back, and a lost lock is
//     not given back at all.
//
// What it does not do: it does not fence. A process that is stopped between the
// look at the gate and the send, sends late; a lock server that forgets lets
// two owners run until the next renewal. The store's fencing number decides
// then (R13), and Lease.Bind only writes it on the lock.
package watchdog

import (
	"context"
	"errors"
	"fmt"
	"time"
)

var (
	// ErrLeaseLost: another owner was seen, or the lock is gone. It may have been
	// another's in the meantime.
	ErrLeaseLost = errors.New("lease lost")
	// ErrLeaseExpired: the lease could not be extended before its local end.
	ErrLeaseExpired = errors.New("lease expired")
	// ErrNoProgress: the work did not call Progress for too long; renewing ended
	// so that a hung worker does not keep its school from the others.
	ErrNoProgress = errors.New("no progress")
	// ErrMaxHold: the lock was held for as long as one Hold may; the work is asked
	// to end, what is left of the lease is still good.
	ErrMaxHold = errors.New("lock held for its maximum time")
	// ErrReleased: the lease was used after Hold had given the lock back.
	ErrReleased = errors.New("lock was released")

	// ErrNotHeld answers a release of a lock that is another's or gone.
	ErrNotHeld = errors.New("lock is not held")
	// ErrStale answers an acquire that reached the server after its patience had
	// run out. The lock was not taken.
	ErrStale = errors.New("request came too late")
	// ErrServerChanged marks an error that says at once that the connection or
	// the server's role ended, as a failover looks from here: worth one more try
	// without a wait.
	ErrServerChanged = errors.New("connection or role of the lock server changed")
)

// BusyError says that another acquisition holds the lock.
type BusyError struct {
	Owner     string        // instance id of the holder
	Remaining time.Duration // until its lease ends unless it is extended
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("lock is held by %q, lease ends in %s", e.Owner, e.Remaining)
}

// Request asks a Backend for a lock.
type Request struct {
	Name        string
	Owner       string        // instance id
	Acquisition string        // made by the caller, new for each Hold
	Lease       time.Duration // above 0, whole milliseconds
	ETC         time.Duration // kept with the lock for people
	// Patience bounds the request itself: a server that gets it later than this
	// after the call began must refuse it, so that a delayed packet cannot take
	// the lock again after its sender gave up.
	Patience time.Duration
}

// Backend is a lock server. Every method is one atomic step there and may run
// more than once or late without harm. A method returns soon after its context
// has ended. An error that is none of those named here means unknown: the step
// may have been done, may be done later, or not at all.
type Backend interface {
	// Acquire takes the lock if it is free or held by this acquisition already.
	// *BusyError, ErrStale: it was not taken.
	Acquire(ctx context.Context, r Request) error
	// Bind writes the fence on the lock; a smaller one than is there changes
	// nothing. ErrLeaseLost.
	Bind(ctx context.Context, name, acquisition string, fence int64) error
	// Extend makes at least lease of time left. It never creates the lock and
	// never shortens the lease. renewal counts 1, 2, 3 … for people. ErrLeaseLost.
	Extend(ctx context.Context, name, acquisition string, lease time.Duration, renewal int64) error
	// Release frees the lock. ErrNotHeld.
	Release(ctx context.Context, name, acquisition string) error
}
