package settings

import (
	"strings"
	"time"
)

// Kinds of sender (R30).
const (
	KindFCM   = "fcm"
	KindRelay = "relay"
	KindLog   = "log"
)

// Sender is one way out: a Firebase project, a relay, or the log. A kinds tag
// names the kinds that a setting belongs to; it is refused on the others.
type Sender struct {
	Kind string `yaml:"kind" oneof:"fcm relay log"`

	// CallTimeout is C: the longest one sending call may take.
	CallTimeout time.Duration `yaml:"call_timeout" range:"50ms..5m"`
	// InFlight is how many messages may be with the receiver at once in one
	// replica; a whole batch has to fit.
	InFlight int `yaml:"in_flight" range:"1..1000000"`
	// RatePerMinute is the sender's limit across the cluster (R9).
	RatePerMinute int `yaml:"rate_per_minute" kinds:"fcm relay" range:"1..100000000"`

	URL            Secret        `yaml:"url" kinds:"relay" secret:"url"`
	Token          Secret        `yaml:"token" kinds:"relay" secret:"all"`
	StatusURL      Secret        `yaml:"status_url" kinds:"relay" secret:"url"`
	ConnectTimeout time.Duration `yaml:"connect_timeout" kinds:"relay" range:"10ms..1m"`
	ReadTimeout    time.Duration `yaml:"read_timeout" kinds:"relay" range:"10ms..5m"`

	Project         string `yaml:"project" kinds:"fcm"`
	CredentialsFile string `yaml:"credentials_file" kinds:"fcm"`
	// Endpoint is scheme://host:port in place of FCM's own.
	Endpoint string `yaml:"endpoint" kinds:"fcm"`
	// OnlyTokensFile lists the only devices that are sent to; all others are
	// SKIPPED as NOT_ALLOWED (R44). It is read at the start.
	OnlyTokensFile string `yaml:"only_tokens_file" kinds:"fcm relay"`
	// DryRun has FCM check every message and deliver none (R44).
	DryRun bool `yaml:"dry_run" kinds:"fcm"`
}

// NewSender returns a sender of the kind with its defaults; what a kind cannot
// default (a relay's URL, a project) stays empty. An unknown kind has none.
func NewSender(kind string) Sender {
	s := Sender{Kind: kind, InFlight: 1000}
	switch kind {
	case KindFCM:
		s.CallTimeout = 15 * time.Second
		s.RatePerMinute = 600_000
	case KindRelay:
		s.CallTimeout = 10 * time.Second
		s.ConnectTimeout = 3 * time.Second
		s.ReadTimeout = 7 * time.Second
		// A relay takes a batch as one request, so the bound that fits FCM's one
		// request a message would be five requests here.
		s.InFlight = 20_000
	case KindLog:
		s.CallTimeout = time.Second
		s.InFlight = 20_000
	}
	return s
}

// withDefaults fills what was not set. A relay's two partial timeouts follow a
// call_timeout that was set shorter than they are.
func (s Sender) withDefaults(set func(name string) bool) Sender {
	d := NewSender(s.Kind)
	if !set("call_timeout") {
		s.CallTimeout = d.CallTimeout
	}
	if !set("in_flight") {
		s.InFlight = d.InFlight
	}
	if !set("rate_per_minute") {
		s.RatePerMinute = d.RatePerMinute
	}
	if !set("connect_timeout") {
		s.ConnectTimeout = min(d.ConnectTimeout, s.CallTimeout)
	}
	if !set("read_timeout") {
		s.ReadTimeout = min(d.ReadTimeout, s.CallTimeout)
	}
	return s
}

// takes reports whether a setting with this kinds tag belongs to the kind.
func takes(kinds, kind string) bool {
	if kinds == "" {
		return true
	}
	for k := range strings.FieldsSeq(kinds) {
		if k == kind {
			return true
		}
	}
	return false
}
