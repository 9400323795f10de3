package fcm

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cloud.google.com/go/auth"
	"github.com/stretchr/testify/require"

	"schoolbell/sender"
	"schoolbell/sender/simulator"
)

// endpointOf is a token endpoint in memory.
type endpointOf struct {
	answer atomic.Pointer[func(context.Context) (*auth.Token, error)]

	mu    sync.Mutex
	times []time.Time
}

// asked is when a token was asked for.
func (e *endpointOf) asked() []time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.times)
}

func (e *endpointOf) will(f func(context.Context) (*auth.Token, error)) { e.answer.Store(&f) }

func (e *endpointOf) fetch(ctx context.Context) (*auth.Token, error) {
	e.mu.Lock()
	e.times = append(e.times, time.Now())
	e.mu.Unlock()
	return (*e.answer.Load())(ctx)
}

func (e *endpointOf) open(t *testing.T) *tokens {
	t.Helper()
	m, err := newMetrics("t", nil)
	require.NoError(t, err)
	var said logged
	tk := newTokens(e.fetch, said.logger(), m)
	t.Cleanup(func() {
		tk.close()
		require.NotContains(t, said.String(), "secret")
	})
	return tk
}

func gives(life time.Duration) func(context.Context) (*auth.Token, error) {
	n := 0
	return func(context.Context) (*auth.Token, error) {
		n++
		return &auth.Token{Value: fmt.Sprint("secret", n), Expiry: time.Now().Add(life)}, nil
	}
}

func answers(status int, body string) func(context.Context) (*auth.Token, error) {
	return func(context.Context) (*auth.Token, error) {
		return nil, &auth.Error{Response: &http.Response{StatusCode: status}, Body: []byte(body)}
	}
}

func hangs(ctx context.Context) (*auth.Token, error) { <-ctx.Done(); return nil, ctx.Err() }

func TestATokenIsAlwaysAtHand(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e endpointOf
		e.will(gives(time.Hour))
		tk := e.open(t)
		tk.awaitFirst(t.Context())
		for range 300 { // five hours, looked at every minute
			header, missing := tk.header(time.Now())
			require.Nil(t, missing)
			require.Contains(t, header, "Bearer secret")
			time.Sleep(time.Minute)
		}
		require.Len(t, e.asked(), 6)
		require.Equal(t, 55*time.Minute, e.asked()[1].Sub(e.asked()[0]))
	})
}

func TestAShortLivedTokenIsReplacedInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e endpointOf
		e.will(gives(40 * time.Second))
		tk := e.open(t)
		tk.awaitFirst(t.Context())
		for range 100 {
			_, missing := tk.header(time.Now())
			require.Nil(t, missing)
			time.Sleep(time.Second)
		}
		require.Equal(t, 20*time.Second, e.asked()[1].Sub(e.asked()[0]))
	})
}

func TestAnEndpointThatFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func(context.Context) (*auth.Token, error)
		class  sender.Class
		code   string
	}{
		"refuses":                {answers(400, `{"error":"invalid_grant","error_description":"secret"}`), sender.Misconfigured, codeTokenRefused},
		"refuses without a word": {answers(401, "secret"), sender.Misconfigured, codeTokenRefused},
		"is busy":                {answers(429, ""), sender.NotSent, codeTokenMissing},
		"is away":                {answers(503, "secret"), sender.NotSent, codeTokenMissing},
		"cannot be reached":      {func(context.Context) (*auth.Token, error) { return nil, errors.New("dial secret") }, sender.NotSent, codeTokenMissing},
		"hangs":                  {hangs, sender.NotSent, codeTokenMissing},
		"gives none":             {func(context.Context) (*auth.Token, error) { return &auth.Token{}, nil }, sender.NotSent, codeTokenMissing},
		"its file is gone":       {func(context.Context) (*auth.Token, error) { return nil, fmt.Errorf("read: %w", os.ErrNotExist) }, sender.NotSent, codeTokenMissing},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var e endpointOf
				e.will(c.answer)
				tk := e.open(t)
				began := time.Now()
				tk.awaitFirst(t.Context())
				require.LessOrEqual(t, time.Since(began), firstWait, "a call does not wait for long")
				time.Sleep(fetchTimeout)
				synctest.Wait()
				_, missing := tk.header(time.Now())
				require.NotNil(t, missing)
				require.Equal(t, c.class, missing.Class)
				require.Equal(t, c.code, missing.Code)
				began = time.Now()
				tk.awaitFirst(t.Context())
				require.Zero(t, time.Since(began), "later ones not at all")

				e.will(gives(time.Hour))
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				_, missing = tk.header(time.Now())
				require.Nil(t, missing, "it comes back by itself")
			})
		})
	}
}

