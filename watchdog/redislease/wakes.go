package redislease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"schoolbell/scripts"
)

const (
	// wakePart is how many schools one message names at most.
	wakePart = 200
	// wakeQuiet is after how much silence a subscriber asks whether the server is
	// still there; a dead connection may stay silent for ever.
	wakeQuiet = 5 * time.Second
)

// Wakes tells replicas that schools were just given work. It is a hint: a message
// reaches who listens at that moment, and nobody else ever.
type Wakes struct {
	client redis.UniversalClient
	keys   scripts.Keys
	log    *slog.Logger
}

// NewWakes returns the wake channel behind client, which stays the caller's.
func NewWakes(client redis.UniversalClient, keys scripts.Keys, log *slog.Logger) *Wakes {
	return &Wakes{client: client, keys: keys, log: log}
}

// Wake tells the replicas that listen, this one included, that these schools have
// work, in no particular order. An error means that some may not have heard of it.
func (w *Wakes) Wake(ctx context.Context, schools ...string) error {
	for len(schools) > 0 {
		n := min(len(schools), wakePart)
		if err := do(ctx, w.client, "publish", w.keys.Wake(), strings.Join(schools[:n], " ")).Err(); err != nil {
			return fmt.Errorf("wake peers for %d schools: %w", len(schools), err)
		}
		schools = schools[n:]
	}
	return nil
}

// Subscribe calls onWake for every school that somebody wakes, one call at a
// time, until ctx ends; it returns nil then. onReady is called each time it has
// begun to listen, at first and after each loss of the connection: what was said
// in between is lost, so the caller asks the store. Neither may block for long.
func (w *Wakes) Subscribe(ctx context.Context, onReady func(), onWake func(school string)) error {
	const least, most = 100 * time.Millisecond, 2 * time.Second
	wait := least
	for failing := false; ; {
		listened, err := w.listen(ctx, onReady, onWake)
		if ctx.Err() != nil {
			return nil
		}
		if listened {
			wait, failing = least, false
		}
		if !failing { // one line for a row of failures
			w.log.LogAttrs(ctx, slog.LevelWarn, "wake channel lost", slog.String("event", "wake_channel_lost"), slog.Any("error", err))
			failing = true
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait - rand.N(wait/4)):
		}
		wait = min(2*wait, most)
	}
}

// listen subscribes once and passes messages on until the connection fails.
func (w *Wakes) listen(ctx context.Context, onReady func(), onWake func(school string)) (listened bool, err error) {
	sub := w.client.Subscribe(ctx, w.keys.Wake())
	// A blocked read does not heed its context; closing the connection ends it.
	stop := context.AfterFunc(ctx, func() { _ = sub.Close() })
	defer func() {
		stop()
		_ = sub.Close()
	}()
	for asked := false; ; {
		message, err := sub.ReceiveTimeout(ctx, wakeQuiet)
		var timeout net.Error
		switch {
		case err == nil:
			asked = false
		case errors.As(err, &timeout) && timeout.Timeout() && !asked && ctx.Err() == nil:
			if err := sub.Ping(ctx); err != nil {
				return listened, err
			}
			asked = true
			continue
		default:
			return listened, err
		}
		switch m := message.(type) {
		case *redis.Subscription:
			if m.Kind == "subscribe" {
				listened = true
				onReady()
			}
		case *redis.Message:
			for _, school := range strings.Fields(m.Payload) {
				onWake(school)
			}
		}
	}
}
