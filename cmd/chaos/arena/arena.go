// Package arena is a small production on one machine: a private PostgreSQL and
// Redis, a simulated receiver with its arrival log, and replicas of schoolbell
// as real processes, to be killed, paused, restarted and cut off. What happened
// is judged from outside: from the arrival log, from the answers that
// applications got, and from SQL; never from the replicas' own counters.
//
// Everything in it is started by it and ends with Close, which also holds when
// the program that made it dies.
package arena

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"schoolbell/coordinator/api"
	"schoolbell/deploy/local"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// Key is the admin key of the replicas of an arena.
const Key = "arena-admin-key"

// Config says how the production is set up.
type Config struct {
	Program   string              // path of the schoolbell binary; required
	Replicas  int                 // started by New; 3 where 0, none below
	Limit     int                 // attempts a cycle; required
	Rest      time.Duration       // rest after a full cycle; required
	Behaviour simulator.Behaviour // of the receiver
	FCM       bool                // the receiver is FCM, over HTTP/2 and TLS; else a relay
	Settings  map[string]string   // SCHOOLBELL_* variables over the arena's own
	Fast      bool                // PostgreSQL without durability, where no power is cut
	Topology  Topology            // how Redis is set up; one server by default
	Redis     local.RedisConfig   // of its servers that hold data
	Ways      bool                // each replica has its own way to each store, which can be broken
	Clocks    bool                // Redis's clock can be stepped; it is slower then
	Wall      bool                // the replicas' clocks can be, if Program has failpoints
	Seed      int64               // shown in the verdict
	Within    *Servers            // share these instead of starting some; nothing is done to them
	Log       io.Writer           // the replicas' logs; nil: thrown away
}

// Servers are those of other arenas as well. Each arena has a database and Redis
// keys of its own in them.
type Servers struct {
	Redis    *local.Redis
	Postgres *local.Postgres
	Template string // another arena's database, copied, that nobody is connected to; "": a new one
	Name     string // of the arena's database, and the prefix of its keys
}

// Arena is a running production.
type Arena struct {
	Redis    *local.Redis    // with Single
	Cluster  *local.Cluster  // with Cluster
	Sentinel *local.Sentinel // with Sentinel
	Postgres *local.Postgres
	Receiver *Receiver
	DB       *pgxpool.Pool // for judging

	cfg Config
	url string // of the database
	dir string // for clocks; "" where there are none

	clock local.FakeClock // Redis's, with Config.Clocks

	log io.Writer

	mu       sync.Mutex
	replicas []*Replica
	faults   []verdict.Fault
	began    time.Time
	posted   []Posted
	gaveUp   map[string]bool // schools of which a notice's answer never came
	next     int
}

// New starts everything and returns when every replica is ready.
func New(ctx context.Context, cfg Config) (a *Arena, err error) {
	if cfg.Replicas == 0 {
		cfg.Replicas = 3
	}
	if cfg.Log == nil {
		cfg.Log = io.Discard
	}
	a = &Arena{cfg: cfg, log: &lines{w: cfg.Log}, began: time.Now(), gaveUp: map[string]bool{}}
	defer func() {
		if err != nil {
			a, err = nil, errors.Join(err, a.Close())
		}
	}()
	if a.Receiver, err = newReceiver(cfg.Behaviour, cfg.FCM); err != nil {
		return a, err
	}
	if cfg.Clocks || cfg.Wall {
		if a.dir, err = os.MkdirTemp("", "arena-clocks-"); err != nil {
			return a, fmt.Errorf("make a place for clocks: %w", err)
		}
	}
	if err = a.startStores(ctx); err != nil {
		return a, err
	}
	if a.DB, err = pgxpool.New(ctx, a.url); err != nil {
		return a, fmt.Errorf("connect the judge: %w", err)
	}
	if !a.copied() {
		if _, err = a.DB.Exec(ctx, audit); err != nil {
			return a, fmt.Errorf("make what the judge keeps: %w", err)
		}
	}
	for range cfg.Replicas {
		if _, err = a.StartReplica(ctx, nil); err != nil {
			return a, err
		}
	}
	return a, nil
}

// startStores starts Redis and a migrated database, or joins those of others.
func (a *Arena) startStores(ctx context.Context) (err error) {
	name := "bell"
	if s := a.cfg.Within; s != nil {
		a.Redis, a.Postgres, name = s.Redis, s.Postgres, s.Name
	} else {
		if err = a.startRedis(ctx); err != nil {
			return err
		}
		if a.Postgres, err = local.StartPostgres(ctx, local.PostgresConfig{Fast: a.cfg.Fast}); err != nil {
			return err
		}
	}
	if a.copied() {
		a.url, err = a.Postgres.CloneDatabase(ctx, name, a.cfg.Within.Template)
		return err
	}
	if a.url, err = a.Postgres.CreateDatabase(ctx, name); err != nil {
		return err
	}
	return a.migrate(ctx)
}

