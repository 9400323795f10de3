package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// requeueMost is how many recipients are put back at once, about: some seconds of
// the store's time, in short steps.
const requeueMost = 100_000

// failurePage is which part of the failures.
type failurePage struct {
	filter school.FailureFilter
	after  school.FailureKey
	limit  int
}

func decodeFailureFilter(_ http.ResponseWriter, r *http.Request) (in failurePage, err error) {
	q, err := query(r, "school", "notice", "code", "cursor", "limit")
	if err != nil {
		return in, err
	}
	given := func(name string) *string {
		if !q.Has(name) {
			return nil
		}
		v := q.Get(name)
		return &v
	}
	if in.filter, err = failureFilter(given("school"), given("notice"), given("code")); err != nil {
		return in, err
	}
	if in.after, err = parseFailureKey(q.Get("cursor")); err != nil {
		return in, err
	}
	in.limit, err = limitOf(q)
	return in, err
}

// failureFilter checks a selection; nil is what was not given.
func failureFilter(schoolID, notice, code *string) (f school.FailureFilter, err error) {
	if schoolID != nil {
		if err := school.ValidateSchoolID("school", *schoolID); err != nil {
			return f, err
		}
		f.School = *schoolID
	}
	if notice != nil {
		if f.Notice, err = school.ParseNoticeID(*notice); err != nil {
			return f, invalid("notice", "must be the id of a notice")
		}
	}
	if code != nil {
		if *code == "" || !validCode(*code) {
			return f, invalid("code", "must be an error code such as INVALID_ARGUMENT, or a reason such as RETRIES_EXHAUSTED")
		}
		f.Code = *code
	}
	return f, nil
}

// validCode reports whether s can be an error code, or is empty.
func validCode(s string) bool {
	return len(s) <= 128 && !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' })
}

// failureKeyText is a cursor: the notice alone, or with code and reason.
func failureKeyText(k school.FailureKey) string {
	id := strconv.FormatInt(k.Notice, 10)
	if k.Whole {
		return id
	}
	return id + "/" + k.Code + "/" + string(k.Reason)
}

func parseFailureKey(s string) (k school.FailureKey, err error) {
	if s == "" {
		return k, nil
	}
	id, rest, parted := strings.Cut(s, "/")
	if k.Notice, err = school.ParseNoticeID(id); err != nil {
		return k, badCursor()
	}
	if k.Whole = !parted; k.Whole {
		return k, nil
	}
	i := strings.LastIndexByte(rest, '/')
	if i < 0 || !validCode(rest[:i]) || !validCode(rest[i+1:]) {
		return k, badCursor()
	}
	k.Code, k.Reason = rest[:i], school.Reason(rest[i+1:])
	return k, nil
}

func (s *Server) listFailures(ctx context.Context, in failurePage) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := s.allowFailures(ctx, in.filter); err != nil {
		return answer{}, err
	}
	list, err := s.deps.Notices.Failures(ctx, in.filter, in.after, in.limit)
	if err != nil {
		return answer{}, fmt.Errorf("list failures: %w", err)
	}
	out := api.List[api.Failure]{Items: make([]api.Failure, len(list.Items))}
	for i, f := range list.Items {
		out.Items[i] = api.Failure{
			School: f.School, Notice: strconv.FormatInt(f.Notice, 10), Title: f.Title, ErrorCode: f.Code, Reason: string(f.Reason),
			Recipients: f.Recipients, LastFailedAt: moment(f.LastAt),
		}
	}
	if list.More {
		out.Next = failureKeyText(list.Next)
	}
	return answer{body: out}, nil
}

// allowFailures asks whether the key may touch what a selection names: another
// school's notice is not found, and a key that is limited to some schools names one.
func (s *Server) allowFailures(ctx context.Context, f school.FailureFilter) error {
	if f.School != "" {
		if err := allow(ctx, f.School); err != nil {
			return err
		}
	}
	if f.Notice != 0 {
		_, err := s.readableNotice(ctx, f.Notice)
		return err
	}
	if f.School == "" && infoOf(ctx).principal.Schools != nil {
		return &api.Error{Code: api.PermissionDenied, Field: "school", Message: "the key is for some schools only; name one of them"}
	}
	return nil
}

func (s *Server) decodeRequeue(w http.ResponseWriter, r *http.Request) (o school.RequeueOrder, err error) {
	if _, err := mediaType(r.Header, api.JSON); err != nil {
		return o, err
	}
	body, release, err := s.readBody(w, r)
	if err != nil {
		return o, err
	}
	defer release()
	return decodeRequeue(body)
}

