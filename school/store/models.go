package store

import (
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
	Priority    int
	Delivery    string
	ScheduledAt *time.Time
	ExpiresAt   *time.Time
	FirstSendAt *time.Time
	LastSendAt  *time.Time
	EndedAt     *time.Time
	CreatedAt   time.Time
	TraceParent string `gorm:"column:traceparent"`
	Title       string
	Body        string
	Data        map[string]string `gorm:"serializer:json"`
	Image       string
	Link        string

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
			ScheduledAt: orZero(m.ScheduledAt), ExpiresAt: orZero(m.ExpiresAt), TraceParent: m.TraceParent,
		},
		Status: school.Status(m.JobStatus),
		Counts: school.Counts{
			Total: m.TotalCount, Waiting: m.WaitingCount, InProgress: m.InProgressCount, RetryPending: m.RetryPendingCount,
			Success: m.SuccessCount, Fail: m.FailCount, RetrySuccess: m.RetrySuccessCount, RetryFail: m.RetryFailCount,
			PermanentFail: m.PermanentFailCount,
			Skipped: school.Skips{
				Disabled: m.SkippedDisabledCount, Cancelled: m.SkippedCancelledCount, Expired: m.SkippedExpiredCount,
				Duplicate: m.SkippedDuplicateCount, NotAllowed: m.SkippedNotAllowedCount,
			},
		},
		CreatedAt: m.CreatedAt, FirstSendAt: orZero(m.FirstSendAt), LastSendAt: orZero(m.LastSendAt), EndedAt: orZero(m.EndedAt),
	}, nil
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
