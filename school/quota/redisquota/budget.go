// Package redisquota runs the sending rule of package quota in Redis, for a
// whole cluster of replicas: one Lua script an operation, so that each is one
// atomic step, on keys of one school that share a slot.
//
// It adds what the pure rule leaves out: a reservation is granted only to the
// holder of the school's lock, under the fence bound to it, while the lease
// outlasts the batch.
//
// It does not wait, repeat or rebuild by itself; the caller decides. The client
// it is given may repeat a script when a reply is lost: every script is
// harmless to repeat. It works on a single Redis, behind Sentinel and on a
// Cluster.
package redisquota

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"schoolbell/school"
	"schoolbell/school/quota"
	"schoolbell/scripts"
)

// Budget is the arbiter of the sending rule. Its methods may be called from
// several goroutines. They fail with school.ErrUnavailable where Redis did not
// answer or could not serve; what was asked may then have happened all the
// same, and asking again with the same ids is right.
type Budget struct {
	client  redis.UniversalClient
	keys    scripts.Keys
	metrics *metrics

	peek, reconcile, rebuild, reserve, settle *redis.Script
}

// New returns a Budget on client, whose owner closes it. With a nil registerer
// the metrics are kept but not registered.
func New(client redis.UniversalClient, keys scripts.Keys, reg prometheus.Registerer) (*Budget, error) {
	m, err := newMetrics(reg)
	if err != nil {
		return nil, fmt.Errorf("quota metrics: %w", err)
	}
	script := func(s scripts.Script) *redis.Script { return redis.NewScript(s.Source) }
	return &Budget{
		client:    client,
		keys:      keys,
		metrics:   m,
		peek:      script(scripts.Peek()),
		reconcile: script(scripts.Reconcile()),
		rebuild:   script(scripts.Rebuild()),
		reserve:   script(scripts.Reserve()),
		settle:    script(scripts.Settle()),
	}, nil
}

// Peek looks at a school's lock and quota without touching them. Its error, like
// those of Reconcile and Settle, does not name the school: the caller's does.
func (b *Budget) Peek(ctx context.Context, schoolID string) (school.Peek, error) {
	r, err := b.run(ctx, b.peek, schoolID, []string{b.keys.Lock(schoolID), b.keys.Quota(schoolID)})
	if err != nil {
		return school.Peek{}, err
	}
	p := school.Peek{
		Known:     r.status == "KNOWN",
		Attempted: int(r.int(0)),
		Limit:     int(r.int(1)),
		Cycle:     r.int(2),
		Resting:   r.millis(3),
		LeaseLeft: r.millis(4),
		Owner:     r.text(5),
		Fence:     r.decimal(6),
		Orphaned:  r.int(7) == 1,
	}
	p.Held = p.LeaseLeft > 0
	if r.status != "KNOWN" && r.status != "UNKNOWN" {
		r.unexpected()
	}
	if r.err != nil {
		return school.Peek{}, r.err
	}
	return p, nil
}

// Reconcile raises a school's quota to what the ledger says and makes it where
// it is missing. It never lowers anything.
func (b *Budget) Reconcile(ctx context.Context, schoolID string, l school.Ledger, rule school.Rule) error {
	if err := quota.CheckMerge(l, rule); err != nil {
		return err
	}
	r, err := b.run(ctx, b.reconcile, schoolID, []string{b.keys.Quota(schoolID)}, ledgerArgs(l, rule)...)
	if err != nil {
		return err
	}
	return b.merged(r, l)
}

// Rebuild is Reconcile for a school whose rest lies further ahead than it can,
// since the clock of Redis went back: the rest becomes what the ledger has left
// of it, also where that is less. school.ErrFenced where (acquisition, fence)
// does not hold the lock.
func (b *Budget) Rebuild(ctx context.Context, schoolID, acquisition string, fence int64, l school.Ledger, rule school.Rule) error {
	if err := quota.CheckMerge(l, rule); err != nil {
		return fmt.Errorf("rebuild school %s: %w", schoolID, err)
	}
	args := append([]any{acquisition, fence}, ledgerArgs(l, rule)...)
	r, err := b.run(ctx, b.rebuild, schoolID, []string{b.keys.Lock(schoolID), b.keys.Quota(schoolID)}, args...)
	if err == nil {
		err = b.merged(r, l)
	}
	if err != nil {
		return fmt.Errorf("rebuild school %s: %w", schoolID, err)
	}
	return nil
}

// merged reads the answer of reconcile and rebuild and counts what was lost. A
// school that has sent nothing yet has lost nothing by being created.
func (b *Budget) merged(r *reply, l school.Ledger) error {
	switch r.status {
	case "KEPT":
	case "CREATED":
		if l.Cycle > 0 || l.Attempted > 0 || l.Filled || l.Resting > 0 {
			b.metrics.rebuilds.Inc()
		}
	case "RAISED", "RESET":
		b.metrics.rebuilds.Inc()
	case "NOT_OWNER":
		return school.ErrFenced
	default:
		r.unexpected()
	}
	return r.err
}

