package arena

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/google/uuid"

	"schoolbell/coordinator/api"
)

// Posted is a notice that a replica said it accepted.
type Posted struct {
	ID     string
	School string
	Total  int
	At     time.Time // of the answer
}

// Post hands in a notice for n devices as NDJSON, through the replicas in turn,
// as an application behind a load balancer does: an answer that did not come is
// asked for again, at another replica, with the same idempotency key.
func (a *Arena) Post(ctx context.Context, school string, n int) (Posted, error) {
	return a.PostNotice(ctx, notice(school), Devices(school, n), n)
}

// PostOnce is Post of a notice that is to be sent at most once.
func (a *Arena) PostOnce(ctx context.Context, school string, n int) (Posted, error) {
	req := notice(school)
	req.Delivery = "at_most_once"
	return a.PostNotice(ctx, req, Devices(school, n), n)
}

func notice(school string) api.NoticeRequest {
	return api.NoticeRequest{School: school, Title: "Homework is due", Body: "Please sign the form."}
}

func smallNotice(school string, n int) api.NoticeRequest {
	req := notice(school)
	for r := range Devices(school, n) {
		req.Recipients = append(req.Recipients, r)
	}
	return req
}

func (a *Arena) accepted(got api.Accepted, school string) Posted {
	p := Posted{ID: got.ID, School: school, Total: got.Total, At: time.Now()}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.posted = append(a.posted, p)
	return p
}

// Devices are n recipients whose tokens the receiver accepts.
func Devices(school string, n int) iter.Seq2[api.Recipient, error] {
	return func(yield func(api.Recipient, error) bool) {
		for i := range n {
			if !yield(api.Recipient{Token: fmt.Sprintf("%s-%s-%07d", "device", school, i)}, nil) {
				return
			}
		}
	}
}

// PostNotice is Post with everything chosen. recipients must be repeatable.
func (a *Arena) PostNotice(ctx context.Context, n api.NoticeRequest, recipients iter.Seq2[api.Recipient, error], total int) (Posted, error) {
	key := uuid.NewString()
	var last error
	for ctx.Err() == nil {
		r := a.turn()
		if r == nil {
			last = errors.New("no replica is alive")
			wait(ctx, 100*time.Millisecond)
			continue
		}
		got, err := a.upload(ctx, r, n, recipients, key)
		if err == nil {
			if got.Total != total {
				return Posted{}, fmt.Errorf("notice of school %s: %d recipients accepted of %d", n.School, got.Total, total)
			}
			return a.accepted(got, n.School), nil
		}
		last = err
		var refused *api.Error
		if errors.As(err, &refused) && !refused.Temporary() {
			return Posted{}, fmt.Errorf("post a notice of school %s to %s: %w", n.School, r.Name, err)
		}
		wait(ctx, 50*time.Millisecond)
	}
	a.mu.Lock()
	a.gaveUp[n.School] = true
	a.mu.Unlock()
	return Posted{}, fmt.Errorf("post a notice of school %s: %w", n.School, errors.Join(context.Cause(ctx), last))
}

// patience is how long an application waits for an answer before it asks another
// replica: one that stands still answers nobody.
const patience = 10 * time.Second

func (a *Arena) upload(ctx context.Context, r *Replica, n api.NoticeRequest, recipients iter.Seq2[api.Recipient, error], key string) (api.Accepted, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return r.Client().Upload(ctx, n, recipients, key)
}

// turn is the next living replica.
func (a *Arena) turn() *Replica {
	all := a.all()
	for range all {
		a.mu.Lock()
		r := all[a.next%len(all)]
		a.next++
		a.mu.Unlock()
		if r.Alive() {
			return r
		}
	}
	return nil
}

// Accepted lists every notice that a replica said it accepted.
func (a *Arena) Accepted() []Posted {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]Posted(nil), a.posted...)
}
