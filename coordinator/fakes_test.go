package coordinator_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/school"
	"schoolbell/school/quota/quotatest"
	"schoolbell/sender"
	"schoolbell/sender/redisrate/ratetest"
)

// world is a cluster in memory: one store, one arbiter, one receiver, and as
// many replicas as a test starts. It lives in a synctest bubble, so that rests
// of minutes pass at once.
type world struct {
	*testing.T
	script   *script
	outbox   *outbox
	arbiter  *arbiter
	rates    *ratetest.Memory
	receiver *receiver
	log      *logbook

	mu       sync.Mutex
	replicas []*replica
	told     []string // what peers were told
	unable   map[string]bool
}

// inWorld runs f in a bubble with a world of its own. Whatever f leaves running
// fails the test.
func inWorld(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newScript()
		w := &world{T: t, script: s, outbox: newOutbox(s), arbiter: newArbiter(s), rates: ratetest.NewMemory(time.Now, nil), receiver: newReceiver(s), log: &logbook{}}
		t.Cleanup(func() { // runs last: after the replicas have stopped
			for _, secret := range []string{secretTitle, secretBody, secretToken} {
				require.NotContains(t, w.log.String(), secret)
			}
			w.outbox.sound(t)
		})
		f(w)
	})
}

// replica is a Coordinator that runs.
type replica struct {
	*coordinator.Coordinator
	name string
	ctx  context.Context // ends with the stop
	stop context.CancelFunc
	done chan error
}

// start runs a replica until the test ends. change may alter what it is made of.
func (w *world) start(name string, change ...func(*coordinator.Config, *coordinator.Deps)) *replica {
	w.Helper()
	cfg := coordinator.Config{Instance: name, DefaultSender: "fcm"}
	deps := coordinator.Deps{
		Queue: w.outbox, Budget: w.arbiter, Rates: w.rates, Holder: &holder{a: w.arbiter, instance: name},
		Members: members{w, name}, Peers: &peers{w: w, name: name},
		Lanes: []coordinator.Lane{{Name: "fcm", Sender: w.receiver}},
		Log:   slog.New(slog.NewJSONHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range change {
		f(&cfg, &deps)
	}
	c, err := coordinator.New(cfg, deps)
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(w.Context())
	r := &replica{Coordinator: c, name: name, ctx: ctx, stop: cancel, done: make(chan error, 1)}
	w.mu.Lock()
	w.replicas = append(w.replicas, r)
	w.mu.Unlock()
	go func() { r.done <- c.Run(ctx) }()
	w.Cleanup(func() { w.halt(r) })
	synctest.Wait()
	return r
}

// halt stops a replica and waits until its Run has returned.
func (w *world) halt(r *replica) {
	w.Helper()
	require.NoError(w, w.end(r))
}

// end is halt with what Run returned.
func (w *world) end(r *replica) error {
	r.stop()
	err, ok := <-r.done
	if ok {
		close(r.done)
	}
	w.mu.Lock()
	w.replicas = slices.DeleteFunc(w.replicas, func(o *replica) bool { return o == r })
	w.mu.Unlock()
	return err
}

// tick runs the dispatch tick of r every interval until its stop, as its
// schedule would.
func (w *world) tick(r *replica, interval time.Duration) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(interval):
				_ = r.Tick(r.ctx)
			}
		}
	}()
	w.Cleanup(func() { r.stop(); <-ended })
}

// pass lets virtual time go by and waits until nothing happens any more.
func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// sizes are the batches that the receiver got, of one school or of all.
func (w *world) sizes(schoolID string) []int {
	var sizes []int
	for _, a := range w.receiver.of(schoolID) {
		sizes = append(sizes, len(a.ids))
	}
	return sizes
}

// judge fails the test where a school got more than its limit between two
// rests, judged from what the receiver saw.
func (w *world) judge(schoolID string, limit int, rest time.Duration) {
	w.Helper()
	var sent []quotatest.Sent
	for _, a := range w.receiver.of(schoolID) {
		sent = append(sent, quotatest.Sent{Start: a.start.UnixMilli(), End: a.end.UnixMilli(), Size: len(a.ids)})
	}
	require.Empty(w, quotatest.Judge(sent, limit, rest.Milliseconds()))
}

// script records each call to a part in its order and makes calls fail, wait or
// panic where a test says so.
type script struct {
	mu     sync.Mutex
	calls  []call
	counts map[string]int
	before map[string]fault
	after  map[string]fault
}

type call struct {
	op, school, detail string
}

// fault runs at the n-th call (from 1) of its operation. Its error becomes the
// call's.
type fault func(ctx context.Context, n int) error

func newScript() *script {
	return &script{counts: map[string]int{}, before: map[string]fault{}, after: map[string]fault{}}
}

// onCall sets what happens before op does anything.
func (s *script) onCall(op string, f fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before[op] = f
}

// onReturn sets what happens after op has done its work.
func (s *script) onReturn(op string, f fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after[op] = f
}

func (s *script) enter(ctx context.Context, op, schoolID, detail string) error {
	s.mu.Lock()
	s.calls = append(s.calls, call{op: op, school: schoolID, detail: detail})
	s.counts[op]++
	n, f := s.counts[op], s.before[op]
	s.mu.Unlock()
	if f != nil {
		return f(ctx, n)
	}
	return nil
}

func (s *script) leave(ctx context.Context, op string) error {
	s.mu.Lock()
	n, f := s.counts[op], s.after[op]
	s.mu.Unlock()
	if f != nil {
		return f(ctx, n)
	}
	return nil
}

