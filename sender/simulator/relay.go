package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxRequest bounds a request's body.
const maxRequest = 16 << 20

type relayRequest struct {
	Batch    string         `json:"batch_id"`
	School   string         `json:"school"`
	Messages []relayMessage `json:"messages"`
}

type relayMessage struct {
	ID       string            `json:"id"`
	Token    string            `json:"token"`
	Title    *string           `json:"title"`
	Body     *string           `json:"body"`
	Data     map[string]string `json:"data"`
	Attempt  int               `json:"attempt"`
	Requeued int               `json:"requeued"`
}

type relayResult struct {
	ID         string `json:"id"`
	Status     string `json:"status"`
	Code       string `json:"code,omitempty"`
	RetryAfter int    `json:"retry_after_seconds,omitempty"`
}

// relay is the relay protocol.
func (e *Engine) relay(w http.ResponseWriter, r *http.Request) {
	came := e.now()
	behave := e.behave.Load()
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		e.memory.aborted()
		http.Error(w, "the body cannot be read", http.StatusBadRequest)
		return
	}
	read := e.now()
	req, fence, err := parseRelay(r, body)
	if err != nil {
		e.memory.protocolError(err.Error())
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}

	arrivals := make([]Arrival, len(req.Messages))
	for i, m := range req.Messages {
		arrivals[i] = Arrival{
			T: came, Kind: "relay", School: req.School, Notice: noticeOf(m.ID), Message: m.ID,
			TokenSHA: tokenSHA(m.Token), Batch: req.Batch, Fence: fence, Attempt: m.Attempt, Requeued: m.Requeued,
		}
	}
	e.memory.request(req.Batch, len(arrivals))
	if err := e.record.begin(arrivals); err != nil {
		e.memory.ended(arrivals)
		e.fail(w, err)
		return
	}

	whole, wait := e.ofRequest(r, req, behave)
	each := e.ofMessages(req, arrivals, whole, wait, behave)
	e.memory.decide(arrivals, behave.Dedupe)
	e.pause(r, behave.Latency.at(e.draw("latency", req.Batch)), whole)

	// The end is fixed before the caller can see it; see the package's doc.
	ended, gone := e.now(), r.Context().Err() != nil
	if gone {
		ended = read
	}
	for i := range arrivals {
		a := &arrivals[i]
		a.Ended = ended
		a.Lost = a.Answer == AnswerAccepted && (gone || losesAnswer(whole) || losesAnswer(each[i]))
	}
	e.memory.ended(arrivals)
	if err := e.record.end(arrivals); err != nil {
		e.fail(w, err)
		return
	}
	e.answer(w, r, arrivals, each, whole, wait, behave)
}

// losesAnswer says of which outcomes a sender cannot learn that its message was
// accepted.
func losesAnswer(o *outcome) bool {
	if o == nil {
		return false
	}
	switch o.effect {
	case leaveOut, nameTwice, misspell, loseAnswer, truncate, cut, falseAlarm:
		return true
	}
	return false
}

// parseRelay reads the request strictly: the simulator is the judge of whether
// the protocol is kept.
func parseRelay(r *http.Request, body []byte) (req relayRequest, fence int64, err error) {
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "application/json" {
		return req, 0, errors.New("Content-Type must be application/json")
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return req, 0, errors.New("the body is not the JSON it should be")
	}
	switch {
	case req.Batch == "" || req.School == "":
		return req, 0, errors.New("batch_id and school are required")
	case r.Header.Get("Idempotency-Key") != req.Batch:
		return req, 0, errors.New("Idempotency-Key must be the batch_id")
	case r.Header.Get("X-Schoolbell-School") != req.School:
		return req, 0, errors.New("X-Schoolbell-School must be the school")
	case len(req.Messages) == 0:
		return req, 0, errors.New("messages may not be empty")
	}
	if fence, err = strconv.ParseInt(r.Header.Get("X-Schoolbell-Fence"), 10, 64); err != nil {
		return req, 0, errors.New("X-Schoolbell-Fence must be a number")
	}
	seen := make(map[string]bool, len(req.Messages))
	for i, m := range req.Messages {
		switch {
		case m.ID == "" || m.Token == "" || m.Title == nil || m.Body == nil || m.Data == nil:
			return req, 0, fmt.Errorf("messages[%d]: id, token, title, body and data are required", i)
		case m.Attempt < 1:
			return req, 0, fmt.Errorf("messages[%d]: attempt counts from 1", i)
		case seen[m.ID]:
			return req, 0, fmt.Errorf("messages[%d]: the id comes twice", i)
		}
		seen[m.ID] = true
	}
	return req, fence, nil
}

// ofRequest finds what befalls the whole request, and the seconds for
// Retry-After. In this order: its bearer token, a device token that asks for
// it, the quota, chance.
func (e *Engine) ofRequest(r *http.Request, req relayRequest, behave *compiled) (whole *outcome, wait int) {
	wait = behave.RetryAfter
	if e.cfg.Token != "" && r.Header.Get("Authorization") != "Bearer "+e.cfg.Token {
		return e.script.byCode["AUTH"], wait
	}
	for _, m := range req.Messages {
		if o, times := e.script.ofToken(m.Token); o != nil && o.request && e.memory.stillScripted(m.Token, times) {
			return o, wait
		}
	}
	if quotaWait, ok := e.memory.takeQuota("relay", len(req.Messages), behave.Quota, e.now()); !ok {
		return e.script.byCode["THROTTLED"], max(wait, quotaWait)
	}
	return behave.request.pick(e.draw("request", req.Batch)), wait
}

