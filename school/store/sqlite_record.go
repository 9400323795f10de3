package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"schoolbell/school"
)

// How a batch was settled.
const (
	settledRecorded  = "recorded"
	settledTakenOver = "taken_over"
	settledWithdrawn = "withdrawn"
)

type batchRow struct {
	school, owner string
	sender        string
	fence, cycle  int64
	size          int
	filled        bool
	claimedAt     int64
	settled       bool
	settledBy     string
	settledAs     string
}

func (tx *sqliteTx) batch(id string) (b batchRow, found bool, err error) {
	found, err = tx.one(`SELECT school_id, owner, sender, fence, cycle, size, filled, claimed_at, settled_at IS NOT NULL, coalesce(settled_by, ''), coalesce(settled_as, '')
		FROM push_batches WHERE id = ?1`, []any{id},
		&b.school, &b.owner, &b.sender, &b.fence, &b.cycle, &b.size, &b.filled, &b.claimedAt, &b.settled, &b.settledBy, &b.settledAs)
	return b, found, err
}

func (tx *sqliteTx) settle(batch, by, as string) error {
	_, err := tx.exec(`UPDATE push_batches SET settled_at = ?2, settled_by = ?3, settled_as = ?4 WHERE id = ?1`, batch, tx.now, by, as)
	return err
}

// coveredJoin are the recipients that a batch covers, by the ranges of their key.
const coveredJoin = `push_batch_ranges AS r CROSS JOIN push_cluster_tokens AS t
	ON t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq`

// stillCovered leaves out what is final and what has left the batch.
const stillCovered = `t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.retry_after IS NULL`

// coveredRow is a recipient that an open batch covers, with what its notice asks.
type coveredRow struct {
	notice      int64
	seq         int
	standing    school.Standing
	code        string
	reason      school.Reason
	processedAt *int64
	delivery    school.Delivery
	closing     school.Reason
}

func (tx *sqliteTx) covered(batch string) (list []coveredRow, err error) {
	err = tx.each(`SELECT t.cluster_id, t.seq, t.job_status, t.attempts, t.retry_count, t.orphan_count, coalesce(t.error_code, ''), coalesce(t.reason, ''),
			t.processed_at, c.delivery, coalesce(c.closing, '')
		FROM `+coveredJoin+` CROSS JOIN push_clusters AS c ON c.id = t.cluster_id WHERE r.batch_id = ?1 AND `+stillCovered, []any{batch},
		func(scan func(...any) error) error {
			var c coveredRow
			s := &c.standing
			err := scan(&c.notice, &c.seq, &s.State, &s.Attempts, &s.Retries, &s.Orphanings, &c.code, &c.reason, &c.processedAt, &c.delivery, &c.closing)
			list = append(list, c)
			return err
		})
	return list, err
}

// rowChange is what a waiting recipient becomes.
type rowChange struct {
	notice      int64
	seq         int
	from        int // attempts that it has
	change      school.Change
	retryAfter  *int64
	processedAt *int64
}

const writeSQL = `UPDATE push_cluster_tokens AS t SET
	job_status = x.value->>3, attempts = x.value->>4, retry_count = x.value->>5, orphan_count = x.value->>6,
	retry_after = x.value->>7, processed_at = x.value->>8, error_code = x.value->>9, reason = x.value->>10
	FROM json_each(?1) AS x
	WHERE t.cluster_id = x.value->>0 AND t.seq = x.value->>1 AND t.attempts = x.value->>2 AND ` + stillCovered

// write changes recipients that open batches cover, all of them or, with
// ErrMismatch, none.
func (tx *sqliteTx) write(changes []rowChange) error {
	if len(changes) == 0 {
		return nil
	}
	rows := make([][11]any, len(changes))
	for i := range changes {
		c := &changes[i]
		rows[i] = [11]any{c.notice, c.seq, c.from, c.change.State, c.change.Attempts, c.change.Retries, c.change.Orphanings,
			c.retryAfter, c.processedAt, stringOrNil(c.change.Code), stringOrNil(string(c.change.Reason))}
	}
	text, err := table(rows)
	if err != nil {
		return err
	}
	n, err := tx.exec(writeSQL, text)
	if err != nil {
		return err
	}
	if n != len(changes) {
		return fmt.Errorf("%d of %d results are of no recipient that the batch covers: %w", len(changes)-n, len(changes), ErrMismatch)
	}
	return nil
}

