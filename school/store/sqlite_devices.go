package store

import (
	"context"
	"crypto/sha256"
	"fmt"

	"schoolbell/school"
)

// PutDevices does what DB.PutDevices does.
func (db *SQLite) PutDevices(ctx context.Context, schoolID string, devices []school.NewDevice) (done school.Devices, err error) {
	op := "put devices of school " + schoolID
	if err := checkSchoolID(schoolID); err != nil {
		return done, fmt.Errorf("%s: %w", op, err)
	}
	devices = eachOnce(devices)
	var (
		rows   = make([][4]any, len(devices))
		given  []string    // keys of the devices whose topics are replaced
		topics [][2]string // key and topic
	)
	for i := range devices {
		d := &devices[i]
		key := tokenKey(d.Token)
		rows[i] = [4]any{key, d.Token, d.Ref, d.Enabled}
		if d.Topics != nil {
			given = append(given, key)
		}
		for _, topic := range d.Topics {
			topics = append(topics, [2]string{key, topic})
		}
	}
	list, err := table(rows)
	if err != nil {
		return done, fmt.Errorf("%s: %w", op, err)
	}
	err = db.change(ctx, op, func(tx *sqliteTx) error {
		done = school.Devices{Registered: len(devices)}
		if err := tx.touchSchool(schoolID); err != nil {
			return err
		}
		if _, err := tx.one(`SELECT count(*) FROM json_each(?2) AS x CROSS JOIN devices AS d ON d.school_id = ?1 AND d.token_sha = unhex(x.value->>0)
			WHERE d.retired_at IS NOT NULL`, []any{schoolID, list}, &done.Revived); err != nil {
			return err
		}
		known, err := tx.exec(`UPDATE devices AS d SET
				ref = coalesce(x.value->>2, d.ref), enabled = coalesce(x.value->>3, d.enabled), registered_at = ?3, updated_at = ?3, retired_at = NULL
			FROM json_each(?2) AS x WHERE d.school_id = ?1 AND d.token_sha = unhex(x.value->>0)`, schoolID, list, tx.now)
		if err != nil {
			return err
		}
		if done.Created = len(devices) - known; done.Created > 0 {
			if _, err := tx.exec(`INSERT INTO devices (school_id, token_sha, token, ref, enabled, registered_at, updated_at)
				SELECT ?1, unhex(x.value->>0), x.value->>1, coalesce(x.value->>2, ''), coalesce(x.value->>3, 1), ?3, ?3
				FROM json_each(?2) AS x WHERE true ON CONFLICT DO NOTHING`, schoolID, list, tx.now); err != nil {
				return err
			}
		}
		return tx.putTopics(schoolID, given, topics)
	})
	if err != nil {
		return school.Devices{}, err
	}
	return done, nil
}

// putTopics replaces the topics of the devices that are given.
func (tx *sqliteTx) putTopics(schoolID string, given []string, topics [][2]string) error {
	if len(given) == 0 {
		return nil
	}
	keys, err := table(given)
	if err != nil {
		return err
	}
	if _, err := tx.exec(`DELETE FROM device_topics WHERE school_id = ?1 AND token_sha IN (SELECT unhex(value) FROM json_each(?2))`, schoolID, keys); err != nil {
		return err
	}
	list, err := table(topics)
	if err != nil {
		return err
	}
	_, err = tx.exec(`INSERT INTO device_topics (school_id, topic, token_sha)
		SELECT ?1, x.value->>1, unhex(x.value->>0) FROM json_each(?2) AS x WHERE true ON CONFLICT DO NOTHING`, schoolID, list)
	return err
}

// DeleteDevice does what DB.DeleteDevice does.
func (db *SQLite) DeleteDevice(ctx context.Context, schoolID, token string) error {
	sum := sha256.Sum256([]byte(token))
	return db.change(ctx, "delete device of school "+schoolID, func(tx *sqliteTx) error {
		n, err := tx.exec(`DELETE FROM devices WHERE school_id = ?1 AND token_sha = ?2`, schoolID, sum[:])
		if err == nil && n == 0 {
			err = school.ErrNotFound
		}
		return err
	})
}

// gone is what became of the devices of a batch that no longer exist.
type gone struct {
	engaged          bool // by this batch
	retired, flagged int
}

