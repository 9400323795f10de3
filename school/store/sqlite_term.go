package store

import (
	"context"
	"time"

	"schoolbell/school"
)

// termRow is a school's ledger as a transaction found it.
type termRow struct {
	fence       int64
	acquisition string
	ledger      school.Ledger
	next        *int64 // next_eligible_at
	paused      bool
}

// termRow reads a school's ledger, whoever holds it.
func (tx *sqliteTx) termRow(schoolID string) (t termRow, found bool, err error) {
	var rest int64
	found, err = tx.one(`SELECT fence, acquisition, cycle, attempted, next_eligible_at, "limit", rest, settings_version, paused
		FROM school_terms WHERE school_id = ?1`, []any{schoolID},
		&t.fence, &t.acquisition, &t.ledger.Cycle, &t.ledger.Attempted, &t.next, &t.ledger.Rule.Limit, &rest, &t.ledger.Rule.Version, &t.paused)
	t.ledger.Filled, t.ledger.Resting, t.ledger.Rule.Rest = t.next != nil, tx.until(t.next), restFromMillis(rest)
	return t, found, err
}

// until is how long it is to a time, 0 where that has passed or there is none.
func (tx *sqliteTx) until(at *int64) time.Duration {
	if at == nil {
		return 0
	}
	return max(0, micros(*at-tx.now))
}

// held refuses a term that is not the newest one of its school.
func (tx *sqliteTx) held(t school.Term) (termRow, error) {
	row, found, err := tx.termRow(t.School)
	if err != nil {
		return row, err
	}
	if !found || row.fence != t.Fence || row.acquisition != t.Acquisition {
		return row, school.ErrFenced
	}
	return row, nil
}

// OpenTerm does what DB.OpenTerm does.
func (db *SQLite) OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error) {
	t := school.Term{School: schoolID, Acquisition: acquisition, Owner: owner}
	err := db.change(ctx, "open term of school "+schoolID, func(tx *sqliteTx) error {
		settings, found, err := tx.school(schoolID)
		if err != nil {
			return err
		}
		row, has, err := tx.termRow(schoolID)
		if err != nil {
			return err
		}
		if !found || !has {
			return school.ErrNotFound
		}
		t.Fence, t.Ledger, t.Settings = row.fence+1, row.ledger, settings
		t.Settings.Paused = row.paused
		if _, err := tx.exec(`UPDATE school_terms SET fence = ?2, acquisition = ?3, owner = ?4, opened_at = ?5 WHERE school_id = ?1`,
			schoolID, t.Fence, acquisition, owner, tx.now); err != nil {
			return err
		}
		return tx.each(`SELECT id, fence, cycle, size, send_deadline FROM push_batches INDEXED BY push_batches_unsettled
			WHERE school_id = ?1 AND settled_at IS NULL ORDER BY fence, id`, []any{schoolID}, func(scan func(...any) error) error {
			var b school.OpenBatch
			var deadline int64
			err := scan(&b.ID, &b.Fence, &b.Cycle, &b.Size, &deadline)
			b.Remaining = micros(deadline - tx.now)
			t.Unsettled = append(t.Unsettled, b)
			return err
		})
	})
	if err != nil {
		return school.Term{}, err
	}
	return t, nil
}

// school reads a school's settings, but for the pause, which lies in its term.
func (tx *sqliteTx) school(id string) (s school.School, found bool, err error) {
	var (
		rest    *int64
		created instant
	)
	s.ID = id
	found, err = tx.one(`SELECT name, sender, "limit", rest, settings_version, created_at FROM schools WHERE id = ?1`, []any{id},
		&s.Name, &s.Sender, &s.Limit, &rest, &s.SettingsVersion, &created)
	s.Rest, s.CreatedAt = restOrNil(rest), created.Time
	return s, found, err
}
