package store

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"schoolbell/school"
)

// smsKind is the one kind of fallback that there is.
const smsKind = "sms"

// giveFallbackSQL goes with the statement that made the notice, in its
// transaction, and only for a notice that has a fallback: the functions that make
// notices need not know of it.
const giveFallbackSQL = `SELECT schoolbell_give_fallback($1, $2, $3)`

// recordFallbackSQL goes with the statement that records a batch, in its
// transaction and its round trip, and only where there is a fallback to make. A
// record that is repeated makes none twice, and neither does a recipient that
// fails again after a requeue.
const recordFallbackSQL = `INSERT INTO push_fallbacks (cluster_id, seq, school_id, kind, retry_after)
	SELECT x.notice, x.seq, $1, '` + smsKind + `', clock_timestamp() FROM unnest($2::bigint[], $3::integer[]) AS x(notice, seq)
	ON CONFLICT DO NOTHING`

// askAccept calls a function that makes a notice, with its fallback.
func askAccept(ctx context.Context, c *pgx.Conn, sql string, args []any, n *school.Notice, o *opened) error {
	if n.Fallback == "" {
		return c.QueryRow(ctx, sql, args...).Scan(&o.outcome, &o.id, &o.status, &o.total)
	}
	var batch pgx.Batch
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(&o.outcome, &o.id, &o.status, &o.total) })
	batch.Queue(giveFallbackSQL, args[0], n.School, n.Fallback)
	return c.SendBatch(ctx, &batch).Close()
}

// ClaimFallbacks takes up to limit fallbacks that are due, oldest first, and
// counts a try of each. For the lease they are nobody else's; whoever has posted
// one says so with SettleFallback, and one of which nothing is heard is due again
// when the lease ends. school.ErrUnavailable, school.ErrCommitUnknown: what was
// taken comes back with the lease.
func (db *DB) ClaimFallbacks(ctx context.Context, limit int, lease time.Duration) (list []school.Fallback, err error) {
	err = change(ctx, db.dispatch, "claim fallbacks", func(c *pgx.Conn) error {
		rows, err := c.Query(ctx, `SELECT cluster_id, seq, school_id, ref, sms, attempt, age_us, void FROM schoolbell_claim_fallbacks($1, $2)`,
			limit, lease.Microseconds())
		if err != nil {
			return err
		}
		list, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f school.Fallback, err error) {
			var age int64
			err = row.Scan(&f.Notice, &f.Seq, &f.School, &f.Ref, &f.Text, &f.Attempt, &age, &f.Void)
			f.Age = micros(age)
			return f, err
		})
		return err
	})
	return list, err
}

// SettleFallback writes what became of a try. One that was claimed again
// meanwhile is left to its new owner, unless it was sent: that holds whoever
// says so. Saying it twice is no error. school.ErrUnavailable,
// school.ErrCommitUnknown: to be tried again.
func (db *DB) SettleFallback(ctx context.Context, f school.Fallback, p school.Posted) error {
	return change(ctx, db.dispatch, "settle fallback "+f.ID(), func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `UPDATE push_fallbacks SET job_status = $4, error_code = $5,
				retry_after = CASE WHEN $4 = 'PENDING' THEN clock_timestamp() + $6 * interval '1 microsecond' END,
				sent_at = CASE WHEN $4 = 'SENT' THEN clock_timestamp() END
			WHERE cluster_id = $1 AND seq = $2 AND job_status = 'PENDING' AND (attempts = $3 OR $4 = 'SENT')`,
			f.Notice, f.Seq, f.Attempt, string(p.State), stringOrNil(p.Code), p.RetryIn.Microseconds())
		return err
	})
}

// fallbackModel is a row of push_fallbacks.
type fallbackModel struct {
	Seq       int
	JobStatus string
	N         int
}

func (fallbackModel) TableName() string { return "push_fallbacks" }

// countFallbacks counts a notice's fallbacks by state.
func countFallbacks(q *gorm.DB, notice int64) (*school.FallbackCounts, error) {
	var list []fallbackModel
	if err := q.Select("job_status, count(*) AS n").Where("cluster_id = ?", notice).Group("job_status").Find(&list).Error; err != nil {
		return nil, err
	}
	c := &school.FallbackCounts{}
	for _, m := range list {
		switch school.PostState(m.JobStatus) {
		case school.PostPending:
			c.Pending = m.N
		case school.PostSent:
			c.Sent = m.N
		case school.PostFailed:
			c.Failed = m.N
		default:
			return nil, fmt.Errorf("fallbacks in state %q", m.JobStatus)
		}
	}
	return c, nil
}

// fallbacksOf are the states of the fallbacks of a range of a notice's
// recipients, by seq.
func fallbacksOf(q *gorm.DB, notice int64, from, to int) (map[int]school.PostState, error) {
	var list []fallbackModel
	if err := q.Select("seq, job_status").Where("cluster_id = ? AND seq BETWEEN ? AND ?", notice, from, to).Find(&list).Error; err != nil {
		return nil, err
	}
	states := make(map[int]school.PostState, len(list))
	for _, m := range list {
		states[m.Seq] = school.PostState(m.JobStatus)
	}
	return states, nil
}
