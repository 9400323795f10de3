// Package outbox hands a notice to schoolbell inside the transaction of the program
// that imports it (R19): committed, the notice will be sent or have a known reason
// why not; rolled back, it never was. The dispatchers hear of the commit at once.
//
// It calls the SQL function schoolbell_enqueue and does nothing else: it opens,
// commits and retries nothing. The schema has to be in the same database (schoolbell
// migrate up), its role needs EXECUTE on the function and no more, and the function's
// schema has to be on the session's search_path. PostgreSQL only.
//
// It imports no driver and no gorm: whoever uses one of them compiles only that.
// [Enqueue] takes what database/sql has in common, which gorm's own transaction is as
// well: give it tx.Statement.ConnPool of a *gorm.DB. Past gorm's logger, that is,
// which would write the tokens of a slow statement into the log. [EnqueuePgx] takes
// pgx's. Arguments travel as text, so that no driver has to know of arrays or JSON.
package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"schoolbell/school"
)

// Errors besides *school.FieldError. After any error but a *school.FieldError that
// came without a statement the transaction has failed, as PostgreSQL has it: roll it
// back, or to a savepoint.
var (
	// ErrIdempotencyMismatch: the key came before with another notice.
	ErrIdempotencyMismatch = school.ErrIdempotencyMismatch
	// ErrBusy: another transaction that is still open uses the key.
	ErrBusy = errors.New("another transaction that is still open uses this idempotency key: try again when it has ended")
	// ErrSchema: the database does not have the function.
	ErrSchema = errors.New("schoolbell_enqueue is not there: run `schoolbell migrate up` on this database, and have its schema on the search_path")
	// ErrDenied: the role may not call it.
	ErrDenied = errors.New("no right to call it: GRANT EXECUTE ON FUNCTION schoolbell_enqueue TO this role")
)

// Recipient is one device; see school.NewRecipient.
type Recipient = school.NewRecipient

// Notice is a message of one school to many devices. Zero fields are left out;
// limits are those of the HTTP API.
type Notice struct {
	School string // required; one that is not known is made with the commit
	Title  string // required
	Body   string
	Data   map[string]string
	Image  string
	Link   string

	Recipients []Recipient // at most 1,000,000; or
	Topic      string      // the devices that have it now

	Priority    school.Priority // empty: normal
	Delivery    school.Delivery // empty: at least once
	ScheduledAt time.Time
	ExpiresAt   time.Time
	Fallback    string // text of an SMS to those that definitely failed (R35)

	// IdempotencyKey makes a repeat answer with the first id (R27); another notice
	// with it is refused. 1 to 255 printable characters.
	IdempotencyKey string
	// Silent leaves the notice to the dispatchers' next tick: transactions that notify
	// commit one after the other in PostgreSQL, and cannot be prepared.
	Silent bool
}

// Tx is a transaction of database/sql: *sql.Tx, *sql.Conn inside one, or
// tx.Statement.ConnPool of a *gorm.DB. On a *sql.DB the notice commits by itself.
type Tx interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Enqueue stores n in the caller's transaction and returns its id. What is wrong
// with n is a *school.FieldError; the checks that need no database come before any
// statement, so that the transaction is still whole. Besides: ErrIdempotencyMismatch,
// ErrBusy, ErrSchema, ErrDenied, and the driver's errors, wrapped.
func Enqueue(ctx context.Context, tx Tx, n Notice) (id string, err error) {
	args, err := arguments(&n)
	if err != nil {
		return "", err
	}
	return answer(tx.QueryRowContext(ctx, enqueueSQL, args...), &n)
}

// PgxTx is a pgx.Tx, or a connection or pool of pgx, on which the notice commits by
// itself. R is pgx.Row, which the compiler finds out.
type PgxTx[R Row] interface {
	QueryRow(ctx context.Context, query string, args ...any) R
}

// Row is the answer to a query.
type Row interface{ Scan(dest ...any) error }

// EnqueuePgx does what Enqueue does.
func EnqueuePgx[R Row](ctx context.Context, tx PgxTx[R], n Notice) (id string, err error) {
	args, err := arguments(&n)
	if err != nil {
		return "", err
	}
	return answer(tx.QueryRow(ctx, enqueueSQL, args...), &n)
}

const enqueueSQL = `SELECT schoolbell_enqueue($1::text, $2::text, $3::text, $4::text::jsonb, NULL, $5::text::jsonb)`

func answer(row Row, n *Notice) (id string, err error) {
	if err := row.Scan(&id); err != nil {
		return "", fmt.Errorf("enqueue notice of school %s: %w", n.School, meaning(err))
	}
	return id, nil
}

// meaning tells errors apart by their SQLSTATE, which pgx's and lib/pq's have.
func meaning(err error) error {
	var state interface{ SQLState() string }
	if !errors.As(err, &state) {
		return err
	}
	switch state.SQLState() {
	case "22023":
		// "ERROR: field: message (SQLSTATE 22023)" or "pq: field: message"
		text, _, _ := strings.Cut(err.Error(), " (SQLSTATE")
		text = strings.TrimPrefix(strings.TrimPrefix(text, "ERROR: "), "pq: ")
		if field, message, ok := strings.Cut(text, ": "); ok {
			return &school.FieldError{Field: field, Message: message}
		}
	case "SB011":
		return ErrIdempotencyMismatch
	case "SB007":
		return ErrBusy
	case "42883":
		return fmt.Errorf("%w (%w)", ErrSchema, err)
	case "42501":
		return fmt.Errorf("%w (%w)", ErrDenied, err)
	}
	return err
}

func arguments(n *Notice) ([]any, error) {
	if n.Priority == "" {
		n.Priority = school.Normal
	}
	if n.Delivery == "" {
		n.Delivery = school.AtLeastOnce
	}
	if err := validate(n); err != nil {
		return nil, err
	}
	options := map[string]any{"priority": n.Priority, "delivery": n.Delivery, "notify": !n.Silent}
	for name, text := range map[string]string{"image": n.Image, "link": n.Link, "topic": n.Topic, "idempotency_key": n.IdempotencyKey} {
		if text != "" {
			options[name] = text
		}
	}
	for name, at := range map[string]time.Time{"scheduled_at": n.ScheduledAt, "expires_at": n.ExpiresAt} {
		if !at.IsZero() {
			options[name] = at
		}
	}
	if n.Fallback != "" {
		options["fallback"] = map[string]string{"sms": n.Fallback}
	}
	if n.Topic == "" {
		type object struct {
			Token   string            `json:"token"`
			Ref     string            `json:"ref,omitempty"`
			Enabled *bool             `json:"enabled,omitempty"`
			Badge   *int              `json:"badge,omitempty"`
			Data    map[string]string `json:"data,omitempty"`
		}
		list := make([]object, len(n.Recipients))
		for i, r := range n.Recipients {
			list[i] = object(r)
		}
		options["recipients"] = list
	}
	data, err := json.Marshal(n.Data)
	if err != nil {
		return nil, err
	}
	given, err := json.Marshal(options)
	if err != nil {
		return nil, err
	}
	return []any{n.School, n.Title, n.Body, string(data), string(given)}, nil
}

func validate(n *Notice) error {
	checked := school.Notice{
		School: n.School, Content: school.Content{Title: n.Title, Body: n.Body, Data: n.Data, Image: n.Image, Link: n.Link},
		Priority: n.Priority, Delivery: n.Delivery, Topic: n.Topic, ScheduledAt: n.ScheduledAt, ExpiresAt: n.ExpiresAt,
		Fallback: n.Fallback, IdempotencyKey: n.IdempotencyKey,
	}
	if err := school.ValidateNotice(&checked, time.Time{}); err != nil {
		return err
	}
	switch {
	case n.Topic != "" && len(n.Recipients) > 0:
		return &school.FieldError{Field: "topic", Message: "cannot go with recipients; give one of the two"}
	case n.Topic == "" && len(n.Recipients) == 0:
		return &school.FieldError{Field: "recipients", Message: "must name at least one device, or name a topic"}
	case len(n.Recipients) > school.MaxRecipients:
		return &school.FieldError{Field: "recipients", Message: fmt.Sprintf("at most %d", school.MaxRecipients), Size: true}
	}
	for i := range n.Recipients {
		if err := school.ValidateRecipient(i, &n.Recipients[i], &checked.Content); err != nil {
			return err
		}
	}
	return nil
}
