package web

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// submission is one notice that came in, read and checked completely.
type submission struct {
	notice     *school.Notice
	total      int
	recipients iter.Seq2[school.NewRecipient, error]
	accept     time.Duration // for storing it
	held       []func()      // given back when the request ends, last first
}

// hold keeps release for the end of the request.
func (s *submission) hold(release func()) { s.held = append(s.held, release) }

// Close gives everything back: the key, the file, the upload's place, room.
func (s *submission) Close() {
	for _, release := range s.held {
		defer release() // last first, and all of them even if one panics
	}
	s.held = nil
}

// decodeSubmission reads POST /v1/notices in either form.
func (s *Server) decodeSubmission(w http.ResponseWriter, r *http.Request) (*submission, error) {
	if r.Header.Get("Content-Encoding") != "" {
		return nil, &api.Error{Code: api.UnsupportedMediaType, Message: "send the body without Content-Encoding"}
	}
	media, err := mediaType(r.Header, api.JSON, api.NDJSON)
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return nil, err
	}
	sub := &submission{}
	read := s.readNotice
	if media == api.NDJSON {
		read = s.readUpload
	}
	done := false
	defer func() { // on an error and on a panic alike; a good submission is the endpoint's to close
		if !done {
			sub.Close()
		}
	}()
	if err := read(sub, w, r, key); err != nil {
		return nil, err
	}
	done = true
	return sub, nil
}

// readNotice reads a notice that comes as one JSON body.
func (s *Server) readNotice(sub *submission, w http.ResponseWriter, r *http.Request, key string) error {
	body, release, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	sub.hold(release)
	n, recipients, err := decodeNotice(body, false)
	if err != nil {
		return err
	}
	h := sha256.New()
	_, _ = io.WriteString(h, api.JSON+"\n")
	_, _ = h.Write(body)
	if err := s.admit(sub, r.Context(), n, key); err != nil {
		return err
	}
	n.RequestHash = h.Sum(nil)
	sub.total, sub.accept = len(recipients), s.cfg.AcceptTimeout
	if n.Topic != "" {
		sub.accept = s.cfg.UploadAccept // it may have as many devices as an upload has lines
	}
	sub.recipients = func(yield func(school.NewRecipient, error) bool) {
		for i := range recipients {
			if !yield(recipients[i], nil) {
				return
			}
		}
	}
	return nil
}

// admit checks what is known once the notice itself is: whether the key may
// touch the school, and whether a request with the same idempotency key is
// under way here.
func (s *Server) admit(sub *submission, ctx context.Context, n *school.Notice, key string) error {
	if err := allow(ctx, n.School); err != nil {
		return err
	}
	if n.Fallback != "" && !s.cfg.Fallback {
		return invalid("fallback", "is not available here: no webhook takes the messages; set fallback.url (SCHOOLBELL_FALLBACK_URL) on the server, or leave fallback out")
	}
	if key != "" {
		release, ok := s.keys.take(schoolKey{n.School, key})
		if !ok {
			return &api.Error{Code: api.Conflict, Field: "Idempotency-Key", RetryAfter: time.Second,
				Message: "a request with this key is under way; ask again for its answer"}
		}
		sub.hold(release)
	}
	n.IdempotencyKey = key
	n.TraceParent = string(infoOf(ctx).trace)
	sub.notice = n
	return nil
}

// readBody reads a JSON body within its size, its time, and the room that all
// bodies together have. The room is held until release.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) (body []byte, release func(), err error) {
	if r.ContentLength > maxBody {
		return nil, nil, &http.MaxBytesError{Limit: maxBody}
	}
	room := r.ContentLength
	if room < 0 { // not said: the most it can be
		room = maxBody
	}
	if !s.bodies.TryAcquire(room) {
		return nil, nil, &api.Error{Code: api.Unavailable, RetryAfter: time.Second, Message: "too many large requests at once"}
	}
	body, err = readAll(http.MaxBytesReader(w, r.Body, maxBody), r.ContentLength)
	if err != nil {
		s.bodies.Release(room)
		return nil, nil, bodyError(err)
	}
	return body, func() { s.bodies.Release(room) }, nil
}

// readAll reads a body whose length may be known; what is not sent takes no
// memory. The deadline for this was set when the request came in.
func readAll(r io.Reader, length int64) ([]byte, error) {
	var b bytes.Buffer
	b.Grow(int(min(max(length, 0), 64<<10)) + bytes.MinRead)
	_, err := b.ReadFrom(r)
	return b.Bytes(), err
}

// bodyError tells a body that broke off from one that was too slow or too large.
func bodyError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return invalid("", "the body ended before it was complete")
	}
	return fmt.Errorf("read body: %w", err)
}

// mediaType returns the request's media type if it is one of those taken.
func mediaType(h http.Header, taken ...string) (string, error) {
	refused := &api.Error{Code: api.UnsupportedMediaType, Message: "send Content-Type: " + strings.Join(taken, " or ")}
	media, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return "", refused
	}
	if charset, ok := params["charset"]; ok && !strings.EqualFold(charset, "utf-8") {
		return "", &api.Error{Code: api.UnsupportedMediaType, Message: "send the body in UTF-8"}
	}
	for _, t := range taken {
		if media == t {
			return t, nil
		}
	}
	return "", refused
}

// idempotencyKey returns the request's key, empty where it has none.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	switch len(values) {
	case 0:
		return "", nil
	case 1:
		return values[0], school.ValidateKey(values[0])
	}
	return "", invalid("Idempotency-Key", "is given twice")
}

// schoolKey is an idempotency key with the school that it belongs to.
type schoolKey struct{ school, key string }

// keyRegistry knows the idempotency keys whose first request is being read or
// stored by this replica. It saves a repeat of a long upload from being read
// only to meet the first one in the store, which decides between replicas.
type keyRegistry struct {
	mu    sync.Mutex
	under map[schoolKey]struct{}
}

func (k *keyRegistry) take(key schoolKey) (release func(), ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, busy := k.under[key]; busy {
		return nil, false
	}
	k.under[key] = struct{}{}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.under, key)
	}, true
}
