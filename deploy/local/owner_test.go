package local

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ownerEnv makes this test binary an owner of servers instead, which the tests
// below then end in every way a program can end.
const ownerEnv = "SCHOOLBELL_LOCAL_TEST_OWNER"

// report is what an owner says about what must not outlive it.
type report struct {
	PIDs []int
	Dirs []string
	Left string // a folder that nobody is left to remove
}

func own(kind string) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	rep, err := ownings[kind](ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	if err := json.NewEncoder(os.Stdout).Encode(rep); err != nil {
		os.Exit(4)
	}
	// How to end: a line on standard input, or a signal.
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	switch line {
	case "panic\n":
		panic("as told")
	case "exit\n":
		os.Exit(0)
	}
	select {}
}

var ownings = map[string]func(context.Context) (report, error){
	"redis": func(ctx context.Context) (report, error) {
		r, err := StartRedis(ctx, RedisConfig{})
		if err != nil {
			return report{}, err
		}
		return report{PIDs: []int{r.PID()}, Dirs: []string{r.srv.dir}}, nil
	},
	"paused redis": func(ctx context.Context) (report, error) {
		r, err := StartRedis(ctx, RedisConfig{})
		if err != nil {
			return report{}, err
		}
		return report{PIDs: []int{r.PID()}, Dirs: []string{r.srv.dir}}, r.Pause()
	},
	"killed redis": func(ctx context.Context) (report, error) {
		r, err := StartRedis(ctx, RedisConfig{})
		if err != nil {
			return report{}, err
		}
		rep := report{PIDs: []int{r.PID()}, Dirs: []string{r.srv.dir}}
		r.Kill()
		return rep, nil
	},
	// The parent-death signal must do alone what it can: the process ends.
	"unguarded redis": func(ctx context.Context) (report, error) {
		r, err := StartRedis(ctx, RedisConfig{})
		if err != nil {
			return report{}, err
		}
		return report{PIDs: []int{r.PID()}, Left: r.srv.dir}, r.srv.guard.cmd.Process.Kill()
	},
	"program": func(ctx context.Context) (report, error) {
		p, err := StartProgram(ctx, ProgramConfig{Path: "sleep", Args: []string{"3600"}})
		if err != nil {
			return report{}, err
		}
		return report{PIDs: []int{p.PID()}}, nil
	},
	"program with children": func(ctx context.Context) (report, error) {
		_, rep, err := startFamily(ctx)
		return rep, err
	},
	"paused program with children": func(ctx context.Context) (report, error) {
		p, rep, err := startFamily(ctx)
		if err != nil {
			return report{}, err
		}
		return rep, p.Pause()
	},
	"builder": func(ctx context.Context) (report, error) {
		b, err := NewBuilder(false)
		if err != nil {
			return report{}, err
		}
		_, err = b.Build(ctx, testProgram)
		return report{Dirs: []string{b.dir}}, err
	},
	"postgres": func(ctx context.Context) (report, error) {
		p, err := StartPostgres(ctx, PostgresConfig{Fast: true})
		if err != nil {
			return report{}, err
		}
		return report{PIDs: append(childrenOf(p.PID()), p.PID()), Dirs: []string{p.srv.dir}}, nil
	},
	"paused postgres": func(ctx context.Context) (report, error) {
		p, err := StartPostgres(ctx, PostgresConfig{Fast: true})
		if err != nil {
			return report{}, err
		}
		rep := report{PIDs: append(childrenOf(p.PID()), p.PID()), Dirs: []string{p.srv.dir}}
		return rep, p.Pause()
	},
}

func startFamily(ctx context.Context) (*Program, report, error) {
	p, err := StartProgram(ctx, ProgramConfig{Path: "sh", Args: []string{"-c", "sleep 3600 & sleep 3600"}})
	if err != nil {
		return nil, report{}, err
	}
	var children []int
	err = poll(ctx, p.proc, func() (bool, error) {
		children = childrenOf(p.PID())
		return len(children) == 2, nil
	})
	return p, report{PIDs: append(children, p.PID())}, err
}

func TestNothingOutlivesItsOwner(t *testing.T) {
	t.Parallel()
	signal := func(s syscall.Signal) func(*exec.Cmd, *bufio.Writer) {
		return func(c *exec.Cmd, _ *bufio.Writer) { _ = c.Process.Signal(s) }
	}
	say := func(line string) func(*exec.Cmd, *bufio.Writer) {
		return func(_ *exec.Cmd, in *bufio.Writer) {
			_, _ = in.WriteString(line + "\n")
			_ = in.Flush()
		}
	}
	for _, tc := range []struct {
		kind, name string
		end        func(*exec.Cmd, *bufio.Writer)
	}{
		{"redis", "SIGKILL", signal(syscall.SIGKILL)},
		{"redis", "SIGTERM", signal(syscall.SIGTERM)},
		{"redis", "SIGINT", signal(syscall.SIGINT)},
		{"redis", "panic", say("panic")},
		{"redis", "os.Exit", say("exit")},
		{"paused redis", "SIGKILL", signal(syscall.SIGKILL)},
		{"killed redis", "SIGKILL", signal(syscall.SIGKILL)},
		{"unguarded redis", "SIGKILL", signal(syscall.SIGKILL)},
		{"program", "SIGKILL", signal(syscall.SIGKILL)},
		{"program", "os.Exit", say("exit")},
		{"program with children", "SIGKILL", signal(syscall.SIGKILL)},
		{"paused program with children", "SIGKILL", signal(syscall.SIGKILL)},
		{"builder", "SIGKILL", signal(syscall.SIGKILL)},
		{"postgres", "SIGKILL", signal(syscall.SIGKILL)},
		{"postgres", "panic", say("panic")},
		{"paused postgres", "SIGKILL", signal(syscall.SIGKILL)},
		// As a job runner ends a whole job.
		{"postgres", "SIGKILL of its group", func(c *exec.Cmd, _ *bufio.Writer) {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
		}},
	} {
		t.Run(tc.kind+" "+tc.name, func(t *testing.T) {
			t.Parallel()
			rep, cmd, in := startOwner(t, tc.kind)
			if rep.Left != "" {
				t.Cleanup(func() { require.NoError(t, os.RemoveAll(rep.Left)) })
			}
			for _, dir := range rep.Dirs {
				require.False(t, noFolder(dir))
			}
			tc.end(cmd, in)
			_ = cmd.Wait()
			for _, id := range rep.PIDs {
				eventually(t, fmt.Sprintf("process %d is gone", id), func() bool { return gone(id) })
			}
			for _, dir := range rep.Dirs {
				eventually(t, "the folder is gone", func() bool { return noFolder(dir) })
			}
		})
	}
}

func startOwner(t *testing.T, kind string) (report, *exec.Cmd, *bufio.Writer) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), ownerEnv+"="+kind)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var said tail
	cmd.Stderr = &said
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var rep report
	if err := json.NewDecoder(out).Decode(&rep); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Fatalf("owner of %s: %v: %s", kind, err, said.b)
	}
	require.NotEmpty(t, len(rep.PIDs)+len(rep.Dirs))
	return rep, cmd, bufio.NewWriter(in)
}

// tail keeps what an owner says on its standard error.
type tail struct{ b []byte }

func (w *tail) Write(p []byte) (int, error) {
	w.b = append(w.b, p...)
	return len(p), nil
}
