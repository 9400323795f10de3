package store

import (
	"context"
	"fmt"

	"schoolbell/school"
)

// Claim does what DB.Claim does.
func (db *SQLite) Claim(ctx context.Context, t school.Term, c school.Claim) error {
	b, err := claimedOf(t, c)
	if err != nil {
		return err
	}
	op := "claim batch " + c.Batch
	m, err := movesOf(c.Work)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return db.change(ctx, op, func(tx *sqliteTx) error {
		row, err := tx.held(t)
		if err != nil {
			return err
		}
		if row.paused {
			return school.ErrPaused
		}
		switch settings, found, err := tx.school(t.School); {
		case err != nil:
			return err
		case found && settings.SettingsVersion > c.Rule.Version:
			return school.ErrRuleChanged
		}
		if err := tx.advance(t.School, &row, c, b); err != nil {
			return err
		}
		if _, err := tx.exec(`INSERT INTO push_batches (id, school_id, sender, fence, cycle, size, filled, owner, claimed_at, send_deadline)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`, c.Batch, t.School, c.Sender, t.Fence, c.Grant.Cycle, b.size, b.filled, t.Owner, tx.now,
			tx.now+c.Longest.Microseconds()+c.Record.Microseconds()); err != nil {
			return err
		}
		ranges := make([][4]any, len(m.rangeNotice))
		for i := range ranges {
			ranges[i] = [4]any{m.rangeNotice[i], m.rangeFrom[i], m.rangeTo[i], m.rangeKind[i]}
		}
		text, err := table(ranges)
		if err != nil {
			return err
		}
		if _, err := tx.exec(`INSERT INTO push_batch_ranges (batch_id, cluster_id, from_seq, to_seq, kind)
			SELECT ?1, x.value->>0, x.value->>1, x.value->>2, x.value->>3 FROM json_each(?2) x`, c.Batch, text); err != nil {
			return err
		}
		if err := tx.take(t, m); err != nil || !c.UrgentFirst {
			return err
		}
		return tx.urgentFirst(t.School, m)
	})
}

// urgentFirst refuses a claim that leaves first attempts of an urgent notice behind
// for anything else.
func (tx *sqliteTx) urgentFirst(schoolID string, m *moves) error {
	var waits int
	found, err := tx.one(`SELECT 1 FROM push_clusters AS c INDEXED BY push_clusters_open
		WHERE c.school_id = ?1 AND c.ended_at IS NULL AND c.priority = 0 AND c.due_at <= ?2
			AND c.frontier < c.total_count AND c.closing IS NULL AND (c.expires_at IS NULL OR c.expires_at > ?2) LIMIT 1`,
		[]any{schoolID, tx.now}, &waits)
	if err != nil || !found {
		return err
	}
	taken := make([][2]any, len(m.notice))
	for i := range taken {
		taken[i] = [2]any{m.notice[i], m.taken[i]}
	}
	text, err := table(taken)
	if err != nil {
		return err
	}
	var others int
	if _, err := tx.one(`SELECT count(*) FROM json_each(?1) AS x CROSS JOIN push_clusters AS c ON c.id = x.value->>0
		WHERE x.value->>1 > 0 AND c.priority > 0`, []any{text}, &others); err != nil {
		return err
	}
	if others+len(m.againSeq) > 0 {
		return fmt.Errorf("an urgent notice waits: %w", school.ErrStalePage)
	}
	return nil
}

