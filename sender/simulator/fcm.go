package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
)

// maxPayload is FCM's bound for a message's notification and data, in bytes.
const maxPayload = 4096

// answerValidated is the Answer of a message that was only validated: it has
// not arrived.
const answerValidated = "validated"

type fcmRequest struct {
	ValidateOnly bool        `json:"validate_only"`
	Message      *fcmMessage `json:"message"`
}

type fcmMessage struct {
	Token        string            `json:"token"`
	FID          string            `json:"fid"`
	Topic        string            `json:"topic"`
	Condition    string            `json:"condition"`
	Data         map[string]string `json:"data"`
	Notification struct {
		Title string `json:"title"`
		Body  string `json:"body"`
		Image string `json:"image"`
	} `json:"notification"`
	Android struct {
		CollapseKey  string `json:"collapse_key"`
		Priority     string `json:"priority"`
		TTL          string `json:"ttl"`
		Notification struct {
			Tag string `json:"tag"`
		} `json:"notification"`
	} `json:"android"`
	APNS struct {
		Headers map[string]string `json:"headers"`
	} `json:"apns"`
	Webpush struct {
		Notification struct {
			Tag string `json:"tag"`
		} `json:"notification"`
		FCMOptions struct {
			Link string `json:"link"`
		} `json:"fcm_options"`
	} `json:"webpush"`
}

// fcm is FCM's HTTP v1: one message a request.
func (e *Engine) fcm(w http.ResponseWriter, r *http.Request) {
	came := e.now()
	behave := e.behave.Load()
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		e.memory.aborted()
		refuseFCM(w, http.StatusBadRequest, "INVALID_ARGUMENT", "the body cannot be read")
		return
	}
	read := e.now()
	if !e.authorized(r) {
		e.memory.unauthorized()
		refuseFCM(w, http.StatusUnauthorized, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
		return
	}
	if p := r.PathValue("project"); e.cfg.Project != "" && p != e.cfg.Project {
		refuseFCM(w, http.StatusNotFound, "NOT_FOUND", "Requested entity was not found.") // without FcmError: not a device
		return
	}
	req, a, err := parseFCM(r, body)
	if err != nil {
		e.memory.protocolError(err.Error())
		var field fieldError
		errors.As(err, &field)
		refuseFCM(w, http.StatusBadRequest, "INVALID_ARGUMENT", err.Error(), badField(field.field))
		return
	}
	a.T = came

	arrivals := []Arrival{a}
	e.memory.request(a.Batch+"/"+a.Message, 1)
	if err := e.record.begin(arrivals); err != nil {
		e.memory.ended(arrivals)
		e.fail(w, err)
		return
	}
	o, wait := e.ofFCM(req, a, behave)
	arrivals[0].Answer, arrivals[0].RetryAfter = answerOf(o), asksToWait(o, wait)
	if req.ValidateOnly && arrivals[0].Answer == AnswerAccepted {
		arrivals[0].Answer = answerValidated
	}
	e.memory.decide(arrivals, false) // FCM never drops a repeat
	e.pause(r, behave.Latency.at(e.draw("latency", a.Batch, a.Message)), o)

	// The end is fixed before the caller can see it; see the package's doc.
	ended, gone := e.now(), r.Context().Err() != nil
	if gone {
		ended = read
	}
	arrivals[0].Ended = ended
	arrivals[0].Lost = arrivals[0].Answer == AnswerAccepted && (gone || losesFCMAnswer(o))
	e.memory.ended(arrivals)
	if err := e.record.end(arrivals); err != nil {
		e.fail(w, err)
		return
	}
	answerFCM(w, r, o, wait, arrivals[0])
}

// fieldError is a request that breaks the rules in a field.
type fieldError struct{ field, text string }

func (e fieldError) Error() string { return e.field + ": " + e.text }

var ttlForm = regexp.MustCompile(`^[0-9]+(\.[0-9]{1,9})?s$`)

