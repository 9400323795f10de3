package web

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeStore keeps notices and schools in memory. It follows the contract of
// Notices.Accept to the letter: the key first, then the recipients, all or
// nothing.
type fakeStore struct {
	mu       sync.Mutex
	later    time.Duration // of its clock than testNow
	lastID   int64
	notices  map[int64]*stored
	schools  map[string]*school.Backlog
	topics   map[string]int                // devices that have it
	accepts  int                           // calls of Accept
	taken    int                           // recipients taken from the sequence, also of what was rolled back
	devices  map[string][]school.NewDevice // by school, as they came
	puts     []int                         // devices of each call
	filtered school.DeviceFilter           // last
	brakes   []school.EngagedBrake         // by id, from 1
	err      error                         // answers everything
	pingErr  error
	onAccept func(ctx context.Context) error // before anything

	failures school.FailureList // answers every list of them
	asked    []failurePage
	requeued []school.Requeued // answers requeues, one after the other
	orders   []school.RequeueOrder
	refused  error // with the first of requeued
}

type stored struct {
	notice     school.Notice
	receipt    school.Receipt
	recipients []school.NewRecipient
	closing    school.Reason
}

func newFakeStore() *fakeStore {
	return &fakeStore{notices: make(map[int64]*stored), schools: make(map[string]*school.Backlog)}
}

func (f *fakeStore) Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error) {
	f.mu.Lock()
	f.accepts++
	on, err := f.onAccept, f.err
	f.mu.Unlock()
	if on != nil {
		if err := on(ctx); err != nil {
			return school.Receipt{}, err
		}
	}
	if err != nil {
		return school.Receipt{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n.IdempotencyKey != "" {
		for _, s := range f.notices {
			if s.notice.School == n.School && s.notice.IdempotencyKey == n.IdempotencyKey {
				if !bytes.Equal(s.notice.RequestHash, n.RequestHash) {
					return school.Receipt{}, fmt.Errorf("accept: %w", school.ErrIdempotencyMismatch)
				}
				r := s.receipt
				r.Replay = true
				return r, nil
			}
		}
	}
	if err := school.ValidateExpiry(n, testNow.Add(f.later)); err != nil {
		return school.Receipt{}, fmt.Errorf("accept: %w", err)
	}
	s := &stored{notice: *n}
	if n.Topic != "" {
		total, recipients = f.topics[n.Topic], f.devicesOf(n.Topic)
	}
	for r, err := range recipients {
		if err != nil {
			return school.Receipt{}, fmt.Errorf("accept: %w", err)
		}
		f.taken++
		s.recipients = append(s.recipients, r)
	}
	if len(s.recipients) != total {
		return school.Receipt{}, fmt.Errorf("accept: %d recipients of %d", len(s.recipients), total)
	}
	if err := ctx.Err(); err != nil {
		return school.Receipt{}, err
	}
	f.lastID++
	s.notice.ID = f.lastID
	s.receipt = school.Receipt{ID: f.lastID, School: n.School, Status: school.NoticePending, Total: total}
	f.notices[f.lastID] = s
	if f.schools[n.School] == nil {
		f.schools[n.School] = &school.Backlog{School: school.School{ID: n.School, CreatedAt: testNow}}
	}
	return s.receipt, nil
}

func (f *fakeStore) devicesOf(topic string) iter.Seq2[school.NewRecipient, error] {
	return func(yield func(school.NewRecipient, error) bool) {
		for i := range f.topics[topic] {
			if !yield(school.NewRecipient{Token: fmt.Sprint(topic, i)}, nil) {
				return
			}
		}
	}
}

func (f *fakeStore) Notice(_ context.Context, id int64) (school.Progress, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return school.Progress{}, f.err
	}
	s, ok := f.notices[id]
	if !ok {
		return school.Progress{}, fmt.Errorf("notice %d: %w", id, school.ErrNotFound)
	}
	return s.progress(), nil
}

// Cancel ends a notice at once, unless it has expired.
func (f *fakeStore) Cancel(_ context.Context, id int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.notices[id]
	switch {
	case f.err != nil:
		return f.err
	case !ok:
		return fmt.Errorf("cancel notice %d: %w", id, school.ErrNotFound)
	case s.closing == school.Expired:
		return fmt.Errorf("cancel notice %d: %w", id, school.ErrConflict)
	}
	s.closing = school.Cancelled
	return nil
}

func (f *fakeStore) Failures(_ context.Context, q school.FailureFilter, after school.FailureKey, limit int) (school.FailureList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, failurePage{q, after, limit})
	return f.failures, f.err
}

