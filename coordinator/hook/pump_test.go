package hook

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// memory is a table in memory, with the clock of the test's bubble.
type memory struct {
	mu       sync.Mutex
	rows     []*row
	claims   int
	claimErr error
	settle   func() error // before anything is settled
}

type row struct {
	id      int
	at      time.Time // from when it may be claimed
	made    time.Time
	tries   []time.Time
	void    string
	state   school.PostState
	code    string
	settled int
}

func (m *memory) add(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for range n {
		m.rows = append(m.rows, &row{id: len(m.rows), at: time.Now(), made: time.Now(), state: school.PostPending})
	}
}

func (m *memory) Claim(_ context.Context, limit int, lease time.Duration) (list []*row, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.claims++
	if m.claimErr != nil {
		return nil, m.claimErr
	}
	for _, r := range m.rows {
		if len(list) < limit && r.state == school.PostPending && !r.at.After(time.Now()) {
			r.at = time.Now().Add(lease)
			r.tries = append(r.tries, time.Now())
			list = append(list, r)
		}
	}
	return list, nil
}

func (m *memory) Settle(_ context.Context, r *row, p school.Posted) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.settle != nil {
		if err := m.settle(); err != nil {
			return err
		}
	}
	r.state, r.code, r.settled = p.State, p.Code, r.settled+1
	r.at = time.Now().Add(p.RetryIn)
	return nil
}

func (m *memory) tried() (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.rows {
		n += len(r.tries)
	}
	return n
}

func (m *memory) states() (words []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.rows {
		words = append(words, string(r.state))
	}
	return words
}

var patience = PumpConfig{Name: "test", AtOnce: 3, Poll: time.Second, First: 5 * time.Second, Most: time.Minute, Until: time.Hour}

// world is a pump on a table in memory; post decides the answer to each try.
type world struct {
	*memory
	pump    *Pump[*row]
	mu      sync.Mutex
	results []string
	at      int // posts under way
	most    int
}

func newWorld(t *testing.T, post func(ctx context.Context, r *row) Answer) *world {
	t.Helper()
	w := &world{memory: &memory{}}
	try := func(r *row) Try {
		return Try{Attempt: len(r.tries), Age: time.Since(r.made), Void: r.void, Post: func(ctx context.Context) Answer {
			w.mu.Lock()
			w.at++
			w.most = max(w.most, w.at)
			w.mu.Unlock()
			defer func() { w.mu.Lock(); w.at--; w.mu.Unlock() }()
			return post(ctx, r)
		}}
	}
	done := func(r *row, result Result, a Answer) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.results = append(w.results, fmt.Sprint(r.id, " ", result, " ", a.Code))
	}
	var err error
	w.pump, err = NewPump(patience, w.memory, try, done, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	return w
}

// run runs the pump until stop is called, which waits for its end.
func (w *world) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.pump.Run(ctx) }()
	return func() { cancel(); <-ended }
}

// pass lets time pass, and all that happens in it.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestEverythingIsPostedOnceAndNoMoreAtOnceThanMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, *row) Answer { time.Sleep(100 * time.Millisecond); return Answer{Fate: Taken} })
		w.add(10)
		defer w.run(t)()
		pass(450 * time.Millisecond)
		require.NotContains(t, w.states(), "PENDING", "without looking at the clock in between")
		require.Equal(t, 3, w.most)
		w.add(1)
		w.pump.Wake()
		pass(101 * time.Millisecond)
		require.NotContains(t, w.states(), "PENDING", "woken")
		w.add(1)
		pass(patience.Poll + 101*time.Millisecond)
		require.NotContains(t, w.states(), "PENDING", "found")
		require.Equal(t, 12, w.tried())
	})
}

func TestWaitsGrowUntilItIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(_ context.Context, r *row) Answer {
			if r.id > 0 {
				return Answer{Fate: Taken} // the webhook is well
			}
			return Answer{Fate: Delayed, Code: "HTTP_404"}
		})
		w.add(1)
		stop := w.run(t)
		for range 5 * 60 {
			pass(15 * time.Second)
			w.add(1)
		}
		stop()
		r := w.rows[0]
		require.Equal(t, school.PostFailed, r.state)
		require.Equal(t, "HTTP_404", r.code)
		want := []time.Duration{5, 10, 20, 40, 60, 60}
		for i := range want {
			gap := r.tries[i+1].Sub(r.tries[i])
			require.GreaterOrEqual(t, gap, want[i]*time.Second)
			require.LessOrEqual(t, gap, want[i]*time.Second*6/5+patience.Poll)
		}
		require.InDelta(t, time.Hour, r.tries[len(r.tries)-1].Sub(r.made), float64(75*time.Second), "an hour long, and a last time")
		require.Equal(t, "0 expired HTTP_404", w.results[slices.IndexFunc(w.results, func(s string) bool { return s == "0 expired HTTP_404" })])
	})
}

func TestAnIllWebhookIsTriedOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		well := false
		var mu sync.Mutex
		w := newWorld(t, func(context.Context, *row) Answer {
			mu.Lock()
			defer mu.Unlock()
			if well {
				return Answer{Fate: Taken}
			}
			return Answer{Fate: Delayed, Code: CodeConnectFailed}
		})
		w.add(100)
		defer w.run(t)()
		pass(10 * time.Minute)
		tries := w.tried()
		require.LessOrEqual(t, tries, 3+6+10, "1, 2, 4 … 60 s")
		require.GreaterOrEqual(t, tries, 3+6+8)
		w.pump.Wake() // news do not hurry it
		mu.Lock()
		well = true
		mu.Unlock()
		pass(3 * time.Minute) // the last wait of a row is as long
		require.NotContains(t, w.states(), "PENDING")
		require.LessOrEqual(t, w.most, patience.AtOnce)
	})
}

func TestAnAskedForPauseHoldsForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var posts []time.Time
		w := newWorld(t, func(context.Context, *row) Answer {
			posts = append(posts, time.Now())
			if len(posts) == 1 {
				return Answer{Fate: Delayed, Code: "HTTP_429", Wait: 30 * time.Second}
			}
			return Answer{Fate: Taken}
		})
		w.add(1)
		defer w.run(t)()
		pass(time.Second)
		w.add(1)
		w.pump.Wake()
		pass(time.Minute)
		require.Len(t, posts, 3)
		require.GreaterOrEqual(t, posts[1].Sub(posts[0]), 30*time.Second)
	})
}

func TestRefusedAndVoidAreFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, *row) Answer { return Answer{Fate: Refused, Code: "HTTP_422"} })
		w.add(2)
		w.rows[1].void = "CANCELLED"
		defer w.run(t)()
		pass(time.Hour)
		slices.SortFunc(w.results, cmp.Compare[string])
		require.Equal(t, []string{"0 refused HTTP_422", "1 void "}, w.results)
		require.Equal(t, []string{"HTTP_422", "CANCELLED"}, []string{w.rows[0].code, w.rows[1].code})
		require.Equal(t, []string{"FAILED", "FAILED"}, w.states())
	})
}

func TestAStopWaitsForWhatIsOnTheWire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(ctx context.Context, _ *row) Answer {
			select {
			case <-time.After(5 * time.Second):
				return Answer{Fate: Taken}
			case <-ctx.Done():
				return Answer{Fate: Delayed, Code: CodeNoAnswer}
			}
		})
		w.add(10)
		stop := w.run(t)
		pass(time.Second)
		stop()
		sent := 0
		for _, r := range w.rows {
			if r.state == school.PostSent {
				sent++
			}
		}
		require.Equal(t, 3, sent, "and nothing new begins")
	})
}

func TestWhatIsKnownIsWrittenOnceTheTableIsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, *row) Answer { return Answer{Fate: Taken} })
		w.add(1)
		away := fmt.Errorf("settle: %w", school.ErrUnavailable)
		began := time.Now()
		w.settle = func() error {
			if time.Since(began) < 10*time.Second {
				return away
			}
			return nil
		}
		stop := w.run(t)
		pass(15 * time.Second)
		require.Equal(t, []string{"SENT"}, w.states())
		require.Equal(t, 1, w.tried())

		w.memory.mu.Lock()
		w.settle = func() error { return away }
		w.memory.mu.Unlock()
		w.add(1)
		pass(2 * time.Second)
		stopped := time.Now()
		stop()
		require.LessOrEqual(t, time.Since(stopped), settleAtStop+time.Second, "a stop does not wait for it for ever")
		require.Equal(t, []string{"SENT", "PENDING"}, w.states(), "its lease runs out")
	})
}

func TestATableThatIsAwayIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(context.Context, *row) Answer { return Answer{Fate: Taken} })
		w.claimErr = school.ErrUnavailable
		w.add(1)
		defer w.run(t)()
		pass(10 * time.Second)
		require.LessOrEqual(t, w.claims, 12)
		w.memory.mu.Lock()
		w.claimErr = nil
		w.memory.mu.Unlock()
		pass(2 * time.Second)
		require.Equal(t, []string{"SENT"}, w.states())
	})
}

func TestAPumpNeedsItsNumbers(t *testing.T) {
	t.Parallel()
	for _, change := range []func(*PumpConfig){
		func(c *PumpConfig) { c.AtOnce = 0 }, func(c *PumpConfig) { c.Poll = 0 }, func(c *PumpConfig) { c.First = 0 },
		func(c *PumpConfig) { c.Most = 0 }, func(c *PumpConfig) { c.Until = -1 },
	} {
		c := patience
		change(&c)
		_, err := NewPump(c, &memory{}, nil, nil, slog.New(slog.DiscardHandler))
		require.ErrorContains(t, err, "must be above 0")
	}
}
