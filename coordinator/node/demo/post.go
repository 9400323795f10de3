package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"time"

	"github.com/google/uuid"

	"schoolbell/coordinator/api"
)

// noticeMost is how many devices one notice is for at most: several notices a
// school, so that they come in through several replicas.
const noticeMost = 500

// noticeTitle tells the demonstration's own notices from those of somebody who
// tries the API meanwhile.
const noticeTitle = "Homework is due"

// requestsAtOnce is how many notices are handed in at once.
const requestsAtOnce = 4

// posted is a notice that a replica said it accepted.
type posted struct {
	id, school string
	total      int
	at         time.Time
}

// applications are those who hand in notices and look at what becomes of them,
// through whichever replica is there, as behind a load balancer.
type applications struct {
	cluster *cluster
	http    *http.Client
	room    chan struct{}
}

func newApplications(c *cluster) applications {
	return applications{
		cluster: c, room: make(chan struct{}, requestsAtOnce),
		// A connection to a replica that was killed is of no use to the next call.
		http: &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
	}
}

func (a applications) close() { a.http.CloseIdleConnections() }

var errNobody = errors.New("no replica is there")

// ask makes a call through the replica whose turn it is.
func (a applications) ask(call func(c *api.Client) error) error {
	r := a.cluster.next()
	if r == nil {
		return errNobody
	}
	return call(&api.Client{BaseURL: r.url, HTTP: a.http})
}

