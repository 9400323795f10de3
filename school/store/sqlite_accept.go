package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"sync"
	"time"

	"schoolbell/school"
)

const (
	// insertRows is how many recipients one statement writes. The driver compiles
	// a statement each time and looks each argument up among all of them: fewer
	// rows cost the one, more the other.
	insertRows = 100

	// moveRows is how many recipients are moved from where they were gathered in
	// one statement, between two looks at the context.
	moveRows = 50_000
)

// keysInProgress are the idempotency keys whose first request is under way. The
// file belongs to this process, so memory knows them all.
type keysInProgress struct {
	mu   sync.Mutex
	held map[string]bool
}

func (k *keysInProgress) take(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[key] {
		return false
	}
	if k.held == nil {
		k.held = map[string]bool{}
	}
	k.held[key] = true
	return true
}

func (k *keysInProgress) release(key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.held, key)
}

// Accept does what DB.Accept does. A notice of many recipients is gathered on a
// connection of its own, in a temporary table that SQLite keeps on disk, and
// written from there in one transaction: a slow iterator holds nobody up, memory
// stays bounded, and nothing is left of it whatever ends the process. Writing a
// million takes some seconds, in which nothing else is written.
func (db *SQLite) Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error) {
	if err := checkSchoolID(n.School); err != nil {
		return school.Receipt{}, err
	}
	if n.IdempotencyKey != "" {
		if r, ok, err := db.replay(ctx, n); ok || err != nil {
			return r, err
		}
		key := n.School + "/" + n.IdempotencyKey
		if !db.keys.take(key) {
			return school.Receipt{}, fmt.Errorf("accept notice: a request with this idempotency key is in progress: %w", school.ErrConflict)
		}
		defer db.keys.release(key)
		// It may have ended between the two.
		if r, ok, err := db.replay(ctx, n); ok || err != nil {
			return r, err
		}
	}
	if err := db.current(ctx, n); err != nil {
		return school.Receipt{}, err
	}
	args, err := noticeArgs(n)
	if err != nil {
		return school.Receipt{}, err
	}
	if n.Topic != "" {
		return db.acceptTopic(ctx, n, args)
	}
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

// current refuses a notice that has expired.
func (db *SQLite) current(ctx context.Context, n *school.Notice) error {
	if n.ExpiresAt.IsZero() {
		return nil
	}
	return db.read(ctx, db.dispatch, "accept notice", func(tx *sqliteTx) error {
		return school.ValidateExpiry(n, time.UnixMicro(tx.now))
	})
}

// replay looks for the first answer to the notice's idempotency key.
func (db *SQLite) replay(ctx context.Context, n *school.Notice) (r school.Receipt, known bool, err error) {
	err = db.read(ctx, db.dispatch, "accept notice", func(tx *sqliteTx) error {
		var hash []byte
		r = school.Receipt{School: n.School, Replay: true}
		known, err = tx.one(`SELECT id, job_status, total_count, request_hash FROM push_clusters WHERE school_id = ?1 AND idempotency_key = ?2`,
			[]any{n.School, n.IdempotencyKey}, &r.ID, &r.Status, &r.Total, &hash)
		if err == nil && known && !bytes.Equal(hash, n.RequestHash) {
			return school.ErrIdempotencyMismatch
		}
		return err
	})
	return r, known, err
}

// acceptWhole stores a notice of a moderate number of recipients.
func (db *SQLite) acceptWhole(ctx context.Context, n *school.Notice, args []any, rows []recipientRow, seen *seenTokens) (r school.Receipt, err error) {
	err = db.change(ctx, "accept notice", func(tx *sqliteTx) error {
		if r, err = tx.openNotice(n, args, len(rows), seen.duplicates); err != nil {
			return err
		}
		w := tx.intoNotice(n)
		for i := range rows {
			if err := w.add(i+1, &rows[i]); err != nil {
				return err
			}
		}
		if err := w.flush(); err != nil {
			return err
		}
		return tx.touchSchool(n.School)
	})
	return r, err
}

// acceptTopic stores a notice whose recipients are a topic's devices.
func (db *SQLite) acceptTopic(ctx context.Context, n *school.Notice, args []any) (r school.Receipt, err error) {
	err = db.change(ctx, "accept notice", func(tx *sqliteTx) error {
		if r, err = tx.openNotice(n, args, 0, 0); err != nil {
			return err
		}
		if r.Total, err = tx.fillTopic(n); err != nil {
			return err
		}
		if r.Total == 0 {
			r.Status = school.NoticeCompleted
		}
		return tx.touchSchool(n.School)
	})
	return r, err
}

// fillTopic makes the devices of the notice's topic its recipients, in the order
// of their keys, as schoolbell_fill_topic does, and returns how many they are.
func (tx *sqliteTx) fillTopic(n *school.Notice) (total int, err error) {
	after := []byte{0} // below the key of any device
	for {
		wrote, err := tx.exec(`INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref)
			SELECT ?1, ?4 + row_number() OVER (ORDER BY m.token_sha), ?2, m.token, nullif(m.ref, '') FROM (
				SELECT t.token_sha, d.token, d.ref FROM device_topics AS t CROSS JOIN devices AS d ON d.school_id = t.school_id AND d.token_sha = t.token_sha
				WHERE t.school_id = ?2 AND t.topic = ?3 AND t.token_sha > ?5 AND d.retired_at IS NULL
				ORDER BY t.token_sha LIMIT ?6) AS m`, n.ID, n.School, n.Topic, total, after, moveRows)
		if err != nil {
			return 0, err
		}
		if total += wrote; total > school.MaxRecipients {
			return 0, topicTooLarge()
		}
		if wrote < moveRows {
			break
		}
		var last string
		if _, err := tx.one(`SELECT token FROM push_cluster_tokens WHERE cluster_id = ?1 AND seq = ?2`, []any{n.ID, total}, &last); err != nil {
			return 0, err
		}
		sum := sha256.Sum256([]byte(last))
		after = sum[:]
	}
	_, err = tx.exec(`UPDATE push_clusters SET topic = ?2, total_count = ?3,
			job_status = CASE WHEN ?3 = 0 THEN 'COMPLETED' ELSE job_status END, ended_at = CASE WHEN ?3 = 0 THEN ?4 END
		WHERE id = ?1`, n.ID, n.Topic, total, tx.now)
	return total, err
}

// acceptStream gathers the recipients as they come and then stores all.
func (db *SQLite) acceptStream(ctx context.Context, n *school.Notice, args []any, head []recipientRow, seen *seenTokens,
	next func() (school.NewRecipient, error, bool)) (r school.Receipt, err error) {
	const op = "accept notice"
	if err := db.enter(op); err != nil {
		return r, err
	}
	defer db.leave()
	conn, err := db.ingest.Conn(ctx)
	if err != nil {
		return r, sqliteMeaning(op, err)
	}
	defer conn.Close()
	src := &copySource{head: head, seen: seen, next: next}
	err = db.transact(ctx, conn, op, "BEGIN", func(tx *sqliteTx) error { return tx.gather(src) })
	switch {
	case src.panicked != nil:
		panic(src.panicked)
	case src.err != nil:
		return r, src.err
	case err != nil:
		return r, err
	}
	r, err = db.writeGathered(ctx, conn, n, args, src.seq, seen.duplicates)
	if err == nil {
		// The log has become long. It is moved into the file while others write on;
		// where that fails the next commit does it.
		_, _ = conn.ExecContext(context.WithoutCancel(ctx), `PRAGMA wal_checkpoint(PASSIVE)`)
	}
	return r, err
}

// writeGathered stores the notice and what was gathered of it.
func (db *SQLite) writeGathered(ctx context.Context, conn *sql.Conn, n *school.Notice, args []any, total, duplicates int) (r school.Receipt, err error) {
	const op = "accept notice"
	if err := db.turn.pass(ctx); err != nil {
		return r, fmt.Errorf("%s: %w", op, err)
	}
	defer db.turn.leave()
	err = db.transact(ctx, conn, op, "BEGIN IMMEDIATE", func(tx *sqliteTx) error {
		if r, err = tx.openNotice(n, args, total, duplicates); err != nil {
			return err
		}
		for from := 0; from < total; from += moveRows {
			if _, err := tx.exec(recipientsSQL+`temp.gathered WHERE seq > ? AND seq <= ?`, n.ID, n.School, tx.now, from, from+moveRows); err != nil {
				return err
			}
		}
		return tx.touchSchool(n.School)
	})
	return r, err
}

// gather puts recipients into a temporary table of this connection. The database
// itself is not touched.
func (tx *sqliteTx) gather(src *copySource) error {
	_, err := tx.exec(`CREATE TEMP TABLE gathered (seq INTEGER PRIMARY KEY, token TEXT, ref TEXT, enabled INTEGER, badge INTEGER, data TEXT, duplicate INTEGER)`)
	if err != nil {
		return err
	}
	w := recipientWriter{tx: tx, sql: func(values string) string { return `INSERT INTO temp.gathered ` + values }}
	for src.Next() {
		if err := w.add(src.seq, &src.row); err != nil {
			return err
		}
	}
	if src.err != nil {
		return errors.New("the caller gave up")
	}
	return w.flush()
}

// recipientsSQL writes recipients from rows of (seq, token, ref, enabled, badge,
// data, duplicate).
const recipientsSQL = `INSERT INTO push_cluster_tokens (cluster_id, seq, school_id, token, ref, enabled, badge, data, job_status, reason, processed_at)
	SELECT ?, seq, ?, token, ref, enabled, badge, data, CASE WHEN duplicate THEN 'SKIPPED' ELSE 'PENDING' END,
		CASE WHEN duplicate THEN 'DUPLICATE' END, CASE WHEN duplicate THEN ? END FROM `

func (tx *sqliteTx) intoNotice(n *school.Notice) *recipientWriter {
	return &recipientWriter{tx: tx, args: []any{n.ID, n.School, tx.now}, sql: func(values string) string {
		return `WITH given (seq, token, ref, enabled, badge, data, duplicate) AS (` + values + `) ` + recipientsSQL + `given`
	}}
}

// recipientWriter writes recipients in statements of insertRows. Numbers stand in
// the text, since arguments cost more; what a caller wrote is always an argument.
type recipientWriter struct {
	tx     *sqliteTx
	sql    func(values string) string
	args   []any // after those of the values
	values strings.Builder
	given  []any
	rows   int
}

func (w *recipientWriter) add(seq int, r *recipientRow) error {
	b := &w.values
	if w.rows == 0 {
		b.WriteString("VALUES ")
	} else {
		b.WriteByte(',')
	}
	b.WriteByte('(')
	b.WriteString(strconv.Itoa(seq))
	b.WriteString(",?")
	w.given = append(w.given, r.token)
	w.text(r.ref)
	switch {
	case r.enabled == nil:
		b.WriteString(",NULL")
	case *r.enabled:
		b.WriteString(",1")
	default:
		b.WriteString(",0")
	}
	b.WriteByte(',')
	if r.badge == nil {
		b.WriteString("NULL")
	} else {
		b.WriteString(strconv.Itoa(int(*r.badge)))
	}
	w.text(r.data)
	if r.duplicate {
		b.WriteString(",1)")
	} else {
		b.WriteString(",0)")
	}
	if w.rows++; w.rows == insertRows {
		return w.flush()
	}
	return nil
}

func (w *recipientWriter) text(s *string) {
	if s == nil {
		w.values.WriteString(",NULL")
		return
	}
	w.values.WriteString(",?")
	w.given = append(w.given, *s)
}

func (w *recipientWriter) flush() error {
	if w.rows == 0 {
		return nil
	}
	_, err := w.tx.exec(w.sql(w.values.String()), append(w.given, w.args...)...)
	w.values.Reset()
	w.given, w.rows = w.given[:0], 0
	return err
}

// openNotice writes the notice's row under an id of its own.
func (tx *sqliteTx) openNotice(n *school.Notice, args []any, total, duplicates int) (school.Receipt, error) {
	due := tx.now
	if !n.ScheduledAt.IsZero() {
		due = max(due, n.ScheduledAt.UnixMicro())
	}
	for range idAttempts {
		id, err := newID(time.UnixMicro(tx.now))
		if err != nil {
			return school.Receipt{}, err
		}
		row := append([]any{id}, args...)
		made, err := tx.exec(`INSERT INTO push_clusters (id, school_id, title, body, data, image, link, priority, delivery,
				scheduled_at, expires_at, traceparent, idempotency_key, request_hash, due_at, created_at, total_count, skipped_duplicate_count)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING`,
			append(row, due, tx.now, total, duplicates)...)
		if err != nil {
			return school.Receipt{}, err
		}
		if made == 1 {
			n.ID = id
			if n.Fallback != "" {
				if _, err := tx.exec(`UPDATE push_clusters SET fallback_sms = ?2 WHERE id = ?1`, id, n.Fallback); err != nil {
					return school.Receipt{}, err
				}
			}
			return school.Receipt{ID: id, School: n.School, Status: school.NoticePending, Total: total}, nil
		}
	}
	return school.Receipt{}, fmt.Errorf("%d ids were taken: %w", idAttempts, school.ErrUnavailable)
}

// touchSchool makes a school with its ledger row where it does not exist. After a
// deletion its version goes on where it was, since it only grows.
func (tx *sqliteTx) touchSchool(id string) error {
	if _, err := tx.exec(`INSERT INTO school_terms (school_id) VALUES (?1) ON CONFLICT DO NOTHING`, id); err != nil {
		return err
	}
	_, err := tx.exec(`INSERT INTO schools (id, settings_version, created_at)
		SELECT t.school_id, t.settings_version + 1, ?2 FROM school_terms t WHERE t.school_id = ?1 ON CONFLICT DO NOTHING`, id, tx.now)
	return err
}