func (f *fakeStore) Requeue(_ context.Context, o school.RequeueOrder) (r school.Requeued, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.orders = append(f.orders, o)
	if len(f.requeued) > 0 {
		r, f.requeued = f.requeued[0], f.requeued[1:]
	}
	return r, cmp.Or(f.refused, f.err)
}

func (f *fakeStore) Pause(_ context.Context, id string) error  { return f.setPaused(id, true) }
func (f *fakeStore) Resume(_ context.Context, id string) error { return f.setPaused(id, false) }

func (f *fakeStore) setPaused(id string, paused bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.schools[id]
	switch {
	case f.err != nil:
		return f.err
	case !ok:
		return fmt.Errorf("school %s: %w", id, school.ErrNotFound)
	}
	b.School.Paused = paused
	return nil
}

func (s *stored) progress() school.Progress {
	p := school.Progress{Notice: s.notice, Status: school.NoticePending, CreatedAt: testNow}
	p.Counts.Total = len(s.recipients)
	if s.notice.Fallback != "" {
		p.Fallbacks = &school.FallbackCounts{Pending: 1, Sent: 2, Failed: 3}
	}
	if p.Closing = s.closing; p.Closing != "" {
		p.Status, p.Counts.Skipped.Cancelled, p.EndedAt = school.NoticeCancelled, p.Counts.Total, testNow
		return p
	}
	seen := make(map[string]bool)
	for _, r := range s.recipients {
		if seen[r.Token] {
			p.Counts.Skipped.Duplicate++
		} else {
			p.Counts.Waiting++
		}
		seen[r.Token] = true
	}
	return p
}

func (f *fakeStore) Notices(_ context.Context, q school.NoticeFilter) ([]school.Progress, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []school.Progress
	for id := f.lastID; id > 0 && len(out) < q.Limit; id-- {
		s := f.notices[id]
		if s == nil || (q.School != "" && s.notice.School != q.School) || (q.Before != 0 && id >= q.Before) {
			continue
		}
		p := s.progress()
		if q.Status == "" || q.Status == p.Status {
			out = append(out, p)
		}
	}
	return out, f.err
}

func (f *fakeStore) Recipients(_ context.Context, id int64, q school.RecipientFilter) ([]school.RecipientRow, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.notices[id]
	if !ok {
		return nil, school.ErrNotFound
	}
	var out []school.RecipientRow
	for i, r := range s.recipients {
		if seq := i + 1; seq > q.After && len(out) < q.Limit && (q.State == "" || q.State == school.Pending) {
			out = append(out, school.RecipientRow{Seq: seq, Ref: r.Ref, MessageID: school.MessageID(id, seq), Token: "…", State: school.Pending})
			if s.notice.Fallback != "" {
				out[len(out)-1].Fallback = school.PostSent
			}
		}
	}
	return out, nil
}

func (f *fakeStore) PutSchool(_ context.Context, id string, c school.SchoolChange) (school.School, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, had := f.schools[id]
	if !had {
		b = &school.Backlog{School: school.School{ID: id, CreatedAt: testNow}}
		f.schools[id] = b
	}
	if c.Name != nil {
		b.School.Name = *c.Name
	}
	if c.Sender != nil {
		b.School.Sender = *c.Sender
	}
	if c.Limit != nil {
		b.School.Limit = c.Limit
	}
	if c.Rest != nil {
		b.School.Rest = c.Rest
	}
	return b.School, !had, f.err
}

func (f *fakeStore) School(_ context.Context, id string) (school.Backlog, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.schools[id]
	if !ok {
		return school.Backlog{}, school.ErrNotFound
	}
	return *b, f.err
}

func (f *fakeStore) Schools(_ context.Context, afterID string, limit int) ([]school.Backlog, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []school.Backlog
	for _, b := range f.schools {
		if b.School.ID > afterID {
			out = append(out, *b)
		}
	}
	slices.SortFunc(out, func(a, b school.Backlog) int { return cmp.Compare(a.School.ID, b.School.ID) })
	return out[:min(limit, len(out))], f.err
}

func (f *fakeStore) Ping(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pingErr
}

