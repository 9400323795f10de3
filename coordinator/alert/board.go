package alert

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"schoolbell/school"
)

// Conditions is where it is kept what holds, so that it is told once.
type Conditions interface {
	// RaiseAlert notes that a condition holds; told is whether an alert was made.
	RaiseAlert(ctx context.Context, c school.Condition) (told bool, err error)
	// EndAlert notes that it holds no longer.
	EndAlert(ctx context.Context, key, kind string, body []byte) (told bool, err error)
}

// How often something that goes on is told, and after how long unseen it is new.
const (
	tellEvery = time.Hour
	lapse     = 10 * time.Minute
)

const (
	boardRoom    = 256 // what waits for the store; more is not kept
	boardTimeout = 5 * time.Second
	boardFirst   = 100 * time.Millisecond
	boardMost    = 30 * time.Second
	boardStop    = 2 * time.Second // for what is left at the stop
)

// Board takes what happens without making anybody wait, and writes it into the
// store, in the order in which it happened and again until it is written.
type Board struct {
	store Conditions
	told  func() // an alert waits to be posted
	log   *slog.Logger

	mu   sync.Mutex
	ops  []op
	kick chan struct{}
}

// op is one thing that happened.
type op struct {
	key   string
	kind  Kind
	event Event
	count int
	what  what
}

type what int

const (
	raised what = iota
	reminded
	ended
)

// NewBoard makes a board. told hears of each alert that was made.
func NewBoard(store Conditions, told func(), log *slog.Logger) *Board {
	return &Board{store: store, told: told, log: log.With("component", "alert"), kick: make(chan struct{}, 1)}
}

// Raise says that something happened to e.Sender, count times: an alert of that
// kind, where none was made of it lately. It does not block.
func (b *Board) Raise(kind Kind, e Event, count int) {
	b.put(op{keyOf(kind, e), kind, e, max(1, count), raised})
}

// Remind says that what was raised still holds. Where nothing was, or it has ended,
// nothing comes of it.
func (b *Board) Remind(kind Kind, e Event) { b.put(op{keyOf(kind, e), kind, e, 1, reminded}) }

// End says that what was raised as kind holds no longer: an alert of the kind as.
func (b *Board) End(kind, as Kind, e Event) { b.put(op{keyOf(kind, e), as, e, 1, ended}) }

// keyOf: one sender's is one alert, however many schools and replicas meet it.
func keyOf(kind Kind, e Event) string { return string(kind) + "/" + e.Sender }

// put keeps an op. The same as what waits last for its key is joined with it.
func (b *Board) put(o op) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := len(b.ops) - 1; i >= 0; i-- {
		if was := &b.ops[i]; was.key == o.key {
			if was.what == o.what {
				o.count += was.count
				*was = o
				return
			}
			break
		}
	}
	if len(b.ops) >= boardRoom {
		b.log.Warn("an alert is dropped: the store takes none for too long", "event", "alert_dropped", "kind", string(o.kind))
		return
	}
	b.ops = append(b.ops, o)
	select {
	case b.kick <- struct{}{}:
	default:
	}
}

func (b *Board) first() (op, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ops) == 0 {
		return op{}, false
	}
	o := b.ops[0]
	b.ops = b.ops[1:]
	return o, true
}

// Run writes until ctx ends, and then for a moment what is left.
func (b *Board) Run(ctx context.Context) {
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-b.kick:
			b.drain(ctx)
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), boardStop)
	defer cancel()
	b.drain(last)
}

// drain writes all that waits, each until it is written or ctx ends.
func (b *Board) drain(ctx context.Context) {
	for {
		o, ok := b.first()
		if !ok {
			return
		}
		for wait := boardFirst; ; wait = min(2*wait, boardMost) {
			err := b.write(ctx, o)
			if err == nil {
				break
			}
			if !errors.Is(err, school.ErrUnavailable) && !errors.Is(err, school.ErrCommitUnknown) {
				b.log.Error("an alert could not be kept", "event", "alert_lost", "kind", string(o.kind), "error", err)
				break
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				// Kept for the last try, at the stop.
				b.mu.Lock()
				b.ops = append([]op{o}, b.ops...)
				b.mu.Unlock()
				return
			}
		}
	}
}

func (b *Board) write(ctx context.Context, o op) error {
	ctx, cancel := context.WithTimeout(ctx, boardTimeout)
	defer cancel()
	body, err := json.Marshal(o.event)
	if err != nil {
		return err
	}
	var told bool
	if o.what == ended {
		told, err = b.store.EndAlert(ctx, o.key, string(o.kind), body)
	} else {
		told, err = b.store.RaiseAlert(ctx, school.Condition{
			Key: o.key, Kind: string(o.kind), Body: body, Count: o.count, Remind: o.what == reminded, Every: tellEvery, Lapse: lapse,
		})
	}
	if err == nil && told {
		b.told()
	}
	return err
}