// recordGone retires the devices that are gone, or flags them where they are too
// many to be believed or a brake is on for the school and the batch's sender.
// Registered anew after the claim, a device is not the one that was answered for.
func (tx *sqliteTx) recordGone(r *school.BatchRecord, b *batchRow, o *outcomes) (g gone, err error) {
	shas, err := tx.retiring(o)
	if err != nil || len(shas) == 0 {
		return g, err
	}
	list, err := table(shas)
	if err != nil {
		return g, err
	}
	var brake int64
	on, err := tx.one(`SELECT id FROM device_brakes INDEXED BY device_brakes_open WHERE school_id = ?1 AND sender = ?2 AND closed_at IS NULL`,
		[]any{r.School, b.sender}, &brake)
	if err != nil {
		return g, err
	}
	if !on && !r.Brake {
		g.retired, err = tx.exec(`UPDATE devices SET retired_at = ?3 WHERE school_id = ?1 AND token_sha IN (SELECT unhex(value) FROM json_each(?4))
			AND retired_at IS NULL AND registered_at < ?2`, r.School, b.claimedAt, tx.now, list)
		return g, err
	}
	if !on {
		g.engaged = true
		if _, err := tx.one(`INSERT INTO device_brakes (school_id, sender, batch_id, owner, unregistered, size, engaged_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) RETURNING id`,
			[]any{r.School, b.sender, r.Batch, r.Owner, len(shas), b.size, tx.now}, &brake); err != nil {
			return g, err
		}
	}
	g.flagged, err = tx.exec(`INSERT INTO device_flags AS f (brake_id, school_id, token_sha, batch_id, claimed_at, flagged_at)
		SELECT ?2, d.school_id, d.token_sha, ?3, ?4, ?5 FROM json_each(?6) AS x CROSS JOIN devices AS d ON d.school_id = ?1 AND d.token_sha = unhex(x.value)
		WHERE d.retired_at IS NULL AND d.registered_at < ?4
		ON CONFLICT (brake_id, token_sha) DO UPDATE SET
			batch_id = excluded.batch_id, claimed_at = max(f.claimed_at, excluded.claimed_at), flagged_at = excluded.flagged_at`,
		r.School, brake, r.Batch, b.claimedAt, tx.now, list)
	return g, err
}

// CloseBrake does what DB.CloseBrake does.
func (db *SQLite) CloseBrake(ctx context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error) {
	op := fmt.Sprintf("close brake %d", id)
	if err := checkBrakeEnd(op, as); err != nil {
		return school.EngagedBrake{}, err
	}
	err := db.change(ctx, op, func(tx *sqliteTx) error {
		var was string
		found, err := tx.one(`SELECT coalesce(closed_as, '') FROM device_brakes WHERE id = ?1`, []any{id}, &was)
		switch {
		case err != nil:
			return err
		case !found:
			return school.ErrNotFound
		case was == string(as):
			return nil
		case was != "":
			return fmt.Errorf("the brake was closed otherwise: %w", school.ErrConflict)
		}
		_, err = tx.exec(`UPDATE device_brakes SET closed_at = ?2, closed_as = ?3, closed_by = ?4 WHERE id = ?1`, id, tx.now, string(as), by)
		return err
	})
	for n := flagsAtOnce; err == nil && n >= flagsAtOnce; {
		err = db.change(ctx, op, func(tx *sqliteTx) (err error) {
			n, err = tx.endFlags(id, as)
			return err
		})
	}
	if err != nil {
		return school.EngagedBrake{}, err
	}
	return db.Brake(ctx, id)
}

// endFlags takes some flags off a closed brake and returns how many.
func (tx *sqliteTx) endFlags(id int64, as school.BrakeEnd) (int, error) {
	const some = `(SELECT token_sha FROM device_flags WHERE brake_id = ?1 ORDER BY token_sha LIMIT ?2)`
	if as == school.BrakeConfirmed {
		retired, err := tx.exec(`UPDATE devices AS d SET retired_at = ?3
			FROM (SELECT school_id, token_sha, claimed_at FROM device_flags WHERE brake_id = ?1 ORDER BY token_sha LIMIT ?2) AS f
			WHERE d.school_id = f.school_id AND d.token_sha = f.token_sha AND d.retired_at IS NULL AND d.registered_at < f.claimed_at`, id, flagsAtOnce, tx.now)
		if err != nil {
			return 0, err
		}
		if _, err := tx.exec(`UPDATE device_brakes SET retired_count = retired_count + ?2 WHERE id = ?1`, id, retired); err != nil {
			return 0, err
		}
	}
	return tx.exec(`DELETE FROM device_flags WHERE brake_id = ?1 AND token_sha IN `+some, id, flagsAtOnce)
}
