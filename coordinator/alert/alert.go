// Package alert tells operators, through a webhook of Discord, Slack or their own,
// what they should look at (R42): at once what stops a sender or shows that one is
// set up wrongly, and in a digest the recipients that failed for good.
//
// # Kinds
//
//   - sender_stopped: a receiver does not let a sender in; nothing is sent by it.
//     Again every hour while that lasts. sender_resumed: it does again.
//   - sender_unanswered: a sender's receiver answers none of the replicas.
//     sender_answered: it does again.
//   - sender_id_mismatch, third_party_auth_error: messages were refused since the
//     device belongs to another sender, or since the key for its platform (APNs,
//     web push) is wrong. At once for each sender, then every hour with the number
//     of messages since.
//   - unregistered_brake: an unusual share of a batch came back as unregistered,
//     and no device of it was retired. At once for each sender, then every hour.
//   - failures: recipients that have become PERMANENT_FAIL since the digest
//     before, by school, error code and reason.
//
// # JSON
//
// The kind json of the webhook gets
//
//	{"version":1,"id":"17","kind":"sender_stopped","at":"…","since":"…","seen":3,
//	 "text":"…","link":"https://…","sender":"relay","school":"A","code":"UNAUTHENTICATED"}
//
// with Idempotency-Key: alert-<id>. version grows when a field changes its meaning
// or goes; fields may be added. id is the alert's, the same in every try. at is
// when it was raised, since when what it tells of began, seen how often that was
// seen since the alert before (messages, batches or recipients, as the kind goes).
// text says the same in words, in several lines. link is the operators' page, where
// one is set. sender, school (whose batch showed it), code, unregistered and size
// (of the batch) are there where the kind has them. failures has
//
//	"failures":{"from":"…","until":"…","recipients":40,"schools":2,
//	 "items":[{"school":"A","name":"…","recipients":30,"codes":[{"code":"UNAVAILABLE","reason":"RETRIES_EXHAUSTED","recipients":30}]}],
//	 "more_schools":0}
//
// with at most 20 schools, the most first, and 5 codes of each.
//
// # Delivery
//
// Alerts wait in the store: told once for all replicas, at least once each, under
// growing pauses from 5 s to 10 min for a day, not before what the webhook's
// Retry-After asks for. No alert holds a device token, a title, a body, data, a
// ref or a key.
package alert

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator/hook"
	"schoolbell/school"
)

// Kind is what an alert is about.
type Kind string

const (
	SenderStopped     Kind = "sender_stopped"
	SenderResumed     Kind = "sender_resumed"
	SenderUnanswered  Kind = "sender_unanswered"
	SenderAnswered    Kind = "sender_answered"
	SenderMismatch    Kind = "sender_id_mismatch"
	ThirdPartyAuth    Kind = "third_party_auth_error"
	UnregisteredBrake Kind = "unregistered_brake"
	FailuresDigest    Kind = "failures"
)

// Kinds lists all.
func Kinds() []Kind {
	return []Kind{SenderStopped, SenderResumed, SenderUnanswered, SenderAnswered, SenderMismatch, ThirdPartyAuth, UnregisteredBrake, FailuresDigest}
}

// Event is what an alert tells. It is stored as JSON.
type Event struct {
	Sender       string    `json:"sender,omitempty"`
	School       string    `json:"school,omitempty"`
	Code         string    `json:"code,omitempty"`
	Unregistered int       `json:"unregistered,omitempty"`
	Size         int       `json:"size,omitempty"`
	Failures     *Failures `json:"failures,omitempty"`
}

// Failures is a digest, bounded in size.
type Failures struct {
	From        time.Time      `json:"from"`
	Until       time.Time      `json:"until"`
	Recipients  int            `json:"recipients"`
	Schools     int            `json:"schools"`
	Items       []SchoolFailed `json:"items"`
	MoreSchools int            `json:"more_schools"`
}

// SchoolFailed are the failures of one school.
type SchoolFailed struct {
	School     string       `json:"school"`
	Name       string       `json:"name,omitempty"`
	Recipients int          `json:"recipients"`
	Codes      []CodeFailed `json:"codes"`
}

// CodeFailed are those with one code and reason.
type CodeFailed struct {
	Code       string `json:"code"`
	Reason     string `json:"reason,omitempty"`
	Recipients int    `json:"recipients"`
}

// Webhooks that are known.
const (
	Discord = "discord"
	Slack   = "slack"
	JSON    = "json"
)

// Config is how alerts are told.
type Config struct {
	Kind string // Discord, Slack or JSON
	Link string // the operators' page; empty: none

	// Zone is the time zone that texts show times in; nil: UTC.
	Zone *time.Location
}

// Outbox is where alerts wait.
type Outbox interface {
	// ClaimAlerts takes up to limit that are due, for the lease.
	ClaimAlerts(ctx context.Context, limit int, lease time.Duration) ([]school.Alert, error)
	// SettleAlert writes what became of a try.
	SettleAlert(ctx context.Context, a school.Alert, p school.Posted) error
}

type table struct{ Outbox }

func (t table) Claim(ctx context.Context, limit int, lease time.Duration) ([]school.Alert, error) {
	return t.ClaimAlerts(ctx, limit, lease)
}

func (t table) Settle(ctx context.Context, a school.Alert, p school.Posted) error {
	return t.SettleAlert(ctx, a, p)
}

