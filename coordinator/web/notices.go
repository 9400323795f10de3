package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

func (s *Server) acceptNotice(ctx context.Context, sub *submission) (answer, error) {
	storing, cancel := context.WithTimeout(ctx, sub.accept)
	defer cancel()
	rc, err := s.deps.Notices.Accept(storing, sub.notice, sub.total, sub.recipients)
	if err != nil {
		return answer{}, fmt.Errorf("accept notice of school %s: %w", sub.notice.School, err)
	}
	// Also for a repeat: the hint of the first time may have died with a replica.
	s.deps.Waker.Wake(rc.School)
	id := strconv.FormatInt(rc.ID, 10)
	infoOf(ctx).notice = id
	h := http.Header{"Location": {"/v1/notices/" + id}}
	if rc.Replay {
		h.Set("Idempotent-Replayed", "true")
	} else {
		s.metrics.accepted.Inc()
	}
	// A repeat gets the first answer to the letter, however far the notice has
	// come since; where it stands is for GET to say. A notice to a topic that no
	// device has is no error of its school: it has ended.
	status := school.NoticePending
	if rc.Total == 0 {
		status = school.NoticeCompleted
	}
	return answer{status: http.StatusAccepted, header: h,
		body: api.Accepted{ID: id, School: rc.School, Status: string(status), Total: rc.Total}}, nil
}

func (s *Server) getNotice(ctx context.Context, id int64) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	p, err := s.readableNotice(ctx, id)
	if err != nil {
		return answer{}, err
	}
	out := noticeOf(&p)
	out.Body, out.Data = p.Notice.Content.Body, p.Notice.Content.Data
	if f := p.Fallbacks; f != nil {
		out.Fallback = &api.Fallbacks{Pending: f.Pending, Sent: f.Sent, Failed: f.Failed}
	}
	if p.EndedAt.IsZero() {
		b, err := s.deps.Schools.School(ctx, p.Notice.School)
		if err != nil {
			return answer{}, fmt.Errorf("read school %s: %w", p.Notice.School, err)
		}
		out.ExpectedEndAt = moment(expectedEnd(s.deps.Now(), &p, &b, s.ruleOf(&b.School)))
	}
	return answer{body: out}, nil
}

// cancelNotice answers with the notice as it stands then: IN_PROGRESS with closing
// set while calls in flight have not ended. Cancelling again answers the same.
func (s *Server) cancelNotice(ctx context.Context, id int64) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if _, err := s.readableNotice(ctx, id); err != nil {
		return answer{}, err
	}
	switch err := s.deps.Notices.Cancel(ctx, id); {
	case errors.Is(err, school.ErrConflict):
		// No Retry-After: it will not become possible.
		return answer{}, &api.Error{Code: api.Conflict, Message: "the notice has ended or expired; there is nothing to cancel"}
	case err != nil:
		return answer{}, fmt.Errorf("cancel notice %d: %w", id, err)
	}
	return s.getNotice(ctx, id)
}

// readableNotice reads a notice of a school that the key may touch. Another's
// is not found rather than forbidden: ids of other schools are not this key's
// business.
func (s *Server) readableNotice(ctx context.Context, id int64) (school.Progress, error) {
	p, err := s.deps.Notices.Notice(ctx, id)
	switch {
	case errors.Is(err, school.ErrNotFound), err == nil && allow(ctx, p.Notice.School) != nil:
		return school.Progress{}, notFound("notice", strconv.FormatInt(id, 10))
	case err != nil:
		return p, fmt.Errorf("read notice %d: %w", id, err)
	}
	return p, nil
}

func (s *Server) listNotices(ctx context.Context, f school.NoticeFilter) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	switch {
	case f.School != "":
		if err := allow(ctx, f.School); err != nil {
			return answer{}, err
		}
	case infoOf(ctx).principal.Schools != nil:
		return answer{}, &api.Error{Code: api.PermissionDenied, Field: "school", Message: "the key is for some schools only; name one of them with ?school="}
	}
	list, err := s.deps.Notices.Notices(ctx, f)
	if err != nil {
		return answer{}, fmt.Errorf("list notices: %w", err)
	}
	items := make([]api.Notice, len(list))
	for i := range list {
		items[i] = noticeOf(&list[i])
	}
	return answer{body: page(items, f.Limit, func(last api.Notice) string { return last.ID })}, nil
}

func (s *Server) listRecipients(ctx context.Context, in recipientsOf) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	p, err := s.readableNotice(ctx, in.notice)
	if err != nil {
		return answer{}, err
	}
	if !p.PurgedAt.IsZero() { // those that are left are about to go: half a list would look like a whole one
		return answer{body: api.RecipientList{List: api.List[api.RecipientStatus]{Items: []api.RecipientStatus{}}, PurgedAt: moment(p.PurgedAt)}}, nil
	}
	rows, err := s.deps.Notices.Recipients(ctx, in.notice, in.filter)
	if err != nil {
		return answer{}, fmt.Errorf("list recipients of notice %d: %w", in.notice, err)
	}
	items := make([]api.RecipientStatus, len(rows))
	for i, r := range rows {
		items[i] = api.RecipientStatus{
			Seq: r.Seq, Ref: r.Ref, MessageID: r.MessageID, Token: r.Token, State: string(r.State), Attempts: r.Attempts,
			ErrorCode: r.Code, Reason: string(r.Reason), NextTryAt: moment(r.NextTryAt), Fallback: string(r.Fallback),
		}
	}
	return answer{body: page(items, in.filter.Limit, func(last api.RecipientStatus) string { return strconv.Itoa(last.Seq) })}, nil
}

// noticeOf shows a notice as lists do, without its longer texts.
func noticeOf(p *school.Progress) api.Notice {
	n, c := &p.Notice, &p.Counts
	return api.Notice{
		ID: strconv.FormatInt(n.ID, 10), School: n.School, Status: string(p.Status),
		Counts: api.Counts{
			Total: c.Total, Waiting: c.Waiting, InProgress: c.InProgress, Success: c.Success, Fail: c.Fail,
			RetrySuccess: c.RetrySuccess, RetryFail: c.RetryFail, RetryPending: c.RetryPending, PermanentFail: c.PermanentFail,
			Skipped: api.Skipped(c.Skipped),
		},
		Title: n.Content.Title, Image: n.Content.Image, Link: n.Content.Link, Topic: n.Topic,
		Priority: string(n.Priority), Delivery: string(n.Delivery),
		CreatedAt: p.CreatedAt.UTC(), ScheduledAt: moment(n.ScheduledAt), ExpiresAt: moment(n.ExpiresAt),
		Closing: string(p.Closing), FirstSendAt: moment(p.FirstSendAt), LastSendAt: moment(p.LastSendAt), EndedAt: moment(p.EndedAt), PurgedAt: moment(p.PurgedAt),
	}
}

// moment shows a time, or nothing for the zero time.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