// Record does what DB.Record does.
func (db *SQLite) Record(ctx context.Context, r school.BatchRecord) error {
	op := "record batch " + r.Batch
	o, err := outcomesOf(r.Results)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	var what gone
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		b, found, err := tx.batch(r.Batch)
		switch {
		case err != nil:
			return err
		case !found:
			return school.ErrNotFound
		case b.settled && b.settledAs == settledRecorded && b.settledBy == r.Owner && b.fence == r.Fence:
			return nil
		case b.settled:
			return school.ErrTakenOver
		case b.school != r.School || b.owner != r.Owner || b.fence != r.Fence:
			return fmt.Errorf("batch is another owner's: %w", school.ErrConflict)
		case b.size != len(r.Results):
			return fmt.Errorf("%d results for %d recipients: %w", len(r.Results), b.size, ErrMismatch)
		}
		if err := tx.settle(r.Batch, r.Owner, settledRecorded); err != nil {
			return err
		}
		// The rest runs from here on (R4); only in the cycle that this batch filled.
		if r.Filled && b.cycle == r.Cycle {
			if _, err := tx.exec(`UPDATE school_terms SET next_eligible_at = ?3 WHERE school_id = ?1 AND cycle = ?2`,
				r.School, b.cycle, tx.now+r.Rest.Microseconds()); err != nil {
				return err
			}
		}
		var ledger counterMoves
		if err := tx.recordFailed(r.Batch, o, &ledger); err != nil {
			return err
		}
		if err := tx.recordAccepted(r.Batch, o, &ledger); err != nil {
			return err
		}
		if err := tx.move(&ledger); err != nil {
			return err
		}
		if err := tx.recordFallbacks(r.School, o); err != nil {
			return err
		}
		what, err = tx.recordGone(&r, &b, o)
		return err
	})
	if err == nil {
		db.metrics.count(db.log, &r, o, what)
	}
	return err
}

// recordFailed writes the outcomes other than accepted, by key. Those that wait
// again thereby leave the batch.
func (tx *sqliteTx) recordFailed(batch string, o *outcomes, ledger *counterMoves) error {
	if len(o.seq) == 0 {
		return nil
	}
	type span struct{ from, to int32 }
	ranges := map[int64][]span{}
	closing := map[int64]school.Reason{}
	err := tx.each(`SELECT r.cluster_id, r.from_seq, r.to_seq, coalesce(c.closing, '')
		FROM push_batch_ranges AS r CROSS JOIN push_clusters AS c ON c.id = r.cluster_id WHERE r.batch_id = ?1`, []any{batch},
		func(scan func(...any) error) error {
			var (
				id  int64
				s   span
				why school.Reason
			)
			err := scan(&id, &s.from, &s.to, &why)
			ranges[id], closing[id] = append(ranges[id], s), why
			return err
		})
	if err != nil {
		return err
	}
	changes := make([]rowChange, len(o.seq))
	for i := range changes {
		id, seq := o.notice[i], o.seq[i]
		inside := false
		for _, s := range ranges[id] {
			inside = inside || (seq > s.from && seq <= s.to)
		}
		if !inside {
			return fmt.Errorf("result of recipient %s, which the batch does not cover: %w", school.MessageID(id, int(seq)), ErrMismatch)
		}
		c := rowChange{notice: id, seq: int(seq), from: int(o.attempts[i]) - 1, processedAt: &tx.now, change: school.Change{
			State: school.State(o.status[i]), Attempts: int(o.attempts[i]), Retries: int(o.retries[i]), Orphanings: int(o.orphans[i]),
			Code: orEmpty(o.code[i]), Reason: school.Reason(orEmpty(o.reason[i])),
		}}
		if c.change.State == school.RetryPending {
			if why := closing[id]; why != "" { // no retry follows in a notice that was cancelled or expired meanwhile
				c.change.State, c.change.Reason = school.PermanentFail, why
			} else {
				at := tx.now + o.retryIn[i]
				c.retryAfter = &at
			}
		}
		ledger.add(id, counterInProgress, counterOf(&c.change), 1)
		changes[i] = c
	}
	return tx.write(changes)
}

// recordAccepted writes what is left of the batch as accepted, by range.
func (tx *sqliteTx) recordAccepted(batch string, o *outcomes, ledger *counterMoves) error {
	if len(o.okN) == 0 {
		return nil
	}
	left := map[int64]int{}
	want := 0
	for i, id := range o.okNotice {
		left[id] += int(o.okN[i])
		want += int(o.okN[i])
	}
	err := tx.each(`SELECT t.cluster_id, t.attempts > 0, count(*) FROM `+coveredJoin+`
		WHERE r.batch_id = ?1 AND `+stillCovered+` GROUP BY 1, 2`, []any{batch}, func(scan func(...any) error) error {
		var (
			id    int64
			later bool
			n     int
		)
		if err := scan(&id, &later, &n); err != nil {
			return err
		}
		left[id] -= n
		change := school.Change{State: school.Success, Attempts: 1}
		if later {
			change.Attempts = 2
		}
		ledger.add(id, counterInProgress, counterOf(&change), n)
		return nil
	})
	if err != nil {
		return err
	}
	for _, n := range left {
		if n != 0 {
			return fmt.Errorf("accepted results are not the recipients that the batch covers: %w", ErrMismatch)
		}
	}
	n, err := tx.exec(`UPDATE push_cluster_tokens AS t SET
			job_status = 'SUCCESS', attempts = t.attempts + 1, error_code = NULL, reason = NULL, processed_at = ?2
		FROM push_batch_ranges AS r
		WHERE r.batch_id = ?1 AND t.cluster_id = r.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq AND `+stillCovered, batch, tx.now)
	if err == nil && n != want {
		err = fmt.Errorf("%d accepted results written of %d: %w", n, want, ErrMismatch)
	}
	return err
}

