package simulator

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Config sets up an Engine. The zero value accepts everything and keeps nothing.
type Config struct {
	Behaviour Behaviour
	Log       io.Writer // the arrival log as NDJSON; nil: none. Not closed by the engine
	Keep      bool      // keep all arrivals in memory, for Arrivals and GET /_sim/log
	Seed      uint64    // of everything left to chance
	Token     string    // the bearer token that the relay asks for; empty: anyone may send
	Project   string    // the only Firebase project there is; empty: any
	Authorize bool      // FCM wants an access token got from /token
	Logger    *slog.Logger
}

// Engine is the receiver: an http.Handler with FCM's POST
// /v1/projects/{project}/messages:send and POST /token, the relay's POST /relay
// and POST /status, and the control endpoints under /_sim/. It is safe for concurrent use.
type Engine struct {
	cfg    Config
	script script
	behave atomic.Pointer[compiled]
	record *record
	memory *memory
	tokens issued
	mux    *http.ServeMux
	log    *slog.Logger
	start  time.Time

	mu       sync.Mutex
	requests int // being answered
	closed   bool
	idle     chan struct{} // closed once closed is set and no request is answered
	stop     chan struct{} // closed by Stop: waits inside answers end
	stopOnce sync.Once
}

// New returns an engine. Close it to have the log written out.
func New(cfg Config) (*Engine, error) {
	e := &Engine{
		cfg:    cfg,
		script: newScript(),
		memory: newMemory(),
		mux:    http.NewServeMux(),
		log:    cfg.Logger,
		start:  time.Now(),
		idle:   make(chan struct{}),
		stop:   make(chan struct{}),
	}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if err := e.SetBehaviour(cfg.Behaviour); err != nil {
		return nil, err
	}
	e.record = newRecord(cfg.Log, cfg.Keep)
	e.mux.HandleFunc("POST /v1/projects/{project}/messages:send", e.fcm)
	e.mux.HandleFunc("POST /token", e.token)
	e.mux.HandleFunc("POST /relay", e.relay)
	e.mux.HandleFunc("POST /status", e.status)
	e.mux.HandleFunc("GET /_sim/behaviour", e.getBehaviour)
	e.mux.HandleFunc("PUT /_sim/behaviour", e.putBehaviour)
	e.mux.HandleFunc("GET /_sim/counts", e.getCounts)
	e.mux.HandleFunc("GET /_sim/log", e.getLog)
	return e, nil
}

// ServeHTTP implements http.Handler.
func (e *Engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !e.enter() {
		http.Error(w, "the simulator has stopped", http.StatusServiceUnavailable)
		return
	}
	defer e.leave()
	e.mux.ServeHTTP(w, r)
}

// SetBehaviour replaces the behaviour for requests that come in from now on.
func (e *Engine) SetBehaviour(b Behaviour) error {
	c, err := e.script.compile(b)
	if err != nil {
		return err
	}
	e.behave.Store(c)
	return nil
}

// Behaviour is what SetBehaviour was given last.
func (e *Engine) Behaviour() Behaviour { return e.behave.Load().Behaviour }

// Arrivals are all arrivals so far, in the order of the log, if Config.Keep was
// set. One that is being answered has no answer yet.
func (e *Engine) Arrivals() []Arrival { return e.record.arrivals() }

// Counts are the sums so far.
func (e *Engine) Counts() Counts { return e.memory.snapshot() }

// Stop ends the waits inside answers: latencies are cut short and callers that
// are kept hanging are dropped, so that a server can shut down.
func (e *Engine) Stop() { e.stopOnce.Do(func() { close(e.stop) }) }

// Close stops, waits for the requests being answered, and writes out the log.
// Its error says that the log is not complete. It may be called once.
func (e *Engine) Close() error {
	e.Stop()
	e.mu.Lock()
	e.closed = true
	if e.requests == 0 {
		close(e.idle)
	}
	e.mu.Unlock()
	<-e.idle
	return e.record.close()
}

func (e *Engine) enter() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.requests++
	return true
}

func (e *Engine) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests--
	if e.closed && e.requests == 0 {
		close(e.idle)
	}
}

// now is the wall clock as it was at the start, moved on by the monotonic
// clock: a step of the wall clock must not bend a rest.
func (e *Engine) now() int64 { return e.start.UnixNano() + int64(time.Since(e.start)) }

// draw is a number in [0, 1) that depends on the seed and the words alone.
func (e *Engine) draw(words ...string) float64 {
	h := e.cfg.Seed ^ 14695981039346656037
	for _, w := range words {
		for i := range len(w) {
			h = (h ^ uint64(w[i])) * 1099511628211 // FNV-1a
		}
		h = (h ^ 0xff) * 1099511628211 // no word ends like this
	}
	// The finaliser of SplitMix64: FNV alone leaves the high bits alike.
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	h ^= h >> 31
	return float64(h>>11) / (1 << 53)
}

func tokenSHA(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:8])
}

// fail answers a request whose arrival could not be logged: it must not count.
func (e *Engine) fail(w http.ResponseWriter, err error) {
	e.log.Error("arrival log failed", "event", "simulator_log_failed", "error", err.Error())
	http.Error(w, fmt.Sprintf("simulator: %v", err), http.StatusInternalServerError)
}