// copied reports whether the database is a copy of another arena's.
func (a *Arena) copied() bool { return a.cfg.Within != nil && a.cfg.Within.Template != "" }

// Begin says that the run begins now: the verdict counts from here.
func (a *Arena) Begin() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.began = time.Now()
	return a.began
}

// Close ends everything. An arena that New failed to make is nil, and may be
// closed too.
func (a *Arena) Close() error {
	if a == nil {
		return nil
	}
	var errs []error
	for _, r := range a.all() {
		if p := r.process.Load(); p != nil {
			errs = append(errs, p.Close())
		}
		errs = append(errs, r.closeWays())
	}
	if a.DB != nil {
		a.DB.Close()
	}
	if a.cfg.Within == nil {
		if a.Postgres != nil {
			errs = append(errs, a.Postgres.Close())
		}
		errs = append(errs, a.closeRedis())
	}
	if a.dir != "" {
		errs = append(errs, os.RemoveAll(a.dir))
	}
	if a.Receiver != nil {
		errs = append(errs, a.Receiver.Close())
	}
	return errors.Join(errs...)
}

func (a *Arena) migrate(ctx context.Context) error {
	p, err := local.StartProgram(ctx, local.ProgramConfig{
		Path: a.cfg.Program, Args: []string{"migrate", "up"}, Stderr: a.log,
		Env: []string{"SCHOOLBELL_DATABASE_URL=" + a.url},
	})
	if err != nil {
		return err
	}
	code, err := p.Wait(ctx)
	if code != 0 && err == nil {
		err = fmt.Errorf("migrate up ended with exit code %d", code)
	}
	return errors.Join(err, p.Close())
}

// Replica is one schoolbell process, or one after another under the same name.
type Replica struct {
	Name string // instance id

	// The replica's own ways to its stores, with Config.Ways; they stay the same
	// from one process to the next.
	ToRedis, ToPostgres *Way

	clock   local.FakeClock // with Config.Wall
	arena   *Arena
	env     map[string]string
	process atomic.Pointer[process]
}

type process struct {
	*local.Program
	url string
}

// URL is where the replica's API answers; another one after each start.
func (r *Replica) URL() string { return r.process.Load().url }

// StartReplica starts one more replica, with further variables of its own, and
// returns when it is ready.
func (a *Arena) StartReplica(ctx context.Context, env map[string]string) (*Replica, error) {
	a.mu.Lock()
	r := &Replica{Name: "replica-" + strconv.Itoa(len(a.replicas)+1), arena: a, env: env}
	a.replicas = append(a.replicas, r)
	a.mu.Unlock()
	err := r.makeWays()
	if err == nil && a.cfg.Wall {
		r.clock, err = local.NewFakeClock(filepath.Join(a.dir, r.Name+"-clock"))
	}
	if err == nil {
		err = r.Start(ctx)
	}
	if err != nil {
		err = errors.Join(err, r.closeWays())
		a.mu.Lock()
		a.replicas = slices.DeleteFunc(a.replicas, func(x *Replica) bool { return x == r })
		a.mu.Unlock()
		return nil, err
	}
	return r, nil
}

func (r *Replica) makeWays() (err error) {
	if !r.arena.cfg.Ways {
		return nil
	}
	if r.ToRedis, err = newWay(r.Name, verdict.PartitionRedis, r.arena.redisServers()...); err != nil {
		return err
	}
	r.ToPostgres, err = newWay(r.Name, verdict.PartitionDB, r.arena.Postgres.Addr())
	return err
}

func (r *Replica) closeWays() error {
	var errs []error
	for _, w := range []*Way{r.ToRedis, r.ToPostgres} {
		if w != nil {
			errs = append(errs, w.close())
		}
	}
	return errors.Join(errs...)
}

