package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// PostgresConfig says how a private PostgreSQL runs. The zero value is as
// durable as production: fsync, full_page_writes and synchronous_commit are
// on, so that what is judged or measured against it counts.
type PostgresConfig struct {
	// Fast gives durability up (fsync and full_page_writes off), for unit
	// tests. Such a server may lose or corrupt its data only when the machine
	// dies, not by Kill or an immediate shutdown: a commit is written before it
	// is answered, so synchronous_commit stays on.
	Fast bool

	// MaxConnections defaults to 200.
	MaxConnections int

	// Settings are further server settings, which win over ours, such as
	// "shared_buffers": "2GB".
	Settings map[string]string
}

// Shutdown is how PostgreSQL is asked to stop.
type Shutdown int

const (
	// Fast ends sessions, rolls back, writes a checkpoint (SIGINT).
	Fast Shutdown = iota
	// Immediate drops everything; the next start recovers from the log
	// (SIGQUIT).
	Immediate
)

func (m Shutdown) signal() syscall.Signal {
	if m == Immediate {
		return syscall.SIGQUIT
	}
	return syscall.SIGINT
}

// Postgres is one private PostgreSQL server. Superuser postgres, no password,
// UTC, databases in UTF-8. Its methods may be called from several goroutines.
type Postgres struct {
	bin  string // folder of its programs
	cfg  PostgresConfig
	cred *syscall.Credential
	port int
	srv  *server
}

