package store

import (
	"context"
	"errors"
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

// Notice returns a notice with what became of it so far. school.ErrNotFound,
// school.ErrUnavailable.
func (db *DB) Notice(ctx context.Context, id int64) (school.Progress, error) {
	op := fmt.Sprintf("notice %d", id)
	var m noticeModel
	err := db.models.WithContext(ctx).Where("id = ?", id).Take(&m).Error
	if errors.Is(err, gorm.ErrRecordNotFound) {
		return school.Progress{}, fmt.Errorf("%s: %w", op, school.ErrNotFound)
	}
	if err != nil {
		return school.Progress{}, readError(op, err)
	}
	return m.progress()
}

// Notices lists notices, newest first. school.ErrUnavailable; *school.FieldError
// for a limit outside 1 … 1000.
func (db *DB) Notices(ctx context.Context, f school.NoticeFilter) ([]school.Progress, error) {
	const op = "notices"
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	q := db.models.WithContext(ctx).Order("id DESC").Limit(f.Limit)
	if f.School != "" {
		q = q.Where("school_id = ?", f.School)
	}
	if f.Status != "" {
		q = q.Where("job_status = ?", string(f.Status))
	}
	if f.Before != 0 {
		q = q.Where("id < ?", f.Before)
	}
	var list []noticeModel
	if err := q.Find(&list).Error; err != nil {
		return nil, readError(op, err)
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
	RetryAfter *time.Time
}

func (recipientModel) TableName() string { return "push_cluster_token_states" }

// Recipients lists recipients of one notice in order of seq, IN_PROGRESS worked
// out and tokens shortened. school.ErrNotFound, school.ErrUnavailable;
// *school.FieldError for a limit outside 1 … 1000.
func (db *DB) Recipients(ctx context.Context, id int64, f school.RecipientFilter) ([]school.RecipientRow, error) {
	op := fmt.Sprintf("recipients of notice %d", id)
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	q := db.models.WithContext(ctx).Where("cluster_id = ? AND seq > ?", id, f.After).Order("seq").Limit(f.Limit)
	if f.State != "" {
		q = q.Where("job_status = ?", string(f.State))
	}
	if f.Code != "" {
		q = q.Where("error_code = ?", f.Code)
	}
	var list []recipientModel
	if err := q.Find(&list).Error; err != nil {
		return nil, readError(op, err)
	}
	if len(list) == 0 {
		var n int64
		if err := db.models.WithContext(ctx).Model(&noticeModel{}).Where("id = ?", id).Limit(1).Count(&n).Error; err != nil {
			return nil, readError(op, err)
		}
		if n == 0 {
			return nil, fmt.Errorf("%s: %w", op, school.ErrNotFound)
		}
	}
	rows := make([]school.RecipientRow, len(list))
	for i := range list {
		m := &list[i]
		rows[i] = school.RecipientRow{
			Seq: m.Seq, Ref: orEmpty(m.Ref), MessageID: school.MessageID(m.ClusterID, m.Seq), Token: m.Token,
			State: school.State(m.JobStatus), Attempts: m.Attempts, Code: orEmpty(m.ErrorCode),
			Reason: school.Reason(orEmpty(m.Reason)), NextTryAt: orZero(m.RetryAfter),
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