// Start starts the replica's process, again where it had one before.
func (r *Replica) Start(ctx context.Context) error {
	a := r.arena
	port, err := local.FreePort()
	if err != nil {
		return err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	redis, postgres := a.redisURL(), a.url
	if r.ToRedis != nil {
		redis, postgres = r.ToRedis.url(redis), r.ToPostgres.url(postgres)
	}
	env := map[string]string{
		"SCHOOLBELL_DATABASE_URL":        postgres,
		"SCHOOLBELL_REDIS_URL":           redis,
		"SCHOOLBELL_HTTP_LISTEN":         addr,
		"SCHOOLBELL_ADMIN_KEY":           Key,
		"SCHOOLBELL_INSTANCE_ID":         r.Name,
		"SCHOOLBELL_QUOTA_LIMIT":         strconv.Itoa(a.cfg.Limit),
		"SCHOOLBELL_QUOTA_REST":          a.cfg.Rest.String(),
		"SCHOOLBELL_STOP_DELAY":          "300ms",
		"SCHOOLBELL_LOG_FORMAT":          "json",
		"SCHOOLBELL_DATABASE_MAX_CONNS":  "12",
		"SCHOOLBELL_DISPATCH_FIRST_TICK": "2s",
		"SCHOOLBELL_DISPATCH_TICK":       "2s",
	}
	if a.cfg.Wall {
		env["CLOCK_OFFSET_FILE"] = r.clock.Path()
	}
	if a.cfg.Within != nil {
		env["SCHOOLBELL_REDIS_PREFIX"] = a.cfg.Within.Name
	}
	maps.Copy(env, a.Receiver.settings())
	maps.Copy(env, a.cfg.Settings)
	maps.Copy(env, r.env)
	vars := make([]string, 0, len(env))
	for _, name := range slices.Sorted(maps.Keys(env)) {
		vars = append(vars, name+"="+env[name])
	}
	url := "http://" + addr
	program, err := local.StartProgram(ctx, local.ProgramConfig{
		Path: a.cfg.Program, Args: []string{"serve"}, Env: vars, Stdout: a.log, Stderr: a.log,
		Ready: func(ctx context.Context) error {
			return ready(ctx, url)
		},
	})
	if err != nil {
		return fmt.Errorf("replica %s: %w", r.Name, err)
	}
	r.process.Store(&process{Program: program, url: url})
	return nil
}

// Client calls this replica's API.
func (r *Replica) Client() *api.Client { return clientOf(r.URL()) }

// ready is nil where the replica at url says that it is ready for requests.
func ready(ctx context.Context, url string) error {
	r, err := clientOf(url).Ready(ctx)
	if err == nil && !r.Ready {
		err = errNoneReady
	}
	return err
}

func clientOf(url string) *api.Client {
	return &api.Client{BaseURL: url, Key: Key, HTTP: httpClient}
}

var httpClient = &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 16, DisableKeepAlives: true}}

// Alive reports whether the process runs.
func (r *Replica) Alive() bool {
	p := r.process.Load()
	if p == nil {
		return false
	}
	select {
	case <-p.Exited():
		return false
	default:
		return true
	}
}

// Kill ends the process with SIGKILL.
func (r *Replica) Kill() error {
	r.arena.note(verdict.Fault{At: time.Now(), Kind: verdict.Kill, Target: r.Name})
	p := r.process.Load()
	p.Kill()
	return p.Close()
}

// Pause stops the process where it stands (SIGSTOP) until resume is called, once.
func (r *Replica) Pause() (resume func() error, err error) {
	p := r.process.Load()
	f := verdict.Fault{At: time.Now(), Kind: verdict.Pause, Target: r.Name}
	if err := p.Pause(); err != nil {
		return nil, err
	}
	return func() error {
		f.Until = time.Now()
		r.arena.note(f)
		return p.Resume()
	}, nil
}

// Died notes that the process ended by itself, as if it had been killed, at the
// latest now.
func (r *Replica) Died(at time.Time) error {
	r.arena.note(verdict.Fault{At: at, Kind: verdict.Kill, Target: r.Name})
	return r.process.Load().Close()
}

// Stop ends the process gracefully (SIGTERM) and returns its exit code.
func (r *Replica) Stop(ctx context.Context) (int, error) {
	r.arena.note(verdict.Fault{At: time.Now(), Kind: "stop", Target: r.Name})
	return r.process.Load().Stop(ctx)
}

// Exited is closed when the process has ended.
func (r *Replica) Exited() <-chan struct{} { return r.process.Load().Exited() }

// Replicas are all replicas, alive or not.
func (a *Arena) Replicas() []*Replica { return a.all() }

func (a *Arena) all() []*Replica {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.replicas)
}

// Owner is the replica whose instance id is name; nil where there is none.
func (a *Arena) Owner(name string) *Replica {
	for _, r := range a.all() {
		if r.Name == name {
			return r
		}
	}
	return nil
}

func (a *Arena) note(f verdict.Fault) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.faults = append(a.faults, f)
}

// lines keeps the lines of several processes apart.
type lines struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
