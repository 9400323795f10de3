// Package redisrate keeps, in Redis, what a whole cluster of replicas knows of a
// sender: how much of its rate is left, which schools wait for it and in which
// order, and whether the receiver lets the sender in (R9, R32). Each operation is
// one script on one key, so that it is one atomic step and runs on a Cluster.
//
// It does not wait and does not repeat by itself: the caller decides. The client
// may repeat a script when a reply is lost, which is harmless. Redis's clock is the
// only one that it goes by. What Redis loses costs time and nothing else: the rate
// starts with nothing, and a stop is found again with one message (see DESIGN.md).
package redisrate

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"schoolbell/scripts"
	"schoolbell/sender"
)

// Rates is the arbiter of the senders. Its methods may be called from several
// goroutines. An error means that Redis did not answer or could not serve, or that
// the sender is not one of those it was made for; what was asked may then have
// happened all the same, and asking again with the same ids is right.
type Rates struct {
	client redis.UniversalClient
	keys   scripts.Keys
	limits map[string]sender.Limit

	take, report, look *redis.Script
}

// New returns the arbiter of the senders named, on client, whose owner closes it.
func New(client redis.UniversalClient, keys scripts.Keys, limits map[string]sender.Limit) (*Rates, error) {
	for name, l := range limits {
		if err := check(l); err != nil {
			return nil, fmt.Errorf("rate of sender %s: %w", name, err)
		}
	}
	script := func(s scripts.Script) *redis.Script { return redis.NewScript(s.Source) }
	return &Rates{client: client, keys: keys, limits: limits,
		take: script(scripts.Take()), report: script(scripts.Report()), look: script(scripts.Look())}, nil
}

func check(l sender.Limit) error {
	switch {
	case l.PerMinute < 0 || l.PerMinute > 100_000_000:
		return fmt.Errorf("%d messages a minute: need 0 (none) to 100,000,000", l.PerMinute)
	case l.Batch < 1 || l.Batch > 1_000_000:
		return fmt.Errorf("batches of %d: need 1 to 1,000,000", l.Batch)
	case l.Ramp < 0 || l.Ramp > time.Hour:
		return fmt.Errorf("ramp of %s: need 0 to 1h", l.Ramp)
	}
	return nil
}

// Take takes a batch of the sender's rate, or a place in the line for it.
func (r *Rates) Take(ctx context.Context, t sender.Take) (sender.Ticket, error) {
	k, err := r.run(ctx, r.take, t.Sender, t.ID, t.School, t.Want, max(1, t.Longest.Milliseconds()), t.Believed)
	if err != nil {
		return sender.Ticket{}, fmt.Errorf("take %d messages of sender %s for school %s: %w", t.Want, t.Sender, t.School, err)
	}
	out := sender.Ticket{ID: t.ID}
	switch k.status {
	case "GRANTED":
		out.Kind, out.Size, out.Probe, out.Epoch = sender.Taken, int(k.int(0)), k.int(1) == 1, k.int(2)
		if k.err == nil && (out.Size < 1 || out.Size > t.Want) {
			k.fail("granted %d of %d wanted", out.Size, t.Want)
		}
	case "WAIT":
		out.Kind, out.Wait, out.Joined = sender.TakeLater, k.millis(0), k.int(1) == 1
	case "STOPPED":
		out.Kind, out.Wait, out.Code, out.Stopped = sender.TakeStopped, k.millis(0), k.text(1), k.millis(2)
	default:
		k.fail("unknown answer %q", k.status)
	}
	return out, k.of("take", t.Sender)
}

