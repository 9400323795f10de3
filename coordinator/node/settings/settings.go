package settings

import (
	"log/slog"
	"net"
	"time"
)

// Settings is everything a replica can be told. The yaml tag is a setting's
// name in the file; the environment name is SCHOOLBELL_ and the path in capitals
// with underscores, unless an env tag says otherwise. A range or oneof tag is
// checked by [Settings.Validate].
type Settings struct {
	// DatabaseURL is postgres://… ; empty asks for the embedded mode.
	DatabaseURL Secret `yaml:"database_url" secret:"url" usage:"PostgreSQL URL, postgres://user:password@host:5432/name or postgres:///name?host=/var/run/postgresql"`

	Redis     Redis     `yaml:"redis"`
	HTTP      HTTP      `yaml:"http"`
	Database  Database  `yaml:"database"`
	Quota     Quota     `yaml:"quota"`
	Dispatch  Dispatch  `yaml:"dispatch"`
	Lock      Lock      `yaml:"lock"`
	Sweep     Sweep     `yaml:"sweep"`
	Retry     Retry     `yaml:"retry"`
	Brake     Brake     `yaml:"brake"`
	Retention Retention `yaml:"retention"`
	Alerts    Alerts    `yaml:"alerts"`
	Fallback  Fallback  `yaml:"fallback"`
	Log       Log       `yaml:"log"`

	// InstanceID names this replica in Redis, in the database and in the log.
	// Two living replicas never share one.
	InstanceID string `yaml:"instance_id" usage:"name of this replica (default: host name and a random part)"`

	// Timezone is an IANA name; the sweep's schedule is read in it.
	Timezone string `yaml:"timezone" usage:"the schools' time zone"`

	// StopDelay is how long a stopping replica says that it is not ready while
	// it still accepts requests, so that a load balancer notices first.
	StopDelay time.Duration `yaml:"stop_delay" range:"0s..10m" usage:"not ready but still accepting and sending, at stop"`
	// StopTimeout bounds the graceful stop (R15).
	StopTimeout time.Duration `yaml:"stop_timeout" range:"1s..30m" usage:"longest graceful stop"`

	// Senders by name. A school's sender is one of these.
	Senders map[string]Sender `yaml:"senders"`
	// DefaultSender is used by schools that name none.
	DefaultSender string `yaml:"default_sender" usage:"sender of schools that name none (default: the only one)"`

	// origins says where each value came from, by path; what is missing is a
	// default. Only Load fills it.
	origins map[string]Origin
}

// Redis is the arbiter's address.
type Redis struct {
	// URL is redis://, rediss://, redis+sentinel:// or redis+cluster://; empty
	// asks for the embedded mode.
	URL Secret `yaml:"url" secret:"url" usage:"Redis URL: redis://, rediss://, redis+sentinel:// or redis+cluster://"`
	// Prefix begins every key. Braces would move the hash tag.
	Prefix string `yaml:"prefix" usage:"beginning of every Redis key"`
}

// Who may call the HTTP API.
const (
	AuthKeys = "keys" // a key with a role
	AuthNone = "none" // everybody who can reach it; on loopback only
)

// HTTP is the API's side of the replica.
type HTTP struct {
	Listen string `yaml:"listen" usage:"address of the HTTP API, host:port (default: 127.0.0.1:8080 embedded, :8080 otherwise)"`
	Auth   string `yaml:"auth" oneof:"keys none" usage:"who may call: keys or none (default: keys; none when embedded on loopback)"`
	// AdminKey is the bootstrap key: every role, all schools.
	AdminKey Secret `yaml:"admin_key" env:"SCHOOLBELL_ADMIN_KEY" secret:"all"`
}

// Database is how the outbox uses its connections.
type Database struct {
	// MaxConns of one replica; recording results takes at most half of them (R34).
	MaxConns int `yaml:"max_conns" range:"4..1000" usage:"database connections of this replica"`
}

// Quota is the sending rule for schools that have none of their own (R1).
type Quota struct {
	Limit int           `yaml:"limit" range:"1..1000000" usage:"attempts per school and cycle"`
	Rest  time.Duration `yaml:"rest" range:"1ms..168h" usage:"rest after a full cycle"`
	// Headroom is kept free below the limit where the limit is a contract.
	Headroom int `yaml:"headroom" range:"0..1000000" usage:"attempts kept free below the limit"`
}

// Dispatch is how a school's turn goes.
type Dispatch struct {
	Page  int `yaml:"page" range:"1..10000" usage:"recipients read at once"`
	Batch int `yaml:"batch" range:"1..1000" usage:"most messages of one batch"`
	// Slots is how many schools one replica works on at once.
	Slots     int           `yaml:"slots" range:"1..4096" usage:"schools at once in this replica"`
	FirstTick time.Duration `yaml:"first_tick" range:"10ms..1h" usage:"first look for missed work after the start"`
	Tick      time.Duration `yaml:"tick" range:"10ms..1h" usage:"look for missed work this often"`
	// Pace is the wait between a school's batches (R9).
	Pace time.Duration `yaml:"pace" range:"0s..1h" usage:"wait between a school's batches"`
	// ClaimTimeout is W: what reserve and claim may take together before a batch
	// is withdrawn instead of sent.
	ClaimTimeout time.Duration `yaml:"claim_timeout" range:"50ms..1m" usage:"longest reserve and claim of a batch"`
}

// Lock is how long a school is held without a sign of life.
type Lock struct {
	// ETC is the expected time to complete a batch that a school starts with;
	// then it is learned (R11). Lease = 1.5 ETC.
	ETC time.Duration `yaml:"etc" range:"100ms..10m" usage:"expected time of a batch to begin with; the lease is 1.5 of it"`
	// ETCMax bounds what is learned, and so how long a killed owner's school waits.
	ETCMax time.Duration `yaml:"etc_max" range:"100ms..10m" usage:"most that the expected time of a batch may become"`
}

