// Package school is the domain: schools, notices and their recipients, the
// states a recipient passes through, what each outcome of a send does to it,
// and the vocabulary in which store, rule, lock and scheduler talk to one
// another.
//
// It is pure: standard library only, no clock, no I/O. Whoever needs a time or
// a random number gives it.
//
// Invariants kept here: a recipient changes its state only through [Next] (and
// the set-based equivalents in the store, which are tested against it); a final
// state is left only by a requeue; a retry is counted exactly once, in one
// place.
package school

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"
)

// Sizes that are limits of the product, not settings.
const (
	MaxID         = 64        // characters of a school's id or a sender's name
	MaxToken      = 4096      // bytes of a device token
	MaxRef        = 255       // characters of a recipient's ref
	MaxRecipients = 1_000_000 // recipients of one notice
	MaxDevices    = 1_000_000 // devices of one registration
	MaxTopics     = 2000      // topics of one device: FCM's own limit
	MaxPayload    = 4096      // bytes of title, body, data, link and image together: FCM's own limit
	MaxKey        = 255       // characters of an idempotency key (R27)
	MaxName       = 255       // characters of a school's name
	MaxLink       = 2048      // bytes of an image's or a link's address
	MaxSMS        = 2000      // characters of a fallback's text: ten times what one SMS or LMS of most providers carries
)

var idPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

var topicPattern = regexp.MustCompile(`^[A-Za-z0-9._~%-]{1,255}$`)

// ValidID reports whether s can name a school or a sender: letters, digits,
// dot, underscore and dash, 1 to 64 of them. Braces are out since the id
// becomes a Redis hash tag.
func ValidID(s string) bool { return idPattern.MatchString(s) }

// Kinds of error that cross package borders. Everything else is internal.
var (
	ErrNotFound      = errors.New("not found")
	ErrConflict      = errors.New("conflict")
	ErrFenced        = errors.New("fenced: a newer owner holds the school")                 // R13
	ErrStalePage     = errors.New("page is stale: what it read has moved")                  // page anew
	ErrPaused        = errors.New("school is paused")                                       // R28
	ErrRuleChanged   = errors.New("school's settings have changed")                         // open a new term
	ErrTakenOver     = errors.New("batch was taken over by a newer owner")                  // R13
	ErrCommitUnknown = errors.New("commit unknown: the connection broke before the answer") // nothing may be sent
	ErrUnavailable   = errors.New("unavailable")                                            // store or arbiter not reachable

	// ErrIdempotencyMismatch says that the key was used before with another request (R27).
	ErrIdempotencyMismatch = errors.New("idempotency key was used before with another request")
)

// FieldError is bad input: it names the field as the caller wrote it and says
// what would be right.
type FieldError struct {
	Field   string // e.g. recipients[3].token
	Message string // what is wrong and what to do; never the value of a token, title or body
	Size    bool   // a size limit was passed: too large rather than invalid
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Message }

// MessageID names one recipient of one notice, the same from the first attempt
// to the last (R26).
func MessageID(notice int64, seq int) string {
	return strconv.FormatInt(notice, 10) + "." + strconv.Itoa(seq)
}

// noticeEpoch is the moment from which notice ids count milliseconds.
const noticeEpoch = 1577836800000 // 2020-01-01T00:00:00Z

// NewNoticeID makes an id from now and 22 random bits: ordered by time to the
// millisecond, and never given out again when a database starts anew, so that
// a relay which drops repeats by message id does not drop a new notice for an
// old one. Two ids of one millisecond can meet (1 in 4 million); the primary
// key refuses the second and the caller makes another.
func NewNoticeID(now time.Time, random uint32) int64 {
	return (now.UnixMilli()-noticeEpoch)<<22 | int64(random&(1<<22-1))
}

// ParseNoticeID reads an id as the API shows it.
func ParseNoticeID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id <= 0 || strconv.FormatInt(id, 10) != s {
		return 0, fmt.Errorf("notice %q: %w", s, ErrNotFound)
	}
	return id, nil
}
