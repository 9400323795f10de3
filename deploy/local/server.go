package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// startTimeout bounds a start or stop whose context has no deadline.
const startTimeout = 60 * time.Second

// errAddressInUse is the answer of a start that lost the race for its port.
var errAddressInUse = errors.New("address already in use")

// server is what Redis and PostgreSQL have in common: a folder, a log file in
// it, and one process at a time.
type server struct {
	name  string // for errors
	dir   string
	guard *guard

	mu     sync.Mutex // serialises start, stop and close
	proc   *process   // nil before the first start
	closed bool
}

func newServer(name, parent string) (*server, error) {
	dir, g, err := guardedFolder(parent, name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &server{name: name, dir: dir, guard: g}, nil
}

func (s *server) logPath() string { return filepath.Join(s.dir, "log") }

// start launches c and waits until ready says so. The caller holds mu.
func (s *server) start(ctx context.Context, c command, ready func(context.Context, *process) (bool, error)) error {
	if s.closed {
		return fmt.Errorf("start %s: %w", s.name, os.ErrClosed)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("%s not ready after %s", s.name, startTimeout))
	defer cancel()
	log, err := os.OpenFile(s.logPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	before, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		_ = log.Close()
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	c.stdout, c.stderr, c.env = log, log, append(serverEnv(), c.env...)
	p, err := launch(c, s.guard)
	_ = log.Close() // the process has its own copy
	if err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	s.proc = p
	err = poll(ctx, p, func() (bool, error) { return ready(ctx, p) })
	if err == nil {
		return nil
	}
	if !errors.Is(err, errExited) {
		p.kill()
	}
	said := s.logSince(before)
	if errors.Is(err, errExited) {
		err = fmt.Errorf("%w (%s)", err, p.exit())
		if strings.Contains(said, "Address already in use") {
			err = errors.Join(err, errAddressInUse)
		}
	}
	return fmt.Errorf("start %s: %w; its log: %s", s.name, err, said)
}

// stop sends sig, lets a stopped process go on to take it, and waits; after
// the context's end the process is killed. The caller holds mu.
func (s *server) stop(ctx context.Context, sig syscall.Signal) error {
	if s.proc == nil || !s.proc.running() {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("%s not stopped after %s", s.name, startTimeout))
	defer cancel()
	_ = s.proc.signal(sig)
	_ = s.proc.signalGroup(syscall.SIGCONT)
	if err := s.proc.wait(ctx); err != nil {
		s.proc.kill()
		return fmt.Errorf("stop %s: %w", s.name, err)
	}
	return nil
}

// remove ends the guard and the folder. The caller holds mu and has ended the
// process.
func (s *server) remove() error {
	if s.closed {
		return nil
	}
	s.closed = true
	err := os.RemoveAll(s.dir)
	if gerr := s.guard.release(); gerr != nil {
		err = errors.Join(err, gerr)
	}
	if err != nil {
		return fmt.Errorf("close %s: %w", s.name, err)
	}
	return nil
}

// logSince returns what the log holds after the offset, at most its last 2 KiB.
func (s *server) logSince(offset int64) string {
	const most = 2048
	f, err := os.Open(s.logPath())
	if err != nil {
		return ""
	}
	defer f.Close()
	if end, err := f.Seek(0, io.SeekEnd); err == nil && end-offset > most {
		offset = end - most
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return ""
	}
	b, _ := io.ReadAll(io.LimitReader(f, most))
	return strings.TrimSpace(string(b))
}

// pid of the running process; 0 if there is none.
func (s *server) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc == nil || !s.proc.running() {
		return 0
	}
	return s.proc.pid
}
