package node

import (
	"context"
	"errors"
	"iter"
	"time"

	"schoolbell/school"
	"schoolbell/school/store"
)

// outbox cuts the way to the database.
func (l *lifeline) outbox(next outbox) outbox {
	if l == nil {
		return next
	}
	return cuttableOutbox{next, l}
}

type cuttableOutbox struct {
	next outbox
	line *lifeline
}

var _ outbox = cuttableOutbox{}

func (o cuttableOutbox) Ping(ctx context.Context) error { return o.line.step(ctx, o.next.Ping) }

func (o cuttableOutbox) Due(ctx context.Context, horizon time.Duration) ([]school.Due, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Due, error) { return o.next.Due(ctx, horizon) })
}

func (o cuttableOutbox) WorkIn(ctx context.Context, schoolID string) (time.Duration, error) {
	return through(ctx, o.line, func(ctx context.Context) (time.Duration, error) { return o.next.WorkIn(ctx, schoolID) })
}

func (o cuttableOutbox) OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Term, error) {
		return o.next.OpenTerm(ctx, schoolID, acquisition, owner)
	})
}

func (o cuttableOutbox) Takeover(ctx context.Context, t school.Term, p school.RetryPolicy) (school.Orphans, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Orphans, error) { return o.next.Takeover(ctx, t, p) })
}

func (o cuttableOutbox) Page(ctx context.Context, t school.Term, limit int) (school.Page, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Page, error) { return o.next.Page(ctx, t, limit) })
}

func (o cuttableOutbox) Claim(ctx context.Context, t school.Term, c school.Claim) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Claim(ctx, t, c) })
}

func (o cuttableOutbox) Skip(ctx context.Context, t school.Term, work []school.Work) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Skip(ctx, t, work) })
}

func (o cuttableOutbox) Withdraw(ctx context.Context, t school.Term, batch string) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Withdraw(ctx, t, batch) })
}

// Record of a dead replica says that its results are void, which they are: the
// caller would try anything else again until the stop's timeout.
func (o cuttableOutbox) Record(ctx context.Context, r school.BatchRecord) error {
	err := o.line.step(ctx, func(ctx context.Context) error { return o.next.Record(ctx, r) })
	if errors.Is(err, ErrKilled) {
		return errors.Join(school.ErrTakenOver, err)
	}
	return err
}

func (o cuttableOutbox) Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Confirm(ctx, t, confirmed) })
}

func (o cuttableOutbox) Expire(ctx context.Context, limit int) (int, error) {
	return through(ctx, o.line, func(ctx context.Context) (int, error) { return o.next.Expire(ctx, limit) })
}

func (o cuttableOutbox) Sweep(ctx context.Context) (int, error) {
	return through(ctx, o.line, o.next.Sweep)
}

func (o cuttableOutbox) Purge(ctx context.Context, after time.Duration) (school.Purged, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Purged, error) { return o.next.Purge(ctx, after) })
}

func (o cuttableOutbox) Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Receipt, error) { return o.next.Accept(ctx, n, total, recipients) })
}

func (o cuttableOutbox) Notice(ctx context.Context, id int64) (school.Progress, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Progress, error) { return o.next.Notice(ctx, id) })
}

func (o cuttableOutbox) Notices(ctx context.Context, f school.NoticeFilter) ([]school.Progress, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Progress, error) { return o.next.Notices(ctx, f) })
}

func (o cuttableOutbox) Recipients(ctx context.Context, id int64, f school.RecipientFilter) ([]school.RecipientRow, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.RecipientRow, error) { return o.next.Recipients(ctx, id, f) })
}

func (o cuttableOutbox) Cancel(ctx context.Context, id int64) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Cancel(ctx, id) })
}

func (o cuttableOutbox) Failures(ctx context.Context, f school.FailureFilter, after school.FailureKey, limit int) (school.FailureList, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.FailureList, error) { return o.next.Failures(ctx, f, after, limit) })
}

func (o cuttableOutbox) Requeue(ctx context.Context, order school.RequeueOrder) (school.Requeued, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Requeued, error) { return o.next.Requeue(ctx, order) })
}

func (o cuttableOutbox) PutSchool(ctx context.Context, id string, c school.SchoolChange) (s school.School, created bool, err error) {
	err = o.line.step(ctx, func(ctx context.Context) error {
		var err error
		s, created, err = o.next.PutSchool(ctx, id, c)
		return err
	})
	return s, created, err
}

func (o cuttableOutbox) Pause(ctx context.Context, id string) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Pause(ctx, id) })
}