// Reserve asks for attempts. Every answer of the rule is a Grant; an error is a
// bad reservation, an answer that makes no sense, or school.ErrUnavailable.
func (b *Budget) Reserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	g, err := b.askReserve(ctx, r)
	if err != nil {
		b.metrics.reserve.WithLabelValues("error").Inc()
		return school.Grant{}, fmt.Errorf("reserve batch %s of school %s: %w", r.Batch, r.School, err)
	}
	b.metrics.reserve.WithLabelValues(grantResult(g.Kind)).Inc()
	return g, nil
}

func (b *Budget) askReserve(ctx context.Context, r school.Reservation) (school.Grant, error) {
	if err := quota.CheckReservation(r); err != nil {
		return school.Grant{}, err
	}
	a, err := b.run(ctx, b.reserve, r.School, []string{b.keys.Lock(r.School), b.keys.Quota(r.School)},
		r.Acquisition, r.Fence, r.Batch, r.Want, quota.Millis(r.Longest), quota.Millis(r.Margin),
		r.Rule.Limit, quota.Millis(r.Rule.Rest), r.Rule.Version,
		r.Floor.Cycle, r.Floor.Attempted, flag(r.Floor.Filled), quota.Millis(r.Floor.Resting))
	if err != nil {
		return school.Grant{}, err
	}
	var g school.Grant
	switch a.status {
	case "GRANTED":
		rested := a.int(4)
		g = school.Grant{
			Kind:      school.Granted,
			Size:      int(a.int(0)),
			Cycle:     a.int(1),
			Attempted: int(a.int(2)),
			Filled:    a.int(3) == 1,
			Opened:    rested >= 0,
			Rule:      a.rule(5),
		}
		if g.Opened {
			g.RestedFor = a.millis(4)
		}
		if a.err == nil && (g.Size < 1 || g.Size > r.Want) {
			return school.Grant{}, fmt.Errorf("granted %d of %d wanted", g.Size, r.Want)
		}
	case "RESTING":
		g = school.Grant{
			Kind:      school.Resting,
			Wait:      a.millis(0),
			Cycle:     a.int(1),
			Attempted: int(a.int(2)),
			Rule:      a.rule(3),
		}
	case "NOT_OWNER":
		g.Kind = school.NotOwner
	case "LEASE_SHORT":
		g.Kind = school.LeaseShort
	case "NEED_REBUILD":
		g = school.Grant{Kind: school.NeedRebuild, ClockJumped: a.text(0) == "clock"}
	case "SETTLED":
		g.Kind = school.BatchSettled
	default:
		a.unexpected()
	}
	return g, a.err
}

// Settle says what became of a reservation. Settled before, closed after its
// deadline, or of an older cycle: no error. school.ErrReservationUnknown where
// Redis does not have it.
func (b *Budget) Settle(ctx context.Context, x school.Settlement) error {
	result, err := b.askSettle(ctx, x)
	b.metrics.settle.WithLabelValues(result).Inc()
	return err
}

func (b *Budget) askSettle(ctx context.Context, x school.Settlement) (result string, err error) {
	if err := quota.CheckSettlement(x); err != nil {
		return "error", err
	}
	r, err := b.run(ctx, b.settle, x.School, []string{b.keys.Quota(x.School)}, x.Batch, x.Cycle, x.Attempted)
	if err != nil {
		return "error", err
	}
	switch r.status {
	case "OK":
		return "ok", nil
	case "LATE":
		return "late", nil
	case "DUP":
		return "dup", nil
	case "UNKNOWN":
		return "unknown", school.ErrReservationUnknown
	}
	r.unexpected()
	return "error", r.err
}

// Forget removes the quota of a deleted school. Its lock is left alone: nobody
// holds the lock of a school that may be deleted, and if somebody does it ends
// by itself.
func (b *Budget) Forget(ctx context.Context, schoolID string) error {
	if !school.ValidID(schoolID) {
		return errSchoolID
	}
	if err := b.client.Del(ctx, b.keys.Quota(schoolID)).Err(); err != nil {
		return fmt.Errorf("forget school %s: %w", schoolID, unavailable(err))
	}
	return nil
}

var errSchoolID = errors.New("school id: must be 1 to 64 letters, digits, dots, underscores or dashes")

func (b *Budget) run(ctx context.Context, s *redis.Script, schoolID string, keys []string, args ...any) (*reply, error) {
	if !school.ValidID(schoolID) {
		return nil, errSchoolID
	}
	v, err := s.Run(ctx, b.client, keys, args...).Result()
	if err != nil {
		return nil, unavailable(err)
	}
	return readReply(v)
}

// unavailable marks errors that mean Redis could not serve. What a script
// itself refused, or a key of another type, stays as it is: asking again would
// not help.
func unavailable(err error) error {
	var answer redis.Error
	if errors.As(err, &answer) {
		for _, own := range []string{"ERR", "WRONGTYPE", "NOPERM", "CROSSSLOT"} {
			if strings.HasPrefix(err.Error(), own) {
				return err
			}
		}
	}
	return fmt.Errorf("%w: %w", school.ErrUnavailable, err)
}

func ledgerArgs(l school.Ledger, r school.Rule) []any {
	return []any{
		l.Cycle, l.Attempted, flag(l.Filled), quota.Millis(l.Resting),
		l.Rule.Limit, quota.Millis(l.Rule.Rest), l.Rule.Version,
		r.Limit, quota.Millis(r.Rest), r.Version,
	}
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
