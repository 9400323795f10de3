package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
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

	// Env is added to the server's environment, "NAME=value" each.
	Env []string
}

// Redis is one private redis-server. Its methods may be called from several
// goroutines.
type Redis struct {
	bin  string
	role redisRole
	port int
	srv  *server
}

// redisRole is what a redis-server is started as.
type redisRole struct {
	// args is the whole command line, for the port and folders of r. It is
	// asked at each start, when the data folder exists.
	args func(r *Redis) ([]string, error)

	env []string // added to the server's environment

	// offsets from the port at which further ports must be free.
	offsets []int
}

// StartRedis starts a redis-server and returns when it answers. The context
// bounds the start, not the server's life. The caller closes it.
func StartRedis(ctx context.Context, cfg RedisConfig) (*Redis, error) {
	role, err := plainRedis(cfg)
	if err != nil {
		return nil, err
	}
	return startRedis(ctx, role)
}

func plainRedis(cfg RedisConfig) (redisRole, error) {
	fsync, aof := cfg.Fsync, "yes"
	switch fsync {
	case "":
		fsync = "everysec"
	case "everysec", "always", "no":
	default:
		return redisRole{}, fmt.Errorf("start redis: fsync %q: want everysec, always or no", fsync)
	}
	if cfg.Memory {
		aof = "no"
	}
	return redisRole{env: cfg.Env, args: func(r *Redis) ([]string, error) {
		args := []string{
			"--bind", "127.0.0.1",
			"--port", strconv.Itoa(r.port),
			"--dir", r.dataDir(),
			"--save", "",
			"--appendonly", aof,
			"--appendfsync", fsync,
			"--maxmemory-policy", "noeviction",
			"--daemonize", "no",
		}
		return append(args, cfg.Args...), nil
	}}, nil
}

func startRedis(ctx context.Context, role redisRole) (*Redis, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("start redis: install the Debian package redis-server: %w", err)
	}
	srv, err := newServer("redis", os.TempDir())
	if err != nil {
		return nil, err
	}
	r := &Redis{bin: bin, role: role, srv: srv}
	err = onFreePort(func(port int) error {
		srv.mu.Lock()
		defer srv.mu.Unlock()
		r.port = port
		return r.start(ctx)
	}, role.offsets...)
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
	args, err := r.role.args(r)
	if err != nil {
		return fmt.Errorf("start redis: %w", err)
	}
	return r.srv.start(ctx, command{
		path:        r.bin,
		args:        args,
		env:         r.role.env,
		dir:         r.dataDir(),
		deathSignal: syscall.SIGKILL,
	}, func(ctx context.Context, p *process) (bool, error) {
		return r.answers(ctx, p.pid), nil
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
// after the loss of its disk; a Cluster node keeps its place in the cluster.
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

// answers reports whether the process pid answers PING at our port (so not
// while it loads its data, and not another server that has the port).
func (r *Redis) answers(ctx context.Context, pid int) bool {
	if pong, err := r.ask(ctx, "PING"); err != nil || pong != "+PONG" {
		return false
	}
	info, err := r.ask(ctx, "INFO server")
	return err == nil && strings.Contains(info, fmt.Sprintf("\r\nprocess_id:%d\r\n", pid))
}

// Do sends one command, written as for redis-cli ("SET k v"), on a connection of
// its own, and returns the answer as text: a list has a line for each element,
// nothing is "$-1". What the server refuses is an error, and so is an answer that
// takes longer than ten seconds. It needs no client library, which the importers
// of this package have in their own version.
func (r *Redis) Do(ctx context.Context, command string) (string, error) {
	answer, err := r.exchange(ctx, command, 10*time.Second)
	if err == nil && answer.refused {
		err = errors.New(answer.text)
	}
	if err != nil {
		return "", fmt.Errorf("redis at %s: %s: %w", r.Addr(), command, err)
	}
	return answer.text, nil
}

// ask is Do for those who look at refusals themselves: the line "-ERR …", as the
// first line of any other reply but a text or a list.
func (r *Redis) ask(ctx context.Context, command string) (string, error) {
	answer, err := r.exchange(ctx, command, time.Second)
	if answer.refused {
		return "-" + answer.text, nil
	}
	return answer.text, err
}

type answer struct {
	text    string
	refused bool
}

func (r *Redis) exchange(ctx context.Context, command string, patience time.Duration) (answer, error) {
	d := net.Dialer{Timeout: patience}
	conn, err := d.DialContext(ctx, "tcp4", r.Addr())
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return answer{}, err
	}
	return readAnswer(bufio.NewReader(conn))
}

func readAnswer(in *bufio.Reader) (answer, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return answer{}, err
	}
	line = strings.TrimRight(line, "\r\n")
	if text, ok := strings.CutPrefix(line, "-"); ok {
		return answer{text, true}, nil
	}
	n, err := strconv.Atoi(strings.TrimLeft(line, "$*"))
	if err != nil || n < 0 {
		return answer{text: line}, nil
	}
	switch line[0] {
	case '$':
		b := make([]byte, n+len("\r\n"))
		_, err := io.ReadFull(in, b)
		return answer{text: string(b[:n])}, err
	case '*':
		var all []string
		for range n {
			one, err := readAnswer(in)
			if err != nil {
				return answer{}, err
			}
			all = append(all, one.text)
		}
		return answer{text: strings.Join(all, "\n")}, nil
	}
	return answer{text: line}, nil
}
