// Package web serves the HTTP API, health and metrics of one replica.
//
// It reads a request within limits, checks it to the last field, calls the
// store and writes the answer; it sends nothing and decides nothing about
// sending. What it needs of others it declares here.
//
// Invariants: nothing is handed to the store that was not checked completely;
// a client that is slow, stops, or hangs up holds no transaction and leaves
// nothing behind; request handling never waits for a receiver (R34); no answer
// and no log line holds a token, a text or a key.
package web

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// Notices is the outbox as applications see it.
type Notices interface {
	// Accept stores n and its total recipients in one transaction, creates an
	// unknown school, and gives the notice its id. The sequence can be ranged
	// over more than once and yields the same each time. Where n has a Topic, its
	// recipients are that topic's devices, in the same transaction, and nothing is
	// taken from the sequence; a topic without any is a total of 0.
	//
	// The idempotency key comes first: a known key with the same RequestHash
	// answers as the first time, with Replay set, and takes nothing from the
	// sequence; with another hash school.ErrIdempotencyMismatch; one whose first
	// request is still under way school.ErrConflict. A notice whose expires_at has
	// passed by the store's clock is refused next. An error of the sequence rolls
	// everything back and is returned, wrapped.
	//
	// school.ErrUnavailable: nothing was stored. school.ErrCommitUnknown: it may
	// have been.
	Accept(ctx context.Context, n *school.Notice, total int, recipients iter.Seq2[school.NewRecipient, error]) (school.Receipt, error)

	// Notice, school.ErrNotFound.
	Notice(ctx context.Context, id int64) (school.Progress, error)
	// Notices, newest first.
	Notices(ctx context.Context, f school.NoticeFilter) ([]school.Progress, error)
	// Recipients of one notice in order of seq, tokens shortened. school.ErrNotFound.
	Recipients(ctx context.Context, id int64, f school.RecipientFilter) ([]school.RecipientRow, error)
	// Cancel closes a notice: nothing of it is claimed after Cancel returned; what
	// an open batch covers gets its outcome. Cancelled already: no error.
	// school.ErrConflict for one that has ended or expired, school.ErrNotFound.
	Cancel(ctx context.Context, id int64) error
	// Failures lists recipients that failed for good in groups.
	Failures(ctx context.Context, f school.FailureFilter, after school.FailureKey, limit int) (school.FailureList, error)
	// Requeue puts recipients that failed for good back, in bounded steps; with an
	// error what was done until then. school.ErrNotFound for an order of a notice
	// that there is not, school.ErrConflict of one that takes no more attempts.
	Requeue(ctx context.Context, o school.RequeueOrder) (school.Requeued, error)
}

// Schools is the schools' settings and backlog.
type Schools interface {
	// PutSchool creates the school, ledger row included, or changes the fields
	// given; it reports whether it was created.
	PutSchool(ctx context.Context, id string, c school.SchoolChange) (school.School, bool, error)
	// School, school.ErrNotFound.
	School(ctx context.Context, id string) (school.Backlog, error)
	// Schools with an id above afterID, in order of id.
	Schools(ctx context.Context, afterID string, limit int) ([]school.Backlog, error)
	// Pause stops a school: no claim of it commits after Pause returned. Paused
	// already: no error. school.ErrNotFound.
	Pause(ctx context.Context, id string) error
	// Resume lets it go on. Errors as Pause.
	Resume(ctx context.Context, id string) error
}

// Devices is the schools' registry of devices.
type Devices interface {
	// PutDevices registers devices in one transaction, in their order, and makes an
	// unknown school. Asking again is harmless.
	PutDevices(ctx context.Context, schoolID string, devices []school.NewDevice) (school.Devices, error)
	// DeleteDevice, school.ErrNotFound.
	DeleteDevice(ctx context.Context, schoolID, token string) error
	// Devices of one school in order of their keys, tokens shortened. school.ErrNotFound.
	Devices(ctx context.Context, schoolID string, f school.DeviceFilter) ([]school.Device, error)
}

