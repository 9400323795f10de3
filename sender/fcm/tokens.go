package fcm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"cloud.google.com/go/auth"
	googlecredentials "cloud.google.com/go/auth/credentials"

	"schoolbell/sender"
)

const (
	// scope is all that sending needs. The SDK by itself asks for six, the
	// whole of the project's cloud among them.
	scope = "https://www.googleapis.com/auth/firebase.messaging"

	fetchTimeout = 10 * time.Second
	fetchFirst   = time.Second // wait after a failure, doubled up to
	fetchMost    = time.Minute

	// refreshEarly is how long before its end a token is replaced, or half its
	// life where that is shorter.
	refreshEarly = 5 * time.Minute
	// expiryMargin is how long before its end a token is not used any more.
	expiryMargin = 10 * time.Second
	// refusalPause is the least time between two fetches that were caused by
	// FCM refusing a token.
	refusalPause = 10 * time.Second
	// firstWait is how long after the start calls wait for the first token,
	// which is on its way then. Later ones are there beforehand.
	firstWait = 3 * time.Second
)

// credentialTypes are the kinds of file that are taken: all of which get a token
// without a person.
var credentialTypes = []googlecredentials.CredType{
	googlecredentials.ServiceAccount,
	googlecredentials.AuthorizedUser,
	googlecredentials.ExternalAccount,
	googlecredentials.ImpersonatedServiceAccount,
}

// credentials are a file that access tokens can be had with.
type credentials struct {
	path    string
	project string // that the file names; may be empty
}

// newCredentials checks the file. Its errors name the file and nothing in it.
func newCredentials(path string) (*credentials, error) {
	c := &credentials{path: path}
	creds, err := c.read()
	if err != nil {
		return nil, err
	}
	c.project, _ = creds.ProjectID(context.Background()) // of a file, so it asks nobody
	return c, nil
}

func (c *credentials) read() (*auth.Credentials, error) {
	text, err := os.ReadFile(c.path)
	if err != nil {
		return nil, fmt.Errorf("read credentials_file: %w", err)
	}
	var file struct {
		Type googlecredentials.CredType `json:"type"`
	}
	if json.Unmarshal(text, &file) != nil {
		return nil, fmt.Errorf("credentials_file %s is no JSON", c.path)
	}
	if !slices.Contains(credentialTypes, file.Type) {
		return nil, fmt.Errorf("credentials_file %s is none of %q by its type", c.path, credentialTypes)
	}
	creds, err := googlecredentials.NewCredentialsFromJSON(file.Type, text, &googlecredentials.DetectOptions{
		Scopes: []string{scope},
		Client: &http.Client{Timeout: fetchTimeout},
		Logger: slog.New(slog.DiscardHandler), // the library's own, switched on by the environment, writes tokens
	})
	if err != nil {
		return nil, fmt.Errorf("credentials_file %s cannot be used as credentials of type %s", c.path, file.Type)
	}
	return creds, nil
}

// fetch gets an access token. The file is read anew, so that a replaced key is
// used, and nothing in between keeps a token that FCM refused.
func (c *credentials) fetch(ctx context.Context) (*auth.Token, error) {
	creds, err := c.read()
	if err != nil {
		return nil, err
	}
	return creds.Token(ctx)
}

// tokens keeps one valid access token at hand. A goroutine of its own fetches
// them, so that a token endpoint that fails or hangs delays no message: who has
// no token is told so at once.
type tokens struct {
	fetch   func(context.Context) (*auth.Token, error)
	log     *slog.Logger
	metrics *metrics

	now    atomic.Pointer[tokenState]
	first  chan struct{} // closed when the first fetch has ended
	until  time.Time     // nobody waits for that any longer
	nudge  chan string   // capacity 1: the header that FCM refused
	stop   context.CancelFunc
	closed chan struct{}
}

type tokenState struct {
	header  string // Authorization; empty: there is none
	expires time.Time
	refused bool // the last fetch failed for what the credentials are
}

func newTokens(fetch func(context.Context) (*auth.Token, error), log *slog.Logger, m *metrics) *tokens {
	ctx, stop := context.WithCancel(context.Background())
	t := &tokens{
		fetch: fetch, log: log, metrics: m,
		first: make(chan struct{}), until: time.Now().Add(firstWait), nudge: make(chan string, 1), stop: stop, closed: make(chan struct{}),
	}
	t.now.Store(&tokenState{})
	go t.run(ctx)
	return t
}

