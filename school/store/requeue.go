package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"schoolbell/school"
)

const (
	// requeueStep is how many recipients of a notice one step of a requeue looks at:
	// it holds the notice's lock for some tens of milliseconds, which is what a claim
	// or a record of that notice may have to wait.
	requeueStep = 5000
	// failureRows bounds how many recipients one call looks at.
	failureRows = 500_000
	// failureNotices is how many notices with failures are listed at once.
	failureNotices = 200
)

// requeuer is what an engine does to one stretch of a notice.
type requeuer interface {
	// clock is the time by which recipients failed.
	clock(ctx context.Context, op string) (time.Time, error)
	// requeueOneStep puts back what matches with a seq in (from, upto]. It answers
	// done, absent, cancelled, expired, purged or deleted.
	requeueOneStep(ctx context.Context, op string, o *school.RequeueOrder, notice int64, from, upto int) (outcome string, n int, err error)
}

// Requeue puts recipients that failed for good back, due at once: their retries
// begin anew, their attempts go on counting, a notice that had ended is open
// again. It works in short steps, each of which stands by itself, so it may be
// cut off and asked again: what was put back does not match any more. Where the
// order is larger than Limit, or than one call looks at, More asks to go on from
// Next. It wakes nobody: Schools names who has work now.
//
// Notices that were cancelled, have expired or were purged, and those of deleted
// schools, are left and counted, as is an outcome that is not known of an
// at-most-once notice unless Code names it. For an order of one notice that is
// left: school.ErrConflict, with why in Left; school.ErrNotFound where there is
// none.
//
// school.ErrUnavailable, school.ErrCommitUnknown, with what was done until then.
func (db *DB) Requeue(ctx context.Context, o school.RequeueOrder) (school.Requeued, error) {
	return requeue(ctx, db, db.readModels, o)
}

func requeue(ctx context.Context, db requeuer, models readModels, o school.RequeueOrder) (r school.Requeued, err error) {
	const op = "requeue"
	if o.Limit < 1 {
		return r, fmt.Errorf("%s: limit %d: at least 1", op, o.Limit)
	}
	if o.From.Before.IsZero() {
		if o.From.Before, err = db.clock(ctx, op); err != nil {
			return r, err
		}
	}
	place, looked := o.From, 0
	for {
		list, err := models.failedNotices(ctx, op, o.FailureFilter, place)
		if err != nil {
			return r, err
		}
		if len(list) == 0 && o.Notice != 0 && o.From.Notice == 0 {
			if _, err := models.Notice(ctx, o.Notice); err != nil {
				return r, fmt.Errorf("%s: %w", op, err)
			}
		}
		for _, n := range list {
			if n.ID != place.Notice {
				place.Notice, place.Seq = n.ID, 0
			}
			if r.Recipients >= o.Limit || looked > 0 && looked+n.TotalCount > failureRows {
				r.Next, r.More = place, true
				return r, nil
			}
			looked += n.TotalCount
			cut, err := requeueNotice(ctx, db, models, &o, n, &place, &r)
			if err != nil {
				return r, err
			}
			if cut {
				r.Next, r.More = place, true
				return r, nil
			}
			place.Seq = n.TotalCount
		}
		if len(list) < failureNotices {
			return r, nil
		}
	}
}

// requeueNotice works on one notice from place on, which it moves. cut says that
// the limit was reached in it.
func requeueNotice(ctx context.Context, db requeuer, models readModels, o *school.RequeueOrder, n failedNotice, place *school.RequeuePlace, r *school.Requeued) (cut bool, err error) {
	op := fmt.Sprintf("requeue notice %d", n.ID)
	if n.Outcome != requeueDone && o.Notice != 0 {
		leave(&r.Left, n.Outcome, n.PermanentFailCount)
		return false, fmt.Errorf("%s: %s: %w", op, n.Outcome, school.ErrConflict)
	}
	if n.Outcome == requeuePurged {
		r.Left.Purged += n.PermanentFailCount // there are no recipients to look at
		return false, nil
	}
	stretches, err := models.failedStretches(ctx, op, o, n, place.Seq)
	if err != nil {
		return false, err
	}
	for _, s := range stretches {
		if r.Recipients >= o.Limit {
			return true, nil
		}
		outcome, put := n.Outcome, s.Matching
		if outcome == requeueDone && s.Matching > 0 && !o.DryRun {
			outcome, put, err = db.requeueOneStep(ctx, op, o, n.ID, max(place.Seq, s.Stretch*requeueStep), (s.Stretch+1)*requeueStep)
			if err != nil {
				return false, err
			}
		}
		switch {
		case outcome == requeueDone:
			r.Recipients += put
			r.Left.OutcomeUnknown += s.Unknown
			if put > 0 && !o.DryRun && !slices.Contains(r.Schools, n.SchoolID) {
				r.Schools = append(r.Schools, n.SchoolID)
			}
		case o.Notice != 0: // since the list was read
			leave(&r.Left, outcome, s.Matching+s.Unknown)
			return false, fmt.Errorf("%s: %s: %w", op, outcome, school.ErrConflict)
		default:
			leave(&r.Left, outcome, s.Matching+s.Unknown)
		}
		place.Seq = (s.Stretch + 1) * requeueStep
	}
	return false, nil
}