// Brakes keep devices from being retired until a person has looked.
type Brakes interface {
	// Brakes, newest first.
	Brakes(ctx context.Context, f school.BrakeFilter) ([]school.EngagedBrake, error)
	// Brake, school.ErrNotFound.
	Brake(ctx context.Context, id int64) (school.EngagedBrake, error)
	// CloseBrake confirms or clears a brake; to repeat it is harmless.
	// school.ErrConflict where it was closed in the other way, school.ErrNotFound.
	CloseBrake(ctx context.Context, id int64, as school.BrakeEnd, by string) (school.EngagedBrake, error)
	// OpenBrakes counts those that are on.
	OpenBrakes(ctx context.Context) (int, error)
}

// Database says whether the store can be reached.
type Database interface {
	Ping(ctx context.Context) error
}

// Arbiter looks at a school's lock and quota without touching them.
type Arbiter interface {
	Peek(ctx context.Context, schoolID string) (school.Peek, error)
}

// Waker tells the replica's own agenda, and through it the others, that schools
// have work. It does not block and cannot fail: it is a hint.
type Waker interface {
	Wake(schoolIDs ...string)
}

// Cluster lists the living replicas and the senders of this one.
type Cluster interface {
	// Replicas returns what it knows, at least this replica, also with an error:
	// the others could not be asked for.
	Replicas(ctx context.Context) ([]Replica, error)
	Senders(ctx context.Context) ([]SenderStatus, error)
}

// Replica is one living replica.
type Replica struct {
	Instance      string
	Version       string
	Address       string
	Since         time.Time
	SchoolsHeld   int
	RatePerSecond float64
	Self          bool // this process
}

// SenderStatus is one configured sender.
type SenderStatus struct {
	Name          string
	Kind          string
	Stopped       bool
	Reason        string // why it is stopped or lowered, or what keeps a part of the replicas from sending
	RatePerMinute int    // 0: no limit
	RatePerSecond float64

	RateNow    int           // messages that the cluster may send a minute now; 0: no limit
	RateUsed   int           // that it sent a minute, lately
	Waiting    int           // schools that wait for the rate
	Lowered    bool          // the receiver asked for less
	Code       string        // Stopped: a result's code
	Since      time.Duration // Stopped: how long it has been; 0: not known
	NextProbe  time.Duration // Stopped: until the next try; 0: with the next message
	DryRun     bool          // the receiver checks messages and delivers none
	OnlyTokens *int          // how many devices it is limited to; nil: it is not
}

// Config is what can be set. A zero field is its default.
type Config struct {
	Rule    school.Rule // the deployment's default, shown where a school has none of its own; Limit and Rest required
	Senders []string    // names that a school may choose; nil: not checked
	// DefaultSender is that of schools that name none.
	DefaultSender string
	Version       api.Version

	OperationsNeedKey bool // /metrics, /version and /openapi.yaml ask for a key with the read role; health stays open

	Fallback bool // notices may have a fallback: somebody posts them

	HeaderTimeout time.Duration // for a request's header; 10 s
	BodyTimeout   time.Duration // for a JSON body; 30 s
	AcceptTimeout time.Duration // for storing a JSON notice, and for every other call to the store; 30 s
	WriteTimeout  time.Duration // for an answer to be taken; 30 s
	IdleTimeout   time.Duration // for a connection without a request; 120 s
	StopTimeout   time.Duration // for the requests under way at a stop; 45 s

	MaxBodies int64 // bytes of JSON bodies in memory at once, all requests together; 256 MiB

	Uploads       int           // NDJSON uploads at once; 2
	UploadDir     string        // for their temporary files; os.TempDir()
	UploadBytes   int64         // size of one; 1 GiB
	UploadGrace   time.Duration // before the slowest permitted rate is asked of it; 30 s
	UploadRate    int64         // slowest permitted rate, bytes a second; 64 KiB
	UploadTimeout time.Duration // longest permitted reading; 15 min
	UploadAccept  time.Duration // for storing one; 10 min
}

// Limits of the wire that are promises of the API, not settings.
const (
	maxBody = 8 << 20  // JSON body
	maxLine = 64 << 10 // NDJSON line
)

