package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// RedisConfig says how a private redis-server runs. The zero value is durable
// as production is: append-only file, fsync every second, no eviction.
type RedisConfig struct {
	// Memory keeps no append-only file: data is gone with the process.
	Memory bool

	// Fsync is appendfsync: "everysec" (default), "always" or "no".
	Fsync string

	// Args are further command line options, after ours, such as
	// "--maxmemory", "64mb".
	Args []string
}

// Redis is one private redis-server. Its methods may be called from several
// goroutines.
type Redis struct {
	bin  string
	cfg  RedisConfig
	port int
	srv  *server
}

// StartRedis starts a redis-server and returns when it answers. The context
// bounds the start, not the server's life. The caller closes it.
func StartRedis(ctx context.Context, cfg RedisConfig) (*Redis, error) {
	return startRedis(ctx, cfg, nil)
}

// startRedis is StartRedis with further arguments that depend on the port, and
// with the ports at the given offsets free too.
func startRedis(ctx context.Context, cfg RedisConfig, args func(port int) []string, offsets ...int) (*Redis, error) {
	switch cfg.Fsync {
	case "":
		cfg.Fsync = "everysec"
	case "everysec", "always", "no":
	default:
		return nil, fmt.Errorf("start redis: fsync %q: want everysec, always or no", cfg.Fsync)
	}
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("start redis: install the Debian package redis-server: %w", err)
	}
	srv, err := newServer("redis", os.TempDir())
	if err != nil {
		return nil, err
	}
	r := &Redis{bin: bin, srv: srv}
	for range portAttempts {
		r.cfg = cfg
		if r.port, err = freePort(offsets...); err != nil {
			break
		}
		if args != nil {
			r.cfg.Args = append(append([]string(nil), cfg.Args...), args(r.port)...)
		}
		srv.mu.Lock()
		err = r.start(ctx)
		srv.mu.Unlock()
		if !errors.Is(err, errAddressInUse) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Redis) dataDir() string { return filepath.Join(r.srv.dir, "data") }

// start launches the process; the caller holds srv.mu.
func (r *Redis) start(ctx context.Context) error {
	if err := os.Mkdir(r.dataDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("start redis: %w", err) // such as after Close
	}
	aof := "yes"
	if r.cfg.Memory {
		aof = "no"
	}
	args := []string{
		"--bind", "127.0.0.1",
		"--port", strconv.Itoa(r.port),
		"--dir", r.dataDir(),
		"--save", "",
		"--appendonly", aof,
		"--appendfsync", r.cfg.Fsync,
		"--maxmemory-policy", "noeviction",
		"--daemonize", "no",
	}
	return r.srv.start(ctx, command{
		path:        r.bin,
		args:        append(args, r.cfg.Args...),
		dir:         r.dataDir(),
		deathSignal: syscall.SIGKILL,
	}, func(ctx context.Context, p *process) (bool, error) {
		return redisAnswers(ctx, r.port, p.pid), nil
	})
}

// Addr is the server's "127.0.0.1:port". It stays the same for its whole life.
func (r *Redis) Addr() string { return loopback(r.port) }

// URL is the server's "redis://127.0.0.1:port/0".
func (r *Redis) URL() string { return "redis://" + r.Addr() + "/0" }

// PID is the process id of redis-server; 0 while it is down.
func (r *Redis) PID() int { return r.srv.pid() }

// Restart stops the server if it runs (or is paused, or was killed) and starts
// it on the same port. With keepData it is stopped in order (SIGTERM, which
// flushes the append-only file) and comes back with what that file holds; a
// Kill before it makes it a crash instead. Without, it comes back empty, as
// after the loss of its disk.
func (r *Redis) Restart(ctx context.Context, keepData bool) error {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	if keepData {
		if err := r.srv.stop(ctx, syscall.SIGTERM); err != nil {
			return err
		}
	} else {
		r.kill()
		if err := os.RemoveAll(r.dataDir()); err != nil {
			return fmt.Errorf("restart redis: %w", err)
		}
	}
	return again(ctx, r.start)
}

// Kill ends the server with SIGKILL, as a crash does, and returns when it is
// gone. Nothing happens if it is down already.
func (r *Redis) Kill() {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	r.kill()
}

func (r *Redis) kill() {
	if r.srv.proc != nil {
		r.srv.proc.kill()
	}
}

// Pause stops the process (SIGSTOP) and returns when it stands still:
// connections stay open and nobody answers. It fails with os.ErrProcessDone if
// the server is down.
func (r *Redis) Pause() error {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	return pause(r.srv.proc)
}

// Resume ends a pause; what clients sent meanwhile is executed now.
func (r *Redis) Resume() error {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	return r.srv.proc.signalGroup(syscall.SIGCONT)
}

// Close ends the server and removes its folder.
func (r *Redis) Close() error {
	r.srv.mu.Lock()
	defer r.srv.mu.Unlock()
	r.kill()
	return r.srv.remove()
}

// again repeats a start on a fixed port while something else, such as a
// listener's last connection, still has that port.
func again(ctx context.Context, start func(context.Context) error) error {
	for i := 1; ; i++ {
		err := start(ctx)
		if !errors.Is(err, errAddressInUse) || i == portAttempts {
			return err
		}
		select {
		case <-time.After(time.Duration(i) * 50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// pause stops a process's group and waits until it stands: SIGSTOP is
// delivered, but not yet obeyed, when kill returns.
func pause(p *process) error {
	if err := p.signalGroup(syscall.SIGSTOP); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return poll(ctx, p, func() (bool, error) {
		st, err := readStat(p.pid)
		if err != nil {
			return false, fmt.Errorf("pause process %d: %w", p.pid, err)
		}
		return st.state == 'T' || st.state == 't', nil
	})
}

// redisAnswers reports whether the process pid answers PING at the port (so
// not while it loads its data, and not another server that has the port).
func redisAnswers(ctx context.Context, port, pid int) bool {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.DialContext(ctx, "tcp4", loopback(port))
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := conn.Write([]byte("PING\r\nINFO server\r\n")); err != nil {
		return false
	}
	in := bufio.NewReader(conn)
	if line, err := in.ReadString('\n'); err != nil || line != "+PONG\r\n" {
		return false
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return false
		}
		if id, ok := strings.CutPrefix(line, "process_id:"); ok {
			return strings.TrimSpace(id) == strconv.Itoa(pid)
		}
	}
}
