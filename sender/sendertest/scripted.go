// Package sendertest holds what tests of senders and of their callers share: a
// suite that every sender has to pass, and a sender in memory that does what a
// test tells it to.
package sendertest

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"schoolbell/sender"
)

// Call is one call of a Scripted sender.
type Call struct {
	Batch    sender.Batch
	Began    time.Time
	Ended    time.Time // zero while it runs
	Deadline time.Time // of its context, zero for none
	Results  []sender.Result
}

// Scripted is a sender in memory: it accepts everything, unless a rule or the
// test at its other end says otherwise, and remembers every call. Its clock is
// time.Now, so it may be used in a synctest bubble.
type Scripted struct {
	longest time.Duration

	mu     sync.Mutex
	rules  []rule
	latent time.Duration
	held   bool
	calls  []Call
	open   int
	began  chan struct{} // capacity 1: a call began since the last look
	resume chan struct{} // closed when held ends
}

type rule struct {
	prefix string
	result sender.Result
	times  int // left; below 0 without end
}

var _ sender.Sender = (*Scripted)(nil)

// NewScripted returns a sender whose calls may take longest, 10 s if that is 0.
func NewScripted(longest time.Duration) *Scripted {
	if longest == 0 {
		longest = 10 * time.Second
	}
	return &Scripted{longest: longest, began: make(chan struct{}, 1)}
}

// Longest implements sender.Sender.
func (s *Scripted) Longest() time.Duration { return s.longest }

// Answer gives messages whose token begins with prefix this result from now on,
// times times altogether, without end where times is 0. The rule that was made
// last comes first.
func (s *Scripted) Answer(prefix string, times int, result sender.Result) {
	if times == 0 {
		times = -1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append([]rule{{prefix, result, times}}, s.rules...)
}

// Delay makes every call from now on take d.
func (s *Scripted) Delay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latent = d
}

// Hold lets no call end until Release; one whose context ends first has unknown
// results.
func (s *Scripted) Hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held {
		s.held, s.resume = true, make(chan struct{})
	}
}

// Release ends Hold.
func (s *Scripted) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held {
		s.held = false
		close(s.resume)
	}
}

// Send implements sender.Sender.
func (s *Scripted) Send(ctx context.Context, batch sender.Batch) []sender.Result {
	if ctx.Err() != nil {
		return sender.Fill(batch.Messages, sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled})
	}
	s.mu.Lock()
	call := len(s.calls)
	deadline, _ := ctx.Deadline()
	s.calls = append(s.calls, Call{Batch: batch, Began: time.Now(), Deadline: deadline})
	s.open++
	held, resume, delay := s.held, s.resume, s.latent
	results := s.results(batch.Messages)
	s.mu.Unlock()
	select {
	case s.began <- struct{}{}:
	default:
	}

	cut := false
	if held {
		select {
		case <-resume:
		case <-ctx.Done():
			cut = true
		}
	}
	if delay > 0 && !cut {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			cut = true
		}
	}
	if cut {
		results = sender.Fill(batch.Messages, sender.Result{Class: sender.Unknown, Code: sender.CodeCallTimeout})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	s.calls[call].Ended, s.calls[call].Results = time.Now(), slices.Clone(results)
	return results
}

func (s *Scripted) results(messages []sender.Message) []sender.Result {
	results := sender.Fill(messages, sender.Result{Class: sender.Accepted})
	for i, m := range messages {
		for j := range s.rules {
			r := &s.rules[j]
			if r.times == 0 || !strings.HasPrefix(m.Token, r.prefix) {
				continue
			}
			r.times = max(r.times-1, -1)
			results[i] = r.result
			results[i].ID = m.ID
			break
		}
	}
	return results
}

// Calls are all calls so far, in the order in which they began.
func (s *Scripted) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Open is how many calls run now.
func (s *Scripted) Open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

// AwaitCalls waits until n calls have begun, counted from the first, or ctx
// ends. One goroutine may wait at a time.
func (s *Scripted) AwaitCalls(ctx context.Context, n int) ([]Call, error) {
	for {
		if calls := s.Calls(); len(calls) >= n {
			return calls, nil
		}
		select {
		case <-s.began:
		case <-ctx.Done():
			return s.Calls(), context.Cause(ctx)
		}
	}
}
