package simulator

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// Arrival is one message that came in. Its JSON form is a line of the log.
type Arrival struct {
	N        int64  `json:"n"` // counts from 1, in the order of the log
	T        int64  `json:"t_ns"`
	Kind     string `json:"kind"` // "relay" or "fcm"
	School   string `json:"school"`
	Notice   string `json:"notice"`
	Message  string `json:"message"`
	TokenSHA string `json:"token_sha"` // first 16 hex digits of the token's SHA-256
	Batch    string `json:"batch"`
	Fence    int64  `json:"fence"`
	Attempt  int    `json:"attempt"`
	Requeued int    `json:"requeued,omitempty"` // a requeued message is a new one; FCM is not told

	// ValidateOnly: FCM was asked to check the message and not to deliver it
	// (validate_only). It has not arrived, whatever the answer.
	ValidateOnly bool `json:"validate_only,omitempty"`

	// What replaces an older push on the screen, with kind fcm.
	Tag         string `json:"tag,omitempty"`          // Android notification tag
	CollapseID  string `json:"collapse_id,omitempty"`  // apns-collapse-id
	CollapseKey string `json:"collapse_key,omitempty"` // Android's, which ought not to be there

	Answer     string `json:"answer,omitempty"`              // empty in the first line
	RetryAfter int    `json:"retry_after_seconds,omitempty"` // that the answer asked for
	Ended      int64  `json:"ended_ns,omitempty"`
	Lost       bool   `json:"lost,omitempty"`   // accepted, but its sender cannot have learnt it
	Repeat     bool   `json:"repeat,omitempty"` // taken for one accepted before, and dropped
}

// AnswerAccepted is the Answer of an accepted message.
const AnswerAccepted = "200"

// Accepted reports whether the receiver took the message as a new one.
func (a Arrival) Accepted() bool { return a.Answer == AnswerAccepted && !a.Repeat }

// Key names the message in the receiver's eyes: a requeue keeps the id and is a
// new message.
func (a Arrival) Key() string { return messageKey(a.Message, a.Requeued) }

func messageKey(id string, requeued int) string {
	if requeued == 0 {
		return id
	}
	return fmt.Sprintf("%s#%d", id, requeued)
}

// flushEvery bounds how far the log may be behind while requests come in.
const flushEvery = 100 * time.Millisecond

// record is the arrival log: lines to a writer, and all arrivals in memory if
// asked. The first failed write is kept and told by every later call: a
// receiver whose log has a hole can judge nothing.
type record struct {
	mu      sync.Mutex
	out     *bufio.Writer // nil: no log
	lines   *json.Encoder
	scratch bytes.Buffer
	keep    bool
	kept    []Arrival
	last    int64 // the last n
	err     error

	stop    chan struct{}
	stopped chan struct{}
}

func newRecord(w io.Writer, keep bool) *record {
	r := &record{keep: keep, stop: make(chan struct{}), stopped: make(chan struct{})}
	if w == nil {
		close(r.stopped)
		return r
	}
	r.out = bufio.NewWriterSize(w, 1<<20)
	r.lines = json.NewEncoder(&r.scratch)
	r.lines.SetEscapeHTML(false)
	go r.flushLoop()
	return r
}

func (r *record) flushLoop() {
	defer close(r.stopped)
	tick := time.NewTicker(flushEvery)
	defer tick.Stop()
	for {
		select {
		case <-r.stop:
			return
		case <-tick.C:
			r.mu.Lock()
			r.flush()
			r.mu.Unlock()
		}
	}
}

// begin numbers the arrivals of one request and writes their first lines.
func (r *record) begin(arrivals []Arrival) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range arrivals {
		r.last++
		arrivals[i].N = r.last
		r.line(&arrivals[i])
	}
	if r.keep {
		r.kept = append(r.kept, arrivals...)
	}
	return r.err
}

// end writes their second lines.
func (r *record) end(arrivals []Arrival) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range arrivals {
		r.line(&arrivals[i])
		if r.keep {
			r.kept[arrivals[i].N-1] = arrivals[i]
		}
	}
	return r.err
}

func (r *record) line(a *Arrival) {
	if r.out == nil || r.err != nil {
		return
	}
	r.scratch.Reset()
	if err := r.lines.Encode(a); err != nil {
		r.err = fmt.Errorf("write arrival log: %w", err)
		return
	}
	if _, err := r.out.Write(r.scratch.Bytes()); err != nil {
		r.err = fmt.Errorf("write arrival log: %w", err)
	}
}

func (r *record) flush() {
	if r.out == nil || r.err != nil {
		return
	}
	if err := r.out.Flush(); err != nil {
		r.err = fmt.Errorf("write arrival log: %w", err)
	}
}

func (r *record) arrivals() []Arrival {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.kept)
}

// close writes out what is buffered. Nothing may be recorded afterwards.
func (r *record) close() error {
	if r.out != nil {
		close(r.stop)
	}
	<-r.stopped
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flush()
	return r.err
}
