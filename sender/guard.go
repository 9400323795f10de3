package sender

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// DefaultGrace is how long Guard waits for a call's results after its deadline.
// It is generous, since nothing leaves any more by then and giving up turns
// known results into unknown ones; it is well within the time that a batch has
// for being recorded.
const DefaultGrace = time.Second

// GuardConfig sets up a Guard.
type GuardConfig struct {
	Name  string        // the sender's name, for logs
	Grace time.Duration // 0: DefaultGrace
}

// Guard stands before a sender and keeps the promises of Sender for it: one
// sane result a message, by the deadline, never a panic. Whatever the sender
// behind it gets wrong becomes Unknown for the messages concerned, since they
// may have left. A call that overruns is given up but not forgotten: Close
// joins it.
type Guard struct {
	name  string
	grace time.Duration
	next  Sender
	log   *slog.Logger

	mu     sync.Mutex
	calls  int
	closed bool
	idle   chan struct{} // closed when closed is set and no call runs
}

// NewGuard returns a guard before next. A nil logger discards.
func NewGuard(cfg GuardConfig, next Sender, log *slog.Logger) (*Guard, error) {
	if next == nil {
		return nil, errors.New("guard of a sender: there is no sender")
	}
	if cfg.Grace < 0 {
		return nil, fmt.Errorf("guard of sender %s: grace %v is negative", cfg.Name, cfg.Grace)
	}
	if cfg.Grace == 0 {
		cfg.Grace = DefaultGrace
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Guard{
		name:  cfg.Name,
		grace: cfg.Grace,
		next:  next,
		log:   log.With("sender", cfg.Name),
		idle:  make(chan struct{}),
	}, nil
}

// Longest is that of the sender behind. The grace is not part of it: it waits
// for results, while nothing leaves any more.
func (g *Guard) Longest() time.Duration { return g.next.Longest() }

// Ask asks the sender behind.
func (g *Guard) Ask(ctx context.Context, ids []string) (map[string]Status, error) {
	return Ask(ctx, g.next, ids)
}

// Send hands the batch to the sender behind. It returns when that returns, or
// the grace after ctx has ended or the sender's own longest time has passed.
func (g *Guard) Send(ctx context.Context, batch Batch) []Result {
	if len(batch.Messages) == 0 {
		return nil
	}
	if ctx.Err() != nil {
		return Fill(batch.Messages, Result{Class: NotSent, Code: CodeCancelled})
	}
	if !g.enter() {
		return Fill(batch.Messages, Result{Class: NotSent, Code: CodeClosed})
	}
	ctx, cancel := context.WithTimeout(ctx, g.next.Longest())
	answer := make(chan []Result, 1)
	go func() {
		defer g.leave()
		defer cancel()
		answer <- g.call(ctx, batch)
	}()

	select {
	case results := <-answer:
		return complete(batch.Messages, results)
	case <-ctx.Done():
	}
	late := time.NewTimer(g.grace)
	defer late.Stop()
	select {
	case results := <-answer:
		return complete(batch.Messages, results)
	case <-late.C:
		g.log.Error("call did not end by its deadline; its messages are unknown",
			"event", "send_overrun", "school", batch.School, "batch", batch.ID, "messages", len(batch.Messages))
		return Fill(batch.Messages, Result{Class: Unknown, Code: CodeOverrun})
	}
}

// call turns a panic of the sender into Unknown for the whole batch: what had
// left before it nobody can say. A panic's value may hold anything, so only its
// kind is logged; a stack holds no contents.
func (g *Guard) call(ctx context.Context, batch Batch) (results []Result) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		kind := fmt.Sprintf("%T", p)
		if e, ok := p.(runtime.Error); ok {
			kind += ": " + runtimeKind(e)
		}
		g.log.Error("sender panicked; its messages are unknown",
			"event", "send_panic", "school", batch.School, "batch", batch.ID, "kind", kind, "stack", string(debug.Stack()))
		results = Fill(batch.Messages, Result{Class: Unknown, Code: CodePanic})
	}()
	return g.next.Send(ctx, batch)
}

// runtimeKind keeps the fixed beginning of a runtime error's text; what follows
// "runtime error: …:" may name values.
func runtimeKind(e runtime.Error) string {
	text := strings.TrimPrefix(e.Error(), "runtime error: ")
	if i := strings.IndexAny(text, ":[("); i > 0 {
		text = text[:i]
	}
	return strings.TrimSpace(text)
}

// Close lets no further call in and waits until those that run, given up or
// not, have ended. It fails when ctx ends first. It may be called again.
func (g *Guard) Close(ctx context.Context) error {
	g.mu.Lock()
	if !g.closed {
		g.closed = true
		if g.calls == 0 {
			close(g.idle)
		}
	}
	g.mu.Unlock()
	select {
	case <-g.idle:
		return nil
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		return fmt.Errorf("close sender %s: %d calls still run: %w", g.name, g.calls, context.Cause(ctx))
	}
}

func (g *Guard) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.calls++
	return true
}

func (g *Guard) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls--
	if g.closed && g.calls == 0 {
		close(g.idle)
	}
}

// complete makes of what a sender returned one sane result a message, in order.
func complete(messages []Message, results []Result) []Result {
	if !inOrder(messages, results) {
		results = match(messages, results)
	}
	for i := range results {
		results[i] = sane(results[i], messages[i].Token)
	}
	return results
}

func inOrder(messages []Message, results []Result) bool {
	if len(messages) != len(results) {
		return false
	}
	for i := range messages {
		if messages[i].ID != results[i].ID {
			return false
		}
	}
	return true
}

// match finds each message's result by its id. None, or more than one, means
// that the sender lost track of it: unknown.
func match(messages []Message, results []Result) []Result {
	at := make(map[string]int, len(results))
	for i, r := range results {
		if _, seen := at[r.ID]; seen {
			at[r.ID] = -1
			continue
		}
		at[r.ID] = i
	}
	matched := make([]Result, len(messages))
	for i, m := range messages {
		switch j, ok := at[m.ID]; {
		case !ok:
			matched[i] = Result{ID: m.ID, Class: Unknown, Code: CodeResultMissing}
		case j < 0:
			matched[i] = Result{ID: m.ID, Class: Unknown, Code: CodeResultDuplicate}
		default:
			matched[i] = results[j]
		}
	}
	return matched
}

// maxDetail bounds a detail in bytes.
const maxDetail = 256

// sane keeps what is stored and logged harmless, whatever the sender gave.
func sane(r Result, token string) Result {
	if !r.Class.Valid() {
		r.Class, r.Code = Unknown, CodeResultMalformed
	}
	if r.Class == Accepted {
		r.Code = ""
	} else if !ValidCode(r.Code) {
		r.Code = CodeResultMalformed
	}
	r.OutcomeUnknown = r.OutcomeUnknown && r.Class == Unavailable
	r.RetryAfter = ClampRetryAfter(r.RetryAfter)
	if len(r.Detail) > maxDetail || token != "" && strings.Contains(r.Detail, token) {
		r.Detail = ""
	}
	return r
}
