package redisquota

import (
	"fmt"
	"strconv"
	"time"

	"schoolbell/school"
)

// reply is a script's answer: {status, now_ms, fields …}. The first field that
// is not what it should be is remembered; the zero value is read in its place.
type reply struct {
	status string
	fields []any
	err    error
}

func readReply(v any) (*reply, error) {
	a, ok := v.([]any)
	if !ok || len(a) < 2 {
		return nil, fmt.Errorf("answer is not {status, now, …} but %T", v)
	}
	status, ok := a[0].(string)
	if !ok {
		return nil, fmt.Errorf("answer's status is not text but %T", a[0])
	}
	if _, ok := a[1].(int64); !ok {
		return nil, fmt.Errorf("answer's time is not a number but %T", a[1])
	}
	return &reply{status: status, fields: a[2:]}, nil
}

func (r *reply) unexpected() { r.fail("unknown answer %q", r.status) }

func (r *reply) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

func (r *reply) field(i int) any {
	if i < len(r.fields) {
		return r.fields[i]
	}
	r.fail("answer %s has no field %d", r.status, i)
	return nil
}

func (r *reply) int(i int) int64 {
	n, ok := r.field(i).(int64)
	if !ok {
		r.fail("answer %s: field %d is no number", r.status, i)
	}
	return n
}

func (r *reply) text(i int) string {
	s, ok := r.field(i).(string)
	if !ok {
		r.fail("answer %s: field %d is no text", r.status, i)
	}
	return s
}

func (r *reply) millis(i int) time.Duration { return time.Duration(r.int(i)) * time.Millisecond }

// decimal reads a number that came as text, since it may be too great for a
// Lua number.
func (r *reply) decimal(i int) int64 {
	n, err := strconv.ParseInt(r.text(i), 10, 64)
	if err != nil {
		r.fail("answer %s: field %d is no decimal number", r.status, i)
	}
	return n
}

// rule reads limit, rest and version from field i on.
func (r *reply) rule(i int) school.Rule {
	return school.Rule{Limit: int(r.int(i)), Rest: r.millis(i + 1), Version: r.int(i + 2)}
}
