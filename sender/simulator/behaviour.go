package simulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"
)

// Behaviour is how the simulator answers, apart from what tokens ask for. It
// may be changed while requests are answered; a request keeps the behaviour it
// began with. The zero value accepts everything at once.
type Behaviour struct {
	Latency    Latency            `json:"latency"`     // before each answer
	Outcomes   map[string]float64 `json:"outcomes"`    // code → probability, a message's or a request's
	Reset      float64            `json:"reset"`       // short for Outcomes["RESET"]
	LoseAnswer float64            `json:"lose_answer"` // short for Outcomes["LOSE_ANSWER"]
	Quota      int                `json:"quota"`       // messages in any 60 s; beyond it 429; 0: no bound
	RetryAfter int                `json:"retry_after_seconds"`
	Dedupe     bool               `json:"dedupe"` // drop repeats by message id, as a good relay does; FCM never does

	// The token endpoint: "" gives a token, "refuse" says that the credentials
	// are no good, "fail" answers 503, "hang" not at all.
	TokenAnswer string `json:"token_answer,omitempty"`
	TokenLife   int    `json:"token_life_seconds,omitempty"` // of an access token; 0: 3599
}

const (
	tokenRefuse = "refuse"
	tokenFail   = "fail"
	tokenHang   = "hang"
)

// Latency is the time until an answer: Base, more or less up to Spread, evenly.
type Latency struct{ Base, Spread time.Duration }

// ParseLatency reads "80ms", "80ms±40ms" or "80ms+-40ms". Empty is none.
func ParseLatency(s string) (Latency, error) {
	if s == "" {
		return Latency{}, nil
	}
	base, spread, found := strings.Cut(strings.Replace(s, "+-", "±", 1), "±")
	var l Latency
	var err error
	if l.Base, err = time.ParseDuration(base); err == nil && found {
		l.Spread, err = time.ParseDuration(spread)
	}
	switch {
	case err != nil:
		return Latency{}, fmt.Errorf("latency %q: want a form like 80ms or 80ms±40ms", s)
	case l.Spread < 0 || l.Base < l.Spread:
		return Latency{}, fmt.Errorf("latency %q: the spread may be 0 to the base", s)
	}
	return l, nil
}

// String is the form that ParseLatency reads.
func (l Latency) String() string {
	if l.Spread == 0 {
		return l.Base.String()
	}
	return l.Base.String() + "±" + l.Spread.String()
}

// MarshalText makes it a string in JSON.
func (l Latency) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText is ParseLatency.
func (l *Latency) UnmarshalText(text []byte) error {
	parsed, err := ParseLatency(string(text))
	if err != nil {
		return err
	}
	*l = parsed
	return nil
}

// at is the latency for a draw in [0, 1).
func (l Latency) at(draw float64) time.Duration {
	return l.Base - l.Spread + time.Duration(draw*2*float64(l.Spread))
}

// ParseOutcomes reads "UNREGISTERED=0.02,UNAVAILABLE=0.01". Which codes there
// are is checked where they are used.
func ParseOutcomes(s string) (map[string]float64, error) {
	rates := map[string]float64{}
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		code, number, _ := strings.Cut(part, "=")
		rate, err := strconv.ParseFloat(number, 64)
		if err != nil {
			return nil, fmt.Errorf("outcome %q: want a form like UNREGISTERED=0.02", part)
		}
		if _, twice := rates[code]; twice {
			return nil, fmt.Errorf("outcome %s is given twice", code)
		}
		rates[code] = rate
	}
	return rates, nil
}

// decodeBehaviour reads a Behaviour from JSON. A name that is none is refused:
// a misspelt setting would otherwise make a test that tests nothing.
func decodeBehaviour(d *json.Decoder) (Behaviour, error) {
	var b Behaviour
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil {
		return Behaviour{}, fmt.Errorf("behaviour: %w", err)
	}
	return b, nil
}

// compiled is a Behaviour ready for use.
type compiled struct {
	Behaviour
	message, request chances
}

func (s script) compile(b Behaviour) (*compiled, error) {
	rates := maps.Clone(b.Outcomes)
	if rates == nil {
		rates = map[string]float64{}
	}
	for code, rate := range map[string]float64{"RESET": b.Reset, "LOSE_ANSWER": b.LoseAnswer} {
		if rate != 0 {
			if rates[code] != 0 {
				return nil, fmt.Errorf("behaviour: %s is given twice", code)
			}
			rates[code] = rate
		}
	}
	if b.Quota < 0 || b.RetryAfter < 0 || b.TokenLife < 0 {
		return nil, errors.New("behaviour: quota, retry_after_seconds and token_life_seconds may not be negative")
	}
	switch b.TokenAnswer {
	case "", tokenRefuse, tokenFail, tokenHang:
	default:
		return nil, fmt.Errorf("behaviour: token_answer %q: want %s, %s, %s or nothing", b.TokenAnswer, tokenRefuse, tokenFail, tokenHang)
	}
	if b.Latency.Spread < 0 || b.Latency.Base < b.Latency.Spread {
		return nil, errors.New("behaviour: the latency's spread may be 0 to its base")
	}
	message, request, err := s.chancesOf(rates)
	if err != nil {
		return nil, fmt.Errorf("behaviour: %w", err)
	}
	b.Outcomes = maps.Clone(b.Outcomes)
	return &compiled{Behaviour: b, message: message, request: request}, nil
}
