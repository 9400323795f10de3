package web

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net/http"
	"slices"
	"strings"

	"schoolbell/coordinator/api"
)

// Role is what a key may do. Roles are a set.
type Role uint8

const (
	Read   Role = 1 << iota // look at notices, schools, the cluster
	Ingest                  // hand in notices
	Admin                   // everything
)

// open marks a route that asks for no key.
const open Role = 0

// Principal is who a key stands for.
type Principal struct {
	Name    string   // for the log; never the key
	Roles   Role     // a set
	Schools []string // the only schools it may touch; nil: all
}

// May reports whether p has role; Admin has every role.
func (p Principal) May(role Role) bool { return p.Roles&(role|Admin) != 0 }

// Touches reports whether p may touch the school.
func (p Principal) Touches(schoolID string) bool {
	return p.Schools == nil || slices.Contains(p.Schools, schoolID)
}

// Authenticator tells who a key stands for.
type Authenticator interface {
	// Authenticate, ErrUnknownKey. The key is empty where the request had none.
	Authenticate(ctx context.Context, key string) (Principal, error)
}

// ErrUnknownKey says that a key stands for nobody.
var ErrUnknownKey = errors.New("unknown key")

// AdminKey lets in one key, with every role and for all schools. An empty key
// lets in nobody.
func AdminKey(key string) Authenticator {
	return adminKey{hash: sha256.Sum256([]byte(key)), set: key != ""}
}

type adminKey struct {
	hash [sha256.Size]byte
	set  bool
}

// Authenticate compares hashes, so that neither the time it takes nor the
// length of the key tells anything about it.
func (a adminKey) Authenticate(_ context.Context, key string) (Principal, error) {
	given := sha256.Sum256([]byte(key))
	if subtle.ConstantTimeCompare(a.hash[:], given[:]) == 1 && a.set {
		return Principal{Name: "admin", Roles: Admin}, nil
	}
	return Principal{}, ErrUnknownKey
}

// Everyone lets everybody do everything: for a server that only its own machine
// can reach. Whoever builds the server sees to that.
func Everyone() Authenticator { return everyone{} }

type everyone struct{}

func (everyone) Authenticate(context.Context, string) (Principal, error) {
	return Principal{Name: "everyone", Roles: Admin}, nil
}

// authenticate lets a request pass that may use a route of role.
func (s *Server) authenticate(r *http.Request, role Role) error {
	if role == open {
		return nil
	}
	key, ok := bearer(r.Header)
	if !ok {
		return &api.Error{Code: api.Unauthenticated, Message: "send one header Authorization: Bearer KEY"}
	}
	p, err := s.deps.Auth.Authenticate(r.Context(), key)
	switch {
	case errors.Is(err, ErrUnknownKey) && key == "":
		return &api.Error{Code: api.Unauthenticated, Message: "a key is needed: Authorization: Bearer KEY"}
	case errors.Is(err, ErrUnknownKey):
		return &api.Error{Code: api.Unauthenticated, Message: "the key is not known here"}
	case err != nil:
		return err
	}
	infoOf(r.Context()).principal = p
	if !p.May(role) {
		return &api.Error{Code: api.PermissionDenied, Message: "the key has not the role that this needs: " + role.String()}
	}
	return nil
}

// bearer returns the key of the request, empty where it has none; false where
// it has something else.
func bearer(h http.Header) (string, bool) {
	values := h.Values("Authorization")
	switch len(values) {
	case 0:
		return "", true
	case 1:
		scheme, key, _ := strings.Cut(values[0], " ")
		key = strings.TrimSpace(key)
		return key, strings.EqualFold(scheme, "Bearer") && key != ""
	}
	return "", false
}

// allow refuses a school that the request's key may not touch, and notes the
// school for the log.
func allow(ctx context.Context, schoolID string) error {
	info := infoOf(ctx)
	info.school = schoolID
	if !info.principal.Touches(schoolID) {
		return &api.Error{Code: api.PermissionDenied, Message: "the key is not for this school"}
	}
	return nil
}

func (r Role) String() string {
	var names []string
	for role, name := range map[Role]string{Read: "read", Ingest: "ingest", Admin: "admin"} {
		if r&role != 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, " or ")
}
