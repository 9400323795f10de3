package relay

import (
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

type answer struct {
	Results []json.RawMessage `json:"results"`
}

type answerResult struct {
	ID         string   `json:"id"`
	Status     string   `json:"status"`
	Code       string   `json:"code"`
	RetryAfter *float64 `json:"retry_after_seconds"`
}

// results reads a 200's body. One result that cannot be understood costs only
// its own message; a body that is no such JSON costs all.
func (r *Relay) results(messages []sender.Message, body []byte) []sender.Result {
	var a answer
	if err := json.Unmarshal(body, &a); err != nil {
		// The error may quote the answer, which may quote a message.
		return sender.Fill(messages, sender.Result{Class: sender.Unknown, Code: sender.CodeBadAnswer, Detail: "the answer is not the JSON it should be"})
	}
	at := make(map[string]int, len(messages))
	for i := range messages {
		at[messages[i].ID] = i
	}
	results := sender.Fill(messages, sender.Result{Class: sender.Unknown, Code: sender.CodeResultMissing})
	answered := make([]bool, len(messages))
	for _, raw := range a.Results {
		var one answerResult
		err := json.Unmarshal(raw, &one)
		if err != nil && one.ID == "" {
			one.ID = idOf(raw)
		}
		i, known := at[one.ID]
		switch {
		case !known && (err != nil || one.ID == ""):
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
		ok := err == nil
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
	var a struct {
		Results []struct {
			ID     string `json:"id"`
			Status string `json:"status"`
		} `json:"results"`
	}
	if json.Unmarshal(body, &a) != nil {
		return errors.New("the answer is not the JSON it should be")
	}
	seen := make(map[string]bool, len(a.Results))
	for _, one := range a.Results {
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
