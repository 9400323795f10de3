package store

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

// Purging must not be felt by what sends. A step is short, however fast the disk
// is: the number of rows follows how long the last step took. And it works a
// quarter of the time at most, on one connection that is not dispatch's.
const (
	purgeStepTime  = 50 * time.Millisecond
	purgeStepMost  = 10 * time.Second // where the database does not answer
	purgeRowsLeast = 100
	purgePauses    = 3 // pauses as long as the step before
	purgePauseMost = 5 * time.Second
)

// Rows of recipients in one step: at first, and at most.
const (
	purgeRowsFirst = 1000
	purgeRowsMost  = 5000
)

// purger is what an engine does in one step.
type purger interface {
	// purgeStep removes at most rows recipients in one transaction, and says
	// whether there may be more to do.
	purgeStep(ctx context.Context, after time.Duration, rows int) (p school.Purged, more bool, err error)
}

// Purge removes the recipients of notices that ended at least after ago, the
// fallbacks of those, and batches that were settled at least that long ago; the
// notices with their counts stay, marked as purged before the first of their
// recipients is removed (R29). It works in short transactions with pauses between
// them until nothing is left or ctx ends, which is no error: how far each notice
// has come is stored with it, so whoever purges next goes on there, also after a
// kill. Where another replica purges it ends at once. It returns what it removed
// also with an error: school.ErrUnavailable, school.ErrCommitUnknown (asking again
// is harmless).
func (db *DB) Purge(ctx context.Context, after time.Duration) (school.Purged, error) {
	return purge(ctx, db, after, db.log, db.metrics)
}

func purge(ctx context.Context, db purger, after time.Duration, log *slog.Logger, m *metrics) (total school.Purged, err error) {
	began, rows, more := time.Now(), purgeRowsFirst, true
	for more && ctx.Err() == nil {
		stepped := time.Now()
		var p school.Purged
		p, more, err = purgeOnce(ctx, db, after, rows)
		total = total.Plus(p)
		m.purged(p)
		if err != nil {
			break
		}
		took := time.Since(stepped)
		rows = nextRows(rows, took)
		if more {
			rest(ctx, min(purgePauses*took, purgePauseMost))
		}
	}
	if total != (school.Purged{}) {
		log.InfoContext(ctx, "recipients of old notices were removed", "event", "recipients_purged", "notices", total.Notices,
			"recipients", total.Recipients, "batches", total.Batches, "fallbacks", total.Fallbacks,
			"took_ms", time.Since(began).Milliseconds(), "finished", !more)
	}
	return total, err
}

// purgeOnce takes a step to its end, which is near: one that is broken off would
// leave it open what was removed.
func purgeOnce(ctx context.Context, db purger, after time.Duration, rows int) (school.Purged, bool, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), purgeStepMost)
	defer cancel()
	return db.purgeStep(ctx, after, rows)
}

// nextRows is how many rows the next step may remove if this many took so long.
func nextRows(rows int, took time.Duration) int {
	switch {
	case took > 2*purgeStepTime:
		rows /= 2
	case took < purgeStepTime:
		rows += rows / 4
	}
	return min(max(rows, purgeRowsLeast), purgeRowsMost)
}

// rest waits, or until ctx ends.
func rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func (db *DB) purgeStep(ctx context.Context, after time.Duration, rows int) (p school.Purged, more bool, err error) {
	if err := checkAfter(after); err != nil {
		return p, false, err
	}
	err = change(ctx, db.ingest, "purge", func(c *pgx.Conn) error {
		return c.QueryRow(ctx, `SELECT notices, recipients, batches, ranges, fallbacks, more FROM schoolbell_purge($1, $2)`, after.Microseconds(), rows).
			Scan(&p.Notices, &p.Recipients, &p.Batches, &p.Ranges, &p.Fallbacks, &more)
	})
	if err != nil {
		return school.Purged{}, false, err
	}
	return p, more, nil
}

// checkAfter refuses what would remove what just ended, or has not: a caller's slip.
func checkAfter(after time.Duration) error {
	if after < time.Minute {
		return fmt.Errorf("purge: recipients are kept for at least 1m, not %s", after)
	}
	return nil
}
