package simulator

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// outcome is what can befall a message, or a whole request.
type outcome struct {
	code    string // key of Behaviour.Outcomes; for a refused message the answer's error code
	prefix  string // what a token begins with; the code in lower case does it too
	request bool   // befalls the whole request
	effect  effect
	status  int // with refuseAll: the HTTP status
}

type effect int

const (
	refuse      effect = iota + 1 // the message is answered with code
	leaveOut                      // accepted, missing from the answer
	nameTwice                     // accepted, twice in the answer
	addStranger                   // accepted, and a result for an id that nobody sent
	misspell                      // accepted, with a status that does not exist
	refuseAll                     // an HTTP status
	refuseWait                    // the same with Retry-After
	reset                         // nothing accepted, the connection is reset
	loseAnswer                    // processed as usual, then the connection is reset
	truncate                      // processed as usual, the answer is cut in the middle
	hang                          // nothing accepted, no answer until the caller goes
	garbage                       // nothing accepted, 200 with something that is no answer
	cut                           // processed as usual, then the whole connection is closed
	goAway                        // processed and answered as usual, and the connection is asked to end
	falseAlarm                    // processed as usual, answered 503
)

// outcomes is the whole script language.
var outcomes = []outcome{
	// Of a message.
	{code: "UNREGISTERED", prefix: "unregistered", effect: refuse},
	{code: "UNAVAILABLE", prefix: "unavailable", effect: refuse},
	{code: "INTERNAL", prefix: "internal", effect: refuse},
	{code: "QUOTA_EXCEEDED", prefix: "quota", effect: refuse},
	{code: "SENDER_ID_MISMATCH", prefix: "mismatch", effect: refuse},
	{code: "INVALID_ARGUMENT", prefix: "invalid", effect: refuse},
	{code: "INVALID_PAYLOAD", prefix: "payload", effect: refuse}, // FCM: INVALID_ARGUMENT that names a field which is not the token
	{code: "THIRD_PARTY_AUTH_ERROR", prefix: "thirdparty", effect: refuse},
	{code: "STRANGE_ERROR", prefix: "strange", effect: refuse}, // a code that nobody knows
	{code: "MISSING", prefix: "missing", effect: leaveOut},
	{code: "DUPLICATE", prefix: "duplicate", effect: nameTwice},
	{code: "EXTRA", prefix: "extra", effect: addStranger},
	{code: "BAD_STATUS", prefix: "badstatus", effect: misspell},
	// Of a request.
	{code: "AUTH", prefix: "auth", request: true, effect: refuseAll, status: http.StatusUnauthorized},
	{code: "FORBIDDEN", prefix: "forbidden", request: true, effect: refuseAll, status: http.StatusForbidden},
	{code: "THROTTLED", prefix: "throttled", request: true, effect: refuseWait, status: http.StatusTooManyRequests},
	{code: "BUSY", prefix: "busy", request: true, effect: refuseWait, status: http.StatusServiceUnavailable},
	{code: "DOWN", prefix: "down", request: true, effect: refuseAll, status: http.StatusServiceUnavailable},
	{code: "ERROR", prefix: "error", request: true, effect: refuseAll, status: http.StatusInternalServerError},
	{code: "REDIRECT", prefix: "redirect", request: true, effect: refuseAll, status: http.StatusTemporaryRedirect},
	{code: "RESET", prefix: "reset", request: true, effect: reset},
	{code: "LOSE_ANSWER", prefix: "loseanswer", request: true, effect: loseAnswer},
	{code: "TRUNCATED", prefix: "truncated", request: true, effect: truncate},
	{code: "HANG", prefix: "hang", request: true, effect: hang},
	{code: "GARBAGE", prefix: "garbage", request: true, effect: garbage},
	{code: "CUT", prefix: "cut", request: true, effect: cut},
	{code: "GOAWAY", prefix: "goaway", request: true, effect: goAway},
	{code: "FALSE_ALARM", prefix: "falsealarm", request: true, effect: falseAlarm},
}

// script finds outcomes by token and by code.
type script struct {
	byPrefix map[string]*outcome
	byCode   map[string]*outcome
}

func newScript() script {
	s := script{byPrefix: map[string]*outcome{}, byCode: map[string]*outcome{}}
	for i := range outcomes {
		o := &outcomes[i]
		s.byCode[o.code] = o
		s.byPrefix[o.prefix] = o
		s.byPrefix[strings.ToLower(o.code)] = o
	}
	return s
}

// ofToken reads a token's prefix: the outcome it asks for and how many times;
// 0 times means always. It returns nil for an ordinary token.
func (s script) ofToken(token string) (o *outcome, times int) {
	word, _, found := strings.Cut(token, "-")
	if !found {
		return nil, 0
	}
	name := strings.TrimRight(word, "0123456789")
	o = s.byPrefix[name]
	if o == nil || name == word {
		return o, 0
	}
	times, err := strconv.Atoi(word[len(name):])
	if err != nil || times == 0 {
		return nil, 0
	}
	return o, times
}

// chances are the outcomes of one level, each with its upper end in [0, 1).
type chances []chance

type chance struct {
	below float64
	what  *outcome
}

func (c chances) pick(draw float64) *outcome {
	for _, one := range c {
		if draw < one.below {
			return one.what
		}
	}
	return nil
}

// chancesOf sorts probabilities into those of messages and those of requests.
func (s script) chancesOf(rates map[string]float64) (message, request chances, err error) {
	for _, code := range slices.Sorted(maps.Keys(rates)) {
		rate := rates[code]
		o := s.byCode[code]
		if o == nil {
			return nil, nil, fmt.Errorf("outcome %q: want one of %s", code, strings.Join(s.codes(), ", "))
		}
		if !(rate >= 0 && rate <= 1) {
			return nil, nil, fmt.Errorf("outcome %s=%v: a probability is 0 to 1", code, rate)
		}
		if rate == 0 {
			continue
		}
		level := &message
		if o.request {
			level = &request
		}
		below := rate
		if n := len(*level); n > 0 {
			below += (*level)[n-1].below
		}
		*level = append(*level, chance{below: below, what: o})
	}
	for _, level := range []chances{message, request} {
		// The sum of decimal fractions misses 1 by a few of the last digits.
		if n := len(level); n > 0 && level[n-1].below > 1+1e-9 {
			return nil, nil, fmt.Errorf("probabilities of one level add up to %v: at most 1", level[n-1].below)
		}
	}
	return message, request, nil
}

func (s script) codes() []string {
	return slices.Sorted(maps.Keys(s.byCode))
}