// Report says what a batch found out about the receiver.
func (r *Rates) Report(ctx context.Context, p sender.Report) (sender.Reported, error) {
	k, err := r.run(ctx, r.report, p.Sender, p.Ticket, p.Epoch, heard(p.Heard), p.Code, p.RetryAfter.Milliseconds(), max(0, p.Age.Milliseconds()))
	if err != nil {
		return sender.Reported{}, fmt.Errorf("report on sender %s: %w", p.Sender, err)
	}
	out := sender.Reported{Lowered: k.int(2) == 1, PerMinute: int(k.int(3))}
	switch change := k.text(0); change {
	case "same":
	case "stopped":
		out.Change, out.ProbeIn = sender.ChangeStopped, k.millis(1)
	case "probing":
		out.Change, out.ProbeIn = sender.ChangeProbing, k.millis(1)
	case "resumed":
		out.Change, out.Stopped = sender.ChangeResumed, k.millis(1)
	default:
		k.fail("unknown change %q", change)
	}
	return out, k.of("report", p.Sender)
}

func heard(h sender.Heard) string {
	switch h {
	case sender.HeardRefusal:
		return "refused"
	case sender.HeardThrottled:
		return "throttled"
	case sender.HeardAnswer:
		return "answered"
	case sender.HeardSilence:
		return "silent"
	}
	return "nothing"
}

// Look looks at the sender, and at the school's place in its line where a school
// is named. Where nothing is known of the sender it begins to be.
func (r *Rates) Look(ctx context.Context, l sender.Look) (sender.RateState, error) {
	k, err := r.run(ctx, r.look, l.Sender, l.School, l.Believed)
	if err != nil {
		return sender.RateState{}, fmt.Errorf("look at the rate of sender %s: %w", l.Sender, err)
	}
	s := sender.RateState{PerMinute: int(k.int(0)), Used: int(k.int(1)), Waiting: int(k.int(2))}
	if at := k.millis(3); at >= 0 {
		s.Placed, s.PlaceIn = true, at
	}
	if since := k.millis(4); since >= 0 {
		s.Stopped, s.Since, s.Code, s.ProbeIn, s.Probing = true, since, k.text(5), k.millis(6), k.int(7) == 1
	}
	if left := k.millis(8); left >= 0 {
		s.Lowered, s.LowerFor, s.LowerBy = true, left, k.text(9)
	}
	if k.status != "STATE" {
		k.fail("unknown answer %q", k.status)
	}
	return s, k.of("look", l.Sender)
}

func (r *Rates) run(ctx context.Context, s *redis.Script, name string, args ...any) (*reply, error) {
	l, ok := r.limits[name]
	if !ok {
		return nil, fmt.Errorf("sender %q is not configured on this replica", name)
	}
	args = append(args, l.PerMinute, l.Batch, l.Ramp.Milliseconds())
	v, err := s.Run(ctx, r.client, []string{r.keys.Rate(name)}, args...).Result()
	if err != nil {
		return nil, err
	}
	a, ok := v.([]any)
	if !ok || len(a) < 2 {
		return nil, fmt.Errorf("answer is not {status, now, …} but %T", v)
	}
	status, ok := a[0].(string)
	if !ok {
		return nil, fmt.Errorf("answer's status is not text but %T", a[0])
	}
	return &reply{status: status, fields: a[2:]}, nil
}

// reply is a script's answer: {status, now_ms, fields …}. The first field that is
// not what it should be is remembered; the zero value is read in its place.
type reply struct {
	status string
	fields []any
	err    error
}

func (r *reply) of(what, name string) error {
	if r.err != nil {
		return fmt.Errorf("%s of sender %s: %w", what, name, r.err)
	}
	return nil
}

func (r *reply) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

func (r *reply) int(i int) int64 {
	if i < len(r.fields) {
		if n, ok := r.fields[i].(int64); ok {
			return n
		}
	}
	r.fail("answer %s: field %s is no number", r.status, strconv.Itoa(i))
	return 0
}

func (r *reply) text(i int) string {
	if i < len(r.fields) {
		if s, ok := r.fields[i].(string); ok {
			return s
		}
	}
	r.fail("answer %s: field %s is no text", r.status, strconv.Itoa(i))
	return ""
}

func (r *reply) millis(i int) time.Duration { return time.Duration(r.int(i)) * time.Millisecond }