// StartPostgres makes a data folder and starts a server on it; it returns when
// the server accepts connections. The context bounds the start, not the
// server's life. The caller closes it.
//
// PostgreSQL refuses to run as root; if we are root it runs as the system's
// user postgres.
func StartPostgres(ctx context.Context, cfg PostgresConfig) (*Postgres, error) {
	if cfg.MaxConnections == 0 {
		cfg.MaxConnections = 200
	}
	bin, err := postgresPrograms("/usr/lib/postgresql/*/bin")
	if err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	cred, err := postgresCredential()
	if err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	srv, err := newServer("postgres", folderFor(cred))
	if err != nil {
		return nil, err
	}
	p := &Postgres{bin: bin, cfg: cfg, cred: cred, srv: srv}
	srv.mu.Lock()
	if err = p.initialise(ctx); err == nil {
		err = onFreePort(func(port int) error {
			p.port = port
			return p.start(ctx)
		})
	}
	srv.mu.Unlock()
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (p *Postgres) dataDir() string { return filepath.Join(p.srv.dir, "data") }

// initialise makes the data folder; the caller holds srv.mu.
func (p *Postgres) initialise(ctx context.Context) error {
	if err := os.Chmod(p.srv.dir, 0o755); err != nil {
		return fmt.Errorf("init postgres: %w", err)
	}
	if p.cred != nil {
		if err := os.Chown(p.srv.dir, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
			return fmt.Errorf("init postgres: %w", err)
		}
	}
	log, err := os.OpenFile(p.srv.logPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("init postgres: %w", err)
	}
	defer log.Close()
	// No sync: a machine that dies takes this folder's purpose with it.
	init, err := launch(command{
		path: filepath.Join(p.bin, "initdb"),
		args: []string{"--no-sync", "--no-instructions", "--username=postgres", "--auth=trust",
			"--encoding=UTF8", "--locale=C.UTF-8", "--pgdata", p.dataDir()},
		env: serverEnv(), dir: p.srv.dir, credential: p.cred,
		stdout: log, stderr: log, deathSignal: syscall.SIGKILL,
	}, p.srv.guard)
	if err != nil {
		return fmt.Errorf("init postgres: %w", err)
	}
	if err := init.wait(ctx); err != nil {
		init.kill()
		return fmt.Errorf("init postgres: %w", err)
	}
	if init.state == nil || !init.state.Success() {
		return fmt.Errorf("init postgres: %s; it said: %s", init.exit(), p.srv.logSince(0))
	}
	return nil
}

// settings in the order of the command line, where the last one wins.
func (p *Postgres) settings() []string {
	args := []string{
		"listen_addresses=127.0.0.1",
		"port=" + strconv.Itoa(p.port),
		"unix_socket_directories=",
		"max_connections=" + strconv.Itoa(p.cfg.MaxConnections),
		"jit=off",
		"timezone=UTC",
		"log_timezone=UTC",
		"logging_collector=off",
		// In the data folder, so that they go with it: a killed server leaves
		// its segments in /dev/shm otherwise.
		"dynamic_shared_memory_type=mmap",
	}
	if p.cfg.Fast {
		args = append(args, "fsync=off", "full_page_writes=off")
	}
	for _, k := range slices.Sorted(maps.Keys(p.cfg.Settings)) {
		args = append(args, k+"="+p.cfg.Settings[k])
	}
	return args
}

// start launches the process; the caller holds srv.mu.
func (p *Postgres) start(ctx context.Context) error {
	args := []string{"-D", p.dataDir()}
	for _, s := range p.settings() {
		args = append(args, "-c", s)
	}
	return p.srv.start(ctx, command{
		path:       filepath.Join(p.bin, "postgres"),
		args:       args,
		dir:        p.srv.dir,
		credential: p.cred,
		// Immediate shutdown: its backends end and its shared memory goes.
		deathSignal: syscall.SIGQUIT,
	}, func(_ context.Context, proc *process) (bool, error) {
		pid, _, ready := p.readLockFile()
		return ready && pid == proc.pid, nil
	})
}

// readLockFile reads the postmaster.pid file: the process, its System V shared
// memory segment (0: none yet), and whether it says that it is ready.
func (p *Postgres) readLockFile() (pid, segment int, ready bool) {
	b, err := os.ReadFile(filepath.Join(p.dataDir(), "postmaster.pid"))
	if err != nil {
		return 0, 0, false
	}
	lines := strings.Split(string(b), "\n")
	if len(lines) < 8 {
		return 0, 0, false
	}
	pid, _ = strconv.Atoi(strings.TrimSpace(lines[0]))
	if f := strings.Fields(lines[6]); len(f) == 2 {
		segment, _ = strconv.Atoi(f[1])
	}
	return pid, segment, strings.TrimSpace(lines[7]) == "ready"
}

// Addr is the server's "127.0.0.1:port". It stays the same for its whole life.
func (p *Postgres) Addr() string { return loopback(p.port) }

// URL is the address of one database of this server for superuser postgres;
// the database "postgres" always exists.
func (p *Postgres) URL(database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User("postgres"),
		Host:     p.Addr(),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// PID is the process id of the postmaster; 0 while it is down.
func (p *Postgres) PID() int { return p.srv.pid() }

// CreateDatabase makes an empty database and returns its URL.
func (p *Postgres) CreateDatabase(ctx context.Context, name string) (string, error) {
	return p.CloneDatabase(ctx, name, "template1")
}

// CloneDatabase makes a database as a copy of another, to which nobody may be
// connected, and returns its URL.
func (p *Postgres) CloneDatabase(ctx context.Context, name, template string) (string, error) {
	err := p.exec(ctx, func(c *pgconn.PgConn) string {
		sql := "CREATE DATABASE " + quote(name) + " TEMPLATE " + quote(template)
		// Since version 15 a copy goes through the log by default: 370 ms
		// against 100 ms by files, which only needs the two checkpoints that
		// cost nothing without fsync.
		if p.cfg.Fast && majorVersion(c) >= 15 {
			sql += " STRATEGY file_copy"
		}
		return sql
	})
	if err != nil {
		return "", fmt.Errorf("create database %s: %w", name, err)
	}
	return p.URL(name), nil
}

// DropDatabase removes a database and ends the sessions in it. A database that
// does not exist is no error.
func (p *Postgres) DropDatabase(ctx context.Context, name string) error {
	err := p.exec(ctx, func(*pgconn.PgConn) string {
		return "DROP DATABASE IF EXISTS " + quote(name) + " WITH (FORCE)"
	})
	if err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

func majorVersion(c *pgconn.PgConn) int {
	major, _, _ := strings.Cut(c.ParameterStatus("server_version"), ".")
	n, _ := strconv.Atoi(major)
	return n
}

func (p *Postgres) exec(ctx context.Context, sql func(*pgconn.PgConn) string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	conn, err := pgconn.Connect(ctx, p.URL("postgres"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	_, err = conn.Exec(ctx, sql(conn)).ReadAll()
	return err
}

func quote(identifier string) string {
	return `"` + strings.ReplaceAll(identifier, `"`, `""`) + `"`
}

// Restart stops the server if it runs (or is paused, or was killed) and starts
// it on the same port and data.
func (p *Postgres) Restart(ctx context.Context, mode Shutdown) error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	if err := p.stop(ctx, mode); err != nil {
		return err
	}
	return again(ctx, p.start)
}

// Promote stops the server, starts it as a standby of nobody and promotes it, on
// the same port and data: what it wrote is what such a standby has, and it goes on
// on a new timeline as after a failover.
func (p *Postgres) Promote(ctx context.Context, mode Shutdown) error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	if err := p.stop(ctx, mode); err != nil {
		return err
	}
	signal := filepath.Join(p.dataDir(), "standby.signal")
	if err := os.WriteFile(signal, nil, 0o600); err != nil {
		return fmt.Errorf("promote postgres: %w", err)
	}
	if p.cred != nil {
		if err := os.Chown(signal, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
			return fmt.Errorf("promote postgres: %w", err)
		}
	}
	if err := again(ctx, p.start); err != nil {
		return err
	}
	if err := p.exec(ctx, func(*pgconn.PgConn) string { return "SELECT pg_promote()" }); err != nil {
		return fmt.Errorf("promote postgres: %w", err)
	}
	return nil
}

// Stop stops the server; Restart starts it again.
func (p *Postgres) Stop(ctx context.Context, mode Shutdown) error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	return p.stop(ctx, mode)
}

func (p *Postgres) stop(ctx context.Context, mode Shutdown) error {
	if p.srv.proc == nil || !p.srv.proc.running() {
		return nil
	}
	if err := p.resume(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return p.srv.stop(ctx, mode.signal())
}

// Kill ends the server and all its backends with SIGKILL, as a power failure
// does (but for what the kernel has not written yet), and returns when they are
// gone. Nothing happens if it is down already.
func (p *Postgres) Kill() {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	p.kill()
}

func (p *Postgres) kill() {
	proc := p.srv.proc
	if proc == nil || !proc.running() {
		return
	}
	// Standing still it forks no backend that we would miss.
	_ = pause(proc)
	backends := childrenOf(proc.pid)
	proc.kill()
	for _, id := range backends {
		_ = syscall.Kill(id, syscall.SIGKILL)
	}
	// The next start refuses while a backend is attached to the old memory.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = poll(ctx, nil, func() (bool, error) {
		for _, id := range backends {
			if st, err := readStat(id); err == nil && st.state != 'Z' {
				return false, nil
			}
		}
		return true, nil
	})
}

// Pause stops the postmaster and all its backends (SIGSTOP) and returns when
// the postmaster stands still: connections stay open and nobody answers. It
// fails with os.ErrProcessDone if the server is down.
func (p *Postgres) Pause() error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	if err := pause(p.srv.proc); err != nil {
		return err
	}
	return signalAll(childrenOf(p.srv.proc.pid), syscall.SIGSTOP)
}