// parseFCM reads the request as strictly as FCM documents it, and a little more
// so: what this module adds to the data has to be whole, or the log would lie.
func parseFCM(r *http.Request, body []byte) (req fcmRequest, a Arrival, err error) {
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "application/json" {
		return req, a, errors.New("Content-Type must be application/json")
	}
	if err := json.Unmarshal(body, &req); err != nil || req.Message == nil {
		return req, a, fieldError{"message", "the body is not the JSON it should be"}
	}
	m := req.Message
	targets := 0
	for _, t := range []string{m.Token, m.FID, m.Topic, m.Condition} {
		if t != "" {
			targets++
		}
	}
	if targets != 1 {
		return req, a, fieldError{"message", "exactly one of token, fid, topic and condition"}
	}
	size := len(m.Notification.Title) + len(m.Notification.Body) + len(m.Notification.Image)
	for k, v := range m.Data {
		size += len(k) + len(v)
		if k == "from" || k == "message_type" || strings.HasPrefix(k, "google") || strings.HasPrefix(k, "gcm") {
			return req, a, fieldError{"message.data", "a key is reserved"}
		}
	}
	switch {
	case size > maxPayload:
		return req, a, fieldError{"message", "the message is too big"}
	case m.Android.TTL != "" && !ttlForm.MatchString(m.Android.TTL):
		return req, a, fieldError{"message.android.ttl", "no duration"}
	case m.Android.Priority != "" && m.Android.Priority != "normal" && m.Android.Priority != "high":
		return req, a, fieldError{"message.android.priority", "normal or high"}
	case len(m.APNS.Headers["apns-collapse-id"]) > 64:
		return req, a, fieldError{"message.apns.headers", "apns-collapse-id is longer than 64 bytes"}
	case m.Webpush.FCMOptions.Link != "" && !strings.HasPrefix(m.Webpush.FCMOptions.Link, "https://"):
		return req, a, fieldError{"message.webpush.fcm_options.link", "must be https"}
	}
	a = Arrival{
		Kind: "fcm", School: m.Data["schoolbell_school"], Notice: m.Data["schoolbell_notice"], Message: m.Data["schoolbell_message"],
		Batch: m.Data["schoolbell_batch"], TokenSHA: tokenSHA(m.Token + m.FID + m.Topic + m.Condition),
		ValidateOnly: req.ValidateOnly,
		Tag:          m.Android.Notification.Tag, CollapseID: m.APNS.Headers["apns-collapse-id"], CollapseKey: m.Android.CollapseKey,
	}
	if a.Message == "" {
		return req, a, nil // a message of somebody else
	}
	if a.Fence, err = strconv.ParseInt(m.Data["schoolbell_fence"], 10, 64); err != nil {
		return req, a, fieldError{"message.data", "schoolbell_fence must be a number"}
	}
	if a.Attempt, err = strconv.Atoi(m.Data["schoolbell_attempt"]); err != nil || a.Attempt < 1 {
		return req, a, fieldError{"message.data", "schoolbell_attempt counts from 1"}
	}
	if a.School == "" || a.Notice == "" || a.Batch == "" {
		return req, a, fieldError{"message.data", "schoolbell_school, schoolbell_notice and schoolbell_batch are required"}
	}
	return req, a, nil
}

// ofFCM finds what befalls the message, nil for nothing. In this order: what its
// token asks for, the quota, chance.
func (e *Engine) ofFCM(req fcmRequest, a Arrival, behave *compiled) (o *outcome, wait int) {
	token := req.Message.Token
	if o, times := e.script.ofToken(token); o != nil {
		if e.memory.stillScripted(token, times) {
			return o, behave.RetryAfter
		}
		return nil, 0
	}
	if wait, ok := e.memory.takeQuota("fcm", 1, behave.Quota, e.now()); !ok {
		return e.script.byCode["QUOTA_EXCEEDED"], max(wait, behave.RetryAfter)
	}
	if o := behave.request.pick(e.draw("request", a.Batch, a.Message)); o != nil {
		return o, behave.RetryAfter
	}
	return behave.message.pick(e.draw("message", a.Message, strconv.Itoa(a.Attempt), a.Batch)), behave.RetryAfter
}

// answerOf is what the log says of an outcome.
func answerOf(o *outcome) string {
	if o == nil {
		return AnswerAccepted
	}
	switch o.effect {
	case refuse:
		return o.code
	case refuseAll, refuseWait:
		return strconv.Itoa(o.status)
	case reset, hang, garbage:
		return strings.ToLower(o.code)
	}
	return AnswerAccepted
}

// asksToWait is the Retry-After that the answer of an outcome has; 0: none.
func asksToWait(o *outcome, wait int) int {
	if o == nil {
		return 0
	}
	switch status := fcmErrors[o.code].status; {
	case o.effect == refuseWait, o.effect == refuse && (status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable):
		return wait
	}
	return 0
}

// losesFCMAnswer says of which outcomes a sender cannot learn that its message
// was accepted.
func losesFCMAnswer(o *outcome) bool {
	if o == nil {
		return false
	}
	switch o.effect {
	case leaveOut, misspell, loseAnswer, truncate, cut, falseAlarm:
		return true
	}
	return false
}