// What a step of a requeue found of its notice.
const (
	requeueDone      = "done"
	requeueAbsent    = "absent"
	requeueCancelled = "cancelled"
	requeueExpired   = "expired"
	requeuePurged    = "purged"
	requeueDeleted   = "deleted" // its school is
)

func leave(l *school.RequeueLeft, outcome string, n int) {
	switch outcome {
	case requeueCancelled:
		l.Cancelled += n
	case requeueExpired:
		l.Expired += n
	case requeuePurged:
		l.Purged += n
	case requeueDeleted:
		l.SchoolDeleted += n
	}
}

func (db *DB) clock(ctx context.Context, op string) (now time.Time, err error) {
	return now, readError(op, db.reads.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now))
}

func (db *DB) requeueOneStep(ctx context.Context, op string, o *school.RequeueOrder, notice int64, from, upto int) (outcome string, n int, err error) {
	err = change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT outcome, n FROM schoolbell_requeue($1, $2, $3, $4, $5)`,
			notice, from, upto, stringOrNil(o.Code), o.From.Before).Scan(&outcome, &n)
	})
	return outcome, n, err
}

// failedNotice is a notice that has recipients that failed for good.
type failedNotice struct {
	ID                 int64
	SchoolID           string
	TotalCount         int
	PermanentFailCount int
	Delivery           string
	Title              string
	Outcome            string // what a requeue would find of it
}

// failedNotices lists notices with failures, by id from a place on. No index names
// a counter, so this goes through the notices of the school, or all.
func (r readModels) failedNotices(ctx context.Context, op string, f school.FailureFilter, from school.RequeuePlace) (list []failedNotice, err error) {
	err = r.run(ctx, op, func(q *gorm.DB) error {
		q = q.Table("push_clusters AS c").Select(`c.id, c.school_id, c.total_count, c.permanent_fail_count, c.delivery, c.title, CASE
			WHEN c.purged_at IS NOT NULL THEN 'purged'
			WHEN c.closing = 'CANCELLED' THEN 'cancelled'
			WHEN c.closing IS NOT NULL OR c.expires_at <= ? THEN 'expired'
			WHEN NOT EXISTS (SELECT 1 FROM schools AS s WHERE s.id = c.school_id) THEN 'deleted'
			ELSE 'done' END AS outcome`, r.when(from.Before)).
			Where("c.permanent_fail_count > 0 AND c.id >= ? AND (c.id > ? OR c.total_count > ?)", from.Notice, from.Notice, from.Seq).
			Order("c.id").Limit(failureNotices)
		return failedOf(q, f).Find(&list).Error
	})
	return list, err
}

func failedOf(q *gorm.DB, f school.FailureFilter) *gorm.DB {
	if f.School != "" {
		q = q.Where("c.school_id = ?", f.School)
	}
	if f.Notice != 0 {
		q = q.Where("c.id = ?", f.Notice)
	}
	return q
}

// failedAs is what a code selects.
func failedAs(q *gorm.DB, code string) *gorm.DB {
	q = q.Where("t.job_status = 'PERMANENT_FAIL'")
	if code != "" {
		q = q.Where("(t.error_code = ? OR t.reason = ?)", code, code)
	}
	return q
}

// failedStretch counts what matches in one stretch of a notice's recipients.
type failedStretch struct {
	Stretch  int // of requeueStep recipients, from 0
	Matching int
	Unknown  int // left since their outcome is not known
}

// failedStretches counts what a requeue of a notice matches beyond a seq, so that
// its steps need no more than the stretches that have any.
func (r readModels) failedStretches(ctx context.Context, op string, o *school.RequeueOrder, n failedNotice, after int) (list []failedStretch, err error) {
	left := "1 = 0"
	if n.Delivery == string(school.AtMostOnce) && o.Code != string(school.OutcomeUnknown) {
		left = "t.reason = 'OUTCOME_UNKNOWN'"
	}
	err = r.run(ctx, op, func(q *gorm.DB) error {
		q = q.Table("push_cluster_tokens AS t").
			Select("(t.seq - 1) / ? AS stretch, count(*) FILTER (WHERE NOT coalesce("+left+", 1 = 0)) AS matching, count(*) FILTER (WHERE "+left+") AS unknown", requeueStep).
			Where("t.cluster_id = ? AND t.seq > ? AND (t.processed_at IS NULL OR t.processed_at <= ?)", n.ID, after, r.when(o.From.Before)).
			Group("stretch").Order("stretch")
		return failedAs(q, o.Code).Find(&list).Error
	})
	return list, err
}

// failureModel is a group of failures.
type failureModel struct {
	ClusterID  int64
	Code       string
	Reason     string
	Recipients int
	LastAt     instant
}

// Failures lists recipients that failed for good in groups, newest notices first,
// by code and reason within one. school.ErrUnavailable; *school.FieldError for a
// limit outside 1 … 1000.
func (r readModels) Failures(ctx context.Context, f school.FailureFilter, after school.FailureKey, limit int) (school.FailureList, error) {
	const op = "failures"
	var page school.FailureList
	if err := checkLimit(op, limit); err != nil {
		return page, err
	}
	for looked := 0; ; {
		notices, more, err := r.failureNotices(ctx, op, f, after, looked)
		if err != nil {
			return page, err
		}
		if len(notices) == 0 {
			page.More = more
			page.Next = after
			if !more {
				page.Next = school.FailureKey{}
			}
			return page, nil
		}
		groups, err := r.failureGroups(ctx, op, f, notices)
		if err != nil {
			return page, err
		}
		for _, n := range notices {
			for _, g := range groups[n.ID] {
				at := school.FailureKey{Notice: n.ID, Code: g.Code, Reason: school.Reason(g.Reason)}
				if n.ID == after.Notice && !keyBefore(after, at) {
					continue
				}
				if len(page.Items) == limit {
					page.More = true
					return page, nil
				}
				page.Items = append(page.Items, school.Failure{School: n.SchoolID, Notice: n.ID, Title: n.Title, Code: g.Code,
					Reason: at.Reason, Recipients: g.Recipients, LastAt: g.LastAt.Time})
				page.Next = at
			}
			looked += n.TotalCount
			after = school.FailureKey{Notice: n.ID, Whole: true}
		}
	}
}

// keyBefore compares two places in one notice.
func keyBefore(a, b school.FailureKey) bool {
	return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(a.Reason, b.Reason)) < 0
}

// failureNotices lists the next notices that have failures, newest first, as far as
// their recipients may be looked at; at least one where nothing was looked at yet.
func (r readModels) failureNotices(ctx context.Context, op string, f school.FailureFilter, after school.FailureKey, looked int) (list []failedNotice, more bool, err error) {
	err = r.run(ctx, op, func(q *gorm.DB) error {
		q = q.Table("push_clusters AS c").Select("c.id, c.school_id, c.total_count, c.permanent_fail_count, c.delivery, c.title").
			Where("c.permanent_fail_count > 0 AND c.purged_at IS NULL").Order("c.id DESC").Limit(failureNotices)
		switch {
		case after.Whole:
			q = q.Where("c.id < ?", after.Notice)
		case after.Notice != 0:
			q = q.Where("c.id <= ?", after.Notice)
		}
		return failedOf(q, f).Find(&list).Error
	})
	for i, n := range list {
		if looked > 0 && looked+n.TotalCount > failureRows {
			return list[:i], true, err
		}
		looked += n.TotalCount
	}
	return list, false, err
}

func (r readModels) failureGroups(ctx context.Context, op string, f school.FailureFilter, notices []failedNotice) (map[int64][]failureModel, error) {
	ids := make([]int64, len(notices))
	for i, n := range notices {
		ids[i] = n.ID
	}
	var list []failureModel
	err := r.run(ctx, op, func(q *gorm.DB) error {
		q = q.Table("push_cluster_tokens AS t").
			Select("t.cluster_id, coalesce(t.error_code, '') AS code, coalesce(t.reason, '') AS reason, count(*) AS recipients, max(t.processed_at) AS last_at").
			Where("t.cluster_id IN ?", ids).Group("cluster_id, code, reason")
		return failedAs(q, f.Code).Find(&list).Error
	})
	groups := map[int64][]failureModel{}
	for _, g := range list {
		groups[g.ClusterID] = append(groups[g.ClusterID], g)
	}
	for _, g := range groups { // by byte, whatever collation the database has
		slices.SortFunc(g, func(a, b failureModel) int {
			return cmp.Or(cmp.Compare(a.Code, b.Code), cmp.Compare(a.Reason, b.Reason))
		})
	}
	return groups, err
}
