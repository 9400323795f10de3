package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"schoolbell/school"
)

// flagsAtOnce is how many flags one transaction takes off a closed brake, so that
// nobody waits long for a device.
const flagsAtOnce = 10_000

// CloseBrake ends a brake: confirmed, the devices that it flagged are retired but
// for those registered since; cleared, the flags are removed and nothing is
// retired. From its return on, the devices that its sender reports are judged
// anew. The flags go in bounded steps after the brake is closed; where that breaks
// off, closing it again in the same way goes on. by says who.
//
// school.ErrNotFound; school.ErrConflict where it was closed in the other way;
// school.ErrUnavailable, school.ErrCommitUnknown (asking again is harmless).
func (db *DB) CloseBrake(ctx context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error) {
	op := fmt.Sprintf("close brake %d", id)
	if err := checkBrakeEnd(op, as); err != nil {
		return school.EngagedBrake{}, err
	}
	err := change(ctx, db.ingest, op, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `SELECT schoolbell_close_brake($1, $2, $3)`, id, string(as), by)
		return err
	})
	for n := flagsAtOnce; err == nil && n >= flagsAtOnce; {
		err = change(ctx, db.ingest, op, func(c *pgx.Conn) error {
			return c.QueryRow(ctx, `SELECT schoolbell_end_flags($1, $2)`, id, flagsAtOnce).Scan(&n)
		})
	}
	if err != nil {
		return school.EngagedBrake{}, err
	}
	return db.Brake(ctx, id)
}

func checkBrakeEnd(op string, as school.BrakeEnd) error {
	switch as {
	case school.BrakeConfirmed, school.BrakeCleared:
		return nil
	}
	return fmt.Errorf("%s: a brake cannot be closed as %q", op, as)
}

// brakeModel is a row of device_brakes with the flags that it has now.
type brakeModel struct {
	ID           int64
	SchoolID     string
	Sender       string
	BatchID      string
	Owner        string
	Unregistered int
	Size         int
	EngagedAt    instant
	ClosedAt     instant
	ClosedAs     *string
	ClosedBy     *string
	RetiredCount int
	Flagged      int
}

func brakes(session *gorm.DB) *gorm.DB {
	return session.Table("device_brakes AS k").
		Select("k.*, (SELECT count(*) FROM device_flags f WHERE f.brake_id = k.id) AS flagged")
}

func (m *brakeModel) brake() school.EngagedBrake {
	return school.EngagedBrake{
		ID: m.ID, School: m.SchoolID, Sender: m.Sender, Batch: m.BatchID, Owner: m.Owner, Unregistered: m.Unregistered, Size: m.Size,
		EngagedAt: m.EngagedAt.Time, Flagged: m.Flagged, Retired: m.RetiredCount,
		ClosedAt: m.ClosedAt.Time, ClosedAs: school.BrakeEnd(orEmpty(m.ClosedAs)), ClosedBy: orEmpty(m.ClosedBy),
	}
}

// Brake returns one brake. school.ErrNotFound, school.ErrUnavailable.
func (r readModels) Brake(ctx context.Context, id int64) (school.EngagedBrake, error) {
	var m brakeModel
	err := r.run(ctx, fmt.Sprintf("brake %d", id), func(session *gorm.DB) error { return brakes(session).Where("k.id = ?", id).Take(&m).Error })
	if err != nil {
		return school.EngagedBrake{}, err
	}
	return m.brake(), nil
}

// Brakes lists brakes, newest first. school.ErrUnavailable; *school.FieldError for
// a limit outside 1 … 1000.
func (r readModels) Brakes(ctx context.Context, f school.BrakeFilter) ([]school.EngagedBrake, error) {
	const op = "brakes"
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	var rows []brakeModel
	err := r.run(ctx, op, func(session *gorm.DB) error {
		q := brakes(session).Order("k.id DESC").Limit(f.Limit)
		if f.School != "" {
			q = q.Where("k.school_id = ?", f.School)
		}
		if f.Open {
			q = q.Where("k.closed_at IS NULL")
		}
		if f.Before != 0 {
			q = q.Where("k.id < ?", f.Before)
		}
		return q.Find(&rows).Error
	})
	if err != nil {
		return nil, err
	}
	list := make([]school.EngagedBrake, len(rows))
	for i := range rows {
		list[i] = rows[i].brake()
	}
	return list, nil
}

// OpenBrakes counts the brakes that are on. school.ErrUnavailable.
func (r readModels) OpenBrakes(ctx context.Context) (n int, err error) {
	err = r.run(ctx, "open brakes", func(session *gorm.DB) error {
		return session.Raw(`SELECT count(*) FROM device_brakes WHERE closed_at IS NULL`).Scan(&n).Error
	})
	return n, err
}
