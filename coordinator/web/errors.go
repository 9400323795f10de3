package web

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"math"
	"net/http"
	"os"
	"strconv"
	"syscall"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// statusClientGone is what the log and the metrics show for a request whose
// client hung up: no answer could be written.
const statusClientGone = 499

// problems is the one table from errors to answers. The message of the error
// itself stays inside: it may speak of SQL or hosts.
var problems = []struct {
	is         error
	code       api.Code
	message    string
	field      string
	retryAfter time.Duration
}{
	{is: school.ErrNotFound, code: api.NotFound, message: "there is no such thing"},
	{is: school.ErrIdempotencyMismatch, code: api.IdempotencyMismatch, field: "Idempotency-Key",
		message: "was used for another request of this school; use a new key for a new notice"},
	{is: school.ErrConflict, code: api.Conflict, message: "another request on the same thing is under way; try again", retryAfter: time.Second},
	{is: school.ErrPaused, code: api.Conflict, message: "the school is paused"},
	{is: school.ErrCommitUnknown, code: api.Unavailable, retryAfter: time.Second,
		message: "the database did not say whether it stored this; repeat the request with the same Idempotency-Key"},
	{is: school.ErrUnavailable, code: api.Unavailable, message: "the database cannot be reached; nothing was stored", retryAfter: time.Second},
	{is: syscall.ENOSPC, code: api.Unavailable, message: "there is no room for the upload's temporary file", retryAfter: 30 * time.Second},
	{is: fs.ErrPermission, code: api.Unavailable, message: "the upload's temporary file cannot be made", retryAfter: 30 * time.Second},
	{is: os.ErrDeadlineExceeded, code: api.RequestTimeout, message: "the body came too slowly"},
	{is: context.DeadlineExceeded, code: api.Unavailable, message: "it took too long", retryAfter: time.Second},
}

// problem turns any error into an answer.
func problem(err error) *api.Error {
	if e, ok := errors.AsType[*api.Error](err); ok {
		c := *e
		return &c
	}
	if e, ok := errors.AsType[*school.FieldError](err); ok {
		code := api.InvalidArgument
		if e.Size {
			code = api.TooLarge
		}
		return &api.Error{Code: code, Field: e.Field, Message: e.Message}
	}
	if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return &api.Error{Code: api.TooLarge, Message: "the body is larger than " + strconv.FormatInt(e.Limit, 10) + " bytes"}
	}
	for _, p := range problems {
		if errors.Is(err, p.is) {
			return &api.Error{Code: p.code, Field: p.field, Message: p.message, RetryAfter: p.retryAfter}
		}
	}
	return &api.Error{Code: api.Internal, Message: "something went wrong here; the log has more under the request id"}
}

// notFound says what there is not: a notice or a school by its id.
func notFound(what, id string) error {
	return &api.Error{Code: api.NotFound, Message: "there is no " + what + " " + school.Printable(id)}
}

// writeError answers with err, unless nobody is left to read it.
func (s *Server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	info := infoOf(r.Context())
	info.err = err
	if r.Context().Err() != nil && errors.Is(err, context.Canceled) {
		info.clientGone = true
		return
	}
	e := problem(err)
	e.Status = e.Code.Status()
	e.RequestID = info.id
	info.code = e.Code
	h := w.Header()
	switch e.Code {
	case api.RateLimited, api.Unavailable:
		if e.RetryAfter <= 0 {
			e.RetryAfter = time.Second
		}
	case api.Unauthenticated:
		h.Set("WWW-Authenticate", `Bearer realm="schoolbell"`)
	}
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	body, ok := r.Body.(*requestBody)
	if !ok || body.ended {
		writeJSON(w, e.Status, api.ErrorBody{Error: *e})
		return
	}
	// The client may still be writing. net/http would first wait for more of the
	// body, and the client with it; afterwards it would cut the connection under
	// the client's hands, and the answer with it. So: answer now, and take what
	// comes for a moment, until the client has seen it.
	control := http.NewResponseController(w)
	_ = control.EnableFullDuplex() // the documented way to read after answering
	h.Set("Connection", "close")   // what is left of the body must not be taken for a request
	writeJSON(w, e.Status, api.ErrorBody{Error: *e})
	if r.Header.Get("Expect") == "" { // who waits for leave to send has sent nothing
		_ = control.Flush()
		_ = control.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.Copy(io.Discard, body)
	}
}

// lingerTime is for a client to see that its request was refused.
const lingerTime = 2 * time.Second

// requestBody knows whether it was read to its end.
type requestBody struct {
	io.ReadCloser
	ended bool
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.ended = b.ended || errors.Is(err, io.EOF)
	return n, err
}

// writeJSON answers with body. A client that does not take it is not an error
// of ours.
func writeJSON(w http.ResponseWriter, status int, body any) {
	b, err := json.Marshal(body)
	if err != nil {
		panic("web: an answer cannot be encoded: " + err.Error()) // only our own types come here
	}
	h := w.Header()
	h.Set("Content-Type", api.JSON)
	h.Set("Content-Length", strconv.Itoa(len(b)+1))
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}
