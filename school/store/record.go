package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// recordGoneSQL is recordSQL for a batch of which devices are gone.
const recordGoneSQL = `SELECT engaged, retired, flagged FROM schoolbell_record_gone($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)`

const recordSQL = `SELECT schoolbell_record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)`

// Record settles a batch with the outcome of each of its recipients, in one
// round trip: their states, the notices' counts and ends, retired devices, and,
// where the batch filled its cycle, the rest from this moment on (R4). The
// results cover every recipient that the batch handed over.
//
// It needs no term: what was really sent counts while nobody else settled the
// batch, however old its fence; the ledger changes only in the batch's own
// cycle (R13). Where a notice was cancelled or has expired meanwhile, no retry
// follows. Recording again what this owner recorded is no error.
//
// Where a recipient is to have a fallback and its failure is definite, the
// fallback is made in the same transaction, once in its life (R35).
// With Brake, and while a brake is on for the school and the batch's sender, the
// devices that are gone are flagged instead of retired, in the same transaction;
// a brake that this engages is logged (event=brake_engaged), once or, where the
// answer was lost, again.
//
// school.ErrTakenOver: another settled the batch and the results are void.
// ErrMismatch: the results are not the batch's. school.ErrNotFound: no such
// batch was ever committed. school.ErrUnavailable and school.ErrCommitUnknown:
// to be tried again.
func (db *DB) Record(ctx context.Context, r school.BatchRecord) error {
	op := "record batch " + r.Batch
	o, err := outcomesOf(r.Results)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	args := []any{r.Batch, r.School, r.Owner, r.Fence, r.Cycle, r.Filled, restMillis(r.Rest),
		o.okNotice, o.okN, o.notice, o.seq, o.status, o.attempts, o.retries, o.orphans, o.retryIn, o.code, o.reason, o.retire}
	// One message and so one transaction: the failure and its fallback, or neither.
	var batch pgx.Batch
	var what gone
	if slices.Contains(o.retire, true) {
		batch.Queue(recordGoneSQL, append(args, r.Brake)...).QueryRow(func(row pgx.Row) error {
			return row.Scan(&what.engaged, &what.retired, &what.flagged)
		})
	} else {
		batch.Queue(recordSQL, args...)
	}
	if len(o.fallSeq) > 0 {
		batch.Queue(recordFallbackSQL, r.School, o.fallNotice, o.fallSeq)
	}
	err = change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		if batch.Len() == 1 && !slices.Contains(o.retire, true) { // mostly, and cheaper
			_, err := c.Exec(ctx, recordSQL, args...)
			return err
		}
		return c.SendBatch(ctx, &batch).Close()
	})
	if err == nil {
		db.metrics.count(db.log, &r, o, what)
	}
	return err
}

// outcomes are results as the arrays that schoolbell_record takes: accepted ones
// as a count for each notice, the others one by one.
type outcomes struct {
	okNotice []int64
	okN      []int32

	notice                          []int64
	seq, attempts, retries, orphans []int32
	status                          []string
	retryIn                         []int64
	code, reason                    []*string
	retire                          []bool

	fallNotice []int64 // recipients for whom a fallback is made
	fallSeq    []int32
}

