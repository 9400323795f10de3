package web

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// schoolSettings is a change of one school.
type schoolSettings struct {
	id     string
	change school.SchoolChange
}

func (s *Server) decodeSchoolChange(w http.ResponseWriter, r *http.Request) (schoolSettings, error) {
	in := schoolSettings{id: pathParam(r, "id")}
	if err := school.ValidateSchoolID("id", in.id); err != nil {
		return in, err
	}
	if _, err := mediaType(r.Header, api.JSON); err != nil {
		return in, err
	}
	body, release, err := s.readBody(w, r)
	if err != nil {
		return in, err
	}
	defer release()
	if in.change, err = decodeSchoolChange(body); err != nil {
		return in, err
	}
	if c := in.change.Sender; c != nil && *c != "" && s.cfg.Senders != nil && !slices.Contains(s.cfg.Senders, *c) {
		return in, invalid("sender", "is not a configured sender; there are "+strings.Join(slices.Sorted(slices.Values(s.cfg.Senders)), ", "))
	}
	return in, nil
}

func (s *Server) putSchool(ctx context.Context, in schoolSettings) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := allow(ctx, in.id); err != nil {
		return answer{}, err
	}
	_, created, err := s.deps.Schools.PutSchool(ctx, in.id, in.change)
	if err != nil {
		return answer{}, fmt.Errorf("put school %s: %w", in.id, err)
	}
	s.deps.Waker.Wake(in.id) // a shorter rest or another sender may let it go on
	a, err := s.getSchool(ctx, in.id)
	if created {
		a.status = http.StatusCreated
	}
	return a, err
}

func (s *Server) getSchool(ctx context.Context, id string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := allow(ctx, id); err != nil {
		return answer{}, err
	}
	b, err := s.deps.Schools.School(ctx, id)
	if errors.Is(err, school.ErrNotFound) {
		return answer{}, notFound("school", id)
	}
	if err != nil {
		return answer{}, fmt.Errorf("read school %s: %w", id, err)
	}
	return answer{body: s.showSchools(ctx, []school.Backlog{b})[0]}, nil
}

func (s *Server) pauseSchool(ctx context.Context, id string) (answer, error) {
	return s.setPaused(ctx, id, "pause", s.deps.Schools.Pause)
}

func (s *Server) resumeSchool(ctx context.Context, id string) (answer, error) {
	a, err := s.setPaused(ctx, id, "resume", s.deps.Schools.Resume)
	if err == nil {
		s.deps.Waker.Wake(id) // what waited meanwhile goes on now, not at the next tick
	}
	return a, err
}

// setPaused pauses a school or lets it go on, and answers with it.
func (s *Server) setPaused(ctx context.Context, id, what string, set func(context.Context, string) error) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := allow(ctx, id); err != nil {
		return answer{}, err
	}
	switch err := set(ctx, id); {
	case errors.Is(err, school.ErrNotFound):
		return answer{}, notFound("school", id)
	case err != nil:
		return answer{}, fmt.Errorf("%s school %s: %w", what, id, err)
	}
	return s.getSchool(ctx, id)
}

func (s *Server) listSchools(ctx context.Context, in schoolPage) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	list, err := s.deps.Schools.Schools(ctx, in.after, in.limit)
	if err != nil {
		return answer{}, fmt.Errorf("list schools: %w", err)
	}
	next := ""
	if len(list) >= in.limit {
		next = list[len(list)-1].School.ID
	}
	principal := infoOf(ctx).principal
	list = slices.DeleteFunc(list, func(b school.Backlog) bool { return !principal.Touches(b.School.ID) })
	return answer{body: api.List[api.School]{Items: s.showSchools(ctx, list), Next: next}}, nil
}

const (
	peeks    = 16              // at once, for a list
	peekTime = 2 * time.Second // for all of a list's
)

