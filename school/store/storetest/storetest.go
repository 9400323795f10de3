// Package storetest is the suite that every engine of the store passes: what
// the scheduler and the API rely on, as tests named by behaviour.
//
// It speaks to a store through its methods and looks at the tables, whose names
// are the same in every engine, in plain SQL. It does not test what only one
// engine has (plans, connections that break).
package storetest

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// Store is what the suite checks.
type Store interface {
	Ping(ctx context.Context) error
	Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error)

	Due(ctx context.Context, horizon time.Duration) ([]school.Due, error)
	WorkIn(ctx context.Context, schoolID string) (time.Duration, error)
	OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error)
	Takeover(ctx context.Context, t school.Term, policy school.RetryPolicy) (school.Orphans, error)
	Page(ctx context.Context, t school.Term, limit int) (school.Page, error)
	Claim(ctx context.Context, t school.Term, c school.Claim) error
	Skip(ctx context.Context, t school.Term, work []school.Work) error
	Withdraw(ctx context.Context, t school.Term, batch string) error
	Record(ctx context.Context, r school.BatchRecord) error
	Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error
	Expire(ctx context.Context, limit int) (int, error)
	Sweep(ctx context.Context) (stranded int, err error)
	Purge(ctx context.Context, after time.Duration) (school.Purged, error)

	Notice(ctx context.Context, id int64) (school.Progress, error)
	Notices(ctx context.Context, f school.NoticeFilter) ([]school.Progress, error)
	Recipients(ctx context.Context, id int64, f school.RecipientFilter) ([]school.RecipientRow, error)
	Cancel(ctx context.Context, notice int64) error
	Failures(ctx context.Context, f school.FailureFilter, after school.FailureKey, limit int) (school.FailureList, error)
	Requeue(ctx context.Context, o school.RequeueOrder) (school.Requeued, error)

	ClaimFallbacks(ctx context.Context, limit int, lease time.Duration) ([]school.Fallback, error)
	SettleFallback(ctx context.Context, f school.Fallback, p school.Posted) error

	RaiseAlert(ctx context.Context, c school.Condition) (told bool, err error)
	EndAlert(ctx context.Context, key, kind string, body []byte) (told bool, err error)
	ClaimAlerts(ctx context.Context, limit int, lease time.Duration) ([]school.Alert, error)
	SettleAlert(ctx context.Context, a school.Alert, p school.Posted) error
	StartDigest(ctx context.Context) error
	NewFailures(ctx context.Context) (school.Failures, error)
	TellFailures(ctx context.Context, f school.Failures, kind string, body []byte) (told bool, err error)

	PutSchool(ctx context.Context, id string, c school.SchoolChange) (s school.School, created bool, err error)
	School(ctx context.Context, id string) (school.Backlog, error)
	Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error)
	DeleteSchool(ctx context.Context, id string) error
	Pause(ctx context.Context, id string) error
	Resume(ctx context.Context, id string) error

	PutDevices(ctx context.Context, schoolID string, devices []school.NewDevice) (school.Devices, error)
	DeleteDevice(ctx context.Context, schoolID, token string) error
	Devices(ctx context.Context, schoolID string, f school.DeviceFilter) ([]school.Device, error)
	CloseBrake(ctx context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error)
	Brake(ctx context.Context, id int64) (school.EngagedBrake, error)
	Brakes(ctx context.Context, f school.BrakeFilter) ([]school.EngagedBrake, error)
	OpenBrakes(ctx context.Context) (int, error)
}

// Instance is a fresh, empty, migrated store of the engine under test.
type Instance struct {
	Store Store

	// Query runs SQL that every engine understands and returns its rows as text,
	// NULL as the empty string, true as 1.
	Query func(tb testing.TB, sql string) [][]string

	// Exec changes something behind the store's back.
	Exec func(tb testing.TB, sql string)

	// Device registers a device of a school, switched on or off, retired or not.
	Device func(tb testing.TB, schoolID, token string, enabled, retired bool)

	// Elapse lets d pass: every time that the database remembers moves d into
	// the past.
	Elapse func(tb testing.TB, d time.Duration)
}

