package fcm

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	firebase "firebase.google.com/go/v4"
	"firebase.google.com/go/v4/messaging"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"google.golang.org/api/option"

	"schoolbell/sender"
)

// Defaults of Config.
const (
	// DefaultCallTimeout leaves room above the 10 s that FCM asks callers to
	// wait at least: most of what it does inside is bounded by 10 s, and who
	// gives up sooner and repeats has the message shown twice.
	DefaultCallTimeout = 15 * time.Second
	DefaultInFlight    = 1000
)

// googleEndpoint is FCM's own.
const googleEndpoint = "https://fcm.googleapis.com"

// Config sets up an FCM sender.
type Config struct {
	Name string // the sender's name, for metrics, logs and errors

	// Project is the Firebase project's id. Empty: the one that the
	// credentials name.
	Project string

	// CredentialsFile holds the credentials as JSON (a service account, or one
	// of Google's other kinds). It is read again whenever an access token is
	// due, so that a key can be replaced. Empty, which needs an Endpoint: no
	// Authorization is sent.
	CredentialsFile string

	// Endpoint is scheme://host:port in place of FCM's own; /v1/… is added.
	// https speaks HTTP/2; http speaks HTTP/1.1, as emulators do. Credentials
	// over http are refused unless the host is a loopback address.
	Endpoint string

	// PriorKnowledge makes an http endpoint speak HTTP/2 from the first byte.
	PriorKnowledge bool

	// RootCAs are trusted in place of the system's; nil: the system's.
	RootCAs *x509.CertPool

	CallTimeout time.Duration // one message; 0: 15 s. Below 10 s repeats are likely
	InFlight    int           // messages with FCM at once, over all batches; 0: 1000

	// DryRun has FCM validate every message and deliver none (validate_only).
	DryRun bool
}

// FCM is a sender.Sender for one Firebase project.
type FCM struct {
	cfg     Config
	client  *messaging.Client
	tokens  *tokens // nil: no Authorization
	wire    wire
	flight  *semaphore.Weighted
	metrics *metrics
	log     *slog.Logger
}

var _ sender.Sender = (*FCM)(nil)

// wire is how requests get out, and how that ends.
type wire interface {
	http.RoundTripper
	// close ends the connections. Requests that run lose theirs.
	close()
}

// New returns an FCM sender and begins to fetch its access token. It opens no
// connection to FCM and does not fail where the token cannot be had yet; it does
// where the credentials cannot be read. Close ends it. A nil logger discards; a
// nil reg registers no metrics.
func New(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*FCM, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = log.With("sender", cfg.Name)
	fail := func(err error) (*FCM, error) { return nil, fmt.Errorf("fcm %s: %w", cfg.Name, err) }
	if err := cfg.setDefaults(); err != nil {
		return fail(err)
	}
	to, err := parseEndpoint(cfg.Endpoint)
	if err != nil {
		return fail(err)
	}
	var creds *credentials
	if cfg.CredentialsFile != "" {
		if !to.secure && !to.loopback() {
			return fail(errors.New("endpoint is http and not on this machine: an access token would travel in the clear; use https or leave credentials_file out"))
		}
		if creds, err = newCredentials(cfg.CredentialsFile); err != nil {
			return fail(err)
		}
		if cfg.Project == "" {
			cfg.Project = creds.project
		}
	}
	if err := validProject(cfg.Project); err != nil {
		return fail(err)
	}
	m, err := newMetrics(cfg.Name, reg)
	if err != nil {
		return fail(err)
	}

	f := &FCM{cfg: cfg, log: log, flight: semaphore.NewWeighted(int64(cfg.InFlight)), wire: newWire(cfg, to, m), metrics: m}
	// Without WithHTTPClient the SDK builds a transport of its own.
	client := &http.Client{
		Transport:     &once{next: f.wire},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	ctx := context.Background() // the SDK only reads its options with it
	app, err := firebase.NewApp(ctx, &firebase.Config{ProjectID: cfg.Project},
		option.WithEndpoint(to.base()+"/v1"), option.WithHTTPClient(client))
	if err == nil {
		f.client, err = app.Messaging(ctx)
	}
	if err != nil {
		f.wire.close()
		return fail(fmt.Errorf("set up the Firebase SDK: %w", err))
	}
	if creds != nil {
		f.tokens = newTokens(creds.fetch, log, m)
	}
	return f, nil
}

func (c *Config) setDefaults() error {
	if c.CallTimeout < 0 || c.InFlight < 0 {
		return fmt.Errorf("call_timeout %v and in_flight %d may not be negative", c.CallTimeout, c.InFlight)
	}
	if c.CallTimeout == 0 {
		c.CallTimeout = DefaultCallTimeout
	}
	if c.InFlight == 0 {
		c.InFlight = DefaultInFlight
	}
	if c.Endpoint == "" {
		if c.CredentialsFile == "" {
			return errors.New("there are no credentials: set credentials_file (or GOOGLE_APPLICATION_CREDENTIALS); only with an endpoint of its own a sender may have none")
		}
		c.Endpoint = googleEndpoint
	}
	return nil
}

// validProject keeps what goes into a request's path from changing it.
func validProject(p string) error {
	if p == "" {
		return errors.New("project is missing, and the credentials name none; set it to the Firebase project's id")
	}
	if strings.ContainsFunc(p, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:", r))
	}) {
		return errors.New("project is no project id: letters, digits, dashes, underscores, dots and colons only")
	}
	return nil
}

