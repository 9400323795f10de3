package local

import (
	_ "embed"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
)

//go:embed guard.sh
var guardScript string

// guard is a small shell process that outlives us and cleans up what we could
// not: it reads from a pipe that only we hold, so it sees the end of input when
// we end in whatever way.
type guard struct {
	cmd *exec.Cmd

	mu  sync.Mutex // orders what is written
	in  io.WriteCloser
	end bool
	err error
}

func newGuard(dir string) (*guard, error) {
	cmd := exec.Command("/bin/sh", "-c", guardScript, "schoolbell-guard", dir)
	cmd.Dir = "/"
	cmd.Env = serverEnv()
	// A group of its own: an interrupt from the terminal, or a kill of our
	// whole group, must not end the one that cleans up.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start guard: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start guard: %w", err)
	}
	return &guard{cmd: cmd, in: in}, nil
}

// watch makes the guard end the process with sig should we die before forget.
func (g *guard) watch(pid int, start uint64, sig syscall.Signal) error {
	name := "KILL"
	if sig == syscall.SIGQUIT {
		name = "QUIT"
	}
	return g.say(fmt.Sprintf("watch %d %d %s\n", pid, start, name))
}

func (g *guard) forget() error { return g.say("forget\n") }

func (g *guard) keep() error { return g.say("keep\n") }

func (g *guard) say(line string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.end {
		return fmt.Errorf("tell guard: %w", os.ErrClosed)
	}
	if _, err := io.WriteString(g.in, line); err != nil {
		return fmt.Errorf("tell guard: %w", err)
	}
	return nil
}

// release ends the guard, which then removes whatever is still there, and
// waits for it.
func (g *guard) release() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.end {
		return g.err
	}
	g.end = true
	_ = g.in.Close()
	if err := g.cmd.Wait(); err != nil {
		g.err = fmt.Errorf("end guard: %w", err)
	}
	return g.err
}

// guardedFolder makes a folder whose removal is promised before it exists.
func guardedFolder(parent, kind string) (string, *guard, error) {
	dir := filepath.Join(parent, fmt.Sprintf("schoolbell-%s-%016x", kind, rand.Uint64()))
	g, err := newGuard(dir)
	if err != nil {
		return "", nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		_ = g.keep()
		_ = g.release()
		return "", nil, fmt.Errorf("make folder: %w", err)
	}
	return dir, g, nil
}

// serverEnv is the whole environment of the servers: what the caller has set
// for its own connections (PGOPTIONS, TZ, LANG …) must not change them.
func serverEnv() []string {
	path := os.Getenv("PATH")
	if path == "" {
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	}
	return []string{"PATH=" + path, "LC_ALL=C", "TZ=UTC"}
}
