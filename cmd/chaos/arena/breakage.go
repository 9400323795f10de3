package arena

import (
	"context"
	"errors"
	"fmt"
	"time"

	"schoolbell/deploy/local"
	"schoolbell/sender/simulator/verdict"
)

// The faults of this file take as long as they last and mend what they broke,
// also when ctx ends. Each is noted for the verdict when it is over.

// during notes a fault that lasts as long as f does.
func (a *Arena) during(kind, target, detail string, f func() error) error {
	fault := verdict.Fault{At: time.Now(), Kind: kind, Target: target, Detail: detail}
	err := f()
	fault.Until = time.Now()
	a.note(fault)
	if err != nil {
		return fmt.Errorf("%s (%s) of %s: %w", kind, detail, target, err)
	}
	return nil
}

// KillFor kills the replica and starts it again after that long. A start that
// fails because a store is away is tried again, as by any supervisor.
func (r *Replica) KillFor(ctx context.Context, down time.Duration) error {
	if err := r.Kill(); err != nil {
		return err
	}
	wait(ctx, down)
	return r.startAgain(ctx)
}

// Revive starts a replica again whose process ended by itself, which counts as
// a kill.
func (r *Replica) Revive(ctx context.Context) error {
	return errors.Join(r.Died(time.Now()), r.startAgain(ctx))
}

func (r *Replica) startAgain(ctx context.Context) error {
	for {
		err := r.Start(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		wait(ctx, 500*time.Millisecond)
	}
}

// PauseFor stops the replica where it stands for that long.
func (r *Replica) PauseFor(ctx context.Context, d time.Duration) error {
	resume, err := r.Pause()
	if err != nil {
		return err
	}
	wait(ctx, d)
	return resume()
}

// Exec gives each server of Redis that takes writes a command, such as FLUSHALL.
// A node of a Cluster that is not the key's says so, which is no error.
func (a *Arena) Exec(ctx context.Context, kind, detail, command string) error {
	masters, err := a.Masters(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	return a.during(kind, "redis", detail, func() error {
		var errs []error
		for _, m := range masters {
			if _, err := m.Do(ctx, command); err != nil {
				errs = append(errs, err)
			}
		}
		if len(errs) == len(masters) {
			return errors.Join(errs...)
		}
		return nil
	})
}

// RestartRedis kills a server and lets it come back after that long, with its
// data or without.
func (a *Arena) RestartRedis(ctx context.Context, keep bool, down time.Duration) error {
	detail := "without-data"
	if keep {
		detail = "with-data"
	}
	masters, err := a.Masters(ctx)
	if err != nil {
		return err
	}
	m := masters[0]
	return a.during("redis-restart", m.Addr(), detail, func() error {
		m.Kill()
		wait(ctx, down)
		back := context.WithoutCancel(ctx)
		if err := m.Restart(back, keep); err != nil || a.Sentinel == nil {
			return err
		}
		return a.Sentinel.Follow(back, m)
	})
}

// PauseRedis makes Redis answer nobody: by CLIENT PAUSE, or by stopping the
// process.
func (a *Arena) PauseRedis(ctx context.Context, stop bool, d time.Duration) error {
	masters, err := a.Masters(ctx)
	if err != nil {
		return err
	}
	if !stop {
		return a.during("redis-pause", "redis", "client-pause", func() error {
			for _, m := range masters {
				if _, err := m.Do(ctx, fmt.Sprintf("CLIENT PAUSE %d ALL", d.Milliseconds())); err != nil {
					return err
				}
			}
			wait(ctx, d)
			return nil
		})
	}
	m := masters[0]
	return a.during("redis-pause", m.Addr(), "sigstop", func() error {
		if err := m.Pause(); err != nil {
			return err
		}
		wait(ctx, d)
		return m.Resume()
	})
}

// FailoverRedis lets the master die with the writes of the last while, which its
// replica never got, and waits until the replica has taken its place.
func (a *Arena) FailoverRedis(ctx context.Context, lose time.Duration) error {
	if a.Sentinel == nil {
		return errors.New("a failover needs Sentinel")
	}
	return a.during("redis-failover", "redis", fmt.Sprintf("%s of writes lost", lose), func() error {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		return a.Sentinel.Crash(ctx, lose)
	})
}

// RestartPostgres stops PostgreSQL, in order or at once, and starts it again
// after that long.
func (a *Arena) RestartPostgres(ctx context.Context, mode local.Shutdown, down time.Duration) error {
	detail := "fast"
	if mode == local.Immediate {
		detail = "immediate"
	}
	return a.during("db-restart", "postgres", detail, func() error {
		back := context.WithoutCancel(ctx)
		if err := a.Postgres.Stop(back, mode); err != nil {
			return err
		}
		wait(ctx, down)
		return a.Postgres.Restart(back, mode)
	})
}

// EndSessions ends every session in the database but the one that does it.
func (a *Arena) EndSessions(ctx context.Context) error {
	return a.during("db-restart", "postgres", "terminate", func() error {
		_, err := a.DB.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		return err
	})
}

// StepClock makes the replica's wall clock step by that much, and back after that
// long. It needs Config.Wall.
func (r *Replica) StepClock(ctx context.Context, by, hold time.Duration) error {
	if !r.arena.cfg.Wall {
		return errors.New("the arena's replicas have no clocks to step")
	}
	return r.arena.stepping(ctx, r.clock, r.Name, by, hold)
}

// StepRedisClock makes Redis's clock alone, of all its servers, step by that
// much, and back after that long. It needs Config.Clocks.
func (a *Arena) StepRedisClock(ctx context.Context, by, hold time.Duration) error {
	if !a.cfg.Clocks {
		return errors.New("the arena has no clocks to step")
	}
	return a.stepping(ctx, a.clock, "redis", by, hold)
}

func (a *Arena) stepping(ctx context.Context, clock local.FakeClock, target string, by, hold time.Duration) error {
	return a.during("clock", target, fmt.Sprintf("%+.0fh", by.Hours()), func() error {
		if err := clock.Set(by); err != nil {
			return err
		}
		wait(ctx, hold)
		return clock.Set(0)
	})
}
