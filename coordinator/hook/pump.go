package hook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"schoolbell/school"
)

// Table is where posts wait.
type Table[T any] interface {
	// Claim takes up to limit rows that are due, oldest first, and counts a try of
	// each. Until the lease ends they are nobody else's.
	Claim(ctx context.Context, limit int, lease time.Duration) ([]T, error)
	// Settle writes what became of a try. Saying it again is no error.
	Settle(ctx context.Context, row T, p school.Posted) error
}

// Try is what a Pump has to know of a row, and how it is posted.
type Try struct {
	Attempt int           // number of this try, from 1
	Age     time.Duration // since the row was made
	Void    string        // not to be posted any more, and why; empty: it is
	Post    func(ctx context.Context) Answer
}

// Result is what became of a try, for whoever counts and logs.
type Result int

const (
	Sent     Result = iota + 1 // taken
	Again                      // not taken, to be tried again
	Rejected                   // refused by the webhook
	Void                       // not posted: it had lost its sense
	Expired                    // not taken in the time that it was worth anything
)

func (r Result) String() string {
	return [...]string{"", "sent", "retry", "refused", "void", "expired"}[r]
}

// Results lists all, for a counter that shows each from the beginning.
func Results() []Result { return []Result{Sent, Again, Rejected, Void, Expired} }

// PumpConfig sets up a Pump. All durations are above 0.
type PumpConfig struct {
	Name   string        // for the log
	AtOnce int           // posts at once, at least 1
	Poll   time.Duration // how often the table is looked at when nobody says that there is something
	First  time.Duration // wait after the first try; doubles with each
	Most   time.Duration // longest wait
	Until  time.Duration // age from which a row is not tried again
}

// lease outlasts a post and the writing of what became of it.
const (
	lease         = CallTimeout + 20*time.Second
	settleTimeout = 5 * time.Second
	settleFor     = 30 * time.Second // then the lease is left to run out
	settleAtStop  = 3 * time.Second  // and so much of it where the pump is to end
)

// After this many posts in a row that were not taken, the webhook counts as ill:
// one post at a time is tried, with pauses from pauseFirst to pauseMost.
const (
	illAfter   = 3
	pauseFirst = time.Second
	pauseMost  = time.Minute
)

// Pump moves rows of a table to a webhook. One goroutine runs it.
type Pump[T any] struct {
	cfg   PumpConfig
	table Table[T]
	try   func(row T) Try
	done  func(row T, r Result, a Answer)
	log   *slog.Logger
	kick  chan struct{}

	missed int           // posts in a row that were not taken
	pause  time.Duration // the last one, while the webhook is ill
}

// NewPump makes a pump. try says how a row is posted; done hears of each try, from
// several goroutines.
func NewPump[T any](cfg PumpConfig, table Table[T], try func(row T) Try, done func(row T, r Result, a Answer), log *slog.Logger) (*Pump[T], error) {
	if cfg.AtOnce < 1 || min(cfg.Poll, cfg.First, cfg.Most, cfg.Until) <= 0 {
		return nil, fmt.Errorf("hook: pump %s: %d at once, poll %s, waits %s to %s, until %s: all must be above 0", cfg.Name, cfg.AtOnce, cfg.Poll, cfg.First, cfg.Most, cfg.Until)
	}
	return &Pump[T]{cfg: cfg, table: table, try: try, done: done, log: log.With("component", cfg.Name), kick: make(chan struct{}, 1)}, nil
}

