package storm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"schoolbell/cmd/chaos/arena"
	"schoolbell/cmd/chaos/plan"
	"schoolbell/deploy/local"
)

// errNobody says that no replica is left to do it to.
var errNobody = errors.New("no replica is left for it")

// inject makes one planned fault happen at its moment and returns when it is
// mended.
func (r *run) inject(ctx context.Context, f plan.Fault) {
	r.until(ctx, f.At)
	if ctx.Err() != nil {
		return
	}
	began := time.Now()
	target, err := r.do(ctx, f)
	switch {
	case err != nil && ctx.Err() != nil:
	case err != nil:
		r.say("%s (%s) of %s did not happen as planned: %v", f.Kind, f.Way, target, err)
	default:
		r.say("%s (%s) of %s is over after %s", f.Kind, f.Way, target, time.Since(began).Round(time.Millisecond))
	}
}

func (r *run) do(ctx context.Context, f plan.Fault) (target string, err error) {
	a := r.arena
	switch f.Kind {
	case plan.Kill, plan.Pause, plan.PartitionRedis, plan.PartitionDB:
		return r.toReplica(ctx, f)
	case plan.RedisFlush:
		r.say("%s (%s)", f.Kind, f.Way)
		return "redis", a.Exec(ctx, string(f.Kind), string(f.Way), flush(f))
	case plan.RedisRestart:
		r.say("%s (%s)", f.Kind, f.Way)
		return "redis", a.RestartRedis(ctx, f.Way == plan.KeepData, f.Hold)
	case plan.RedisPause:
		r.say("%s (%s) for %s", f.Kind, f.Way, f.Hold)
		return "redis", a.PauseRedis(ctx, f.Way == plan.StopServer, f.Hold)
	case plan.RedisFailover:
		r.say("%s, losing %s of writes", f.Kind, f.Hold)
		return "redis", a.FailoverRedis(ctx, f.Hold)
	case plan.DBRestart:
		r.say("%s (%s)", f.Kind, f.Way)
		switch f.Way {
		case plan.Terminate:
			return "postgres", a.EndSessions(ctx)
		case plan.ImmediateStop:
			return "postgres", a.RestartPostgres(ctx, local.Immediate, f.Hold)
		}
		return "postgres", a.RestartPostgres(ctx, local.Fast, f.Hold)
	case plan.Clock:
		switch f.Way {
		case plan.ReplicaForth, plan.ReplicaBack:
			return r.toReplica(ctx, f)
		}
		r.say("%s (%s) for %s", f.Kind, f.Way, f.Hold)
		return "redis", a.StepRedisClock(ctx, step(f.Way), f.Hold)
	}
	return "", fmt.Errorf("%s is no kind of fault", f.Kind)
}

func step(w plan.Way) time.Duration {
	if w == plan.RedisBack || w == plan.ReplicaBack {
		return -time.Hour
	}
	return time.Hour
}

func flush(f plan.Fault) string {
	switch f.Way {
	case plan.FlushScript:
		return "SCRIPT FLUSH"
	case plan.DropLock:
		return "DEL schoolbell:{" + School(f.School) + "}:lock"
	case plan.DropQuota:
		return "DEL schoolbell:{" + School(f.School) + "}:quota"
	}
	return "FLUSHALL"
}

// toReplica does it to the replica of the fault's rank.
func (r *run) toReplica(ctx context.Context, f plan.Fault) (string, error) {
	x, held := r.take(ctx, f.Rank)
	if x == nil {
		return "a replica", errNobody
	}
	defer r.leave(x)
	r.say("%s (%s) of %s, which holds %d batches, for %s", f.Kind, f.Way, x.Name, held, f.Hold)
	switch f.Kind {
	case plan.Kill:
		return x.Name, x.KillFor(ctx, f.Hold)
	case plan.Pause:
		return x.Name, x.PauseFor(ctx, f.Hold)
	case plan.PartitionRedis:
		return x.Name, x.ToRedis.Break(ctx, r.arena, string(f.Way), f.Hold)
	case plan.PartitionDB:
		if f.Way == plan.LateTwice {
			return x.Name, x.BreakTwice(ctx, f.Hold)
		}
		return x.Name, x.ToPostgres.Break(ctx, r.arena, string(f.Way), f.Hold)
	case plan.Clock:
		return x.Name, x.StepClock(ctx, step(f.Way), f.Hold)
	}
	return x.Name, fmt.Errorf("%s is done to no replica", f.Kind)
}

// moment is how long a fault waits for a batch in the hands that it is meant for:
// of an idle replica there is nothing to lose.
const moment = 2 * time.Second

// take is the replica of that rank among those that nothing is being done to,
// by how many batches each has in its hands.
func (r *run) take(ctx context.Context, rank int) (*arena.Replica, int) {
	for late := time.Now().Add(moment); ; {
		if x, held, ok := r.pick(ctx, rank, time.Now().After(late)); ok {
			return x, held
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return nil, 0
		}
	}
}

// pick is take at this moment; false where the one it would take holds nothing.
func (r *run) pick(ctx context.Context, rank int, any bool) (*arena.Replica, int, bool) {
	ranking := r.arena.Ranking(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	ranking = slices.DeleteFunc(ranking, func(one arena.Ranked) bool { return r.broken[one.Replica] || !one.Alive() })
	if len(ranking) == 0 {
		return nil, 0, any
	}
	one := ranking[min(rank, len(ranking)-1)]
	if one.Batches == 0 && !any {
		return nil, 0, false
	}
	r.broken[one.Replica] = true
	return one.Replica, one.Batches, true
}

func (r *run) leave(x *arena.Replica) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.broken, x)
}

// revive starts again what is dead though nobody killed it, which is told: no
// fault may end a replica.
func (r *run) revive(ctx context.Context) {
	for _, x := range r.arena.Replicas() {
		if x.Alive() {
			continue
		}
		r.say("%s is dead", x.Name)
		if err := x.Revive(ctx); err != nil {
			r.say("%s does not start again: %v", x.Name, err)
		}
	}
}
