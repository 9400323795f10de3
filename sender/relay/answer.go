package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/sender"
)

// Codes of FCM, which relays use too (R32).
const (
	codeUnregistered = "UNREGISTERED"
	codeInvalid      = "INVALID_ARGUMENT"
	codeMismatch     = "SENDER_ID_MISMATCH"
	codeQuota        = "QUOTA_EXCEEDED"
	codeUnavailable  = "UNAVAILABLE"
	codeInternal     = "INTERNAL"
	codeThirdParty   = "THIRD_PARTY_AUTH_ERROR"
)

// classOf maps the code of a refused message. All of them are definite: the
// relay answered for this very message. A code that is none of FCM's is a
// refusal as well, which nobody here can say more about.
func classOf(code string) sender.Class {
	switch code {
	case codeUnregistered:
		return sender.Gone
	case codeMismatch, codeThirdParty:
		return sender.Mismatch
	case codeQuota:
		return sender.Throttled
	case codeUnavailable, codeInternal:
		return sender.Unavailable
	}
	return sender.Rejected // codeInvalid too
}

// listOf reads {"results":[…]}. The error quotes nothing of it.
func listOf(body []byte) ([]json.RawMessage, error) {
	var a struct {
		Results []json.RawMessage `json:"results"`
	}
	if json.Unmarshal(body, &a) != nil || !plain(body, "results") {
		return nil, errNoAnswer
	}
	return a.Results, nil
}

var errNoAnswer = errors.New("the answer is not the JSON it should be")

type answerResult struct {
	ID         string   `json:"id"`
	Status     string   `json:"status"`
	Code       string   `json:"code"`
	RetryAfter *float64 `json:"retry_after_seconds"`
}

// resultOf reads one result. With ok false it cannot be understood, but its id
// may be known all the same.
func resultOf(raw json.RawMessage) (a answerResult, ok bool) {
	err := json.Unmarshal(raw, &a)
	if err != nil && a.ID == "" {
		a.ID = idOf(raw)
	}
	return a, err == nil && plain(raw, "id", "status", "code", "retry_after_seconds")
}

// idOf finds the id of a result that is wrong in another field.
func idOf(raw json.RawMessage) string {
	var only struct {
		ID string `json:"id"`
	}
	if json.Unmarshal(raw, &only) != nil {
		return ""
	}
	return only.ID
}

// plain reports whether an object has each of the names at most once and in no
// other spelling. encoding/json takes "Status" for "status", and the last of
// several: {"status":"error","status":"ok"} would be an acceptance, and what the
// relay means by it nobody can say. text is valid JSON.
func plain(text []byte, names ...string) bool {
	var seen [4]bool
	depth, isName := 0, false // isName: a string here is a member's name
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '{':
			depth++
			isName = depth == 1
		case '[':
			depth++
		case '}', ']':
			depth--
		case ',':
			isName = depth == 1
		case '"':
			from := i + 1
			for i = from; text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			if !isName {
				continue
			}
			isName = false
			for n, name := range names {
				word := text[from:i]
				if string(word) == name && !seen[n] {
					seen[n] = true
				} else if bytes.EqualFold(word, []byte(name)) || bytes.IndexByte(word, '\\') >= 0 {
					return false // an escape could spell any of them
				}
			}
		}
	}
	return true
}