func decodeRequeue(data []byte) (o school.RequeueOrder, err error) {
	var (
		schoolID, notice, code *string
		cursor                 string
	)
	r := newJSONReader(data)
	if r.next() == 0 && r.pos == len(data) {
		return o, emptyBody(requeueForm)
	}
	text := func(p path, to **string) error {
		s, given, err := r.text(p)
		if given {
			*to = &s
		}
		return err
	}
	ok, err := r.object(path{}, requeueShape, func(name string, p path) (err error) {
		switch name {
		case "school":
			err = text(p, &schoolID)
		case "notice":
			err = text(p, &notice)
		case "code":
			err = text(p, &code)
		case "dry_run":
			var dry *bool
			if dry, err = r.flag(p); dry != nil {
				o.DryRun = *dry
			}
		case "cursor":
			err = r.set(p, &cursor)
		}
		return err
	})
	switch {
	case err != nil:
		return o, err
	case !ok:
		return o, r.invalid(path{}, mustBeObject(path{}))
	}
	if err := r.end(path{}); err != nil {
		return o, err
	}
	if o.FailureFilter, err = failureFilter(schoolID, notice, code); err != nil {
		return o, err
	}
	if o.FailureFilter == (school.FailureFilter{}) {
		return o, invalid("", "names nothing; give school, notice or code, such as "+requeueForm)
	}
	o.From, err = parseRequeuePlace(cursor)
	return o, err
}

// requeuePlaceText is a cursor: notice, seq, and the store's time in microseconds
// before which a recipient had failed.
func requeuePlaceText(p school.RequeuePlace) string {
	return fmt.Sprintf("%d.%d.%d", p.Notice, p.Seq, p.Before.UnixMicro())
}

func parseRequeuePlace(s string) (p school.RequeuePlace, err error) {
	if s == "" {
		return p, nil
	}
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return p, badCursor()
	}
	var n [3]int64
	for i := range parts {
		if n[i], err = strconv.ParseInt(parts[i], 10, 64); err != nil || n[i] < 0 {
			return p, badCursor()
		}
	}
	if n[1] > school.MaxRecipients {
		return p, badCursor()
	}
	return school.RequeuePlace{Notice: n[0], Seq: int(n[1]), Before: time.UnixMicro(n[2])}, nil
}

func (s *Server) requeue(ctx context.Context, o school.RequeueOrder) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := s.allowFailures(ctx, o.FailureFilter); err != nil {
		return answer{}, err
	}
	o.Limit = requeueMost
	r, err := s.putBack(ctx, o)
	if err != nil {
		return answer{}, err
	}
	return answer{body: showRequeued(o, r)}, nil
}

// retryNotice goes on until the notice is done or the call has lasted long.
func (s *Server) retryNotice(ctx context.Context, id int64) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	o := school.RequeueOrder{FailureFilter: school.FailureFilter{Notice: id}, Limit: requeueMost}
	if err := s.allowFailures(ctx, o.FailureFilter); err != nil {
		return answer{}, err
	}
	enough, stop := context.WithTimeout(ctx, s.cfg.AcceptTimeout/2)
	defer stop()
	var sum school.Requeued
	for {
		r, err := s.putBack(ctx, o)
		if err != nil {
			return answer{}, err
		}
		sum.Recipients += r.Recipients
		sum.Left.OutcomeUnknown += r.Left.OutcomeUnknown
		sum.Next, sum.More = r.Next, r.More
		if !r.More || enough.Err() != nil {
			return answer{body: showRequeued(o, sum)}, nil
		}
		o.From = r.Next
	}
}

// putBack requeues and wakes the schools, also of what was done before an error.
func (s *Server) putBack(ctx context.Context, o school.RequeueOrder) (school.Requeued, error) {
	r, err := s.deps.Notices.Requeue(ctx, o)
	if len(r.Schools) > 0 {
		s.deps.Waker.Wake(r.Schools...)
	}
	switch {
	case err == nil:
		return r, nil
	case errors.Is(err, school.ErrNotFound):
		return r, notFound("notice", strconv.FormatInt(o.Notice, 10))
	case errors.Is(err, school.ErrConflict):
		return r, &api.Error{Code: api.Conflict, Message: whyNoMore(r.Left)}
	}
	return r, fmt.Errorf("requeue failures: %w", err)
}

// whyNoMore says why a notice takes no more attempts.
func whyNoMore(l school.RequeueLeft) string {
	switch {
	case l.Cancelled > 0:
		return "the notice was cancelled; it takes no more attempts"
	case l.Expired > 0:
		return "the notice has expired; it takes no more attempts"
	case l.SchoolDeleted > 0:
		return "the notice's school was deleted"
	}
	return "the notice's recipients were removed, as they are some time after its end"
}

func showRequeued(o school.RequeueOrder, r school.Requeued) api.Requeued {
	out := api.Requeued{Requeued: r.Recipients, DryRun: o.DryRun, Left: api.RequeueLeft(r.Left)}
	if r.More {
		out.Next = requeuePlaceText(r.Next)
	}
	return out
}
