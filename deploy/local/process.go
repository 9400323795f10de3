package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// command says what to start.
type command struct {
	path       string
	args       []string
	env        []string
	dir        string
	credential *syscall.Credential // nil: our own
	stdout     io.Writer
	stderr     io.Writer

	// deathSignal is what ends it when we die: SIGKILL, or SIGQUIT for
	// PostgreSQL, which then takes its backends and shared memory along.
	deathSignal syscall.Signal
}

// process is one child that can't outlive us.
type process struct {
	pid    int
	exited chan struct{} // closed once it has ended, been reaped and forgotten

	mu   sync.Mutex // held while signalling, so that no signal hits a reused id
	done bool

	state *os.ProcessState // readable after exited
	err   error            // of waiting, not of the process; readable after exited
}

func launch(c command, g *guard) (*process, error) {
	p := &process{exited: make(chan struct{})}
	started := make(chan error, 1)
	go p.run(c, g, started)
	if err := <-started; err != nil {
		<-p.exited
		return nil, fmt.Errorf("start %s: %w", c.path, err)
	}
	return p, nil
}

// run owns the process from fork to reaping, all on one OS thread: the kernel
// sends the parent-death signal when the *thread* that forked ends, and Go
// ends threads as it likes unless a goroutine is locked to it.
func (p *process) run(c command, g *guard, started chan<- error) {
	defer close(p.exited)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.Command(c.path, c.args...)
	cmd.Dir, cmd.Env = c.dir, c.env
	cmd.Stdout, cmd.Stderr = c.stdout, c.stderr
	cmd.WaitDelay = time.Second // a grandchild may hold our output pipe open
	attr, err := childAttributes(c)
	if err != nil {
		started <- err
		return
	}
	cmd.SysProcAttr = attr
	if err := cmd.Start(); err != nil {
		started <- err
		return
	}
	p.pid = cmd.Process.Pid

	born, err := startTime(p.pid)
	if err == nil {
		err = g.watch(p.pid, born, c.deathSignal)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		p.done = true
		started <- err
		return
	}
	started <- nil

	// Until it is reaped its id names nobody else, so everything that goes by
	// the id ends before that.
	awaitExit(p.pid)
	p.mu.Lock()
	p.done = true
	_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	_ = g.forget()
	p.mu.Unlock()

	err = cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		p.err = err
	}
	p.state = cmd.ProcessState
}

// signal sends sig to the process; os.ErrProcessDone if it has ended.
func (p *process) signal(sig syscall.Signal) error { return p.send(p.pid, sig) }

// signalGroup sends sig to the process and to what it forked.
func (p *process) signalGroup(sig syscall.Signal) error { return p.send(-p.pid, sig) }

func (p *process) send(id int, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return os.ErrProcessDone
	}
	if err := syscall.Kill(id, sig); err != nil {
		if errors.Is(err, syscall.ESRCH) {
			return os.ErrProcessDone
		}
		return fmt.Errorf("send %s to process %d: %w", sig, p.pid, err)
	}
	return nil
}

// running is false from the moment the process has been seen to end.
func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// wait returns nil once the process has ended.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.exited:
		return nil
	default:
	}
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for process %d: %w", p.pid, context.Cause(ctx))
	}
}

// kill ends the process and what it forked, and waits: SIGKILL needs no
// patience.
func (p *process) kill() {
	_ = p.signalGroup(syscall.SIGKILL)
	<-p.exited
}

// exit says in words how the process ended.
func (p *process) exit() string {
	if p.state == nil {
		return "unknown exit"
	}
	return p.state.String()
}

// procStat is what we read of /proc/PID/stat.
type procStat struct {
	state  byte // R, S, D, T (stopped), Z (zombie) …
	parent int
	born   uint64 // clock ticks after boot
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, err
	}
	// The second field is the name in parentheses and may hold anything.
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return procStat{}, fmt.Errorf("read state of process %d: %d fields", pid, len(f))
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return procStat{}, fmt.Errorf("read state of process %d: %w", pid, err)
	}
	born, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("read state of process %d: %w", pid, err)
	}
	return procStat{state: f[0][0], parent: parent, born: born}, nil
}

func startTime(pid int) (uint64, error) {
	st, err := readStat(pid)
	return st.born, err
}

// childrenOf lists the live children of a process.
func childrenOf(pid int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var children []int
	for _, e := range entries {
		id, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if st, err := readStat(id); err == nil && st.parent == pid && st.state != 'Z' {
			children = append(children, id)
		}
	}
	return children
}

// poll calls done until it says true or fails, and answers why it ended
// otherwise: the context, or the process that ended (errExited).
func poll(ctx context.Context, p *process, done func() (bool, error)) error {
	var exited <-chan struct{}
	if p != nil {
		exited = p.exited
	}
	wait := 2 * time.Millisecond
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-timer.C:
			wait = min(wait*5/4, 50*time.Millisecond)
			timer.Reset(wait)
		case <-exited:
			return errExited
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

var errExited = errors.New("the process ended")