// results reads a 200's body. One result that cannot be understood costs only
// its own message; a body that is no such JSON costs all.
func (r *Relay) results(messages []sender.Message, body []byte) []sender.Result {
	list, err := listOf(body)
	if err != nil {
		return sender.Fill(messages, sender.Result{Class: sender.Unknown, Code: sender.CodeBadAnswer, Detail: err.Error()})
	}
	at := make(map[string]int, len(messages))
	for i := range messages {
		at[messages[i].ID] = i
	}
	results := sender.Fill(messages, sender.Result{Class: sender.Unknown, Code: sender.CodeResultMissing})
	answered := make([]bool, len(messages))
	for _, raw := range list {
		one, ok := resultOf(raw)
		i, known := at[one.ID]
		switch {
		case !known && (!ok || one.ID == ""):
			r.metrics.malformed.Inc() // nobody's: its message stays missing
			continue
		case !known:
			r.metrics.extra.Inc()
			continue
		case answered[i]:
			// Even the same answer twice: the relay has lost count.
			r.metrics.duplicate.Inc()
			results[i] = sender.Result{ID: one.ID, Class: sender.Unknown, Code: sender.CodeResultDuplicate}
			continue
		}
		answered[i] = true
		if ok {
			results[i], ok = one.result()
		}
		if !ok {
			r.metrics.malformed.Inc()
			results[i] = sender.Result{ID: one.ID, Class: sender.Unknown, Code: sender.CodeResultMalformed}
		}
	}
	for _, got := range answered {
		if !got {
			r.metrics.missing.Inc()
		}
	}
	return results
}

// result is ok only if the relay clearly accepted or clearly refused.
func (a answerResult) result() (r sender.Result, ok bool) {
	switch a.Status {
	case "ok":
		return sender.Result{ID: a.ID, Class: sender.Accepted}, a.Code == ""
	case "error":
		r := sender.Result{ID: a.ID, Class: classOf(a.Code), Code: a.Code}
		if a.RetryAfter != nil {
			r.RetryAfter = seconds(*a.RetryAfter)
		}
		return r, sender.ValidCode(a.Code)
	}
	return sender.Result{}, false
}

// seconds bounds before it converts: a float beyond a Duration has no defined
// conversion.
func seconds(s float64) time.Duration {
	if !(s > 0) {
		return 0
	}
	return sender.ClampRetryAfter(time.Duration(min(s, sender.MaxRetryAfter.Seconds()) * float64(time.Second)))
}

// decodeStatuses fills in what the relay says of the ids in answers and keeps
// StatusUnknown for all else. An id that comes twice is unknown.
func decodeStatuses(body []byte, answers map[string]sender.Status) error {
	list, err := listOf(body)
	if err != nil {
		return err
	}
	seen := make(map[string]bool, len(list))
	for _, raw := range list {
		one, ok := resultOf(raw)
		if !ok {
			one.Status = "" // whatever it means: unknown
		}
		if _, asked := answers[one.ID]; !asked {
			continue
		}
		status := sender.StatusUnknown
		switch one.Status {
		case sender.StatusAccepted.String():
			status = sender.StatusAccepted
		case sender.StatusNotAccepted.String():
			status = sender.StatusNotAccepted
		}
		if seen[one.ID] {
			status = sender.StatusUnknown
		}
		seen[one.ID] = true
		answers[one.ID] = status
	}
	return nil
}

// metrics count what is wrong with a relay's answers: the messages concerned
// are unknown, and an operator should hear that the relay is at fault.
type metrics struct {
	missing, extra, duplicate, malformed prometheus.Counter
}

func newMetrics(name string, reg prometheus.Registerer) (*metrics, error) {
	bad := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "schoolbell", Name: "relay_bad_results_total",
		Help: "Results of relays that could not be used: missing, extra, duplicate, malformed.",
	}, []string{"sender", "kind"})
	if reg != nil {
		if err := reg.Register(bad); err != nil {
			var known prometheus.AlreadyRegisteredError
			if !errors.As(err, &known) {
				return nil, fmt.Errorf("register metrics: %w", err)
			}
			existing, ok := known.ExistingCollector.(*prometheus.CounterVec)
			if !ok {
				return nil, fmt.Errorf("register metrics: %w", err)
			}
			bad = existing
		}
	}
	return &metrics{
		missing:   bad.WithLabelValues(name, "missing"),
		extra:     bad.WithLabelValues(name, "extra"),
		duplicate: bad.WithLabelValues(name, "duplicate"),
		malformed: bad.WithLabelValues(name, "malformed"),
	}, nil
}
