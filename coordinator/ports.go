package coordinator

import (
	"context"
	"time"

	"schoolbell/school"
	"schoolbell/sender"
)

// Queue is what the scheduler needs of the outbox. Each method that changes
// something is one round trip to the database, COMMIT included, so that an
// owner paused in the middle holds no lock that its successor waits for.
//
// A method fails with school.ErrUnavailable where the store could not be
// reached and nothing was changed.
type Queue interface {
	// Ping says whether the store answers now. A replica takes a school only
	// while it does.
	Ping(ctx context.Context) error

	// Due lists the schools that have work: a due notice with recipients beyond
	// its frontier, a due retry, an unsettled batch past its send deadline; and
	// those whose earliest work comes within horizon. Paused schools are left out.
	Due(ctx context.Context, horizon time.Duration) ([]school.Due, error)

	// WorkIn tells when the school has work next, as Due would with an endless
	// horizon, the deadlines of unsettled batches ahead included: 0 is now,
	// school.Never is not at all, or the school is paused or not there.
	WorkIn(ctx context.Context, schoolID string) (time.Duration, error)

	// OpenTerm raises the school's fence by one and makes (acquisition, owner)
	// its holder. From its return on, no claim of an older fence commits.
	// school.ErrNotFound for an unknown school.
	OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error)

	// Takeover settles every unsettled batch of an older fence whose send
	// deadline has passed and puts its recipients back. school.ErrFenced.
	Takeover(ctx context.Context, t school.Term, policy school.RetryPolicy) (school.Orphans, error)

	// Page reads up to limit recipients that are to be worked on, composed anew.
	Page(ctx context.Context, t school.Term, limit int) (school.Page, error)

	// Claim writes the batch with exactly the recipients it covers, moves the
	// frontiers, writes the skipped ones and advances the ledger: all or nothing.
	// school.ErrFenced, school.ErrPaused, school.ErrStalePage;
	// school.ErrRuleChanged: the school's settings are newer than the claim's rule;
	// school.ErrCommitUnknown: nothing of it may be sent.
	Claim(ctx context.Context, t school.Term, c school.Claim) error

	// Skip moves frontiers over recipients that are not to be sent, when there
	// is nothing else in the page. Errors as Claim.
	Skip(ctx context.Context, t school.Term, work []school.Work) error

	// Withdraw takes back a claim of which nothing was handed to a sender: its
	// recipients are due again and its attempts leave the ledger. Done already,
	// or never committed: no error. school.ErrFenced.
	Withdraw(ctx context.Context, t school.Term, batch string) error

	// Record settles a batch with its outcomes. Done already by this owner: no
	// error. school.ErrTakenOver: a newer owner settled it, the results are void.
	// Devices that are gone are retired in the same transaction or, with Brake and
	// while a brake is on for the school and the batch's sender, flagged.
	Record(ctx context.Context, r school.BatchRecord) error

	// Confirm writes recipients that wait for a retry as decided by
	// school.Confirm. What has moved meanwhile is left. school.ErrFenced.
	Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error

	// Expire closes notices whose expires_at has passed, goes on with closing
	// those that were begun, in bounded steps, and ends finished ones. It
	// returns how many notices it touched.
	Expire(ctx context.Context, limit int) (int, error)

	// Sweep checks counts against recipients, ends finished notices and counts
	// stranded recipients (PENDING or RETRY_PENDING at or below the frontier,
	// without an open batch and without a time to be tried again), which must
	// be 0 and are put back.
	Sweep(ctx context.Context) (stranded int, err error)
}

// Budget is the arbiter of the sending rule: fast, cluster-wide, forgetful.
type Budget interface {
	Peek(ctx context.Context, schoolID string) (school.Peek, error)
	// Reconcile raises what the arbiter knows to what the ledger knows; it never
	// lowers anything and makes what is missing.
	Reconcile(ctx context.Context, schoolID string, ledger school.Ledger, rule school.Rule) error
	// Rebuild sets the rest from the ledger, also lower: only for a school whose
	// rest in Redis lies further ahead than any rest can.
	Rebuild(ctx context.Context, schoolID, acquisition string, fence int64, ledger school.Ledger, rule school.Rule) error
	Reserve(ctx context.Context, r school.Reservation) (school.Grant, error)
	Settle(ctx context.Context, s school.Settlement) error
}

// Rates is the arbiter of the senders: their rates, and whether their receivers let
// them in, for the whole cluster. It may forget, and then grants nothing at first.
type Rates interface {
	// Take takes a batch of a sender's rate, or a place in the line for it. Asked
	// again with the same id it has the same answer.
	Take(ctx context.Context, t sender.Take) (sender.Ticket, error)
	// Report says what a batch found out about the receiver. Of several that find
	// out the same, one is told that something changed.
	Report(ctx context.Context, r sender.Report) (sender.Reported, error)
	// Look tells what is known of a sender, and of a school's place where one is named.
	Look(ctx context.Context, l sender.Look) (sender.RateState, error)
}

// Lease is a school's lock while it is held.
type Lease interface {
	Acquisition() string
	// Bind writes the fence on the lock.
	Bind(ctx context.Context, fence int64) error
	// Ensure extends at once where less than d is left before the local end.
	Ensure(ctx context.Context, d time.Duration) error
	// Extend extends at once, also where the local end is at least d away: for an
	// answer of the arbiter that there is less. An error where it is not then.
	Extend(ctx context.Context, d time.Duration) error
	// Check is the gate: nil while new sends may start, else the cause.
	Check() error
	// Progress tells the watchdog that the work advances.
	Progress()
}

// Holder takes a school's lock and keeps it while fn runs. fn's context ends
// with the lease; calls on the wire go on under contexts of their own and Hold
// waits for fn to return. A *BusyError says that another holds it.
type Holder interface {
	Hold(ctx context.Context, schoolID string, etc time.Duration, fn func(ctx context.Context, l Lease) error) error
}

// BusyError says that another replica holds the school, and for how long its
// lease lasts at most unless it is extended.
type BusyError struct {
	Owner     string
	Remaining time.Duration
}

func (e *BusyError) Error() string { return "school is held by " + e.Owner }

// Members tells of the living replicas, from memory.
type Members interface {
	// Live lists their instance ids, this one included.
	Live() []string
	// OthersAble reports whether another one has a store that answers.
	OthersAble() bool
	// OthersUnanswered reports whether no other one hears from the sender's
	// receiver: true also where there is no other.
	OthersUnanswered(sender string) bool
}

// Peers tells the other replicas that schools have work: a hint, never relied on.
type Peers interface {
	Wake(ctx context.Context, schools ...string) error
}