// showSchools adds what Redis knows. Where Redis cannot be asked, the ledger
// answers, which is never behind what was sent; who holds a lock is not known
// then. After the first failure nobody else is asked: a thousand schools must
// not wait for a thousand timeouts.
func (s *Server) showSchools(ctx context.Context, list []school.Backlog) []api.School {
	ctx, cancel := context.WithTimeout(ctx, peekTime)
	defer cancel()
	now := s.deps.Now()
	out := make([]api.School, len(list))
	var away atomic.Bool
	var g errgroup.Group
	g.SetLimit(peeks)
	for i := range list {
		g.Go(func() error {
			var peek *school.Peek
			if !away.Load() {
				p, err := s.deps.Arbiter.Peek(ctx, list[i].School.ID)
				if err == nil {
					peek = &p
				} else {
					away.Store(true)
				}
			}
			out[i] = showSchool(now, &list[i], peek, s.ruleOf(&list[i].School))
			return nil
		})
	}
	_ = g.Wait() // none fails
	s.markStopped(ctx, out)
	return out
}

// markStopped says which schools' senders are stopped: theirs is due work that no
// slot would help.
func (s *Server) markStopped(ctx context.Context, schools []api.School) {
	senders, err := s.deps.Cluster.Senders(ctx)
	if err != nil {
		return // what is known of the schools is shown all the same
	}
	stopped := map[string]bool{}
	for _, sn := range senders {
		stopped[sn.Name] = sn.Stopped
	}
	for i := range schools {
		schools[i].SenderStopped = stopped[cmp.Or(schools[i].Sender, s.cfg.DefaultSender)]
	}
}

// ruleOf is the rule that a school's settings ask for.
func (s *Server) ruleOf(sc *school.School) school.Rule {
	rule := s.cfg.Rule
	if sc.Limit != nil {
		rule.Limit = *sc.Limit
	}
	if sc.Rest != nil {
		rule.Rest = *sc.Rest
	}
	return rule
}

// showSchool puts together a school's settings, what the store knows of its
// work, and a look at its lock and quota; nil peek: Redis could not be asked.
func showSchool(now time.Time, b *school.Backlog, peek *school.Peek, rule school.Rule) api.School {
	out := api.School{
		ID: b.School.ID, Name: b.School.Name, Sender: b.School.Sender, Limit: rule.Limit, RestSeconds: rule.Rest.Seconds(),
		Attempted: b.Ledger.Attempted, Cycle: b.Ledger.Cycle,
		Waiting: b.Waiting, InProgress: b.InProgress, RetryDue: b.RetryDue, RetryWaiting: b.RetryWaiting, Scheduled: b.Scheduled,
		OldestWaitingSeconds: b.OldestWaitingFor.Seconds(), Degraded: peek == nil, CreatedAt: b.School.CreatedAt.UTC(),
	}
	resting := b.Ledger.Resting
	if peek != nil && peek.Known {
		out.Attempted, out.Cycle = peek.Attempted, peek.Cycle
		resting = max(resting, peek.Resting) // a Redis that lost data shows less until it is reconciled
	}
	if resting > 0 {
		out.RestingSeconds = resting.Seconds()
		out.NextEligibleAt = moment(now.Add(resting))
	}
	held := peek != nil && peek.Held
	if held {
		out.Lock = &api.Lock{Owner: peek.Owner, Fence: peek.Fence, ExpiresInSeconds: max(peek.LeaseLeft, 0).Seconds()}
	}
	out.State = StateOf(b, resting, held)
	return out
}

// StateOf says what a school is doing, from what every replica sees alike, so
// that all give the same answer. Recipients covered by an open batch count as
// work: without a lock their owner is gone and they wait for the next one.
func StateOf(b *school.Backlog, resting time.Duration, held bool) api.SchoolState {
	switch {
	case b.School.Paused:
		return api.Paused
	case resting > 0:
		return api.Resting
	case held:
		return api.Sending
	case b.Waiting > 0 || b.RetryDue > 0 || b.InProgress > 0:
		return api.WaitingForSlot
	case b.RetryWaiting > 0:
		return api.WaitingForRetry
	}
	return api.Idle
}
