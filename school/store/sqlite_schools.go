package store

import (
	"context"
	"fmt"
	"time"

	"schoolbell/school"
)

// PutSchool does what DB.PutSchool does.
func (db *SQLite) PutSchool(ctx context.Context, id string, c school.SchoolChange) (s school.School, created bool, err error) {
	var rest *int64
	if c.Rest != nil {
		ms := restMillis(*c.Rest)
		rest = &ms
	}
	err = db.change(ctx, "put school "+id, func(tx *sqliteTx) error {
		_, known, err := tx.school(id)
		if err != nil {
			return err
		}
		if created = !known; created {
			if err := tx.touchSchool(id); err != nil {
				return err
			}
		}
		_, err = tx.exec(`UPDATE schools SET
				name = coalesce(?2, name), sender = coalesce(?3, sender), "limit" = coalesce(?4, "limit"), rest = coalesce(?5, rest),
				settings_version = settings_version + ?6
			WHERE id = ?1 AND (coalesce(?2, name), coalesce(?3, sender), coalesce(?4, "limit"), coalesce(?5, rest)) IS NOT (name, sender, "limit", rest)`,
			id, c.Name, c.Sender, c.Limit, rest, known)
		return err
	})
	if err != nil {
		return school.School{}, false, err
	}
	b, err := db.School(ctx, id)
	return b.School, created, err
}

// DeleteSchool does what DB.DeleteSchool does.
func (db *SQLite) DeleteSchool(ctx context.Context, id string) error {
	return db.change(ctx, "delete school "+id, func(tx *sqliteTx) error {
		s, found, err := tx.school(id)
		if err != nil {
			return err
		}
		if !found {
			return school.ErrNotFound
		}
		var busy bool
		if _, err := tx.one(`SELECT EXISTS (SELECT 1 FROM push_clusters INDEXED BY push_clusters_open WHERE school_id = ?1 AND ended_at IS NULL)
			OR EXISTS (SELECT 1 FROM push_batches INDEXED BY push_batches_unsettled WHERE school_id = ?1 AND settled_at IS NULL)`, []any{id}, &busy); err != nil {
			return err
		}
		if busy {
			return school.ErrConflict
		}
		if _, err := tx.exec(`UPDATE school_terms SET settings_version = max(settings_version, ?2), paused = 0 WHERE school_id = ?1`, id, s.SettingsVersion); err != nil {
			return err
		}
		if _, err := tx.exec(`DELETE FROM devices WHERE school_id = ?1`, id); err != nil {
			return err
		}
		_, err = tx.exec(`DELETE FROM schools WHERE id = ?1`, id)
		return err
	})
}

// Pause does what DB.Pause does.
func (db *SQLite) Pause(ctx context.Context, id string) error {
	return db.setPaused(ctx, "pause school "+id, id, true)
}

// Resume does what DB.Resume does.
func (db *SQLite) Resume(ctx context.Context, id string) error {
	return db.setPaused(ctx, "resume school "+id, id, false)
}

func (db *SQLite) setPaused(ctx context.Context, op, id string, paused bool) error {
	return db.change(ctx, op, func(tx *sqliteTx) error {
		n, err := tx.exec(`UPDATE school_terms SET paused = ?2 WHERE school_id = ?1 AND EXISTS (SELECT 1 FROM schools WHERE id = ?1)`, id, paused)
		if err == nil && n == 0 {
			err = school.ErrNotFound
		}
		return err
	})
}

// School does what DB.School does.
func (db *SQLite) School(ctx context.Context, id string) (school.Backlog, error) {
	op := "school " + id
	list, err := db.backlogs(ctx, op, `s.id = ?1`, id, 1)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("%s: %w", op, school.ErrNotFound)
	}
	if err != nil {
		return school.Backlog{}, err
	}
	return list[0], nil
}

// Schools does what DB.Schools does.
func (db *SQLite) Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error) {
	const op = "schools"
	if err := checkLimit(op, limit); err != nil {
		return nil, err
	}
	return db.backlogs(ctx, op, `s.id > ?1`, afterID, limit)
}