// advance writes the ledger. Within its cycle the count never falls; a grant that
// fills it sets a rest at once, from the latest moment the call can end.
func (tx *sqliteTx) advance(schoolID string, row *termRow, c school.Claim, b claimed) error {
	l, next := row.ledger, row.next
	if c.Grant.Cycle < l.Cycle {
		return fmt.Errorf("grant of cycle %d is older than the ledger's %d: %w", c.Grant.Cycle, l.Cycle, school.ErrConflict)
	}
	attempted := b.attempted
	if c.Grant.Cycle == l.Cycle {
		attempted = max(attempted, l.Attempted)
	} else {
		next = nil
	}
	if b.filled {
		at := tx.now + c.Longest.Microseconds() + c.Rule.Rest.Microseconds()
		next = &at
	}
	rule := l.Rule
	if c.Rule.Version >= rule.Version {
		rule = c.Rule
	}
	_, err := tx.exec(`UPDATE school_terms SET cycle = ?2, attempted = ?3, next_eligible_at = ?4, "limit" = ?5, rest = ?6, settings_version = ?7
		WHERE school_id = ?1`, schoolID, c.Grant.Cycle, attempted, next, rule.Limit, restMillis(rule.Rest), rule.Version)
	return err
}

// Skip does what DB.Skip does.
func (db *SQLite) Skip(ctx context.Context, t school.Term, work []school.Work) error {
	op := "skip recipients of school " + t.School
	if err := checkSkips(op, work); err != nil || len(work) == 0 {
		return err
	}
	m, err := movesOf(work)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return db.change(ctx, op, func(tx *sqliteTx) error {
		row, err := tx.held(t)
		if err != nil {
			return err
		}
		if row.paused {
			return school.ErrPaused
		}
		return tx.take(t, m)
	})
}

// A plus before a column keeps the planner from another way than by key, here
// through all notices of the school.
const takeNoticesSQL = `UPDATE push_clusters AS c SET
	frontier = coalesce(x.upto, c.frontier),
	in_progress_count = c.in_progress_count + x.taken,
	retry_pending_count = c.retry_pending_count - x.retries,
	job_status = CASE WHEN x.taken > 0 THEN 'IN_PROGRESS' ELSE c.job_status END,
	first_send_at = CASE WHEN x.taken > 0 THEN coalesce(c.first_send_at, ?3) ELSE c.first_send_at END,
	last_send_at = CASE WHEN x.taken > 0 THEN ?3 ELSE c.last_send_at END
	FROM (SELECT value->>0 AS id, value->>1 AS since, value->>2 AS upto, value->>3 AS taken, value->>4 AS retries FROM json_each(?1)) AS x
	WHERE c.id = x.id AND +c.school_id = ?2
		AND (x.upto IS NULL OR (c.frontier = x.since AND x.upto <= c.total_count))
		AND c.closing IS NULL AND c.ended_at IS NULL AND (c.expires_at IS NULL OR c.expires_at > ?3)`

const takeAgainSQL = `UPDATE push_cluster_tokens NOT INDEXED SET retry_after = NULL
	WHERE (cluster_id, seq, attempts) IN (SELECT value->>0, value->>1, value->>2 FROM json_each(?1))
		AND job_status IN ('PENDING', 'RETRY_PENDING') AND retry_after <= ?2`

// One that was handed over before cannot be SKIPPED any more.
const takeSkipsSQL = `UPDATE push_cluster_tokens AS t SET
	job_status = CASE WHEN t.attempts = 0 THEN 'SKIPPED' ELSE 'PERMANENT_FAIL' END,
	reason = x.value->>3, retry_after = NULL, processed_at = ?2
	FROM json_each(?1) AS x
	WHERE t.cluster_id = x.value->>0 AND t.seq = x.value->>1 AND t.attempts = x.value->>2
		AND t.job_status IN ('PENDING', 'RETRY_PENDING')`