// insist makes a call through one replica after the other until one answers.
func (a applications) insist(ctx context.Context, call func(c *api.Client) error) error {
	for {
		err := a.ask(call)
		var refused *api.Error
		if err == nil || errors.As(err, &refused) && !refused.Temporary() {
			return err
		}
		if !pause(ctx, 50*time.Millisecond) {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// handIn hands in a notice: an answer that did not come is asked for again with
// the same key.
func (a applications) handIn(ctx context.Context, n api.NoticeRequest) (posted, error) {
	select {
	case a.room <- struct{}{}:
	case <-ctx.Done():
		return posted{}, context.Cause(ctx)
	}
	defer func() { <-a.room }()
	key := uuid.NewString()
	var got api.Accepted
	err := a.insist(ctx, func(c *api.Client) (err error) {
		got, err = c.Send(ctx, n, key)
		return err
	})
	if err != nil {
		return posted{}, fmt.Errorf("hand in a notice of %s: %w", n.School, err)
	}
	return posted{id: got.ID, school: got.School, total: got.Total, at: time.Now()}, nil
}

// school is the id of the i-th school, from 0.
func (r *run) school(i int) string {
	return fmt.Sprintf("school-%0*d", len(fmt.Sprint(r.cfg.Schools)), i+1)
}

// post hands in what is planned and returns when it is accepted: every school's
// share first, then with Duration a little more whenever a school is about to
// run out.
func (r *run) post(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var schools sync.WaitGroup
	for i := range r.cfg.Schools {
		share := r.cfg.Recipients / r.cfg.Schools
		if i < r.cfg.Recipients%r.cfg.Schools {
			share++
		}
		schools.Go(func() {
			if err := r.postSchool(ctx, i, share); err != nil {
				stop(err)
			}
		})
	}
	schools.Wait()
	return context.Cause(ctx)
}

func (r *run) postSchool(ctx context.Context, i, share int) error {
	end := r.began.Add(r.cfg.Duration)
	for n := 0; ; {
		for left := share; left > 0; {
			size := min(left, noticeMost)
			if err := r.postNotice(ctx, r.school(i), n, size); err != nil {
				return err
			}
			n, left = n+size, left-size
		}
		// The next cycle is handed in when half of one is left.
		share = r.cfg.Limit
		for time.Now().Before(end) && r.waiting.of(r.school(i)) > r.cfg.Limit/2 {
			if !pause(ctx, watchEvery) {
				return context.Cause(ctx)
			}
		}
		if !time.Now().Before(end) {
			return nil
		}
	}
}

// postNotice hands in a notice for n devices of a school, those from first on.
func (r *run) postNotice(ctx context.Context, school string, first, n int) error {
	req := api.NoticeRequest{School: school, Title: noticeTitle, Body: "Please sign the form.", Recipients: make([]api.Recipient, n)}
	for i := range req.Recipients {
		req.Recipients[i].Token = fmt.Sprintf("device-%s-%07d", school, first+i+1)
	}
	p, err := r.client.handIn(ctx, req)
	if err != nil {
		return err
	}
	if p.total != n {
		return fmt.Errorf("notice of %s: %d recipients accepted of %d", school, p.total, n)
	}
	r.mu.Lock()
	r.posted = append(r.posted, p)
	r.mu.Unlock()
	r.accepted.Add(int64(n))
	r.waiting.add(school, n)
	return nil
}

// waiting is how much each school has left to send, as a replica told last, and
// what was handed in since.
type waiting struct {
	mu sync.Mutex
	n  map[string]int
}

func (w *waiting) add(school string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n == nil {
		w.n = map[string]int{}
	}
	w.n[school] += n
}

func (w *waiting) told(n map[string]int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.n == nil {
		w.n = map[string]int{}
	}
	maps.Copy(w.n, n)
}

func (w *waiting) of(school string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n[school]
}

// await returns when every notice has ended.
func (r *run) await(ctx context.Context) error {
	arrivals, since := int64(-1), time.Now()
	for {
		if n := r.receiver.Counts().Arrivals; n != arrivals {
			arrivals, since = n, time.Now()
		}
		open := 1
		err := r.client.ask(func(c *api.Client) (err error) {
			open, err = openNotices(ctx, c)
			return err
		})
		switch {
		case err == nil && open == 0:
			return nil
		case time.Since(since) > r.cfg.Rest+quiet:
			return errors.Join(errStalled, err)
		}
		if !pause(ctx, watchEvery/2) {
			return context.Cause(ctx)
		}
	}
}

// openNotices is how many notices, of a page at most, have not ended.
func openNotices(ctx context.Context, c *api.Client) (int, error) {
	open := 0
	for _, status := range []string{"PENDING", "IN_PROGRESS"} {
		page, err := c.Notices(ctx, api.NoticeQuery{Status: status, Page: api.Page{Limit: 1}})
		if err != nil {
			return 1, err
		}
		open += len(page.Items)
	}
	return open, nil
}

const watchEvery = 500 * time.Millisecond

// watch tells how far the run is until ctx ends.
func (r *run) watch(ctx context.Context) {
	type sample struct {
		at time.Time
		n  int
	}
	var samples []sample // of the last seconds
	for {
		p := Progress{Elapsed: time.Since(r.began), Replicas: r.cfg.Replicas, Accepted: int(r.accepted.Load())}
		p.Planned = p.Accepted
		if r.cfg.Duration == 0 {
			p.Planned = r.cfg.Recipients
		}
		p.Arrived = int(r.receiver.Counts().Distinct)
		p.Alive, p.Kills, p.Address, p.Moved = r.cluster.state()
		p.Schools = r.lookAtSchools(ctx)
		samples = append(samples, sample{time.Now(), p.Arrived})
		samples = samples[max(0, len(samples)-6):]
		if d := samples[len(samples)-1].at.Sub(samples[0].at); d > 0 {
			p.PerSecond = float64(p.Arrived-samples[0].n) / d.Seconds()
		}
		if r.cfg.Watch != nil && ctx.Err() == nil {
			r.cfg.Watch(p)
		}
		if !pause(ctx, watchEvery) {
			return
		}
	}
}

// lookAtSchools asks a replica what the schools are doing. Without an answer
// what was known stays known.
func (r *run) lookAtSchools(ctx context.Context) map[api.SchoolState]int {
	states, left := map[api.SchoolState]int{}, map[string]int{}
	err := r.client.ask(func(c *api.Client) error {
		for page := (api.Page{Limit: 1000}); ; {
			list, err := c.Schools(ctx, page)
			if err != nil {
				return err
			}
			for _, s := range list.Items {
				states[s.State]++
				left[s.ID] = s.Waiting + s.InProgress + s.RetryDue + s.RetryWaiting
			}
			if list.Next == "" {
				return nil
			}
			page.Cursor = list.Next
		}
	})
	if err != nil {
		return nil
	}
	r.waiting.told(left)
	return states
}