func (f *fakeStore) set(change func(f *fakeStore)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// counts returns how often Accept was called and what it took and kept.
func (f *fakeStore) counts() (accepts, taken, kept int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.accepts, f.taken, len(f.notices)
}

type fakeArbiter struct {
	mu    sync.Mutex
	peeks map[string]school.Peek
	err   error
	asked int
}

func (f *fakeArbiter) Peek(_ context.Context, id string) (school.Peek, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.peeks[id], f.err
}

type fakeWaker struct {
	mu    sync.Mutex
	woken []string
}

func (f *fakeWaker) Wake(ids ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.woken = append(f.woken, ids...)
}

type fakeCluster struct{ err error }

func (f fakeCluster) Replicas(context.Context) ([]Replica, error) {
	return []Replica{{Instance: "one", Version: "v1", Since: testNow, SchoolsHeld: 2, Self: true}}, f.err
}

func (fakeCluster) Senders(context.Context) ([]SenderStatus, error) {
	return []SenderStatus{{Name: "log", Kind: "log"}, {Name: "fcm", Kind: "fcm", Stopped: true, Reason: "authentication", RatePerMinute: 600000,
		RateNow: 60000, RateUsed: 12000, Waiting: 3, Lowered: true, Code: "UNAUTHENTICATED", Since: 90 * time.Second, NextProbe: 2500 * time.Millisecond}}, nil
}

var testNow = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)

// world is a server with everything around it.
type world struct {
	t       *testing.T
	store   *fakeStore
	arbiter *fakeArbiter
	waker   *fakeWaker
	reg     *prometheus.Registry
	log     *lockedBuffer
	server  *Server
	dir     string // of uploads
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

const testKey = "a-key-that-must-stay-secret"

func newWorld(t *testing.T, change func(*Config, *Deps)) *world {
	t.Helper()
	w := &world{t: t, store: newFakeStore(), arbiter: &fakeArbiter{peeks: make(map[string]school.Peek)}, waker: &fakeWaker{},
		reg: prometheus.NewRegistry(), log: &lockedBuffer{}, dir: t.TempDir()}
	cfg := Config{Rule: school.Rule{Limit: 5000, Rest: 180 * time.Second}, UploadDir: w.dir,
		Version: api.Version{Version: "v0", Commit: "abc", Go: "go"}}
	deps := Deps{Notices: w.store, Schools: w.store, Devices: w.store, Brakes: w.store, Database: w.store, Arbiter: w.arbiter, Waker: w.waker, Cluster: fakeCluster{},
		Auth: AdminKey(testKey), Registerer: w.reg, Gatherer: w.reg, Log: slog.New(slog.NewJSONHandler(w.log, nil)),
		Now: func() time.Time { return testNow }}
	if change != nil {
		change(&cfg, &deps)
	}
	s, err := New(cfg, deps)
	require.NoError(t, err)
	w.server = s
	return w
}

// do asks the handler directly, with the key, and returns the answer.
func (w *world) do(method, target, contentType string, body io.Reader, headers ...string) *httptest.ResponseRecorder {
	w.t.Helper()
	r := httptest.NewRequest(method, target, body)
	r.Header.Set("Authorization", "Bearer "+testKey)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	rec := httptest.NewRecorder()
	w.server.Handler().ServeHTTP(rec, r)
	return rec
}

func (w *world) post(body string, headers ...string) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(http.MethodPost, "/v1/notices", api.JSON, strings.NewReader(body), headers...)
}

func (w *world) upload(body io.Reader, headers ...string) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(http.MethodPost, "/v1/notices", api.NDJSON, body, headers...)
}

func (w *world) get(target string) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(http.MethodGet, target, "", nil)
}

// requireError checks an answer that refuses, down to its form.
func requireError(t *testing.T, rec *httptest.ResponseRecorder, code api.Code, field string) api.Error {
	t.Helper()
	var body api.ErrorBody
	require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &body), rec.Body.String())
	require.Equal(t, code, body.Error.Code, rec.Body.String())
	require.Equal(t, code.Status(), rec.Code)
	require.Equal(t, field, body.Error.Field, rec.Body.String())
	require.NotEmpty(t, body.Error.Message)
	require.NotEmpty(t, body.Error.RequestID)
	require.Equal(t, rec.Header().Get("X-Request-Id"), body.Error.RequestID)
	require.Equal(t, api.JSON, rec.Header().Get("Content-Type"))
	if code == api.Unavailable || code == api.RateLimited {
		require.NotEmpty(t, rec.Header().Get("Retry-After"))
	}
	return body.Error
}

