package store

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"schoolbell/school"
)

// Priorities are numbers in the database, since they are ordered there.
var priorities = []school.Priority{school.Urgent, school.Normal, school.Low}

func priorityNumber(p school.Priority) (int, error) {
	if p == "" {
		p = school.Normal
	}
	for i, known := range priorities {
		if p == known {
			return i, nil
		}
	}
	return 0, &school.FieldError{Field: "priority", Message: "must be urgent, normal or low"}
}

func priorityWord(n int) (school.Priority, error) {
	if n < 0 || n >= len(priorities) {
		return "", fmt.Errorf("priority %d is none", n)
	}
	return priorities[n], nil
}

// noticeModel is a row of push_clusters without its bookkeeping.
type noticeModel struct {
	ID          int64
	SchoolID    string
	JobStatus   string
	Closing     *string
	Priority    int
	Delivery    string
	ScheduledAt instant
	ExpiresAt   instant
	FirstSendAt instant
	LastSendAt  instant
	EndedAt     instant
	PurgedAt    instant
	CreatedAt   instant
	TraceParent string `gorm:"column:traceparent"`
	Title       string
	Body        string
	Data        map[string]string `gorm:"serializer:json"`
	Image       string
	Link        string
	Topic       *string
	FallbackSMS *string `gorm:"column:fallback_sms"`

	TotalCount             int
	WaitingCount           int
	InProgressCount        int
	RetryPendingCount      int
	SuccessCount           int
	FailCount              int
	RetrySuccessCount      int
	RetryFailCount         int
	PermanentFailCount     int
	SkippedDisabledCount   int
	SkippedCancelledCount  int
	SkippedExpiredCount    int
	SkippedDuplicateCount  int
	SkippedNotAllowedCount int
}

func (noticeModel) TableName() string { return "push_clusters" }

func (m *noticeModel) progress() (school.Progress, error) {
	priority, err := priorityWord(m.Priority)
	if err != nil {
		return school.Progress{}, fmt.Errorf("notice %d: %w", m.ID, err)
	}
	return school.Progress{
		Notice: school.Notice{
			ID: m.ID, School: m.SchoolID,
			Content:  school.Content{Title: m.Title, Body: m.Body, Data: m.Data, Image: m.Image, Link: m.Link},
			Priority: priority, Delivery: school.Delivery(m.Delivery),
			ScheduledAt: m.ScheduledAt.Time, ExpiresAt: m.ExpiresAt.Time, TraceParent: m.TraceParent, Topic: orEmpty(m.Topic),
			Fallback: orEmpty(m.FallbackSMS),
		},
		Status: school.Status(m.JobStatus), Closing: school.Reason(orEmpty(m.Closing)),
		Counts: school.Counts{
			Total: m.TotalCount, Waiting: m.WaitingCount, InProgress: m.InProgressCount, RetryPending: m.RetryPendingCount,
			Success: m.SuccessCount, Fail: m.FailCount, RetrySuccess: m.RetrySuccessCount, RetryFail: m.RetryFailCount,
			PermanentFail: m.PermanentFailCount,
			Skipped: school.Skips{
				Disabled: m.SkippedDisabledCount, Cancelled: m.SkippedCancelledCount, Expired: m.SkippedExpiredCount,
				Duplicate: m.SkippedDuplicateCount, NotAllowed: m.SkippedNotAllowedCount,
			},
		},
		CreatedAt: m.CreatedAt.Time, FirstSendAt: m.FirstSendAt.Time, LastSendAt: m.LastSendAt.Time, EndedAt: m.EndedAt.Time, PurgedAt: m.PurgedAt.Time,
	}, nil
}

// instant is a time as either engine gives it: PostgreSQL a timestamp, SQLite
// microseconds since 1970. NULL is the zero time.
type instant struct{ time.Time }

// Scan implements sql.Scanner.
func (i *instant) Scan(v any) error {
	switch v := v.(type) {
	case nil:
		i.Time = time.Time{}
	case time.Time:
		i.Time = v
	case int64:
		i.Time = time.UnixMicro(v).UTC()
	default:
		return fmt.Errorf("a time of type %T", v)
	}
	return nil
}

// Value implements driver.Valuer, without which gorm takes the field for a
// table. Nothing is written through it.
func (i instant) Value() (driver.Value, error) {
	return nil, errors.New("a read model is not written")
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// restMillis is how a rest is stored.
func restMillis(d time.Duration) int64 { return d.Milliseconds() }

func restFromMillis(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }
