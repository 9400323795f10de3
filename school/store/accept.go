package store

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// Recipients up to this many go in one statement with their notice; beyond it
// they are streamed by COPY, which costs more round trips.
const inOneStatement = 2000

// idAttempts bounds how often another id is made when one is taken.
const idAttempts = 8

// Accept stores a notice and all its recipients in one transaction and returns
// when it is committed; an unknown school is made with its ledger row in the
// same transaction (R18). It wakes nobody.
//
// The notice's ID is given here. Recipients are numbered from 1 in the order in
// which they come; a token that came before in this notice is stored as SKIPPED
// with reason DUPLICATE (R27). total is a hint, 0 where it is not known. Memory
// stays bounded for any number of recipients that the product allows: beyond a
// few thousand they pass through, leaving 16 bytes each behind.
//
// A notice with a Topic takes nothing of the recipients: they are the devices of
// the topic that are not retired, as they stand in the same transaction. One that
// nobody is to get is stored as COMPLETED with a total of 0.
//
// A key that came before answers as it did then and takes nothing of the
// recipients. An error of the iterator stores nothing and is returned as it is.
// Besides:
// school.ErrIdempotencyMismatch where the key came before with another request;
// school.ErrConflict, at once, while the key's first request is in progress;
// *school.FieldError without any recipient or with too many, of topic where that
// has too many devices, and of expires_at where that has passed by the database's
// clock;
// school.ErrUnavailable where the database could not be reached and nothing was
// stored; school.ErrCommitUnknown where the connection broke before the answer
// and the notice could not be found afterwards.
func (db *DB) Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error) {
	if err := checkSchoolID(n.School); err != nil {
		return school.Receipt{}, err
	}
	if r, ok, err := db.replay(ctx, n); ok || err != nil {
		return r, err
	}
	if err := db.current(ctx, n); err != nil {
		return school.Receipt{}, err
	}
	args, err := noticeArgs(n)
	if err != nil {
		return school.Receipt{}, err
	}
	var receipt school.Receipt
	if n.Topic != "" {
		receipt, err = db.acceptCall(ctx, n, acceptTopicSQL, args, n.Topic)
	} else {
		receipt, err = db.acceptListed(ctx, n, args, total, recipients)
	}
	if errors.Is(err, school.ErrCommitUnknown) {
		if found, ok := db.stored(ctx, n); ok {
			return found, nil
		}
	}
	return receipt, err
}

// acceptListed stores a notice whose recipients are listed.
func (db *DB) acceptListed(ctx context.Context, n *school.Notice, args []any, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error) {
	next, stop := iter.Pull2(recipients)
	defer stop()
	seen := newSeen(total)
	head, err := seen.head(next, total)
	if err != nil {
		return school.Receipt{}, err
	}
	if len(head) < inOneStatement {
		return db.acceptWhole(ctx, n, args, head, seen)
	}
	return db.acceptStream(ctx, n, args, head, seen, next)
}

func checkSchoolID(id string) error {
	if !school.ValidID(id) {
		return &school.FieldError{Field: "school", Message: "must be 1 to 64 of A-Z a-z 0-9 . _ -"}
	}
	return nil
}

// replay looks for the first answer to the notice's idempotency key before
// anything is read. A first request that commits a moment later is found by the
// transaction itself, under the key's lock.
func (db *DB) replay(ctx context.Context, n *school.Notice) (_ school.Receipt, known bool, _ error) {
	if n.IdempotencyKey == "" {
		return school.Receipt{}, false, nil
	}
	var hash []byte
	r := school.Receipt{School: n.School, Replay: true}
	err := db.ingest.QueryRow(ctx, `SELECT id, job_status, total_count, request_hash FROM push_clusters
		WHERE school_id = $1 AND idempotency_key = $2`, n.School, n.IdempotencyKey).Scan(&r.ID, &r.Status, &r.Total, &hash)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return school.Receipt{}, false, nil
	case err != nil:
		return school.Receipt{}, false, readError("accept notice", err)
	case !bytes.Equal(hash, n.RequestHash):
		return school.Receipt{}, false, fmt.Errorf("accept notice: %w", school.ErrIdempotencyMismatch)
	}
	return r, true, nil
}

// current refuses a notice that has expired. A replica's own clock must not: it
// may be wrong, and then the answer would depend on who was asked.
func (db *DB) current(ctx context.Context, n *school.Notice) error {
	if n.ExpiresAt.IsZero() {
		return nil
	}
	var now time.Time
	if err := db.ingest.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return readError("accept notice", err)
	}
	return school.ValidateExpiry(n, now)
}

// acceptWhole stores a notice and its recipients in one statement.
func (db *DB) acceptWhole(ctx context.Context, n *school.Notice, args []any, rows []recipientRow, seen *seenTokens) (school.Receipt, error) {
	var (
		tokens    = make([]string, len(rows))
		duplicate = make([]bool, len(rows))
		refs      []*string
		enabled   []*bool
		badges    []*int32
		data      []*string
	)
	for i := range rows {
		r := &rows[i]
		tokens[i], duplicate[i] = r.token, r.duplicate
		refs = sparse(refs, r.ref, i, len(rows))
		enabled = sparse(enabled, r.enabled, i, len(rows))
		badges = sparse(badges, r.badge, i, len(rows))
		data = sparse(data, r.data, i, len(rows))
	}
	return db.acceptCall(ctx, n, acceptSQL, args, len(rows), seen.duplicates, tokens, refs, enabled, badges, data, duplicate)
}

// acceptCall stores a notice by one call of a function, under an id of its own.
func (db *DB) acceptCall(ctx context.Context, n *school.Notice, sql string, args []any, more ...any) (school.Receipt, error) {
	for range idAttempts {
		id, err := newID(db.cfg.Now())
		if err != nil {
			return school.Receipt{}, err
		}
		call := append(append([]any{id}, args...), more...)
		var o opened
		err = change(ctx, db.ingest, "accept notice", func(c *pgx.Conn) error {
			n.ID = id
			return askAccept(ctx, c, sql, call, n, &o)
		})
		if err != nil {
			return school.Receipt{}, acceptError(err)
		}
		if receipt, again, err := o.receipt(n); !again {
			return receipt, err
		}
	}
	return school.Receipt{}, fmt.Errorf("accept notice: %d ids were taken: %w", idAttempts, school.ErrUnavailable)
}

// acceptStream stores a notice, and its recipients as they come.
func (db *DB) acceptStream(ctx context.Context, n *school.Notice, args []any, head []recipientRow, seen *seenTokens,
	next func() (school.NewRecipient, error, bool)) (receipt school.Receipt, err error) {
	src := &copySource{school: n.School, head: head, seen: seen, next: next}
	err = change(ctx, db.ingest, "accept notice", func(c *pgx.Conn) error {
		tx, err := c.Begin(ctx)
		if err != nil {
			return err
		}
		// Does nothing after the commit; the rest of the connection's life is
		// not the caller's, so neither is the deadline.
		defer rollback(ctx, tx)
		var again bool
		for range idAttempts {
			if n.ID, err = newID(db.cfg.Now()); err != nil {
				return err
			}
			var o opened
			call := append([]any{n.ID}, args...)
			if err := tx.QueryRow(ctx, openNoticeSQL, append(call, 0, 0)...).Scan(&o.outcome, &o.id, &o.status, &o.total); err != nil {
				return err
			}
			var refused error
			if receipt, again, refused = o.receipt(n); refused != nil {
				src.err = refused
				return refused
			}
			if !again {
				break
			}
		}
		if again {
			return fmt.Errorf("%d ids were taken", idAttempts)
		}
		if receipt.Replay {
			return nil
		}
		src.notice = n.ID
		if err := tx.QueryRow(ctx, `SELECT now()`).Scan(&src.now); err != nil {
			return err
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"push_cluster_tokens"}, copyColumns, src); err != nil {
			return err
		}
		receipt.Total = src.seq
		if _, err := tx.Exec(ctx, `SELECT schoolbell_fill_notice($1, $2, $3)`, n.ID, src.seq, seen.duplicates); err != nil {
			return err
		}
		if n.Fallback != "" {
			if _, err := tx.Exec(ctx, giveFallbackSQL, n.ID, n.School, n.Fallback); err != nil {
				return err
			}
		}
		return tx.Commit(ctx)
	})
	switch {
	case src.panicked != nil:
		panic(src.panicked)
	case src.err != nil:
		return school.Receipt{}, src.err
	case err != nil:
		return school.Receipt{}, acceptError(err)
	}
	return receipt, nil
}

// opened is the answer of schoolbell_open_notice.
type opened struct {
	outcome string
	id      *int64
	status  *string
	total   *int
}

// receipt says what the answer means; again asks for another id.
func (o *opened) receipt(n *school.Notice) (_ school.Receipt, again bool, _ error) {
	switch o.outcome {
	case "new", "replay":
		return school.Receipt{ID: *o.id, School: n.School, Status: school.Status(*o.status), Total: *o.total, Replay: o.outcome == "replay"}, false, nil
	case "mismatch":
		return school.Receipt{}, false, fmt.Errorf("accept notice: %w", school.ErrIdempotencyMismatch)
	case "busy":
		return school.Receipt{}, false, fmt.Errorf("accept notice: a request with this idempotency key is in progress: %w", school.ErrConflict)
	case "id_taken":
		return school.Receipt{}, true, nil
	}
	return school.Receipt{}, false, fmt.Errorf("accept notice: outcome %q", o.outcome)
}

// stored looks for a notice whose commit is unknown. Finding it settles the
// matter; not finding it does not.
func (db *DB) stored(ctx context.Context, n *school.Notice) (school.Receipt, bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	r := school.Receipt{ID: n.ID, School: n.School}
	err := db.ingest.QueryRow(ctx, `SELECT job_status, total_count FROM push_clusters WHERE id = $1 AND school_id = $2`, n.ID, n.School).
		Scan(&r.Status, &r.Total)
	return r, err == nil
}

// acceptError names the one unique key that a notice can violate (another
// program stored the same idempotency key without the lock that Accept takes),
// and the field of a topic that is too large.
func acceptError(err error) error {
	switch {
	case isUniqueViolation(err):
		return fmt.Errorf("accept notice: idempotency key: %w", school.ErrConflict)
	case errors.Is(err, errTopicTooLarge):
		return topicTooLarge()
	}
	return err
}

func topicTooLarge() error {
	return &school.FieldError{Field: "topic", Message: fmt.Sprintf("has more than %d devices", school.MaxRecipients), Size: true}
}

const openNoticeSQL = `SELECT outcome, id, status, total FROM schoolbell_open_notice($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)`

const acceptSQL = `SELECT outcome, id, status, total FROM schoolbell_accept($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16,
	$17, $18, $19, $20, $21, $22)`

const acceptTopicSQL = `SELECT outcome, id, status, total FROM schoolbell_accept_topic($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`

// noticeArgs are the arguments that these functions share, after the id.
func noticeArgs(n *school.Notice) ([]any, error) {
	data, err := jsonText(n.Content.Data)
	if err != nil {
		return nil, err
	}
	priority, err := priorityNumber(n.Priority)
	if err != nil {
		return nil, err
	}
	delivery := n.Delivery
	switch delivery {
	case "":
		delivery = school.AtLeastOnce
	case school.AtLeastOnce, school.AtMostOnce:
	default:
		return nil, &school.FieldError{Field: "delivery", Message: "must be at_least_once or at_most_once"}
	}
	return []any{n.School, n.Content.Title, n.Content.Body, data, n.Content.Image, n.Content.Link,
		priority, string(delivery), timeOrNil(n.ScheduledAt), timeOrNil(n.ExpiresAt), n.TraceParent,
		stringOrNil(n.IdempotencyKey), n.RequestHash}, nil
}

// recipientRow is a recipient as it is stored; nil is NULL.
type recipientRow struct {
	token     string
	ref       *string
	enabled   *bool
	badge     *int32
	data      *string
	duplicate bool
}

// seenTokens finds the tokens that come again within one notice. It keeps 128
// bits of each one's SHA-256: a million of them are a few dozen megabytes, and
// two different tokens never meet.
type seenTokens struct {
	set        map[[16]byte]struct{}
	duplicates int
}

func newSeen(total int) *seenTokens {
	return &seenTokens{set: make(map[[16]byte]struct{}, min(max(total, 0), school.MaxRecipients))}
}