// Sweep is the recovery sweep (R22).
type Sweep struct {
	Cron string `yaml:"cron" usage:"schedule of the recovery sweep, five fields"`
}

// Retry is what follows a definite failure that may pass (R33).
type Retry struct {
	Max  int           `yaml:"max" range:"0..10" usage:"retries after the first attempt"`
	Base time.Duration `yaml:"base" range:"1ms..1h" usage:"wait before the first retry; doubles with each"`
}

// Brake is when devices that a receiver calls unregistered are not believed to be
// gone (R32): more than Percent of a batch and more than Count.
type Brake struct {
	Percent int `yaml:"percent" range:"1..100" usage:"devices are flagged, not retired, where more than this share of a batch is unregistered; 100: never"`
	Count   int `yaml:"count" range:"0..1000" usage:"and more than so many"`
}

// Retention is how long recipients of ended notices stay, and when those that
// stayed long enough are removed (R29).
type Retention struct {
	Recipients time.Duration `yaml:"recipients" range:"1h..87600h" usage:"how long recipients of ended notices stay"`
	// Cron is when removing begins; one run works for nine minutes at most, and
	// the next goes on where it stopped.
	Cron string `yaml:"cron" usage:"schedule of removing them, five fields"`
}

// Alerts go to a webhook (R42).
type Alerts struct {
	// WebhookURL is a secret as it stands: who has it may post. Empty: nobody is told.
	WebhookURL Secret `yaml:"webhook_url" secret:"host"`
	Kind       string `yaml:"kind" oneof:"discord slack json" usage:"what the webhook of alerts takes: discord, slack or json"`
	// PageURL is where an alert sends people to look.
	PageURL string `yaml:"page_url" usage:"address of the operators' page, which alerts link to"`
	// DigestCron is when failures are summed up; a time without new ones passes in
	// silence.
	DigestCron string `yaml:"digest_cron" usage:"schedule of the digest of failures, five fields"`
}

// Fallback is the webhook of the SMS that follows a definite failure (R35).
type Fallback struct {
	URL Secret `yaml:"url" secret:"url"` // empty: notices cannot have a fallback
	// Token is sent as bearer token.
	Token Secret `yaml:"token" secret:"all"`
}

// Log is how the replica writes its log.
type Log struct {
	// Format is text, json, or auto: text on a terminal and json elsewhere.
	Format string `yaml:"format" oneof:"auto text json" usage:"log as text or json (auto: text on a terminal)"`
	Level  string `yaml:"level" oneof:"debug info warn error" usage:"least level that is logged"`
}

// Default returns the settings of a replica that was told nothing: embedded on
// loopback, with a log sender. InstanceID stays empty, since only the caller
// can know a host name and a random part. Every default is here and in
// [NewSender].
func Default() Settings {
	s := Settings{
		Redis:         Redis{Prefix: "schoolbell"},
		HTTP:          HTTP{Listen: embeddedListen, Auth: AuthNone},
		Database:      Database{MaxConns: 10},
		Timezone:      "Asia/Seoul",
		Quota:         Quota{Limit: 5000, Rest: 180 * time.Second},
		Dispatch:      Dispatch{Page: 1000, Batch: 200, Slots: 64, FirstTick: 60 * time.Second, Tick: 10 * time.Second, ClaimTimeout: 4 * time.Second},
		Lock:          Lock{ETC: 40 * time.Second, ETCMax: 60 * time.Second},
		Sweep:         Sweep{Cron: "*/5 9-21 * * MON-FRI"},
		Retry:         Retry{Max: 3, Base: time.Minute},
		Brake:         Brake{Percent: 30, Count: 20},
		Retention:     Retention{Recipients: 2160 * time.Hour, Cron: "*/10 1-5 * * *"},
		Log:           Log{Format: "auto", Level: "info"},
		StopDelay:     5 * time.Second,
		StopTimeout:   45 * time.Second,
		DefaultSender: KindLog,
	}
	s.Alerts = Alerts{Kind: "json", DigestCron: "0 9-21 * * *"}
	s.Senders = map[string]Sender{KindLog: NewSender(KindLog)}
	return s
}

const (
	embeddedListen = "127.0.0.1:8080" // nobody else can reach a replica that needs no key
	serverListen   = ":8080"
)

// Embedded reports whether the stores are to run inside this process.
func (s Settings) Embedded() bool { return s.DatabaseURL == "" && s.Redis.URL == "" }

// Loopback reports whether only this machine can reach the HTTP API.
func (s Settings) Loopback() bool {
	host, _, err := net.SplitHostPort(s.HTTP.Listen)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// Location is the schools' time zone. UTC where Timezone names none, which
// Validate refuses.
func (s Settings) Location() *time.Location {
	loc, err := time.LoadLocation(s.Timezone)
	if err != nil {
		return time.UTC
	}
	return loc
}

// LogLevel is Log.Level for slog.
func (s Settings) LogLevel() slog.Level {
	var l slog.Level
	if err := l.UnmarshalText([]byte(s.Log.Level)); err != nil {
		return slog.LevelInfo
	}
	return l
}

// Origin says where the value of the setting at path came from.
func (s Settings) Origin(path string) Origin { return s.origins[path] }

// Secret is a string that shows itself to nobody: formatted, logged or
// marshalled it reads "(hidden)", or "" where it is empty. string(x) is the
// value.
type Secret string

const hidden = "(hidden)"

func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return hidden
}

// GoString keeps %#v from showing the value.
func (s Secret) GoString() string { return `"` + s.String() + `"` }

// MarshalText keeps encoders from showing the value.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue keeps slog from showing the value.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }
