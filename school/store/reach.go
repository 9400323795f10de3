package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"schoolbell/school"
)

// Reasons for which a database that answers cannot be opened.
var (
	ErrLogin      = errors.New("login refused")
	ErrNoDatabase = errors.New("no such database")
)

const invalidAuthorization = "28000" // no line of pg_hba.conf, another peer

var loginRefused = []string{"28P01", invalidAuthorization, "42501"} // password, way, no CONNECT on the database

// reachError says in words of its own why a database cannot be opened. The
// driver's error stays in the chain and out of the text: it tells every try, with
// TLS and without, and so each cause twice.
type reachError struct {
	kind, cause error
	text        string
}

func (e *reachError) Error() string   { return e.text }
func (e *reachError) Unwrap() []error { return []error{e.kind, e.cause} }

// reach makes of the driver's error for a first connection what a person can act
// on: ErrLogin, ErrNoDatabase, or school.ErrUnavailable. What the server says
// here is of names that stand in the URL, so it may be told.
func reach(cfg *pgconn.Config, err error) error {
	e := &reachError{kind: school.ErrUnavailable, cause: err}
	at := "the server at " + cfg.Host
	if !strings.HasPrefix(cfg.Host, "/") {
		at = "the server at " + net.JoinHostPort(cfg.Host, strconv.Itoa(int(cfg.Port)))
	}
	causes, network := leaves(err)
	last := causes[len(causes)-1]
	pg, said := errors.AsType[*pgconn.PgError](last)
	switch {
	case said && slices.Contains(loginRefused, pg.Code):
		e.kind = ErrLogin
		e.text = fmt.Sprintf("%s refused the login: %s (SQLSTATE %s); check the user and the password", at, pg.Message, pg.Code)
		if pg.Code == invalidAuthorization {
			e.text += ", and what pg_hba.conf lets in"
		}
	case said && pg.Code == "3D000": // invalid_catalog_name
		e.kind = ErrNoDatabase
		e.text = fmt.Sprintf("%s has no database %q; make it (createdb %s) or name another", at, cfg.Database, cfg.Database)
	case said:
		e.text = fmt.Sprintf("%s takes no connection now: %s (SQLSTATE %s)", at, pg.Message, pg.Code)
	case network:
		e.text = fmt.Sprintf("no database server answers (%s); is PostgreSQL running there, and is the address right?", distinct(causes))
	default:
		e.text = fmt.Sprintf("%s cannot be used: %v", at, last)
	}
	return e
}

// leaves are the causes at the ends of an error, in the order of the tries;
// network says that all of them are silence.
func leaves(err error) (all []error, network bool) {
	network = true
	var walk func(err error)
	walk = func(err error) {
		switch e := err.(type) {
		case *net.OpError, *net.DNSError, *pgconn.PgError:
		case interface{ Unwrap() []error }:
			for _, part := range e.Unwrap() {
				walk(part)
			}
			return
		case interface{ Unwrap() error }:
			if inner := e.Unwrap(); inner != nil {
				walk(inner)
				return
			}
		}
		_, op := err.(*net.OpError)
		_, dns := err.(*net.DNSError)
		network = network && (op || dns || errors.Is(err, context.DeadlineExceeded))
		all = append(all, err)
	}
	walk(err)
	return all, network
}

func distinct(errs []error) string {
	var texts []string
	for _, err := range errs {
		if text := err.Error(); !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, ", ")
}