// ofMessages finds what befalls each message and writes its answer into its
// arrival.
func (e *Engine) ofMessages(req relayRequest, arrivals []Arrival, whole *outcome, wait int, behave *compiled) []*outcome {
	each := make([]*outcome, len(arrivals))
	for i := range arrivals {
		a := &arrivals[i]
		if whole != nil {
			switch whole.effect {
			case refuseAll, refuseWait:
				a.Answer, a.RetryAfter = strconv.Itoa(whole.status), asksToWait(whole, wait)
				continue
			case reset, hang, garbage:
				a.Answer = strings.ToLower(whole.code)
				continue
			}
		}
		o, times := e.script.ofToken(req.Messages[i].Token)
		if o != nil && (o.request || !e.memory.stillScripted(req.Messages[i].Token, times)) {
			o = nil
		} else if o == nil {
			o = behave.message.pick(e.draw("message", a.Message, strconv.Itoa(a.Attempt), strconv.Itoa(a.Requeued)))
		}
		each[i] = o
		a.Answer = AnswerAccepted
		if o != nil && o.effect == refuse {
			a.Answer, a.RetryAfter = o.code, asksToWait(o, behave.RetryAfter)
		}
	}
	return each
}

// pause waits the latency, or with hang until the caller goes.
func (e *Engine) pause(r *http.Request, latency time.Duration, whole *outcome) {
	if whole != nil && whole.effect == hang {
		select {
		case <-r.Context().Done():
		case <-e.stop:
		}
		return
	}
	if latency <= 0 {
		return
	}
	timer := time.NewTimer(latency)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
	case <-e.stop:
	}
}

// answer writes what was decided.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, arrivals []Arrival, each []*outcome, whole *outcome, wait int, behave *compiled) {
	if whole != nil {
		switch whole.effect {
		case refuseWait:
			w.Header().Set("Retry-After", strconv.Itoa(wait))
			http.Error(w, "not accepted", whole.status)
			return
		case refuseAll:
			if whole.status == http.StatusTemporaryRedirect {
				w.Header().Set("Location", r.URL.Path)
			}
			http.Error(w, "not accepted", whole.status)
			return
		case garbage:
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>Welcome to the captive portal</html>") // the caller may have gone
			return
		case reset, hang, loseAnswer:
			drop(w)
			return
		case cut:
			cutConnection(w, r)
			return
		case falseAlarm:
			http.Error(w, "not accepted, so it says", http.StatusServiceUnavailable)
			return
		case goAway:
			w.Header().Set("Connection", "close")
		}
	}
	results := make([]relayResult, 0, len(arrivals)+1)
	for i := range arrivals {
		one := relayResult{ID: arrivals[i].Message, Status: "ok"}
		if each[i] != nil {
			switch each[i].effect {
			case refuse:
				one.Status, one.Code = "error", each[i].code
				one.RetryAfter = arrivals[i].RetryAfter
			case leaveOut:
				continue
			case nameTwice:
				results = append(results, one)
			case addStranger:
				results = append(results, relayResult{ID: "stranger." + arrivals[i].Message, Status: "ok"})
			case misspell:
				one.Status = "queued"
			}
		}
		results = append(results, one)
	}
	// The answer's order means nothing, so it is never the request's.
	for i, j := 0, len(results)-1; i < j; i, j = i+1, j-1 {
		results[i], results[j] = results[j], results[i]
	}
	body, err := json.Marshal(map[string]any{"results": results})
	if err != nil {
		e.fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if whole != nil && whole.effect == truncate {
		body = body[:len(body)/2]
	}
	_, _ = w.Write(body) // a caller that has gone is in the log already
}

// drop ends the connection without an answer: with HTTP/1.1 by a reset.
func drop(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // HTTP/2: the stream is reset
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // or else it ends in good order, which is as good as a drop
	}
	_ = conn.Close()
}

// status answers what became of messages.
func (e *Engine) status(w http.ResponseWriter, r *http.Request) {
	if e.cfg.Token != "" && r.Header.Get("Authorization") != "Bearer "+e.cfg.Token {
		http.Error(w, "not accepted", http.StatusUnauthorized)
		return
	}
	var asked struct {
		IDs []string `json:"ids"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&asked); err != nil {
		e.memory.protocolError("status: the body is not the JSON it should be")
		http.Error(w, "the body is not the JSON it should be", http.StatusBadRequest)
		return
	}
	results := make([]relayResult, len(asked.IDs))
	for i, id := range asked.IDs {
		results[i] = relayResult{ID: id, Status: e.memory.statusOf(id)}
	}
	writeJSON(w, map[string]any{"results": results})
}

// noticeOf is the notice id in a message id "<notice id>.<seq>".
func noticeOf(message string) string {
	if i := strings.LastIndexByte(message, '.'); i >= 0 {
		return message[:i]
	}
	return message
}