// Wake says that there is something. It does not block.
func (p *Pump[T]) Wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// Run works until ctx ends. The posts that are under way then end by their own
// timeouts and are settled before it returns.
func (p *Pump[T]) Run(ctx context.Context) {
	for ctx.Err() == nil {
		wait, claimed, err := p.round(ctx)
		if err != nil && ctx.Err() == nil {
			p.log.Warn("what is to be posted could not be read; it is tried again", "event", "hook_claim_failed", "error", err)
		}
		if claimed && wait == 0 {
			continue
		}
		timer := time.NewTimer(max(wait, p.cfg.Poll))
		kick := p.kick
		if wait > 0 { // the webhook is ill: what is new waits with the rest
			timer.Reset(wait)
			kick = nil
		}
		select {
		case <-ctx.Done():
		case <-kick:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// round claims, posts and settles once. wait is how long the webhook is to be left
// alone.
func (p *Pump[T]) round(ctx context.Context) (wait time.Duration, claimed bool, err error) {
	limit := p.cfg.AtOnce
	if p.missed >= illAfter {
		limit = 1
	}
	call, cancel := context.WithTimeout(ctx, settleTimeout)
	rows, err := p.table.Claim(call, limit, lease)
	cancel()
	if err != nil {
		return 0, false, err
	}
	answers := make([]Answer, len(rows))
	var posts sync.WaitGroup
	for i := range rows {
		posts.Go(func() { answers[i] = p.post(ctx, rows[i]) })
	}
	posts.Wait()
	return p.learn(answers), len(rows) > 0, nil
}

// post makes one post and writes what became of it. It does not end with ctx: what
// is on the wire gets its answer.
func (p *Pump[T]) post(ctx context.Context, row T) Answer {
	t := p.try(row)
	var a Answer
	r := Void
	posted := school.Posted{State: school.PostFailed, Code: t.Void}
	if t.Void == "" {
		a = t.Post(context.WithoutCancel(ctx))
		r, posted = p.decide(t, a)
	}
	if err := p.settle(ctx, row, posted); err != nil {
		p.log.Warn("what became of a post could not be written: it is posted again under the same name", "event", "hook_settle_failed", "error", err)
	}
	p.done(row, r, a)
	return a
}

// decide says what the answer to a try means for its row.
func (p *Pump[T]) decide(t Try, a Answer) (Result, school.Posted) {
	switch {
	case a.Fate == Taken:
		return Sent, school.Posted{State: school.PostSent}
	case a.Fate == Refused:
		return Rejected, school.Posted{State: school.PostFailed, Code: a.Code}
	case t.Age >= p.cfg.Until:
		return Expired, school.Posted{State: school.PostFailed, Code: a.Code}
	}
	wait := p.cfg.Most
	if doublings := t.Attempt - 1; doublings < 30 && p.cfg.First < p.cfg.Most>>doublings {
		wait = p.cfg.First << doublings
	}
	wait = max(wait, a.Wait)
	// Lengthened, so that what failed together does not come back together.
	return Again, school.Posted{State: school.PostPending, Code: a.Code, RetryIn: wait + time.Duration(rand.Int64N(int64(wait)/5+1))}
}

// settle tries for a while: what is known here is known nowhere else.
func (p *Pump[T]) settle(ctx context.Context, row T, posted school.Posted) error {
	stop := ctx
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleFor)
	defer cancel()
	defer context.AfterFunc(stop, func() { time.AfterFunc(settleAtStop, cancel) })()
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		call, cancel := context.WithTimeout(ctx, settleTimeout)
		err := p.table.Settle(call, row, posted)
		cancel()
		if err == nil || !errors.Is(err, school.ErrUnavailable) && !errors.Is(err, school.ErrCommitUnknown) {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// learn says for how long the webhook is to be left alone: as long as it asks for,
// and longer and longer where it takes nothing. An answer about one post, good or
// bad, says that it works.
func (p *Pump[T]) learn(answers []Answer) (wait time.Duration) {
	was := p.missed >= illAfter
	code := ""
	for _, a := range answers {
		switch a.Fate {
		case Taken, Refused:
			p.missed, p.pause = 0, 0
		case Delayed:
			p.missed, code = p.missed+1, a.Code
			wait = max(wait, a.Wait)
		}
	}
	ill := p.missed >= illAfter
	switch {
	case ill && !was:
		p.log.Warn("the webhook takes nothing: one post at a time is tried", "event", "hook_ill", "code", code)
	case was && !ill:
		p.log.Info("the webhook takes posts again", "event", "hook_well")
	}
	if ill {
		p.pause = min(max(2*p.pause, pauseFirst), pauseMost)
		wait = max(wait, p.pause)
	}
	return wait
}
