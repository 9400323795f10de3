package local

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Builder builds our own programs into a folder of its own, each once.
type Builder struct {
	dir   string
	guard *guard
	race  bool

	mu    sync.Mutex
	built map[string]*build
}

type build struct {
	mu   sync.Mutex // held while building
	done bool
	path string
	err  error
}

// NewBuilder makes the folder. With race the programs are built with the race
// detector, which needs cgo. The caller closes it.
func NewBuilder(race bool) (*Builder, error) {
	dir, g, err := guardedFolder(os.TempDir(), "programs")
	if err != nil {
		return nil, fmt.Errorf("new builder: %w", err)
	}
	return &Builder{dir: dir, guard: g, race: race, built: make(map[string]*build)}, nil
}

// Build builds a main package, given by its import path, with the given build
// tags and returns the program's path. The same package and tags are built
// once: a later call returns the same path (or error) and waits for a build
// that is going on. It must run inside the module, as tests do.
func (b *Builder) Build(ctx context.Context, pkg string, tags ...string) (string, error) {
	tags = slices.Sorted(slices.Values(tags))
	key := pkg + " " + strings.Join(tags, ",")
	b.mu.Lock()
	if b.built == nil {
		b.mu.Unlock()
		return "", fmt.Errorf("build %s: %w", pkg, os.ErrClosed)
	}
	one := b.built[key]
	if one == nil {
		one = new(build)
		b.built[key] = one
	}
	b.mu.Unlock()
	one.mu.Lock()
	defer one.mu.Unlock()
	if one.done {
		return one.path, one.err
	}
	sum := sha256.Sum256([]byte(key))
	path := filepath.Join(b.dir, fmt.Sprintf("%s-%x", filepath.Base(pkg), sum[:4]))
	if err := b.goBuild(ctx, path, pkg, tags); err != nil {
		err = fmt.Errorf("build %s: %w", pkg, err)
		if ctx.Err() == nil { // else the next caller may have more time
			one.done, one.err = true, err
		}
		return "", err
	}
	one.done, one.path = true, path
	return path, nil
}

func (b *Builder) goBuild(ctx context.Context, path, pkg string, tags []string) error {
	goTool, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	args := []string{"build", "-buildvcs=false", "-o", path}
	if b.race {
		args = append(args, "-race")
	}
	if len(tags) > 0 {
		args = append(args, "-tags", strings.Join(tags, ","))
	}
	var said bytes.Buffer
	p, err := StartProgram(ctx, ProgramConfig{Path: goTool, Args: append(args, pkg), Stdout: &said, Stderr: &said})
	if err != nil {
		return err
	}
	code, err := p.Wait(ctx)
	err = errors.Join(err, p.Close())
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, strings.TrimSpace(said.String()))
	}
	return err
}

// Close removes the folder; programs that run go on.
func (b *Builder) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.built == nil {
		return nil
	}
	b.built = nil
	if err := errors.Join(os.RemoveAll(b.dir), b.guard.release()); err != nil {
		return fmt.Errorf("close builder: %w", err)
	}
	return nil
}

// ProgramConfig says how one of our programs runs.
type ProgramConfig struct {
	Path string
	Args []string

	// Env is added to our own environment, "NAME=value" each; of a name that
	// comes twice the last one counts.
	Env []string

	// Dir is the working directory; "" is ours.
	Dir string

	// Stdout and Stderr get what the program writes; nil throws it away. They
	// are written to from other goroutines until Wait returns.
	Stdout, Stderr io.Writer

	// Ready is asked again and again until it returns nil; nil: ready at once.
	Ready func(ctx context.Context) error
}

// Program is one of our programs as a real process, to be killed, paused and
// waited for. Its methods may be called from several goroutines.
type Program struct {
	name  string
	guard *guard
	proc  *process
}

// StartProgram starts a program and returns when it is ready. It fails, and
// leaves nothing, when the program ends before that or the context does; the
// context bounds the start, not the program's life. The caller closes it.
func StartProgram(ctx context.Context, cfg ProgramConfig) (*Program, error) {
	name := filepath.Base(cfg.Path)
	g, err := newGuard("")
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	proc, err := launch(command{
		path: cfg.Path, args: cfg.Args, dir: cfg.Dir,
		env:    append(os.Environ(), cfg.Env...),
		stdout: cfg.Stdout, stderr: cfg.Stderr,
		deathSignal: syscall.SIGKILL,
	}, g)
	if err != nil {
		return nil, errors.Join(err, g.release())
	}
	p := &Program{name: name, guard: g, proc: proc}
	if cfg.Ready == nil {
		return p, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("not ready after %s", startTimeout))
	defer cancel()
	var last error
	err = poll(ctx, proc, func() (bool, error) {
		last = cfg.Ready(ctx)
		return last == nil, nil
	})
	if err != nil {
		if errors.Is(err, errExited) {
			err = fmt.Errorf("%w (%s)", err, proc.exit())
		}
		err = fmt.Errorf("start %s: %w", name, errors.Join(err, last))
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// PID is the process's id, also after it has ended.
func (p *Program) PID() int { return p.proc.pid }

// Signal sends a signal to the process; os.ErrProcessDone if it has ended.
func (p *Program) Signal(sig syscall.Signal) error { return p.proc.signal(sig) }

// Kill ends the process with SIGKILL and returns when it is gone.
func (p *Program) Kill() { p.proc.kill() }

// Pause stops the process (SIGSTOP) and returns when it stands still;
// os.ErrProcessDone if it has ended.
func (p *Program) Pause() error { return pause(p.proc) }

// Resume ends a pause; os.ErrProcessDone if the process has ended.
func (p *Program) Resume() error { return p.proc.signalGroup(syscall.SIGCONT) }

// Exited is closed when the process has ended.
func (p *Program) Exited() <-chan struct{} { return p.proc.exited }

// Wait returns the exit code once the process has ended, as a shell counts it:
// 128 + the signal's number for one that a signal ended. It may be called
// again. An error is the context's end, or output that could not be written.
func (p *Program) Wait(ctx context.Context) (int, error) {
	if err := p.proc.wait(ctx); err != nil {
		return 0, fmt.Errorf("%s: %w", p.name, err)
	}
	if p.proc.state == nil {
		return 0, fmt.Errorf("wait for %s: %w", p.name, p.proc.err)
	}
	code := p.proc.state.ExitCode()
	if ws, ok := p.proc.state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		code = 128 + int(ws.Signal())
	}
	if p.proc.err != nil {
		return code, fmt.Errorf("wait for %s: %w", p.name, p.proc.err)
	}
	return code, nil
}

// Stop sends SIGTERM, waits for the exit code, and kills the process when the
// context ends first.
func (p *Program) Stop(ctx context.Context) (int, error) {
	if err := p.proc.signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return 0, fmt.Errorf("stop %s: %w", p.name, err)
	}
	code, err := p.Wait(ctx)
	if err != nil {
		p.proc.kill()
	}
	return code, err
}

// Close kills the process if it still runs.
func (p *Program) Close() error {
	p.proc.kill()
	if err := p.guard.release(); err != nil {
		return fmt.Errorf("close %s: %w", p.name, err)
	}
	return nil
}
