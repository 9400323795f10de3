package store

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"

	"schoolbell/school"
)

// maxList bounds every list (R37).
const maxList = 1000

func checkLimit(op string, limit int) error {
	if limit < 1 || limit > maxList {
		return fmt.Errorf("%s: %w", op, &school.FieldError{Field: "limit", Message: fmt.Sprintf("must be 1 to %d", maxList)})
	}
	return nil
}

// readModels are what people look at, through gorm, on either engine. run gives
// a session and says what its error means.
type readModels struct {
	run  func(ctx context.Context, op string, fn func(q *gorm.DB) error) error
	when func(t time.Time) any // a time as the engine stores it
}

// Notice returns a notice with what became of it so far. school.ErrNotFound,
// school.ErrUnavailable.
func (r readModels) Notice(ctx context.Context, id int64) (school.Progress, error) {
	op := fmt.Sprintf("notice %d", id)
	var m noticeModel
	var fallbacks *school.FallbackCounts
	err := r.run(ctx, op, func(q *gorm.DB) error {
		err := q.Where("id = ?", id).Take(&m).Error
		if err == nil && m.FallbackSMS != nil && m.PurgedAt.IsZero() { // they go with the recipients
			fallbacks, err = countFallbacks(q, id)
		}
		return err
	})
	if err != nil {
		return school.Progress{}, err
	}
	p, err := m.progress()
	p.Fallbacks = fallbacks
	return p, err
}

// Notices lists notices, newest first. school.ErrUnavailable; *school.FieldError
// for a limit outside 1 … 1000.
func (r readModels) Notices(ctx context.Context, f school.NoticeFilter) ([]school.Progress, error) {
	const op = "notices"
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	var list []noticeModel
	err := r.run(ctx, op, func(q *gorm.DB) error {
		q = q.Order("id DESC").Limit(f.Limit)
		if f.School != "" {
			q = q.Where("school_id = ?", f.School)
		}
		if f.Status != "" {
			q = q.Where("job_status = ?", string(f.Status))
		}
		if f.Before != 0 {
			q = q.Where("id < ?", f.Before)
		}
		return q.Find(&list).Error
	})
	if err != nil {
		return nil, err
	}
	notices := make([]school.Progress, len(list))
	for i := range list {
		var err error
		if notices[i], err = list[i].progress(); err != nil {
			return nil, err
		}
	}
	return notices, nil
}

// recipientModel is a row of push_cluster_token_states: the state as people know
// it, the token shortened.
type recipientModel struct {
	ClusterID  int64
	Seq        int
	Ref        *string
	Token      string
	JobStatus  string
	Attempts   int
	ErrorCode  *string
	Reason     *string
	RetryAfter instant
}

func (recipientModel) TableName() string { return "push_cluster_token_states" }

// Recipients lists recipients of one notice in order of seq, IN_PROGRESS worked
// out and tokens shortened. school.ErrNotFound, school.ErrUnavailable;
// *school.FieldError for a limit outside 1 … 1000.
func (r readModels) Recipients(ctx context.Context, id int64, f school.RecipientFilter) ([]school.RecipientRow, error) {
	op := fmt.Sprintf("recipients of notice %d", id)
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	var list []recipientModel
	var fallbacks map[int]school.PostState
	err := r.run(ctx, op, func(session *gorm.DB) error {
		q := session.Where("cluster_id = ? AND seq > ?", id, f.After).Order("seq").Limit(f.Limit)
		if f.State != "" {
			q = q.Where("job_status = ?", string(f.State))
		}
		if f.Code != "" {
			q = q.Where("error_code = ?", f.Code)
		}
		if err := q.Find(&list).Error; err != nil {
			return err
		}
		if len(list) > 0 {
			var err error
			fallbacks, err = fallbacksOf(session, id, list[0].Seq, list[len(list)-1].Seq)
			return err
		}
		var known noticeModel
		return session.Select("id").Where("id = ?", id).Take(&known).Error
	})
	if err != nil {
		return nil, err
	}
	rows := make([]school.RecipientRow, len(list))
	for i := range list {
		m := &list[i]
		rows[i] = school.RecipientRow{
			Seq: m.Seq, Ref: orEmpty(m.Ref), MessageID: school.MessageID(m.ClusterID, m.Seq), Token: m.Token,
			State: school.State(m.JobStatus), Attempts: m.Attempts, Code: orEmpty(m.ErrorCode),
			Reason: school.Reason(orEmpty(m.Reason)), NextTryAt: m.RetryAfter.Time, Fallback: fallbacks[m.Seq],
		}
	}
	return rows, nil
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
