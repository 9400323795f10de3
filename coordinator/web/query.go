package web

import (
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

const (
	defaultLimit = 100
	maxLimit     = 1000
)

// query reads the parameters of a request's query. One that is not known is
// refused: a misspelt filter that is left out silently shows too much.
func query(r *http.Request, known ...string) (url.Values, error) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, invalid("", "the query string is malformed")
	}
	for name, values := range q {
		switch {
		case !slices.Contains(known, name):
			return nil, invalid(school.Printable(name), "is not a parameter of this call; it takes "+strings.Join(known, ", "))
		case len(values) > 1:
			return nil, invalid(name, "is given twice")
		}
	}
	return q, nil
}

func limitOf(q url.Values) (int, error) {
	if !q.Has("limit") {
		return defaultLimit, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > maxLimit {
		return 0, invalid("limit", "must be between 1 and 1000")
	}
	return n, nil
}

// cursorOf reads a cursor that is a number; 0 where there is none.
func cursorOf(q url.Values) (int64, error) {
	if !q.Has("cursor") || q.Get("cursor") == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(q.Get("cursor"), 10, 64)
	if err != nil || n < 1 {
		return 0, badCursor()
	}
	return n, nil
}

func badCursor() error { return invalid("cursor", "must be the next of the page before") }

func decodeNoticeFilter(_ http.ResponseWriter, r *http.Request) (school.NoticeFilter, error) {
	var f school.NoticeFilter
	q, err := query(r, "school", "status", "cursor", "limit")
	if err != nil {
		return f, err
	}
	f.School = q.Get("school")
	if q.Has("school") {
		if err := school.ValidateSchoolID("school", f.School); err != nil {
			return f, err
		}
	}
	f.Status = school.Status(q.Get("status"))
	switch f.Status {
	case "", school.NoticePending, school.NoticeInProgress, school.NoticeCompleted, school.NoticeCancelled:
	default:
		return f, invalid("status", "must be PENDING, IN_PROGRESS, COMPLETED or CANCELLED")
	}
	if f.Before, err = cursorOf(q); err != nil {
		return f, err
	}
	f.Limit, err = limitOf(q)
	return f, err
}

func decodeNoticeID(_ http.ResponseWriter, r *http.Request) (int64, error) {
	id, err := school.ParseNoticeID(pathParam(r, "id"))
	if err != nil {
		return 0, notFound("notice", pathParam(r, "id"))
	}
	infoOf(r.Context()).notice = strconv.FormatInt(id, 10)
	return id, nil
}

// recipientsOf is which recipients of which notice.
type recipientsOf struct {
	notice int64
	filter school.RecipientFilter
}

func decodeRecipientFilter(w http.ResponseWriter, r *http.Request) (in recipientsOf, err error) {
	if in.notice, err = decodeNoticeID(w, r); err != nil {
		return in, err
	}
	q, err := query(r, "state", "error", "cursor", "limit")
	if err != nil {
		return in, err
	}
	f := &in.filter
	f.State = school.State(q.Get("state"))
	switch f.State {
	case "", school.Pending, school.InProgress, school.Success, school.Fail, school.RetryPending, school.PermanentFail, school.Skipped:
	default:
		return in, invalid("state", "must be PENDING, IN_PROGRESS, SUCCESS, FAIL, RETRY_PENDING, PERMANENT_FAIL or SKIPPED")
	}
	f.Code = q.Get("error")
	if !validCode(f.Code) {
		return in, invalid("error", "must be an error code such as UNREGISTERED")
	}
	after, err := cursorOf(q)
	if err != nil {
		return in, err
	}
	if after > school.MaxRecipients {
		return in, badCursor()
	}
	f.After = int(after)
	f.Limit, err = limitOf(q)
	return in, err
}

// schoolPage is which part of the list of schools.
type schoolPage struct {
	after string
	limit int
}

func decodeSchoolPage(_ http.ResponseWriter, r *http.Request) (schoolPage, error) {
	var p schoolPage
	q, err := query(r, "cursor", "limit")
	if err != nil {
		return p, err
	}
	p.after = q.Get("cursor")
	if p.after != "" && !school.ValidID(p.after) {
		return p, badCursor()
	}
	p.limit, err = limitOf(q)
	return p, err
}

// decodeSchoolID reads the school of the path; an id that none can have is not
// found.
func decodeSchoolID(_ http.ResponseWriter, r *http.Request) (string, error) {
	id := pathParam(r, "id")
	if !school.ValidID(id) {
		return "", notFound("school", id)
	}
	return id, nil
}

// page makes a list of a page's rows, with the cursor after its last one where
// the page is full. An empty list is a list, not null.
func page[T any](items []T, limit int, cursor func(last T) string) api.List[T] {
	l := api.List[T]{Items: items}
	if l.Items == nil {
		l.Items = []T{}
	}
	if len(items) >= limit {
		l.Next = cursor(items[len(items)-1])
	}
	return l
}
