package arena

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Alive is a replica whose process runs; nil where none does.
func (a *Arena) Alive() *Replica {
	for _, r := range a.all() {
		if r.Alive() {
			return r
		}
	}
	return nil
}

// errNoneReady says that no replica is ready for requests.
var errNoneReady = errors.New("no replica is ready")

// ready is a replica that says it is ready, the next one where there are several;
// where none is, it waits for one, as a load balancer's clients do.
func (a *Arena) ready(ctx context.Context) (*Replica, error) {
	for {
		a.mu.Lock()
		first := a.next
		a.next++
		a.mu.Unlock()
		all := a.all()
		for i := range all {
			if r := all[(first+i)%len(all)]; r.Alive() && ready(ctx, r.URL()) == nil {
				return r, nil
			}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(errNoneReady, context.Cause(ctx))
		}
	}
}

// PostReady hands in a notice at a replica that has just said it is ready, once:
// such a replica must not refuse it.
func (a *Arena) PostReady(ctx context.Context, school string, n int) (Posted, error) {
	r, err := a.ready(ctx)
	if err != nil {
		return Posted{}, err
	}
	got, err := r.Client().Send(ctx, smallNotice(school, n), "")
	if err != nil {
		return Posted{}, fmt.Errorf("post a notice of school %s to %s, which was ready: %w", school, r.Name, err)
	}
	return a.accepted(got, school), nil
}
