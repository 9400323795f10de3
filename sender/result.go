package sender

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Class says what is known about one message after a call. The zero value is
// no class: Guard turns it into Unknown.
type Class int

// The nine classes. DESIGN.md tells which are certain.
const (
	// Accepted: the receiver said clearly that it took the message. Whether a
	// device showed it is not known.
	Accepted Class = iota + 1
	// Gone: the device is no longer registered. The only class that retires one.
	Gone
	// Rejected: refused for what the message is; the same message is refused again.
	Rejected
	// Mismatch: refused for how this sender is set up for this device or
	// platform (a token of another project, a wrong APNs or web push key).
	// A person has to look; other messages of the sender go on.
	Mismatch
	// Throttled: refused for now, the receiver's quota is used up.
	Throttled
	// Unavailable: the receiver cannot take it now. Result.OutcomeUnknown says
	// whether it may have taken it all the same.
	Unavailable
	// Misconfigured: the receiver does not accept this sender (credentials,
	// project, URL). It stops the sender and uses up nobody's retries.
	Misconfigured
	// NotSent: no part of the message left this process, or the transport's
	// protocol guarantees that the receiver never looked at it (an HTTP/2
	// stream that was refused).
	NotSent
	// Unknown: it left, or may have left, and nobody said what became of it.
	Unknown
)

var classNames = [...]string{
	Accepted:      "accepted",
	Gone:          "gone",
	Rejected:      "rejected",
	Mismatch:      "mismatch",
	Throttled:     "throttled",
	Unavailable:   "unavailable",
	Misconfigured: "misconfigured",
	NotSent:       "not_sent",
	Unknown:       "unknown",
}

// Classes returns all nine, in the order of their declaration, so that a
// mapping from them can be tested to be exhaustive.
func Classes() []Class {
	all := make([]Class, 0, int(Unknown))
	for c := Accepted; c <= Unknown; c++ {
		all = append(all, c)
	}
	return all
}

// Valid reports whether c is one of the nine.
func (c Class) Valid() bool { return c >= Accepted && c <= Unknown }

// String returns the class in lower case with underscores, such as "not_sent".
func (c Class) String() string {
	if !c.Valid() {
		return "class(" + strconv.Itoa(int(c)) + ")"
	}
	return classNames[c]
}

// Result is what became of one message in one call.
type Result struct {
	ID    string // the message's ID
	Class Class

	// OutcomeUnknown is set with Unavailable where the receiver failed without
	// saying whether it had taken the message (a 5xx of FCM). Such a message is
	// repeated for an at-least-once notice and not for an at-most-once one (R25).
	OutcomeUnknown bool

	// Code is the receiver's error code, or one of ours where it gave none
	// (see the Code constants). Empty only with Accepted. At most 64 characters
	// out of A–Z, 0–9 and "_", safe to store, log and use as a key.
	Code string

	// RetryAfter is the receiver's wish, not the wait: a floor for it (R33).
	// 0 means none was given. Never above MaxRetryAfter.
	RetryAfter time.Duration

	// Detail is a short text for people, made by us, never copied from a
	// message or an answer: no token, no text, no key. May be empty.
	Detail string
}

// MayHaveArrived reports whether the receiver has, or may have, taken the
// message: what decides if sending it again can repeat it.
func (r Result) MayHaveArrived() bool {
	return r.Class == Accepted || r.Uncertain()
}

// Uncertain reports whether nobody can say if the receiver took the message:
// the case in which at-least-once sends again and at-most-once gives up (R25).
func (r Result) Uncertain() bool {
	return r.Class == Unknown || !r.Class.Valid() || r.Class == Unavailable && r.OutcomeUnknown
}

// Codes of our own, where no receiver gave one. Those of FCM are used as they are.
const (
	CodeCancelled       = "CANCELLED"        // the context ended
	CodeCallTimeout     = "CALL_TIMEOUT"     // the whole call took too long
	CodeReadTimeout     = "READ_TIMEOUT"     // the receiver fell silent
	CodeConnectFailed   = "CONNECT_FAILED"   // no connection (refused, no route, proxy)
	CodeConnectTimeout  = "CONNECT_TIMEOUT"  // no connection in time
	CodeDNSFailed       = "DNS_FAILED"       // the name did not resolve
	CodeTLSFailed       = "TLS_FAILED"       // no trusted connection
	CodeNoAnswer        = "NO_ANSWER"        // the connection ended without an answer
	CodeBadAnswer       = "BAD_ANSWER"       // an answer that cannot be understood
	CodeResultMissing   = "RESULT_MISSING"   // the answer left the message out
	CodeResultDuplicate = "RESULT_DUPLICATE" // the answer named it more than once
	CodeResultMalformed = "RESULT_MALFORMED" // its part of the answer cannot be understood
	CodePanic           = "SENDER_PANIC"     // our own code failed in the call
	CodeOverrun         = "CALL_OVERRUN"     // the call did not end by its deadline
	CodeClosed          = "SENDER_CLOSED"    // the sender is shut down
	CodeGateClosed      = "GATE_CLOSED"      // the batch's gate let nothing leave any more
)

// MaxRetryAfter is how far a receiver's Retry-After is believed (R33).
const MaxRetryAfter = time.Hour

// ClampRetryAfter bounds a wait that a receiver asked for to 0 … MaxRetryAfter.
func ClampRetryAfter(d time.Duration) time.Duration {
	return min(max(d, 0), MaxRetryAfter)
}

// ParseRetryAfter reads the header Retry-After of an answer: seconds or an HTTP
// date, the latter counted from the answer's own Date, since the receiver's clock
// need not be ours. ok is false where the header is missing or means nothing,
// which is as if it had not been sent. The wait is clamped; a date that has
// passed, or that cannot be compared because there is no Date, is a wait of 0.
func ParseRetryAfter(h http.Header) (wait time.Duration, ok bool) {
	header := strings.TrimSpace(h.Get("Retry-After"))
	if header == "" {
		return 0, false
	}
	if isDigits(header) {
		seconds, err := strconv.ParseInt(header, 10, 64)
		if err != nil || seconds > int64(MaxRetryAfter/time.Second) {
			return MaxRetryAfter, true // a number too large to hold is still a number
		}
		return time.Duration(seconds) * time.Second, true
	}
	at, err := http.ParseTime(header)
	if err != nil {
		return 0, false
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		return 0, true
	}
	return ClampRetryAfter(at.Sub(now)), true
}

func isDigits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

// maxCode bounds a code in characters.
const maxCode = 64

// ValidCode reports whether s may be a Code: 1 to 64 characters out of A–Z,
// 0–9 and "_", beginning with a letter. A receiver's code that is none is not
// to be trusted, stored or shown: it may carry anything, a token included.
func ValidCode(s string) bool {
	if s == "" || len(s) > maxCode || s[0] < 'A' || s[0] > 'Z' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if !(c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_') {
			return false
		}
	}
	return true
}

// Fill returns one result of the same kind for each message of the batch.
// r's ID is ignored.
func Fill(messages []Message, r Result) []Result {
	all := make([]Result, len(messages))
	for i := range messages {
		all[i] = r
		all[i].ID = messages[i].ID
	}
	return all
}
