// Package fallback posts the messages to people whose devices definitely could not
// be reached (R35) to a webhook that knows how to reach them otherwise, by SMS.
//
// # Protocol
//
// POST with Content-Type application/json, Authorization (Bearer) where a token is
// set, and Idempotency-Key:
//
//	{"id":"123.4.sms","school":"A","ref":"member-17","text":"…"}
//
// id, which the header repeats, is the recipient's message id and ".sms". It is the
// same in every try, from every replica, also after a requeue: a receiver that
// drops repeats by it sends one message, whatever breaks in between. ref is the
// application's own name for the recipient, by which the receiver finds the
// number; it is empty where the notice gave none. The device's token is not sent.
//
// 2xx says that the message was taken. 400, 405, 406, 411, 413, 414, 415, 417,
// 422, 431 and 451 refuse it for good. Any other answer, or none, is tried again
// after 5 s, 10 s … 10 min, not before Retry-After, for 24 hours; while nothing is
// taken, one message at a time. Where its notice is cancelled or has expired a
// message is not posted any more.
//
// # When
//
// The store makes the message with the record of a definite failure: the device is
// gone (FAIL), the message was refused, or the last permitted attempt was
// definitely not taken. Never where the last outcome is unknown, so that nobody is
// told twice what arrived; never for a recipient that was skipped (DISABLED,
// CANCELLED, EXPIRED, DUPLICATE, NOT_ALLOWED) or ended by such a wish while it
// waited for a retry, since it was not to be told any more. One in a recipient's
// life, also where it fails again after a requeue.
package fallback

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator/hook"
	"schoolbell/school"
)

// Store is where the messages wait.
type Store interface {
	// ClaimFallbacks takes up to limit that are due, for the lease.
	ClaimFallbacks(ctx context.Context, limit int, lease time.Duration) ([]school.Fallback, error)
	// SettleFallback writes what became of a try.
	SettleFallback(ctx context.Context, f school.Fallback, p school.Posted) error
}

type table struct{ Store }

func (t table) Claim(ctx context.Context, limit int, lease time.Duration) ([]school.Fallback, error) {
	return t.ClaimFallbacks(ctx, limit, lease)
}

func (t table) Settle(ctx context.Context, f school.Fallback, p school.Posted) error {
	return t.SettleFallback(ctx, f, p)
}

// pumping is how patient it is: a school's message is of use today.
var pumping = hook.PumpConfig{
	Name: "fallback", AtOnce: 8, Poll: 2 * time.Second,
	First: 5 * time.Second, Most: 10 * time.Minute, Until: 24 * time.Hour,
}

// message is what the webhook gets.
type message struct {
	ID     string `json:"id"`
	School string `json:"school"`
	Ref    string `json:"ref"`
	Text   string `json:"text"`
}

// New makes the pump that posts fallbacks. Its metric is
// schoolbell_fallbacks_total{result}; a nil reg registers none.
func New(store Store, client *hook.Client, log *slog.Logger, reg prometheus.Registerer) (*hook.Pump[school.Fallback], error) {
	posts := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "schoolbell_fallbacks_total",
		Help: "Posts of fallbacks by what became of them: sent, retry, refused, void (notice cancelled or expired), expired (not taken in 24 hours)."}, []string{"result"})
	for _, r := range hook.Results() {
		posts.WithLabelValues(r.String())
	}
	if reg != nil {
		if err := reg.Register(posts); err != nil {
			return nil, fmt.Errorf("fallback: metrics: %w", err)
		}
	}
	try := func(f school.Fallback) hook.Try {
		return hook.Try{Attempt: f.Attempt, Age: f.Age, Void: string(f.Void), Post: func(ctx context.Context) hook.Answer {
			body, err := json.Marshal(message{ID: f.ID(), School: f.School, Ref: f.Ref, Text: f.Text})
			if err != nil {
				return hook.Answer{Fate: hook.Refused, Code: "NOT_ENCODED"}
			}
			return client.Post(ctx, f.ID(), body)
		}}
	}
	done := func(f school.Fallback, r hook.Result, a hook.Answer) {
		posts.WithLabelValues(r.String()).Inc()
		if r == hook.Rejected || r == hook.Expired {
			log.Warn("a fallback was not taken and is given up", "event", "fallback_failed", "school", f.School, "message", f.ID(), "code", a.Code, "attempts", f.Attempt)
		}
	}
	return hook.NewPump(pumping, table{store}, try, done, log)
}