func outcomesOf(results []school.Recorded) (*outcomes, error) {
	o := &outcomes{
		okNotice: []int64{}, okN: []int32{},
		notice: []int64{}, seq: []int32{}, attempts: []int32{}, retries: []int32{}, orphans: []int32{},
		status: []string{}, retryIn: []int64{}, code: []*string{}, reason: []*string{}, retire: []bool{},
	}
	order := make([]*school.Recorded, len(results))
	for i := range results {
		order[i] = &results[i]
	}
	slices.SortFunc(order, func(a, b *school.Recorded) int {
		return cmp.Or(cmp.Compare(a.Notice, b.Notice), cmp.Compare(a.Seq, b.Seq))
	})
	for i, r := range order {
		if i > 0 && order[i-1].Notice == r.Notice && order[i-1].Seq == r.Seq {
			return nil, fmt.Errorf("recipient %s has two results: %w", school.MessageID(r.Notice, r.Seq), ErrMismatch)
		}
		c := &r.Change
		switch c.State {
		case school.Success:
			if n := len(o.okNotice); n == 0 || o.okNotice[n-1] != r.Notice {
				o.okNotice, o.okN = append(o.okNotice, r.Notice), append(o.okN, 0)
			}
			o.okN[len(o.okN)-1]++
			continue
		case school.Fail, school.PermanentFail, school.RetryPending:
		default:
			return nil, fmt.Errorf("recipient %s: an outcome cannot be %s", school.MessageID(r.Notice, r.Seq), c.State)
		}
		o.notice = append(o.notice, r.Notice)
		o.seq = append(o.seq, int32(r.Seq))
		o.status = append(o.status, string(c.State))
		o.attempts = append(o.attempts, int32(c.Attempts))
		o.retries = append(o.retries, int32(c.Retries))
		o.orphans = append(o.orphans, int32(c.Orphanings))
		o.retryIn = append(o.retryIn, c.RetryIn.Microseconds())
		o.code = append(o.code, stringOrNil(c.Code))
		o.reason = append(o.reason, stringOrNil(string(c.Reason)))
		o.retire = append(o.retire, c.Retire)
		if r.Fallback && c.Definite() {
			o.fallNotice, o.fallSeq = append(o.fallNotice, r.Notice), append(o.fallSeq, int32(r.Seq))
		}
	}
	return o, nil
}

// Takeover settles every unsettled batch of an older fence whose send deadline
// has passed and does to its recipients what school.Next does with
// school.OrphanedUnsure (R25, R33): back at once without using a retry, or
// ended. Batches whose call may still be in flight are left, and Orphans.Wait
// says until when. The ledger is not touched: a cycle that such a batch filled
// rests from the latest moment its call could have ended (R4).
//
// The policy is not asked for anything, since an orphaning uses no retry.
// school.ErrFenced, school.ErrUnavailable, school.ErrCommitUnknown (asking again
// is harmless, but does not tell the batches a second time).
func (db *DB) Takeover(ctx context.Context, t school.Term, _ school.RetryPolicy) (school.Orphans, error) {
	op := "take over batches of school " + t.School
	var (
		o       school.Orphans
		batches []byte
		wait    int64
	)
	err := change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT batches, recipients, wait_us FROM schoolbell_takeover($1, $2, $3, $4, $5)`,
			t.School, t.Fence, t.Acquisition, t.Owner, school.MaxOrphanings).Scan(&batches, &o.Recipients, &wait)
	})
	if err != nil {
		return school.Orphans{}, err
	}
	o.Wait = micros(wait)
	if o.Batches, err = openBatches(batches); err != nil {
		return school.Orphans{}, fmt.Errorf("%s: %w", op, err)
	}
	return o, nil
}

// Confirm writes recipients that wait for a retry, and that their receiver says
// it took, as school.Confirm decided (R25). It is no attempt. What has moved
// meanwhile is left as it is. school.ErrFenced, school.ErrUnavailable;
// school.ErrCommitUnknown: asking and confirming again is harmless.
func (db *DB) Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error {
	op := "confirm recipients of school " + t.School
	if err := checkConfirmed(op, confirmed); err != nil {
		return err
	}
	notices, seqs, attempts := make([]int64, len(confirmed)), make([]int32, len(confirmed)), make([]int32, len(confirmed))
	for i, r := range confirmed {
		notices[i], seqs[i], attempts[i] = r.Notice, int32(r.Seq), int32(r.Change.Attempts)
	}
	return change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `SELECT schoolbell_confirm($1, $2, $3, $4, $5, $6)`, t.School, t.Fence, t.Acquisition, notices, seqs, attempts)
		return err
	})
}

func checkConfirmed(op string, confirmed []school.Recorded) error {
	for _, r := range confirmed {
		if r.Change.State != school.Success {
			return fmt.Errorf("%s: recipient %s: state %s is not what a confirmation writes", op, school.MessageID(r.Notice, r.Seq), r.Change.State)
		}
	}
	return nil
}