// retiring are the keys of the devices that are gone.
func (tx *sqliteTx) retiring(o *outcomes) (shas []string, err error) {
	var gone [][2]any
	for i, retire := range o.retire {
		if retire {
			gone = append(gone, [2]any{o.notice[i], o.seq[i]})
		}
	}
	if len(gone) == 0 {
		return nil, nil
	}
	text, err := table(gone)
	if err != nil {
		return nil, err
	}
	err = tx.each(`SELECT t.token FROM json_each(?1) AS x CROSS JOIN push_cluster_tokens AS t
		ON t.cluster_id = x.value->>0 AND t.seq = x.value->>1`, []any{text}, func(scan func(...any) error) error {
		var token string
		err := scan(&token)
		shas = append(shas, tokenKey(token))
		return err
	})
	return shas, err
}

// tokenKey is a token's key in the table of devices, in hexadecimal.
func tokenKey(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// Takeover does what DB.Takeover does, by asking school.Next of each recipient.
func (db *SQLite) Takeover(ctx context.Context, t school.Term, policy school.RetryPolicy) (o school.Orphans, err error) {
	err = db.change(ctx, "take over batches of school "+t.School, func(tx *sqliteTx) error {
		o = school.Orphans{}
		if _, err := tx.held(t); err != nil {
			return err
		}
		err := tx.each(`SELECT id, fence, cycle, size, send_deadline FROM push_batches INDEXED BY push_batches_unsettled
			WHERE school_id = ?1 AND settled_at IS NULL AND fence < ?2 ORDER BY fence, id`, []any{t.School, t.Fence},
			func(scan func(...any) error) error {
				var b school.OpenBatch
				var deadline int64
				if err := scan(&b.ID, &b.Fence, &b.Cycle, &b.Size, &deadline); err != nil {
					return err
				}
				if left := micros(deadline - tx.now); left > 0 {
					o.Wait = max(o.Wait, left)
				} else {
					o.Batches = append(o.Batches, b)
				}
				return nil
			})
		if err != nil {
			return err
		}
		for _, b := range o.Batches {
			n, err := tx.orphan(b.ID, t.Owner, policy)
			if err != nil {
				return err
			}
			o.Recipients += n
		}
		return nil
	})
	if err != nil {
		return school.Orphans{}, err
	}
	return o, nil
}

// orphan settles a batch whose owner is gone.
func (tx *sqliteTx) orphan(batch, by string, policy school.RetryPolicy) (recipients int, err error) {
	if err := tx.settle(batch, by, settledTakenOver); err != nil {
		return 0, err
	}
	covered, err := tx.covered(batch)
	if err != nil {
		return 0, err
	}
	var ledger counterMoves
	changes := make([]rowChange, len(covered))
	for i, c := range covered {
		change, err := school.Next(c.standing, school.Event{
			Outcome: school.OrphanedUnsure, Code: orphanedCode, Closing: c.closing, Delivery: c.delivery,
		}, policy)
		if err != nil {
			return 0, fmt.Errorf("recipient %s: %w", school.MessageID(c.notice, c.seq), err)
		}
		changes[i] = rowChange{notice: c.notice, seq: c.seq, from: c.standing.Attempts, change: change, processedAt: &tx.now}
		if change.State == school.RetryPending {
			at := tx.now + change.RetryIn.Microseconds()
			changes[i].retryAfter = &at
		}
		ledger.add(c.notice, counterInProgress, counterOf(&change), 1)
	}
	if err := tx.write(changes); err != nil {
		return 0, err
	}
	return len(changes), tx.move(&ledger)
}

// orphanedCode stands where a receiver's code would.
const orphanedCode = "ORPHANED"

// Confirm does what DB.Confirm does.
func (db *SQLite) Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error {
	op := "confirm recipients of school " + t.School
	if err := checkConfirmed(op, confirmed); err != nil {
		return err
	}
	return db.change(ctx, op, func(tx *sqliteTx) error {
		if _, err := tx.held(t); err != nil {
			return err
		}
		var ledger counterMoves
		for _, r := range confirmed {
			n, err := tx.exec(`UPDATE push_cluster_tokens NOT INDEXED SET
					job_status = 'SUCCESS', retry_after = NULL, error_code = NULL, reason = NULL, processed_at = ?5
				WHERE cluster_id = ?1 AND seq = ?2 AND attempts = ?3 AND school_id = ?4
					AND job_status = 'RETRY_PENDING' AND retry_after IS NOT NULL`, r.Notice, r.Seq, r.Change.Attempts, t.School, tx.now)
			if err != nil {
				return err
			}
			if n == 1 {
				ledger.add(r.Notice, counterRetryPending, counterOf(&r.Change), 1)
			}
		}
		return tx.move(&ledger)
	})
}
