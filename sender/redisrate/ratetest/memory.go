package ratetest

import (
	"context"
	"sync"
	"time"

	"schoolbell/sender"
)

// Memory is the rule in this process: what several coordinators of a test share in
// the place of Redis.
type Memory struct {
	now    func() time.Time
	limits map[string]sender.Limit

	mu     sync.Mutex
	models map[string]*Model
	fault  func(op string) error
	takes  []sender.Take
}

// NewMemory returns the arbiter of the senders named, by the clock given. Others have
// no limit.
func NewMemory(now func() time.Time, limits map[string]sender.Limit) *Memory {
	return &Memory{now: now, limits: limits, models: map[string]*Model{}}
}

// Fail sets what every call fails with from now on: f is asked with take, report
// or look, and may be nil.
func (m *Memory) Fail(f func(op string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

// Forget loses everything.
func (m *Memory) Forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.models = map[string]*Model{}
}

// Takes lists what was asked for, in its order.
func (m *Memory) Takes() []sender.Take {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]sender.Take(nil), m.takes...)
}

func (m *Memory) do(op, name string, f func(model *Model, now int64)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fault != nil {
		if err := m.fault(op); err != nil {
			return err
		}
	}
	l, ok := m.limits[name]
	if !ok {
		l = sender.Limit{Batch: 1000}
	}
	if m.models[name] == nil {
		m.models[name] = &Model{Limit: l}
	}
	f(m.models[name], m.now().UnixMilli())
	return nil
}

// Take takes a batch, or a place in the line.
func (m *Memory) Take(_ context.Context, t sender.Take) (out sender.Ticket, err error) {
	err = m.do("take", t.Sender, func(model *Model, now int64) {
		m.takes = append(m.takes, t)
		out = model.Take(now, t)
	})
	return out, err
}

// Report says what a batch found out.
func (m *Memory) Report(_ context.Context, r sender.Report) (out sender.Reported, err error) {
	err = m.do("report", r.Sender, func(model *Model, now int64) { out = model.Report(now, r) })
	return out, err
}

// Look looks at a sender.
func (m *Memory) Look(_ context.Context, l sender.Look) (out sender.RateState, err error) {
	err = m.do("look", l.Sender, func(model *Model, now int64) { out = model.Look(now, l) })
	return out, err
}