// of returns a school's calls as "op" or "op:detail", without those named.
func (s *script) of(schoolID string, without ...string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ops []string
	for _, c := range s.calls {
		if c.school != schoolID || slices.Contains(without, c.op) {
			continue
		}
		if c.detail != "" {
			ops = append(ops, c.op+":"+c.detail)
		} else {
			ops = append(ops, c.op)
		}
	}
	return ops
}

// count is how often op was called for any school.
func (s *script) count(op string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[op]
}

// forget begins the record anew; the faults stay.
func (s *script) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls, s.counts = nil, map[string]int{}
}

// at is a fault with err at the n-th call only.
func at(n int, err error) fault {
	return func(_ context.Context, i int) error {
		if i == n {
			return err
		}
		return nil
	}
}

// slow is a fault that takes d, or until the caller gives up, at the n-th call.
func slow(n int, d time.Duration) fault {
	return func(ctx context.Context, i int) error {
		if i == n {
			time.Sleep(d)
		}
		return nil
	}
}

// panics is a fault that panics at the n-th call, with a value that must not be
// seen anywhere.
func panics(n int) fault {
	return func(_ context.Context, i int) error {
		if i == n {
			panic(fmt.Errorf("value of a panic: %s", secretTitle))
		}
		return nil
	}
}

// What no log line may hold.
const (
	secretTitle = "TITLE-3f1c"
	secretBody  = "BODY-77aa"
	secretToken = "TOKEN-91bd"
)

// receiver is a scripted sender with the log of what arrived.
type receiver struct {
	script *script

	mu       sync.Mutex
	arrivals []*arrival
	latency  time.Duration
	calls    map[int]time.Duration // how long the n-th call takes instead, from 1
	longest  time.Duration
	answer   func(n int, b sender.Batch) []sender.Result // nil: takes everything
}

type arrival struct {
	batch, school string
	fence         int64
	start, end    time.Time
	ids           []string
	messages      []sender.Message
}

func newReceiver(s *script) *receiver {
	return &receiver{script: s, latency: 100 * time.Millisecond, longest: 15 * time.Second}
}

func (r *receiver) Longest() time.Duration { return r.longest }

func (r *receiver) Send(ctx context.Context, b sender.Batch) []sender.Result {
	a := &arrival{batch: b.ID, school: b.School, fence: b.Fence, start: time.Now(), messages: b.Messages}
	for _, m := range b.Messages {
		a.ids = append(a.ids, m.ID)
	}
	r.mu.Lock()
	r.arrivals = append(r.arrivals, a)
	n, latency, answer := len(r.arrivals), r.latency, r.answer
	if d, ok := r.calls[n]; ok {
		latency = d
	}
	r.mu.Unlock()
	err := r.script.enter(ctx, "send", b.School, fmt.Sprint(len(b.Messages)))
	if err == nil {
		select {
		case <-time.After(latency):
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	r.mu.Lock()
	a.end = time.Now()
	r.mu.Unlock()
	_ = r.script.leave(ctx, "send")
	switch {
	case err != nil:
		return sender.Fill(b.Messages, sender.Result{Class: sender.Unknown, Code: sender.CodeCallTimeout})
	case answer != nil:
		return answer(n, b)
	}
	return sender.Fill(b.Messages, sender.Result{Class: sender.Accepted})
}

// answers sets how batches are answered: n counts them from 1 over all schools.
func (r *receiver) answers(f func(n int, b sender.Batch) []sender.Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = f
}

// takes sets how long a call takes.
func (r *receiver) takes(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latency = d
}

// of returns what arrived for a school, or for all with an empty id.
func (r *receiver) of(schoolID string) []arrival {
	r.mu.Lock()
	defer r.mu.Unlock()
	var as []arrival
	for _, a := range r.arrivals {
		if schoolID == "" || a.school == schoolID {
			as = append(as, *a)
		}
	}
	return as
}

// members are the replicas that run.
type members struct {
	w    *world
	name string
}

func (m members) Live() []string {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	var live []string
	for _, r := range m.w.replicas {
		live = append(live, r.name)
	}
	return live
}

func (m members) OthersAble() bool {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	return slices.ContainsFunc(m.w.replicas, func(r *replica) bool { return r.name != m.name && !m.w.unable[r.name] })
}

func (m members) OthersUnanswered(name string) bool {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	return !slices.ContainsFunc(m.w.replicas, func(r *replica) bool {
		return r.name != m.name && !slices.ContainsFunc(r.Lanes(), func(l coordinator.LaneState) bool { return l.Name == name && l.Broken })
	})
}

// peers carries hints to the other replicas at once.
type peers struct {
	w    *world
	name string
}

func (p *peers) Wake(ctx context.Context, schools ...string) error {
	if err := p.w.script.enter(ctx, "tell", "", strings.Join(schools, ",")); err != nil {
		return err
	}
	p.w.mu.Lock()
	others := slices.Clone(p.w.replicas)
	p.w.told = append(p.w.told, schools...)
	p.w.mu.Unlock()
	for _, r := range others {
		if r.name != p.name {
			r.Hear(schools...)
		}
	}
	return nil
}

// logbook keeps what was logged.
type logbook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logbook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// events returns the lines with this event.
func (l *logbook) events(name string) []map[string]any {
	var lines []map[string]any
	for raw := range strings.Lines(l.String()) {
		var line map[string]any
		if json.Unmarshal([]byte(raw), &line) == nil && line["event"] == name {
			lines = append(lines, line)
		}
	}
	return lines
}

var errAway = fmt.Errorf("fake: cut off: %w", school.ErrUnavailable)

var errOther = errors.New("fake: something else")

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