// Run runs the suite on instances that open makes, one for each test.
func Run(t *testing.T, open func(t *testing.T) *Instance) {
	for _, group := range [][]test{acceptTests, topicTests, deviceTests, brakeTests, pageTests, claimTests, recordTests, takeoverTests, confirmTests, closingTests, retentionTests, requeueTests, schoolTests, fallbackTests, alertTests, historyTests} {
		for _, c := range group {
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				w := &world{Instance: open(t), t: t}
				c.run(w)
				w.check()
			})
		}
	}
}

type test struct {
	name string
	run  func(w *world)
}

// world is one test's store with the verbs that tests are written in.
type world struct {
	*Instance
	t     testing.TB
	batch atomic.Int64
}

const (
	longest   = 10 * time.Second
	recording = 2 * time.Second
)

var (
	rule   = school.Rule{Limit: 5000, Rest: 180 * time.Second, Version: 1}
	policy = school.RetryPolicy{Max: 3, Base: time.Minute}
)

func (w *world) ctx() context.Context { return w.t.Context() }

// devices yields n recipients with tokens of their own.
func devices(n int) iter.Seq2[school.NewRecipient, error] {
	return func(yield func(school.NewRecipient, error) bool) {
		for i := range n {
			if !yield(school.NewRecipient{Token: fmt.Sprintf("token-%07d", i+1), Ref: "r" + strconv.Itoa(i+1)}, nil) {
				return
			}
		}
	}
}

func list(rs ...school.NewRecipient) iter.Seq2[school.NewRecipient, error] {
	return func(yield func(school.NewRecipient, error) bool) {
		for _, r := range rs {
			if !yield(r, nil) {
				return
			}
		}
	}
}

func plain(schoolID string) *school.Notice {
	return &school.Notice{School: schoolID, Content: school.Content{Title: "T", Body: "B"}, Priority: school.Normal, Delivery: school.AtLeastOnce}
}

func (w *world) accept(n *school.Notice, rs iter.Seq2[school.NewRecipient, error]) int64 {
	w.t.Helper()
	r, err := w.Store.Accept(w.ctx(), n, 0, rs)
	require.NoError(w.t, err)
	return r.ID
}

func (w *world) notice(schoolID string, n int) int64 {
	w.t.Helper()
	return w.accept(plain(schoolID), devices(n))
}

func (w *world) term(schoolID, owner string) school.Term {
	w.t.Helper()
	term, err := w.Store.OpenTerm(w.ctx(), schoolID, "acq-"+owner+"-"+strconv.FormatInt(w.batch.Add(1), 10), owner)
	require.NoError(w.t, err)
	return term
}

func (w *world) page(term school.Term, limit int) school.Page {
	w.t.Helper()
	p, err := w.Store.Page(w.ctx(), term, limit)
	require.NoError(w.t, err)
	return p
}

// claimOf makes a claim of work as the scheduler would, attempted being what is
// handed over in cycle 1.
func (w *world) claimOf(work []school.Work, attempted int) school.Claim {
	c := school.Claim{
		Batch: "batch-" + strconv.FormatInt(w.batch.Add(1), 10), Sender: "log", Work: work,
		Longest: longest, Record: recording, Rule: rule,
	}
	c.Grant = school.Grant{Kind: school.Granted, Size: c.Size(), Cycle: 1, Attempted: attempted}
	return c
}

func (w *world) claim(term school.Term, work []school.Work) school.Claim {
	w.t.Helper()
	c := w.claimOf(work, term.Ledger.Attempted+len(work))
	c.Grant.Cycle = max(c.Grant.Cycle, term.Ledger.Cycle)
	c.Rule.Version = term.Settings.SettingsVersion
	require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
	return c
}

// results decides an outcome for each recipient of a claim.
func (w *world) results(c school.Claim, outcome func(i int, k *school.Work) school.Event) []school.Recorded {
	w.t.Helper()
	var rs []school.Recorded
	for i := range c.Work {
		k := &c.Work[i]
		if !k.Sendable() {
			continue
		}
		e := outcome(i, k)
		e.Delivery = k.Notice.Delivery
		change, err := school.Next(k.Standing, e, policy)
		require.NoError(w.t, err)
		rs = append(rs, school.Recorded{Notice: k.Notice.ID, Seq: k.Seq, Change: change, Fallback: k.Notice.Fallback != ""})
	}
	return rs
}