// head reads as many recipients as one statement takes, so that most notices
// are read before anything is begun; fewer than that are all there are.
func (s *seenTokens) head(next func() (school.NewRecipient, error, bool), total int) ([]recipientRow, error) {
	rows := make([]recipientRow, 0, min(max(total, 16), inOneStatement))
	for len(rows) < inOneStatement {
		r, err, ok := next()
		if !ok {
			break
		}
		if err != nil {
			return nil, err
		}
		row, err := s.row(r)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		return nil, &school.FieldError{Field: "recipients", Message: "must name at least one device"}
	}
	return rows, nil
}

func (s *seenTokens) row(r school.NewRecipient) (recipientRow, error) {
	sum := sha256.Sum256([]byte(r.Token))
	key := [16]byte(sum[:16])
	_, duplicate := s.set[key]
	if duplicate {
		s.duplicates++
	} else {
		s.set[key] = struct{}{}
	}
	data, err := jsonText(r.Data)
	if err != nil {
		return recipientRow{}, err
	}
	row := recipientRow{token: r.Token, ref: stringOrNil(r.Ref), enabled: r.Enabled, data: data, duplicate: duplicate}
	if r.Badge != nil {
		badge := int32(*r.Badge)
		row.badge = &badge
	}
	return row, nil
}

var copyColumns = []string{"cluster_id", "seq", "school_id", "token", "ref", "enabled", "badge", "data", "job_status", "reason", "processed_at"}

// copySource gives COPY the recipients that were read ahead and then the rest.
// The driver reads it on a goroutine of its own, where a panic of the caller's
// iterator would end the process; it is kept for the caller's goroutine.
type copySource struct {
	school   string
	notice   int64
	head     []recipientRow
	seen     *seenTokens
	next     func() (school.NewRecipient, error, bool)
	seq      int
	row      recipientRow
	err      error
	panicked any
	now      time.Time
}

func (s *copySource) Next() (more bool) {
	defer func() {
		if p := recover(); p != nil {
			s.panicked, s.err, more = p, errors.New("iterator panicked"), false
		}
	}()
	if s.seq < len(s.head) {
		s.row = s.head[s.seq]
		s.seq++
		return true
	}
	r, err, ok := s.next()
	if !ok {
		return false
	}
	if err == nil {
		s.row, err = s.seen.row(r)
	}
	if err == nil && s.seq == school.MaxRecipients {
		err = &school.FieldError{Field: "recipients", Message: fmt.Sprintf("at most %d", school.MaxRecipients), Size: true}
	}
	if err != nil {
		s.err = err
		return false
	}
	s.seq++
	return true
}

func (s *copySource) Values() ([]any, error) {
	status, reason, processed := school.Pending, (*string)(nil), (*time.Time)(nil)
	if s.row.duplicate {
		why := string(school.Duplicate)
		status, reason, processed = school.Skipped, &why, &s.now
	}
	return []any{s.notice, int32(s.seq), s.school, s.row.token, s.row.ref, s.row.enabled, s.row.badge, s.row.data, string(status), reason, processed}, nil
}

// Err ends the COPY. The text goes to the server and its log, so it says
// nothing of the recipients.
func (s *copySource) Err() error {
	if s.err != nil {
		return errors.New("the caller gave up")
	}
	return nil
}

// newID makes a notice id from the time and a random number.
func newID(now time.Time) (int64, error) {
	var b [4]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, fmt.Errorf("notice id: %w", err)
	}
	return school.NewNoticeID(now, binary.BigEndian.Uint32(b[:])), nil
}

func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	// It fails on a connection that broke, and then the server rolls back.
	_ = tx.Rollback(ctx)
}

// sparse sets all[i], and makes all only for the first value that is not nil:
// most notices use none of these columns.
func sparse[T any](all []*T, v *T, i, n int) []*T {
	if v == nil {
		return all
	}
	if all == nil {
		all = make([]*T, n)
	}
	all[i] = v
	return all
}

func jsonText(m map[string]string) (*string, error) {
	if len(m) == 0 {
		return nil, nil
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	s := string(b)
	return &s, nil
}

func stringOrNil(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