// fcmErrors are FCM's documented errors of a message, by code.
var fcmErrors = map[string]struct {
	status  int
	word    string
	message string
}{
	"UNREGISTERED":           {http.StatusNotFound, "NOT_FOUND", "Requested entity was not found."},
	"UNAVAILABLE":            {http.StatusServiceUnavailable, "UNAVAILABLE", "The service is currently unavailable."},
	"INTERNAL":               {http.StatusInternalServerError, "INTERNAL", "Internal error encountered."},
	"QUOTA_EXCEEDED":         {http.StatusTooManyRequests, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Messages sent'."},
	"SENDER_ID_MISMATCH":     {http.StatusForbidden, "PERMISSION_DENIED", "SenderId mismatch"},
	"INVALID_ARGUMENT":       {http.StatusBadRequest, "INVALID_ARGUMENT", "The registration token is not a valid FCM registration token"},
	codePayload:              {http.StatusBadRequest, "INVALID_ARGUMENT", "Invalid value at 'message.data'"},
	"THIRD_PARTY_AUTH_ERROR": {http.StatusUnauthorized, "UNAUTHENTICATED", "Auth error from APNS or Web Push Service"},
	"STRANGE_ERROR":          {http.StatusBadRequest, "FAILED_PRECONDITION", "Something that is documented nowhere."},
}

// codePayload is not FCM's word: it has one code for a bad token and a bad
// message, and names the field.
const codePayload = "INVALID_PAYLOAD"

// answerFCM writes what was decided.
func answerFCM(w http.ResponseWriter, r *http.Request, o *outcome, wait int, a Arrival) {
	if o == nil {
		acceptFCM(w, r, a)
		return
	}
	switch o.effect {
	case refuse:
		known := fcmErrors[o.code]
		if wait := asksToWait(o, wait); wait > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(wait))
		}
		if o.code == codePayload {
			refuseFCM(w, known.status, known.word, known.message, fcmDetail("INVALID_ARGUMENT"), badField("message.data[0].value"))
			return
		}
		refuseFCM(w, known.status, known.word, known.message, fcmDetail(o.code))
	case refuseWait, refuseAll:
		if o.effect == refuseWait {
			w.Header().Set("Retry-After", strconv.Itoa(wait))
		}
		switch o.status {
		case http.StatusTemporaryRedirect:
			w.Header().Set("Location", r.URL.Path)
			http.Error(w, "elsewhere", o.status)
		case http.StatusUnauthorized:
			refuseFCM(w, o.status, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
		case http.StatusForbidden:
			refuseFCM(w, o.status, "PERMISSION_DENIED", "Firebase Cloud Messaging API has not been used in this project.",
				map[string]any{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED", "domain": "googleapis.com"})
		default: // a front end's own page
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(o.status)
			_, _ = io.WriteString(w, "<html><title>Error</title></html>")
		}
	case falseAlarm:
		known := fcmErrors["UNAVAILABLE"]
		refuseFCM(w, known.status, known.word, known.message, fcmDetail("UNAVAILABLE"))
	case leaveOut:
		writeJSON(w, map[string]any{})
	case misspell:
		writeJSON(w, map[string]any{"error": map[string]any{"code": 500, "status": "INTERNAL", "message": "in a 200", "details": []any{}}})
	case garbage:
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<html>Welcome to the captive portal</html>") // the caller may have gone
	case reset, hang, loseAnswer:
		drop(w)
	case cut:
		cutConnection(w, r)
	case truncate:
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", "200")
		_, _ = io.WriteString(w, `{"name":"projects/`)
		panic(http.ErrAbortHandler) // the rest never comes
	case goAway:
		w.Header().Set("Connection", "close") // HTTP/2: a graceful GOAWAY
		acceptFCM(w, r, a)
	default:
		acceptFCM(w, r, a)
	}
}

func acceptFCM(w http.ResponseWriter, r *http.Request, a Arrival) {
	id := fmt.Sprintf("0:%d%%%d", a.T/1000, a.N)
	if a.Answer == answerValidated {
		id = "fake_message_id"
	}
	writeJSON(w, map[string]any{"name": "projects/" + r.PathValue("project") + "/messages/" + id})
}

func fcmDetail(code string) map[string]any {
	return map[string]any{"@type": "type.googleapis.com/google.firebase.fcm.v1.FcmError", "errorCode": code}
}

func badField(field string) map[string]any {
	return map[string]any{
		"@type":           "type.googleapis.com/google.rpc.BadRequest",
		"fieldViolations": []any{map[string]any{"field": field, "description": "Invalid value"}},
	}
}

// refuseFCM writes an error the way Google's APIs do.
func refuseFCM(w http.ResponseWriter, status int, word, message string, details ...map[string]any) {
	if details == nil {
		details = []map[string]any{}
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{ // the caller may have gone
		"error": map[string]any{"code": status, "message": message, "status": word, "details": details},
	})
}