func all(o school.Outcome) func(int, *school.Work) school.Event {
	return func(int, *school.Work) school.Event { return school.Event{Outcome: o, Code: codes[o]} }
}

var codes = map[school.Outcome]string{
	school.Gone: "UNREGISTERED", school.Rejected: "INVALID_ARGUMENT", school.Mismatch: "SENDER_ID_MISMATCH",
	school.Throttled: "QUOTA_EXCEEDED", school.Unavailable: "UNAVAILABLE", school.Unknown: "TIMEOUT",
	school.Misconfigured: "UNAUTHENTICATED", school.NotSent: "NOT_SENT",
}

func (w *world) recordOf(term school.Term, c school.Claim, outcome func(int, *school.Work) school.Event) school.BatchRecord {
	w.t.Helper()
	return school.BatchRecord{
		Batch: c.Batch, School: term.School, Owner: term.Owner, Fence: term.Fence, Cycle: c.Grant.Cycle,
		Filled: c.Grant.Filled, Rest: c.Rule.Rest, Results: w.results(c, outcome),
	}
}

func (w *world) record(term school.Term, c school.Claim, outcome func(int, *school.Work) school.Event) {
	w.t.Helper()
	require.NoError(w.t, w.Store.Record(w.ctx(), w.recordOf(term, c, outcome)))
}

// send claims and records all work that there is, and returns how many were
// handed over.
func (w *world) send(term school.Term, o school.Outcome) int {
	w.t.Helper()
	sent := 0
	for {
		p := w.page(term, 1000)
		if len(p.Work) == 0 {
			return sent
		}
		for len(p.Work) > 0 {
			work := p.Work[:min(200, len(p.Work))]
			p.Work = p.Work[len(work):]
			if (&school.Claim{Work: work}).Size() == 0 {
				err := w.Store.Skip(w.ctx(), term, work)
				if errors.Is(err, school.ErrStalePage) {
					break // duplicates at the end of a notice that has ended
				}
				require.NoError(w.t, err)
				continue
			}
			c := w.claim(term, work)
			w.record(term, c, all(o))
			sent += c.Size()
		}
	}
}

func (w *world) progress(id int64) school.Progress {
	w.t.Helper()
	p, err := w.Store.Notice(w.ctx(), id)
	require.NoError(w.t, err)
	return p
}

func (w *world) ledger(schoolID string) school.Ledger {
	w.t.Helper()
	b, err := w.Store.School(w.ctx(), schoolID)
	require.NoError(w.t, err)
	return b.Ledger
}

// states counts a notice's recipients by state, in words: "PENDING=3 SUCCESS=2".
func (w *world) states(id int64) string {
	w.t.Helper()
	var words []string
	for _, r := range w.Query(w.t, fmt.Sprintf(`SELECT job_status, count(*) FROM push_cluster_token_states WHERE cluster_id = %d GROUP BY job_status ORDER BY job_status`, id)) {
		words = append(words, r[0]+"="+r[1])
	}
	return strings.Join(words, " ")
}