// pumping: one at a time, since webhooks of chats take few a second; and nobody
// wants to hear today of what stopped the day before yesterday.
var pumping = hook.PumpConfig{
	Name: "alert", AtOnce: 1, Poll: 5 * time.Second,
	First: 5 * time.Second, Most: 10 * time.Minute, Until: 24 * time.Hour,
}

// NewPump makes the pump that posts alerts. Its metric is
// schoolbell_alerts_sent_total{kind,result}; a nil reg registers none.
func NewPump(cfg Config, outbox Outbox, client *hook.Client, log *slog.Logger, reg prometheus.Registerer) (*hook.Pump[school.Alert], error) {
	switch cfg.Kind {
	case Discord, Slack, JSON:
	default:
		return nil, fmt.Errorf("alert: kind %q of a webhook is none", cfg.Kind)
	}
	posts := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "schoolbell_alerts_sent_total",
		Help: "Posts of alerts by kind and what became of them: sent, retry, refused, expired (not taken in a day)."}, []string{"kind", "result"})
	for _, k := range Kinds() {
		posts.WithLabelValues(string(k), hook.Sent.String())
	}
	if reg != nil {
		if err := reg.Register(posts); err != nil {
			return nil, fmt.Errorf("alert: metrics: %w", err)
		}
	}
	try := func(a school.Alert) hook.Try {
		return hook.Try{Attempt: a.Attempt, Age: a.Age, Post: func(ctx context.Context) hook.Answer {
			body, err := render(cfg, a)
			if err != nil {
				return hook.Answer{Fate: hook.Refused, Code: "NOT_READABLE"}
			}
			return client.Post(ctx, "alert-"+strconv.FormatInt(a.ID, 10), body)
		}}
	}
	done := func(a school.Alert, r hook.Result, answer hook.Answer) {
		posts.WithLabelValues(a.Kind, r.String()).Inc()
		if r != hook.Sent {
			log.Warn("an alert was not taken by the webhook", "event", "alert_failed", "kind", a.Kind, "alert", a.ID,
				"code", answer.Code, "attempts", a.Attempt, "given_up", r != hook.Again)
		}
	}
	return hook.NewPump(pumping, table{outbox}, try, done, log)
}

// render makes the body of the post.
func render(cfg Config, a school.Alert) ([]byte, error) {
	var e Event
	if err := json.Unmarshal(a.Body, &e); err != nil {
		return nil, err
	}
	zone := cfg.Zone
	if zone == nil {
		zone = time.UTC
	}
	switch cfg.Kind {
	case Discord:
		return discord(cfg, textOf(a, e, zone, escapeDiscord, maxText))
	case Slack:
		return slack(cfg, textOf(a, e, zone, escapeSlack, maxText))
	}
	return json.Marshal(struct {
		Version int       `json:"version"`
		ID      string    `json:"id"`
		Kind    string    `json:"kind"`
		At      time.Time `json:"at"`
		Since   time.Time `json:"since"`
		Seen    int64     `json:"seen"`
		Text    string    `json:"text"`
		Link    string    `json:"link,omitempty"`
		Event
	}{1, strconv.FormatInt(a.ID, 10), a.Kind, a.At.UTC(), a.Since.UTC(), a.Seen, textOf(a, e, zone, plain, maxText), cfg.Link, e})
}

// maxText is how long a text may be, in UTF-16 units: Discord takes 2,000 with the
// link, Slack 3,000 in one block.
const maxText = 1600

// MaxLink is how long a link may be, so that it fits beside the longest text.
const MaxLink = 300

// discord says with allowed_mentions that nobody is called, whatever the text
// holds, and with flags (SUPPRESS_EMBEDS) that no address in it is fetched.
func discord(cfg Config, text string) ([]byte, error) {
	if cfg.Link != "" {
		text += "\n<" + cfg.Link + ">"
	}
	type mentions struct {
		Parse []string `json:"parse"`
	}
	return json.Marshal(struct {
		Content         string   `json:"content"`
		AllowedMentions mentions `json:"allowed_mentions"`
		Flags           int      `json:"flags"`
	}{text, mentions{[]string{}}, 1 << 2})
}

// slack shows the text as plain_text, in which nothing is markup and nobody is
// called; the top-level text is what notifications show.
func slack(cfg Config, text string) ([]byte, error) {
	type object struct {
		Type     string `json:"type"`
		Text     string `json:"text"`
		Emoji    *bool  `json:"emoji,omitempty"`
		Verbatim *bool  `json:"verbatim,omitempty"`
	}
	type block struct {
		Type string `json:"type"`
		Text object `json:"text"`
	}
	yes, no := true, false
	blocks := []block{{"section", object{Type: "plain_text", Text: text, Emoji: &no}}}
	if cfg.Link != "" {
		blocks = append(blocks, block{"section", object{Type: "mrkdwn", Text: "<" + escapeSlack(strings.ReplaceAll(cfg.Link, "|", "%7C")) + "|Open the page>", Verbatim: &yes}})
	}
	first, _, _ := strings.Cut(text, "\n")
	return json.Marshal(struct {
		Text   string  `json:"text"`
		Mrkdwn bool    `json:"mrkdwn"`
		Blocks []block `json:"blocks"`
	}{first, false, blocks})
}