func TestAnEndpointIsNotHammered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e endpointOf
		e.will(answers(503, ""))
		e.open(t)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		require.Less(t, len(e.asked()), 16)
		require.Greater(t, len(e.asked()), 8)
	})
}

// While the endpoint is away the token at hand goes on being used.
func TestATokenOutlivesItsEndpoint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e endpointOf
		e.will(gives(time.Hour))
		tk := e.open(t)
		tk.awaitFirst(t.Context())
		e.will(answers(400, `{"error":"invalid_grant"}`))
		time.Sleep(59 * time.Minute)
		_, missing := tk.header(time.Now())
		require.Nil(t, missing)
		time.Sleep(time.Minute)
		_, missing = tk.header(time.Now())
		require.Equal(t, sender.Misconfigured, missing.Class)
	})
}

func TestARefusedTokenIsReplacedSoon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e endpointOf
		e.will(gives(time.Hour))
		tk := e.open(t)
		tk.awaitFirst(t.Context())
		first, _ := tk.header(time.Now())
		for range 50 {
			tk.refused(first)
		}
		time.Sleep(refusalPause + time.Second)
		synctest.Wait()
		second, missing := tk.header(time.Now())
		require.Nil(t, missing)
		require.NotEqual(t, first, second)
		tk.refused(first) // of a message that was sent with the old one
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Len(t, e.asked(), 2)
	})
}

func TestATokenThatFCMRefuses(t *testing.T) {
	t.Parallel()
	for _, p := range protocols {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			elsewhere := simulate(t, http1, simulator.Config{})
			s := simulate(t, p, simulator.Config{Authorize: true})
			s.cfg.CredentialsFile = elsewhere.credentialsFile(t)
			got := sendOne(t, t.Context(), open(t, s.cfg, nil))
			require.Equal(t, sender.Misconfigured, got.Class, "a token that another one gave")
			require.Equal(t, "UNAUTHENTICATED", got.Code)
			require.EqualValues(t, 1, elsewhere.Counts().TokenRequests)
			require.EqualValues(t, 1, s.Counts().Unauthorized)
		})
	}
}

func TestTokensFromAServiceAccount(t *testing.T) {
	t.Parallel()
	s := simulate(t, http1, simulator.Config{Authorize: true})
	s.cfg.CredentialsFile = s.credentialsFile(t)
	var said logged
	f := open(t, s.cfg, said.logger())
	require.Equal(t, sender.Accepted, sendOne(t, t.Context(), f).Class)
	require.Equal(t, sender.Accepted, sendOne(t, t.Context(), f).Class)
	counts := s.Counts()
	require.EqualValues(t, 1, counts.TokenRequests, "one token for all messages")
	require.Zero(t, counts.Unauthorized)
	require.NotContains(t, said.String(), "simulated-")
}

// A token endpoint that hangs or fails holds up nobody and is not asked once a
// message.
func TestATokenEndpointThatHangsBlocksNoMessage(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]sender.Class{"hang": sender.NotSent, "fail": sender.NotSent, "refuse": sender.Misconfigured} {
		t.Run(answer, func(t *testing.T) {
			t.Parallel()
			s := simulate(t, http1, simulator.Config{Authorize: true, Behaviour: simulator.Behaviour{TokenAnswer: answer}})
			s.cfg.CredentialsFile = s.credentialsFile(t)
			var said logged
			f := open(t, s.cfg, said.logger())
			began := time.Now()
			var ids []string
			for i := range 100 {
				ids = append(ids, "12."+string(rune('A'+i)))
			}
			for range 2 {
				for _, r := range f.Send(t.Context(), batchOf(ids...)) {
					require.Equal(t, want, r.Class)
				}
			}
			require.Less(t, time.Since(began), 2*firstWait)
			counts := s.Counts()
			require.LessOrEqual(t, counts.TokenRequests, int64(4))
			require.Zero(t, counts.Requests, "no message left")
			if answer != "hang" {
				require.Contains(t, said.String(), "event=token_refresh_failed")
			}
		})
	}
}