// Resume ends a pause; what clients sent meanwhile is executed now.
func (p *Postgres) Resume() error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	return p.resume()
}

func (p *Postgres) resume() error {
	proc := p.srv.proc
	if !proc.running() {
		return os.ErrProcessDone
	}
	if err := signalAll(childrenOf(proc.pid), syscall.SIGCONT); err != nil {
		return err
	}
	return proc.signalGroup(syscall.SIGCONT)
}

// Close ends the server and removes its folder.
func (p *Postgres) Close() error {
	p.srv.mu.Lock()
	defer p.srv.mu.Unlock()
	if p.srv.closed {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := p.stop(ctx, Immediate)
	// Left behind only if the server was killed.
	if _, segment, _ := p.readLockFile(); segment != 0 {
		removeSegment(segment)
	}
	return errors.Join(err, p.srv.remove())
}

// signalAll signals the processes that are still there.
func signalAll(pids []int, sig syscall.Signal) error {
	var errs []error
	for _, id := range pids {
		if err := syscall.Kill(id, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, fmt.Errorf("send %s to process %d: %w", sig, id, err))
		}
	}
	return errors.Join(errs...)
}

// postgresPrograms finds the folder of the newest PostgreSQL: where Debian, who
// keeps initdb and postgres out of the PATH, puts each version, or in the PATH.
func postgresPrograms(pattern string) (string, error) {
	dirs, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	version := func(dir string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		return n
	}
	slices.SortFunc(dirs, func(a, b string) int { return version(b) - version(a) })
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	for _, dir := range dirs {
		if exists(filepath.Join(dir, "initdb")) && exists(filepath.Join(dir, "postgres")) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("install the Debian package postgresql: %w", exec.ErrNotFound)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// postgresCredential is the user that PostgreSQL runs as: nil (ourselves)
// unless we are root.
func postgresCredential() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, fmt.Errorf("install the Debian package postgresql, which adds the user: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user postgres: %w", err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, fmt.Errorf("user postgres: %w", err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

// folderFor is the folder for temporary files, or /tmp if another user can't
// enter that.
func folderFor(cred *syscall.Credential) string {
	dir := os.TempDir()
	if cred == nil {
		return dir
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "/tmp"
	}
	for d := abs; ; d = filepath.Dir(d) {
		info, err := os.Stat(d)
		if err != nil || info.Mode()&fs.FileMode(0o001) == 0 {
			return "/tmp"
		}
		if d == filepath.Dir(d) {
			return abs
		}
	}
}