// backlogs reads schools, which being a condition of ?1, and then their work in
// two aggregates over the same stretch of ids, all in one snapshot.
func (db *SQLite) backlogs(ctx context.Context, op, which, id string, limit int) (list []school.Backlog, err error) {
	err = db.read(ctx, db.reads, op, func(tx *sqliteTx) error {
		list = nil
		err := tx.each(`SELECT s.id, s.name, s.sender, s."limit", s.rest, s.settings_version, s.created_at, t.paused,
				t.fence, t.cycle, t.attempted, t.next_eligible_at, t."limit", t.rest, t.settings_version
			FROM schools AS s JOIN school_terms AS t ON t.school_id = s.id
			WHERE `+which+` ORDER BY s.id LIMIT ?2`, []any{id, limit}, func(scan func(...any) error) error {
			var (
				b        school.Backlog
				rest     *int64
				created  instant
				next     *int64
				ruleRest int64
			)
			err := scan(&b.School.ID, &b.School.Name, &b.School.Sender, &b.School.Limit, &rest, &b.School.SettingsVersion, &created, &b.School.Paused,
				&b.Fence, &b.Ledger.Cycle, &b.Ledger.Attempted, &next, &b.Ledger.Rule.Limit, &ruleRest, &b.Ledger.Rule.Version)
			b.School.Rest, b.School.CreatedAt = restOrNil(rest), created.Time
			b.Ledger.Filled, b.Ledger.Resting, b.Ledger.Rule.Rest = next != nil, tx.until(next), restFromMillis(ruleRest)
			list = append(list, b)
			return err
		})
		if err != nil || len(list) == 0 {
			return err
		}
		index := make(map[string]*school.Backlog, len(list))
		for i := range list {
			index[list[i].School.ID] = &list[i]
		}
		stretch := []any{list[0].School.ID, list[len(list)-1].School.ID, tx.now}
		if err := tx.each(`SELECT school_id,
				coalesce(sum(waiting_count) FILTER (WHERE due_at <= ?3), 0), coalesce(sum(waiting_count) FILTER (WHERE due_at > ?3), 0),
				sum(in_progress_count), sum(retry_pending_count), min(due_at) FILTER (WHERE due_at <= ?3 AND waiting_count > 0)
			FROM push_clusters INDEXED BY push_clusters_open WHERE school_id BETWEEN ?1 AND ?2 AND ended_at IS NULL GROUP BY school_id`, stretch, func(scan func(...any) error) error {
			var (
				id     string
				found  school.Backlog
				oldest *int64
			)
			if err := scan(&id, &found.Waiting, &found.Scheduled, &found.InProgress, &found.RetryWaiting, &oldest); err != nil {
				return err
			}
			if b := index[id]; b != nil {
				b.Waiting, b.Scheduled, b.InProgress, b.RetryWaiting = found.Waiting, found.Scheduled, found.InProgress, found.RetryWaiting
				b.OldestWaitingFor = tx.since(oldest)
			}
			return nil
		}); err != nil {
			return err
		}
		return tx.each(`SELECT school_id, count(*) FILTER (WHERE job_status = 'RETRY_PENDING'), min(retry_after)
			FROM push_cluster_tokens INDEXED BY push_cluster_tokens_retry WHERE school_id BETWEEN ?1 AND ?2 AND retry_after IS NOT NULL AND retry_after <= ?3
			GROUP BY school_id`, stretch, func(scan func(...any) error) error {
			var (
				id     string
				due    int
				oldest *int64
			)
			if err := scan(&id, &due, &oldest); err != nil {
				return err
			}
			if b := index[id]; b != nil {
				b.RetryDue, b.RetryWaiting = due, max(0, b.RetryWaiting-due)
				b.OldestWaitingFor = max(b.OldestWaitingFor, tx.since(oldest))
			}
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// since is how long ago a time was, 0 where it has not come or there is none.
func (tx *sqliteTx) since(at *int64) time.Duration {
	if at == nil {
		return 0
	}
	return max(0, micros(tx.now-*at))
}