// check compares every notice's counters with its recipients, and looks for
// recipients that nothing would ever touch again.
func (w *world) check() {
	w.t.Helper()
	for _, fault := range w.faults() {
		w.t.Error(fault)
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
}

func (w *world) faults() (faults []string) {
	w.t.Helper()
	const counted = `SELECT c.id, c.total_count, c.waiting_count, c.in_progress_count, c.retry_pending_count, c.success_count, c.fail_count,
		c.retry_success_count, c.retry_fail_count, c.permanent_fail_count, c.skipped_disabled_count, c.skipped_cancelled_count,
		c.skipped_expired_count, c.skipped_duplicate_count, c.skipped_not_allowed_count FROM push_clusters c WHERE c.purged_at IS NULL ORDER BY c.id`
	// Counted from the notices, since one to a topic without devices has no recipient.
	const recipients = `SELECT c.id, count(s.seq),
		sum(CASE WHEN s.job_status = 'PENDING' THEN 1 ELSE 0 END), sum(CASE WHEN s.job_status = 'IN_PROGRESS' THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'RETRY_PENDING' THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'SUCCESS' AND s.attempts = 1 THEN 1 ELSE 0 END), sum(CASE WHEN s.job_status = 'FAIL' AND s.attempts = 1 THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'SUCCESS' AND s.attempts > 1 THEN 1 ELSE 0 END), sum(CASE WHEN s.job_status = 'FAIL' AND s.attempts > 1 THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'PERMANENT_FAIL' THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'SKIPPED' AND s.reason = 'DISABLED' THEN 1 ELSE 0 END), sum(CASE WHEN s.job_status = 'SKIPPED' AND s.reason = 'CANCELLED' THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'SKIPPED' AND s.reason = 'EXPIRED' THEN 1 ELSE 0 END), sum(CASE WHEN s.job_status = 'SKIPPED' AND s.reason = 'DUPLICATE' THEN 1 ELSE 0 END),
		sum(CASE WHEN s.job_status = 'SKIPPED' AND s.reason = 'NOT_ALLOWED' THEN 1 ELSE 0 END)
		FROM push_clusters c LEFT JOIN push_cluster_token_states s ON s.cluster_id = c.id WHERE c.purged_at IS NULL GROUP BY c.id ORDER BY c.id`
	a, b := w.Query(w.t, counted), w.Query(w.t, recipients)
	if len(a) != len(b) {
		return []string{fmt.Sprintf("%d notices, %d with recipients", len(a), len(b))}
	}
	for i := range a {
		if strings.Join(a[i], " ") != strings.Join(b[i], " ") {
			faults = append(faults, fmt.Sprintf("counters of notice\n%v\nrecipients\n%v", a[i], b[i]))
		}
	}
	// At or below the frontier a waiting recipient is in exactly one open batch
	// or has a time to be tried again, and never both; in a closing notice what
	// was never handed over waits for nothing.
	const covered = `(SELECT count(*) FROM push_batches b JOIN push_batch_ranges r ON r.batch_id = b.id
		WHERE b.settled_at IS NULL AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq)`
	for _, r := range w.Query(w.t, `SELECT x.cluster_id, x.seq, x.job_status, x.covered, x.timed FROM (
			SELECT t.cluster_id, t.seq, t.job_status, `+covered+` AS covered, CASE WHEN t.retry_after IS NULL THEN 0 ELSE 1 END AS timed
			FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
			WHERE t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.seq <= c.frontier) x
		WHERE x.covered + x.timed <> 1`) {
		faults = append(faults, fmt.Sprintf("recipient %s.%s is %s at or below the frontier, in %s open batches, with %s times to be tried again", r[0], r[1], r[2], r[3], r[4]))
	}
	for _, r := range w.Query(w.t, `SELECT c.id, c.job_status, c.ended_at, c.waiting_count + c.in_progress_count + c.retry_pending_count FROM push_clusters c
		WHERE (c.ended_at IS NULL) <> (c.job_status IN ('PENDING', 'IN_PROGRESS'))
		OR (c.ended_at IS NOT NULL AND c.waiting_count + c.in_progress_count + c.retry_pending_count > 0)
		OR (c.ended_at IS NULL AND c.closing IS NULL AND c.waiting_count + c.in_progress_count + c.retry_pending_count = 0)`) {
		faults = append(faults, fmt.Sprintf("notice %s is %s, ended %q, with %s recipients left", r[0], r[1], r[2], r[3]))
	}
	for _, r := range w.Query(w.t, `SELECT t.cluster_id, t.seq, t.job_status, t.attempts FROM push_cluster_tokens t
		WHERE (t.job_status = 'PENDING' AND t.attempts <> 0) OR (t.job_status = 'RETRY_PENDING' AND t.attempts = 0)
		OR (t.job_status NOT IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NOT NULL)
		OR (t.job_status IN ('SKIPPED', 'PERMANENT_FAIL') AND t.reason IS NULL)
		OR (t.job_status = 'SKIPPED' AND t.attempts <> 0)`) {
		faults = append(faults, fmt.Sprintf("recipient %s.%s is %s after %s attempts, or lacks a reason, or keeps a time to be tried again", r[0], r[1], r[2], r[3]))
	}
	return faults
}