// Longest is the call timeout: every message of a batch starts with the call,
// where the caller bounds what is in flight by InFlight.
func (f *FCM) Longest() time.Duration { return f.cfg.CallTimeout }

// Close ends the token's goroutine and the connections. It is called when no
// Send runs any more.
func (f *FCM) Close() {
	if f.tokens != nil {
		f.tokens.close()
	}
	f.wire.close()
}

// Send sends each message of the batch by itself, all of them at once as far as
// InFlight lets them.
func (f *FCM) Send(ctx context.Context, batch sender.Batch) []sender.Result {
	if len(batch.Messages) == 0 {
		return nil
	}
	if f.tokens != nil {
		f.tokens.awaitFirst(ctx)
	}
	results := make([]sender.Result, len(batch.Messages))
	var sending sync.WaitGroup
	for i := range batch.Messages {
		stopped, rest := f.next(ctx, batch)
		if stopped {
			copy(results[i:], sender.Fill(batch.Messages[i:], rest))
			break
		}
		sending.Go(func() {
			defer f.flight.Release(1)
			results[i] = f.one(ctx, batch, &batch.Messages[i])
		})
	}
	sending.Wait()
	return results
}

// next takes a place in flight for the next message of the batch. stopped: that
// message and all behind it get rest.
func (f *FCM) next(ctx context.Context, batch sender.Batch) (stopped bool, rest sender.Result) {
	if f.flight.Acquire(ctx, 1) != nil {
		return true, sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled}
	}
	if ctx.Err() != nil { // Acquire may succeed all the same
		f.flight.Release(1)
		return true, sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled}
	}
	if batch.Gate != nil && batch.Gate() != nil {
		f.flight.Release(1)
		return true, gateClosed
	}
	return false, sender.Result{}
}

var gateClosed = sender.Result{Class: sender.NotSent, Code: sender.CodeGateClosed}

// one sends one message.
func (f *FCM) one(ctx context.Context, batch sender.Batch, m *sender.Message) (r sender.Result) {
	ctx, cancel := context.WithTimeoutCause(ctx, f.cfg.CallTimeout, errCallTimeout)
	defer cancel()
	c := &call{gate: batch.Gate}
	defer func() {
		if p := recover(); p != nil {
			// The value may hold anything; a stack holds no contents.
			f.log.Error("sending one message panicked; it is unknown", "event", "send_panic", "school", batch.School, "batch", batch.ID,
				"kind", fmt.Sprintf("%T", p), "stack", string(debug.Stack()))
			r = sender.Result{ID: m.ID, Class: sender.Unknown, Code: sender.CodePanic}
		}
	}()
	if f.tokens != nil {
		var missing *sender.Result
		if c.authorization, missing = f.tokens.header(time.Now()); missing != nil {
			r = *missing
			r.ID = m.ID
			return r
		}
	}
	send := f.client.Send
	if f.cfg.DryRun {
		send = f.client.SendDryRun
	}
	name, err := send(context.WithValue(ctx, callKey{}, c), message(batch, m, time.Now()))
	if c.repeats > 0 {
		f.metrics.repeats.Add(float64(c.repeats))
	}
	r = c.result(ctx, name, err)
	if r.Class == sender.Misconfigured && c.status == http.StatusUnauthorized && f.tokens != nil {
		f.tokens.refused(c.authorization)
	}
	r.ID = m.ID
	return r
}