func (c *Config) setDefaults() {
	setDefault(&c.HeaderTimeout, 10*time.Second)
	setDefault(&c.BodyTimeout, 30*time.Second)
	setDefault(&c.AcceptTimeout, 30*time.Second)
	setDefault(&c.WriteTimeout, 30*time.Second)
	setDefault(&c.IdleTimeout, 120*time.Second)
	setDefault(&c.StopTimeout, 45*time.Second)
	setDefault(&c.MaxBodies, 256<<20)
	setDefault(&c.Uploads, 2)
	setDefault(&c.UploadDir, os.TempDir())
	setDefault(&c.UploadBytes, 1<<30)
	setDefault(&c.UploadGrace, 30*time.Second)
	setDefault(&c.UploadRate, 64<<10)
	setDefault(&c.UploadTimeout, 15*time.Minute)
	setDefault(&c.UploadAccept, 10*time.Minute)
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) validate() error {
	switch {
	case c.Rule.Limit < 1 || c.Rule.Rest <= 0:
		return errors.New("web: the default rule needs a limit and a rest")
	case min(c.HeaderTimeout, c.BodyTimeout, c.AcceptTimeout, c.WriteTimeout, c.IdleTimeout, c.StopTimeout, c.UploadGrace, c.UploadTimeout, c.UploadAccept) < 0:
		return errors.New("web: a timeout is negative")
	case c.MaxBodies < maxBody:
		return fmt.Errorf("web: %d bytes for all bodies do not hold one of %d", c.MaxBodies, maxBody)
	case c.Uploads < 1 || c.UploadBytes < maxLine || c.UploadRate < 1:
		return errors.New("web: uploads need room for at least one line, one at a time, at one byte a second")
	}
	return nil
}

// Deps are the parts that the server stands on.
type Deps struct {
	Notices  Notices
	Schools  Schools
	Devices  Devices
	Brakes   Brakes
	Database Database
	Arbiter  Arbiter
	Waker    Waker
	Cluster  Cluster
	Auth     Authenticator

	// Checks are parts whose absence degrades the replica without making it
	// unready, by the name that /readyz shows: redis, a sender. An error whose part
	// answers, but not as it should, says in its State() string what is shown in
	// place of "unreachable". May be nil.
	Checks map[string]func(ctx context.Context) error

	Registerer prometheus.Registerer // nil: metrics are not registered
	Gatherer   prometheus.Gatherer   // nil: /metrics is empty
	Log        *slog.Logger          // nil: discarded
	Now        func() time.Time      // nil: time.Now
}

func (d *Deps) validate() error {
	for name, missing := range map[string]bool{
		"notices": d.Notices == nil, "schools": d.Schools == nil, "devices": d.Devices == nil, "brakes": d.Brakes == nil, "database": d.Database == nil, "arbiter": d.Arbiter == nil,
		"waker": d.Waker == nil, "cluster": d.Cluster == nil, "auth": d.Auth == nil,
	} {
		if missing {
			return fmt.Errorf("web: %s is missing", name)
		}
	}
	if d.Registerer == nil {
		d.Registerer = prometheus.NewRegistry() // nobody gathers it
	}
	if d.Gatherer == nil {
		d.Gatherer = prometheus.NewRegistry()
	}
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if d.Now == nil {
		d.Now = time.Now
	}
	return nil
}

// Server is the HTTP side of one replica.
type Server struct {
	cfg      Config
	deps     Deps
	log      *slog.Logger
	metrics  *metrics
	mux      *chi.Mux
	handler  http.Handler
	draining atomic.Bool
	health   health

	bodies  *semaphore.Weighted // bytes of JSON bodies in memory
	uploads chan struct{}       // one element an upload under way
	keys    keyRegistry         // idempotency keys whose first request is under way here
}

// New builds a server. It starts nothing; see [Server.Serve] and
// [Server.Handler].
func New(cfg Config, deps Deps) (*Server, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := deps.validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(deps.Registerer)
	if err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, deps: deps, log: deps.Log, metrics: m,
		bodies:  semaphore.NewWeighted(cfg.MaxBodies),
		uploads: make(chan struct{}, cfg.Uploads),
		keys:    keyRegistry{under: make(map[schoolKey]struct{})},
	}
	s.mux = s.router()
	s.handler = s.observe(s.mux)
	return s, nil
}

// Handler is the whole API as a handler, for a listener of someone else's.
func (s *Server) Handler() http.Handler { return s.handler }
