package simulator

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
)

// defaultTokenLife is how long an access token is taken for, in seconds.
const defaultTokenLife = 3599

// ServiceAccount makes the credentials file of a service account that does not
// exist: a fresh key, and tokenURL (an engine's /token) to get tokens from.
func ServiceAccount(project, tokenURL string) ([]byte, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("make a service account's key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a service account's key: %w", err)
	}
	return json.MarshalIndent(map[string]string{
		"type":           "service_account",
		"project_id":     project,
		"private_key_id": "simulated",
		"private_key":    string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
		"client_email":   "simulated@" + project + ".iam.gserviceaccount.com",
		"client_id":      "0",
		"token_uri":      tokenURL,
	}, "", "  ")
}

// issued are the access tokens that were given out.
type issued struct {
	mu     sync.Mutex
	expiry map[string]time.Time
}

func (i *issued) add(token string, until time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.expiry == nil {
		i.expiry = map[string]time.Time{}
	}
	i.expiry[token] = until
}

func (i *issued) valid(token string, now time.Time) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return now.Before(i.expiry[token])
}

func (i *issued) revoke() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.expiry = nil
}

// authorized reports whether an FCM request may send.
func (e *Engine) authorized(r *http.Request) bool {
	if !e.cfg.Authorize {
		return true
	}
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	return ok && e.tokens.valid(token, time.Now())
}

// RevokeTokens makes every access token given out so far worthless.
func (e *Engine) RevokeTokens() { e.tokens.revoke() }

// token is the token endpoint of OAuth for service accounts. The assertion is
// looked at for its shape only.
func (e *Engine) token(w http.ResponseWriter, r *http.Request) {
	behave := e.behave.Load()
	e.memory.tokenRequest()
	switch behave.TokenAnswer {
	case tokenHang:
		select {
		case <-r.Context().Done():
		case <-e.stop:
		}
		panic(http.ErrAbortHandler)
	case tokenFail:
		http.Error(w, "not now", http.StatusServiceUnavailable)
		return
	case tokenRefuse:
		refuseToken(w, "invalid_grant", "Invalid JWT Signature.")
		return
	}
	if err := r.ParseForm(); err != nil || r.PostForm.Get("grant_type") != "urn:ietf:params:oauth:grant-type:jwt-bearer" {
		refuseToken(w, "unsupported_grant_type", "grant_type must be that of a JWT")
		return
	}
	if !assertion(r.PostForm.Get("assertion")) {
		refuseToken(w, "invalid_grant", "the assertion is no signed JWT")
		return
	}
	random := make([]byte, 16)
	_, _ = rand.Read(random) // never fails
	token, life := "simulated-"+hex.EncodeToString(random), behave.TokenLife
	if life == 0 {
		life = defaultTokenLife
	}
	e.tokens.add(token, time.Now().Add(time.Duration(life)*time.Second))
	writeJSON(w, map[string]any{"access_token": token, "token_type": "Bearer", "expires_in": life})
}

func refuseToken(w http.ResponseWriter, code, description string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": code, "error_description": description}) // the caller may have gone
}

// assertion reports whether s has the shape of a service account's JWT.
func assertion(s string) bool {
	parts := strings.Split(s, ".")
	if len(parts) != 3 {
		return false
	}
	var head struct {
		Algorithm string `json:"alg"`
	}
	var claims struct {
		Issuer   string `json:"iss"`
		Scope    string `json:"scope"`
		Audience string `json:"aud"`
		Expires  int64  `json:"exp"`
	}
	for i, into := range []any{&head, &claims} {
		text, err := base64.RawURLEncoding.DecodeString(parts[i])
		if err != nil || json.Unmarshal(text, into) != nil {
			return false
		}
	}
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	return err == nil && len(signature) > 0 && head.Algorithm == "RS256" &&
		claims.Issuer != "" && strings.Contains(claims.Scope, "firebase.messaging") && claims.Audience != "" && claims.Expires > time.Now().Unix()
}