// take moves frontiers, takes retries by key and writes the skipped ones. Where
// anything of it is not as the page showed it, school.ErrStalePage.
func (tx *sqliteTx) take(t school.Term, m *moves) error {
	notices := make([][5]any, len(m.notice))
	for i := range notices {
		notices[i] = [5]any{m.notice[i], m.from[i], m.to[i], m.taken[i], m.retries[i]}
	}
	if err := allOf(tx, takeNoticesSQL, notices, t.School, tx.now); err != nil {
		return err
	}
	again := make([][3]any, len(m.againSeq))
	for i := range again {
		again[i] = [3]any{m.againNotice[i], m.againSeq[i], m.againAttempts[i]}
	}
	if len(again) > 0 {
		if err := allOf(tx, takeAgainSQL, again, tx.now); err != nil {
			return err
		}
	}
	if len(m.skipSeq) == 0 {
		return nil
	}
	skips := make([][4]any, len(m.skipSeq))
	var ledger counterMoves
	for i := range skips {
		skips[i] = [4]any{m.skipNotice[i], m.skipSeq[i], m.skipAttempts[i], m.skipReason[i]}
		if m.skipAttempts[i] == 0 {
			ledger.add(m.skipNotice[i], counterWaiting, m.skipReason[i], 1)
		} else {
			ledger.add(m.skipNotice[i], counterRetryPending, counterPermanentFail, 1)
		}
	}
	if err := allOf(tx, takeSkipsSQL, skips, tx.now); err != nil {
		return err
	}
	return tx.move(&ledger)
}

// allOf runs a statement over rows, each of which has to meet what it expects.
func allOf[R any](tx *sqliteTx, query string, rows []R, args ...any) error {
	text, err := table(rows)
	if err != nil {
		return err
	}
	n, err := tx.exec(query, append([]any{text}, args...)...)
	if err != nil {
		return err
	}
	if n != len(rows) {
		return fmt.Errorf("%d of %d have moved: %w", len(rows)-n, len(rows), school.ErrStalePage)
	}
	return nil
}

// Withdraw does what DB.Withdraw does.
func (db *SQLite) Withdraw(ctx context.Context, t school.Term, batch string) error {
	return db.change(ctx, "withdraw batch "+batch, func(tx *sqliteTx) error {
		row, err := tx.held(t)
		if err != nil {
			return err
		}
		b, found, err := tx.batch(batch)
		switch {
		case err != nil:
			return err
		case !found || b.settledAs == settledWithdrawn:
			return nil
		case b.settled:
			return fmt.Errorf("batch was settled otherwise: %w", school.ErrTakenOver)
		case b.school != t.School || b.owner != t.Owner:
			return fmt.Errorf("batch is another owner's: %w", school.ErrConflict)
		}
		if err := tx.settle(batch, t.Owner, settledWithdrawn); err != nil {
			return err
		}
		if b.cycle == row.ledger.Cycle {
			next := row.next
			if b.filled {
				next = nil
			}
			if _, err := tx.exec(`UPDATE school_terms SET attempted = ?2, next_eligible_at = ?3 WHERE school_id = ?1`,
				t.School, max(0, row.ledger.Attempted-b.size), next); err != nil {
				return err
			}
		}
		return tx.putBack(batch)
	})
}

// putBack makes what a batch covers due at once. In a notice that closed
// meanwhile it ends: never handed over is SKIPPED, handed over before has failed.
func (tx *sqliteTx) putBack(batch string) error {
	covered, err := tx.covered(batch)
	if err != nil {
		return err
	}
	var ledger counterMoves
	changes := make([]rowChange, len(covered))
	for i, c := range covered {
		r := rowChange{notice: c.notice, seq: c.seq, from: c.standing.Attempts, change: school.Change{
			State: c.standing.State, Attempts: c.standing.Attempts, Retries: c.standing.Retries, Orphanings: c.standing.Orphanings,
			Code: c.code, Reason: c.reason,
		}, processedAt: c.processedAt}
		if c.closing == "" {
			r.retryAfter = &tx.now
		} else {
			r.change.State, r.change.Reason, r.processedAt = school.PermanentFail, c.closing, &tx.now
			if c.standing.Attempts == 0 {
				r.change.State = school.Skipped
			}
		}
		ledger.add(c.notice, counterInProgress, counterOf(&r.change), 1)
		changes[i] = r
	}
	if err := tx.write(changes); err != nil {
		return err
	}
	return tx.move(&ledger)
}