// awaitFirst waits until the first fetch has ended, or was given time enough.
func (t *tokens) awaitFirst(ctx context.Context) {
	select {
	case <-t.first:
		return
	default:
	}
	timer := time.NewTimer(time.Until(t.until))
	defer timer.Stop()
	select {
	case <-t.first:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// header is the Authorization to send, or what becomes of messages without one.
func (t *tokens) header(now time.Time) (header string, missing *sender.Result) {
	s := t.now.Load()
	switch {
	case s.header != "" && now.Before(s.expires.Add(-expiryMargin)):
		return s.header, nil
	case s.refused:
		return "", &sender.Result{Class: sender.Misconfigured, Code: codeTokenRefused, Detail: "no access token is given for these credentials"}
	}
	return "", &sender.Result{Class: sender.NotSent, Code: codeTokenMissing, Detail: "no access token can be had at the moment"}
}

// refused notes that FCM did not take the token: another is fetched soon.
func (t *tokens) refused(header string) {
	select {
	case t.nudge <- header:
	default:
	}
}

func (t *tokens) close() {
	t.stop()
	<-t.closed
}

func (t *tokens) run(ctx context.Context) {
	defer close(t.closed)
	backoff := fetchFirst
	for began := true; ; began = false {
		fetched := time.Now()
		wait, ok := t.refresh(ctx)
		if ctx.Err() != nil {
			return
		}
		if began {
			close(t.first)
		}
		if ok {
			backoff = fetchFirst
		} else {
			wait = backoff + rand.N(backoff/4)
			backoff = min(2*backoff, fetchMost)
		}
		if !t.pause(ctx, wait, fetched) {
			return
		}
	}
}

// pause waits until the next fetch is due, which a refusal of the token at hand
// brings forward. It reports false when ctx has ended.
func (t *tokens) pause(ctx context.Context, wait time.Duration, fetched time.Time) bool {
	due := time.NewTimer(wait)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-due.C:
			return true
		case header := <-t.nudge:
			if header == t.now.Load().header {
				due.Reset(max(0, min(wait, refusalPause)-time.Since(fetched)))
			}
		}
	}
}

// refresh fetches a token once and says when it is due again.
func (t *tokens) refresh(ctx context.Context) (due time.Duration, ok bool) {
	call, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	token, err := t.fetch(call)
	if err == nil && token.Value == "" {
		err = errNoToken
	}
	if ctx.Err() != nil {
		return 0, false
	}
	if err != nil {
		t.metrics.noTokens.Inc()
		why, refused := reason(err)
		was := t.now.Load()
		t.now.Store(&tokenState{header: was.header, expires: was.expires, refused: refused})
		t.log.Warn("no access token could be had", "event", "token_refresh_failed", "reason", why, "left_s", max(0, int(time.Until(was.expires).Seconds())))
		return 0, false
	}
	t.metrics.tokens.Inc()
	life := time.Hour // what Google's tokens have, where the answer does not say
	if !token.Expiry.IsZero() {
		life = time.Until(token.Expiry)
	}
	kind := token.Type
	if kind == "" {
		kind = "Bearer"
	}
	t.now.Store(&tokenState{header: kind + " " + token.Value, expires: time.Now().Add(life)})
	return max(life-min(refreshEarly, life/2), time.Second), true
}

var errNoToken = errors.New("the answer holds no token")

// reason puts a failed fetch into a word that is safe to log: the library's
// errors quote the endpoint's answer. refused: the endpoint said no, and will
// until somebody changes something.
func reason(err error) (why string, refused bool) {
	var answer *auth.Error
	if errors.As(err, &answer) && answer.Response != nil {
		status := answer.Response.StatusCode
		refused = status >= 400 && status < 500 && status != http.StatusTooManyRequests && status != http.StatusRequestTimeout
		var body struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(answer.Body, &body) == nil && oauthCode(body.Error) {
			return body.Error, refused
		}
		return httpCode(status), refused
	}
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, os.ErrPermission):
		return "the credentials_file cannot be read", false
	case isTimeout(err), errors.Is(err, context.DeadlineExceeded):
		return "the token endpoint does not answer in time", false
	case errors.As(err, &dns):
		return "the token endpoint's name does not resolve", false
	case errors.As(err, &op):
		return "no connection to the token endpoint", false
	}
	return "the token endpoint's answer is none", false
}

// oauthCode reports whether s looks like an error code of OAuth (invalid_grant).
func oauthCode(s string) bool {
	if s == "" || len(s) > 40 {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && r != '_' {
			return false
		}
	}
	return true
}