func (o cuttableOutbox) Resume(ctx context.Context, id string) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.Resume(ctx, id) })
}

func (o cuttableOutbox) School(ctx context.Context, id string) (school.Backlog, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Backlog, error) { return o.next.School(ctx, id) })
}

func (o cuttableOutbox) Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Backlog, error) { return o.next.Schools(ctx, afterID, limit) })
}

func (o cuttableOutbox) PutDevices(ctx context.Context, schoolID string, devices []school.NewDevice) (school.Devices, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.Devices, error) { return o.next.PutDevices(ctx, schoolID, devices) })
}

func (o cuttableOutbox) DeleteDevice(ctx context.Context, schoolID, token string) error {
	return o.line.step(ctx, func(ctx context.Context) error { return o.next.DeleteDevice(ctx, schoolID, token) })
}

func (o cuttableOutbox) Devices(ctx context.Context, schoolID string, f school.DeviceFilter) ([]school.Device, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Device, error) { return o.next.Devices(ctx, schoolID, f) })
}

func (o cuttableOutbox) CloseBrake(ctx context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.EngagedBrake, error) { return o.next.CloseBrake(ctx, id, as, by) })
}

func (o cuttableOutbox) Brake(ctx context.Context, id int64) (school.EngagedBrake, error) {
	return through(ctx, o.line, func(ctx context.Context) (school.EngagedBrake, error) { return o.next.Brake(ctx, id) })
}

func (o cuttableOutbox) Brakes(ctx context.Context, f school.BrakeFilter) ([]school.EngagedBrake, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.EngagedBrake, error) { return o.next.Brakes(ctx, f) })
}

func (o cuttableOutbox) OpenBrakes(ctx context.Context) (int, error) {
	return through(ctx, o.line, o.next.OpenBrakes)
}

func (o cuttableOutbox) RecipientCounts(ctx context.Context) (store.RecipientCounts, error) {
	return through(ctx, o.line, o.next.RecipientCounts)
}

// What a dead replica posts to a webhook is settled by nobody, at once: another
// claims it when the lease ends.
func (o cuttableOutbox) ClaimFallbacks(ctx context.Context, limit int, lease time.Duration) ([]school.Fallback, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Fallback, error) { return o.next.ClaimFallbacks(ctx, limit, lease) })
}

func (o cuttableOutbox) SettleFallback(ctx context.Context, f school.Fallback, p school.Posted) error {
	return o.line.last(ctx, func(ctx context.Context) error { return o.next.SettleFallback(ctx, f, p) })
}

func (o cuttableOutbox) ClaimAlerts(ctx context.Context, limit int, lease time.Duration) ([]school.Alert, error) {
	return through(ctx, o.line, func(ctx context.Context) ([]school.Alert, error) { return o.next.ClaimAlerts(ctx, limit, lease) })
}

func (o cuttableOutbox) SettleAlert(ctx context.Context, a school.Alert, p school.Posted) error {
	return o.line.last(ctx, func(ctx context.Context) error { return o.next.SettleAlert(ctx, a, p) })
}

func (o cuttableOutbox) RaiseAlert(ctx context.Context, c school.Condition) (told bool, err error) {
	err = o.line.last(ctx, func(ctx context.Context) error {
		var err error
		told, err = o.next.RaiseAlert(ctx, c)
		return err
	})
	return told, err
}

func (o cuttableOutbox) EndAlert(ctx context.Context, key, kind string, body []byte) (told bool, err error) {
	err = o.line.last(ctx, func(ctx context.Context) error {
		var err error
		told, err = o.next.EndAlert(ctx, key, kind, body)
		return err
	})
	return told, err
}

func (o cuttableOutbox) StartDigest(ctx context.Context) error {
	return o.line.step(ctx, o.next.StartDigest)
}

func (o cuttableOutbox) NewFailures(ctx context.Context) (school.Failures, error) {
	return through(ctx, o.line, o.next.NewFailures)
}

func (o cuttableOutbox) TellFailures(ctx context.Context, f school.Failures, kind string, body []byte) (bool, error) {
	return through(ctx, o.line, func(ctx context.Context) (bool, error) { return o.next.TellFailures(ctx, f, kind, body) })
}

func (o cuttableOutbox) Listen(ctx context.Context, onReady func(), onSchool func(string)) error {
	ctx, done := o.line.bind(ctx)
	defer done()
	return o.next.Listen(ctx, onReady, onSchool)
}

func (o cuttableOutbox) Close() { o.next.Close() }
