package api

import (
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Code says what kind of error an answer is. A program decides by it; the
// message is for people.
type Code string

const (
	InvalidArgument      Code = "invalid_argument"       // 400: Field names what to change
	Unauthenticated      Code = "unauthenticated"        // 401: no key, or one that is not known
	PermissionDenied     Code = "permission_denied"      // 403: the key may not do this, or not for this school
	NotFound             Code = "not_found"              // 404
	MethodNotAllowed     Code = "method_not_allowed"     // 405: the Allow header lists what is
	RequestTimeout       Code = "request_timeout"        // 408: the body came too slowly
	Conflict             Code = "conflict"               // 409: with RetryAfter where trying again helps
	TooLarge             Code = "too_large"              // 413: a size limit was passed
	UnsupportedMediaType Code = "unsupported_media_type" // 415
	IdempotencyMismatch  Code = "idempotency_mismatch"   // 422: the key was used with another request
	RateLimited          Code = "rate_limited"           // 429: with RetryAfter
	Internal             Code = "internal"               // 500: the request id finds the log line
	Unavailable          Code = "unavailable"            // 503: with RetryAfter
)

// statuses is the one table between codes and HTTP.
var statuses = map[Code]int{
	InvalidArgument:      http.StatusBadRequest,
	Unauthenticated:      http.StatusUnauthorized,
	PermissionDenied:     http.StatusForbidden,
	NotFound:             http.StatusNotFound,
	MethodNotAllowed:     http.StatusMethodNotAllowed,
	RequestTimeout:       http.StatusRequestTimeout,
	Conflict:             http.StatusConflict,
	TooLarge:             http.StatusRequestEntityTooLarge,
	UnsupportedMediaType: http.StatusUnsupportedMediaType,
	IdempotencyMismatch:  http.StatusUnprocessableEntity,
	RateLimited:          http.StatusTooManyRequests,
	Internal:             http.StatusInternalServerError,
	Unavailable:          http.StatusServiceUnavailable,
}

// Status is the HTTP status that goes with c; 500 for a code it does not know.
func (c Code) Status() int {
	if s, ok := statuses[c]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// codeOf guesses the code of an answer that is not ours, such as a load
// balancer's page.
func codeOf(status int) Code {
	for c, s := range statuses {
		if s == status {
			return c
		}
	}
	switch {
	case status == http.StatusBadGateway || status == http.StatusGatewayTimeout:
		return Unavailable
	case status >= 400 && status < 500:
		return InvalidArgument
	}
	return Internal
}

// Error is an answer that refuses a request. It is what the server writes and
// what the client's methods return, by pointer; use errors.As.
type Error struct {
	Code      Code   `json:"code"`
	Message   string `json:"message"`
	Field     string `json:"field,omitempty"` // with InvalidArgument and TooLarge: what to change, as the caller wrote it
	RequestID string `json:"request_id,omitempty"`

	Status     int           `json:"-"` // HTTP status
	RetryAfter time.Duration `json:"-"` // from the Retry-After header; 0: none
}

// ErrorBody is the form of an error in an answer.
type ErrorBody struct {
	Error Error `json:"error"`
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(string(e.Code))
	if e.Field != "" {
		fmt.Fprintf(&b, ": %s", e.Field)
	}
	if e.Message != "" {
		fmt.Fprintf(&b, ": %s", e.Message)
	}
	if e.RequestID != "" {
		fmt.Fprintf(&b, " (request %s)", e.RequestID)
	}
	return b.String()
}

// Temporary reports whether the same request may succeed later.
func (e *Error) Temporary() bool {
	switch e.Code {
	case RateLimited, Unavailable, RequestTimeout:
		return true
	case Conflict:
		return e.RetryAfter > 0
	}
	return false
}
