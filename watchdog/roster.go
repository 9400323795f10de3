package watchdog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Member is one replica as the others see it.
type Member struct {
	Instance    string // unique in the cluster
	Version     string
	Address     string    // where its HTTP API listens, for people
	Since       time.Time // when it joined, by the registry's clock
	SchoolsHeld int       // locks held at the last heartbeat
	Rate        float64   // messages handed over a second, lately, at the last heartbeat
	Unable      bool      // at the last heartbeat it could do no work: its store did not answer
	Unanswered  []string  // senders whose receiver did not answer it by then
	Heartbeat   time.Time // by the registry's clock
}

// Load is what a replica says of itself with each heartbeat.
type Load struct {
	SchoolsHeld int
	Rate        float64 // messages handed over a second, lately
	Unable      bool    // it can do no work now
	Unanswered  []string
}

// Registry keeps the members, each until its time to live has passed without a
// heartbeat. It may forget everything: the next heartbeats fill it again.
type Registry interface {
	// Beat writes m, with Heartbeat, and Since where it is zero, set to the
	// registry's time, which it returns.
	Beat(ctx context.Context, m Member, ttl time.Duration) (time.Time, error)
	// Leave removes the member; one that is not there is no error.
	Leave(ctx context.Context, instance string) error
	// Members lists those whose time to live has not passed, in any order.
	Members(ctx context.Context) ([]Member, error)
}

// RosterConfig holds the times of a Roster; a zero field stands for its default.
type RosterConfig struct {
	Beat time.Duration // from one heartbeat to the next; default 5 s
	TTL  time.Duration // how long a member counts after its last heartbeat; at least twice Beat, default 3 × Beat
}

// Roster keeps this replica on the list of replicas that live, and a copy of the
// list. Being on the list gives no right: who may send is the lock's business.
type Roster struct {
	cfg      RosterConfig
	self     Member
	registry Registry
	load     func(ctx context.Context) Load
	log      *slog.Logger

	mu     sync.Mutex
	live   []string // instance ids, sorted, this one included
	others bool     // that are able to work

	othersLive int
	unanswered map[string]int // of them, by sender

	twin time.Time // since of another replica with this one's instance id; Run's own
}

// NewRoster returns the Roster of self; load is asked before each heartbeat and
// may take a part of its time. It does nothing before Run.
func NewRoster(cfg RosterConfig, self Member, registry Registry, load func(ctx context.Context) Load, log *slog.Logger) (*Roster, error) {
	if cfg.Beat == 0 {
		cfg.Beat = 5 * time.Second
	}
	if cfg.TTL == 0 {
		cfg.TTL = 3 * cfg.Beat
	}
	switch {
	case cfg.Beat < 0 || cfg.TTL < 2*cfg.Beat:
		return nil, fmt.Errorf("roster: time to live %s must be at least twice the beat of %s: one lost heartbeat is no death", cfg.TTL, cfg.Beat)
	case self.Instance == "":
		return nil, errors.New("roster: instance must not be empty")
	case registry == nil || load == nil || log == nil:
		return nil, errors.New("roster: registry, load and log must not be nil")
	}
	return &Roster{cfg: cfg, self: self, registry: registry, load: load, log: log, live: []string{self.Instance}}, nil
}

// Run puts this replica on the list, keeps it there until ctx ends, takes it off
// and returns. While the registry does not answer it goes on trying; Live keeps
// what was known.
func (r *Roster) Run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return r.leave(ctx)
		case <-timer.C:
		}
		err := r.beat(ctx)
		switch {
		case err != nil && !failing && ctx.Err() == nil: // one line for a row of failures
			r.log.LogAttrs(ctx, slog.LevelWarn, "heartbeat failed", slog.String("event", "heartbeat_failed"), slog.Any("error", err))
		case err == nil && failing:
			r.log.LogAttrs(ctx, slog.LevelInfo, "heartbeat is back", slog.String("event", "heartbeat_restored"))
		}
		failing = err != nil
		// Earlier by up to 10 %, so that replicas started together do not beat together.
		timer.Reset(r.cfg.Beat - rand.N(r.cfg.Beat/10+1))
	}
}