// requireAnswer decodes an answer into T.
func requireAnswer[T any](t *testing.T, rec *httptest.ResponseRecorder, status int) T {
	t.Helper()
	require.Equal(t, status, rec.Code, rec.Body.String())
	dec := json.NewDecoder(rec.Body)
	dec.DisallowUnknownFields()
	var out T
	require.NoError(t, dec.Decode(&out))
	return out
}

const small = `{"school":"A","title":"t","body":"b","recipients":[{"token":"tok-1"}]}`

type seq = iter.Seq2[school.NewRecipient, error]

// acceptFunc is a store that only accepts.
type acceptFunc func(ctx context.Context, n *school.Notice, total int, recipients seq) (school.Receipt, error)

func (f acceptFunc) Accept(ctx context.Context, n *school.Notice, total int, recipients seq) (school.Receipt, error) {
	return f(ctx, n, total, recipients)
}

func (acceptFunc) Notice(context.Context, int64) (school.Progress, error) {
	return school.Progress{}, school.ErrNotFound
}

func (acceptFunc) Failures(context.Context, school.FailureFilter, school.FailureKey, int) (school.FailureList, error) {
	return school.FailureList{}, nil
}

func (acceptFunc) Requeue(context.Context, school.RequeueOrder) (school.Requeued, error) {
	return school.Requeued{}, school.ErrNotFound
}

func (acceptFunc) Cancel(context.Context, int64) error { return school.ErrNotFound }

func (acceptFunc) Notices(context.Context, school.NoticeFilter) ([]school.Progress, error) {
	return nil, nil
}

func (acceptFunc) Recipients(context.Context, int64, school.RecipientFilter) ([]school.RecipientRow, error) {
	return nil, school.ErrNotFound
}

func (f *fakeStore) PutDevices(_ context.Context, schoolID string, devices []school.NewDevice) (school.Devices, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return school.Devices{}, f.err
	}
	if f.devices == nil {
		f.devices = map[string][]school.NewDevice{}
	}
	f.puts = append(f.puts, len(devices))
	f.devices[schoolID] = append(f.devices[schoolID], slices.Clone(devices)...)
	return school.Devices{Registered: len(devices), Created: 2, Revived: 1}, nil
}

func (f *fakeStore) DeleteDevice(_ context.Context, schoolID, token string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := len(f.devices[schoolID])
	f.devices[schoolID] = slices.DeleteFunc(f.devices[schoolID], func(d school.NewDevice) bool { return d.Token == token })
	if f.err == nil && len(f.devices[schoolID]) == before {
		return school.ErrNotFound
	}
	return f.err
}

func (f *fakeStore) Devices(_ context.Context, schoolID string, q school.DeviceFilter) ([]school.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.devices[schoolID] == nil {
		return nil, school.ErrNotFound
	}
	f.filtered = q
	var out []school.Device
	for i := range f.devices[schoolID] {
		key := fmt.Sprintf("%064x", i+1)
		if key > q.After && len(out) < q.Limit {
			out = append(out, school.Device{Key: key, Token: "…", Enabled: true, Topics: []string{}, RegisteredAt: testNow})
		}
	}
	return out, f.err
}

func (f *fakeStore) Brakes(_ context.Context, q school.BrakeFilter) ([]school.EngagedBrake, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []school.EngagedBrake
	for _, b := range slices.Backward(f.brakes) {
		if (q.School == "" || b.School == q.School) && (!q.Open || b.ClosedAt.IsZero()) && (q.Before == 0 || b.ID < q.Before) && len(out) < q.Limit {
			out = append(out, b)
		}
	}
	return out, f.err
}

func (f *fakeStore) Brake(_ context.Context, id int64) (school.EngagedBrake, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if id > int64(len(f.brakes)) {
		return school.EngagedBrake{}, school.ErrNotFound
	}
	return f.brakes[id-1], f.err
}

func (f *fakeStore) CloseBrake(_ context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := &f.brakes[id-1]
	if b.ClosedAs != "" && b.ClosedAs != as {
		return *b, school.ErrConflict
	}
	b.ClosedAt, b.ClosedAs, b.ClosedBy, b.Retired, b.Flagged = testNow, as, by, b.Flagged, 0
	return *b, f.err
}

func (f *fakeStore) OpenBrakes(context.Context) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, b := range f.brakes {
		if b.ClosedAt.IsZero() {
			n++
		}
	}
	return n, f.err
}