// Live returns the instance ids of the replicas that live, this one included,
// sorted, as of the last heartbeat. It makes no call. The slice is the caller's.
func (r *Roster) Live() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.live)
}

// OthersAble reports whether another replica was able to work at its last
// heartbeat, as of this one's. It makes no call.
func (r *Roster) OthersAble() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.others
}

// OthersUnanswered reports whether no other replica heard from the sender's
// receiver as of its last heartbeat: true also where there is no other. It makes
// no call.
func (r *Roster) OthersUnanswered(sender string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unanswered[sender] == r.othersLive
}

// Members asks the registry who lives, sorted by instance id.
func (r *Roster) Members(ctx context.Context) ([]Member, error) {
	members, err := r.registry.Members(ctx)
	if err != nil {
		return nil, fmt.Errorf("list replicas: %w", err)
	}
	slices.SortFunc(members, func(a, b Member) int { return strings.Compare(a.Instance, b.Instance) })
	return members, nil
}

func (r *Roster) beat(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Beat)
	defer cancel()
	if err := r.lookForTwin(ctx); err != nil {
		return err
	}
	load := r.load(ctx)
	r.self.SchoolsHeld, r.self.Rate, r.self.Unable, r.self.Unanswered = load.SchoolsHeld, load.Rate, load.Unable, load.Unanswered
	now, err := r.registry.Beat(ctx, r.self, r.cfg.TTL)
	if err != nil {
		return fmt.Errorf("write heartbeat: %w", err)
	}
	if r.self.Since.IsZero() {
		r.self.Since = now
	}
	members, err := r.Members(ctx)
	if err != nil {
		return err
	}
	live := make([]string, 0, len(members)+1)
	others, othersLive, unanswered := false, 0, map[string]int{}
	for _, m := range members {
		live = append(live, m.Instance)
		if m.Instance == r.self.Instance {
			continue
		}
		others = others || !m.Unable
		othersLive++
		for _, s := range m.Unanswered {
			unanswered[s]++
		}
	}
	if at, found := slices.BinarySearch(live, r.self.Instance); !found {
		live = slices.Insert(live, at, r.self.Instance)
	}
	r.mu.Lock()
	r.live, r.others, r.othersLive, r.unanswered = live, others, othersLive, unanswered
	r.mu.Unlock()
	return nil
}

// lookForTwin looks whether somebody else has written this replica's entry since
// its last heartbeat: another process of the same instance id, alive now. What a
// predecessor left that has died says nothing, since nobody writes it any more.
// Locks are safe, their owner is an acquisition; but the list shows one for two.
func (r *Roster) lookForTwin(ctx context.Context) error {
	if r.self.Since.IsZero() {
		return nil
	}
	members, err := r.Members(ctx)
	if err != nil {
		return err
	}
	var twin time.Time
	for _, m := range members {
		if m.Instance != r.self.Instance || m.Since.IsZero() || m.Since.Equal(r.self.Since) {
			continue
		}
		if twin = m.Since; !twin.Equal(r.twin) { // one line for each
			r.log.LogAttrs(ctx, slog.LevelWarn, "another replica runs with the same instance id: give each one its own, or none",
				slog.String("event", "instance_id_taken"), slog.String("instance", m.Instance),
				slog.String("other_address", m.Address), slog.Time("other_since", m.Since))
		}
	}
	if !twin.IsZero() {
		r.twin = twin
	}
	return nil
}

// leave takes this replica off the list although ctx has ended.
func (r *Roster) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(r.cfg.Beat, 2*time.Second))
	defer cancel()
	if err := r.registry.Leave(ctx, r.self.Instance); err != nil {
		return fmt.Errorf("leave the list of replicas: %w", err)
	}
	return nil
}
