package local

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const testProgram = "schoolbell/deploy/local/testdata/program"

func builder(t *testing.T) *Builder {
	t.Helper()
	b, err := NewBuilder(false)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

func TestBuildOnce(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	b := builder(t)
	var (
		wg    sync.WaitGroup
		paths [3]string
	)
	for i := range paths {
		wg.Go(func() {
			var err error
			if paths[i], err = b.Build(ctx, testProgram); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.Equal(t, paths[0], paths[1])
	require.Equal(t, paths[0], paths[2])
	before, err := os.Stat(paths[0])
	require.NoError(t, err)

	red, err := b.Build(ctx, testProgram, "red")
	require.NoError(t, err)
	require.NotEqual(t, paths[0], red)
	require.Contains(t, output(t, red, "exit", "0"), "red")
	require.Contains(t, output(t, paths[0], "exit", "0"), "grey")

	again, err := b.Build(ctx, testProgram)
	require.NoError(t, err)
	after, err := os.Stat(again)
	require.NoError(t, err)
	require.Equal(t, before.ModTime(), after.ModTime())

	require.NoError(t, b.Close())
	require.True(t, noFolder(b.dir))
	_, err = b.Build(ctx, testProgram)
	require.ErrorIs(t, err, os.ErrClosed)
}

func TestBuildSaysWhatTheCompilerSaid(t *testing.T) {
	t.Parallel()
	b := builder(t)
	ended, cancel := context.WithCancel(bounded(t))
	cancel()
	_, err := b.Build(ended, testProgram)
	require.ErrorIs(t, err, context.Canceled)
	_, err = b.Build(bounded(t), testProgram)
	require.NoError(t, err, "one caller's end is not another's")
	_, err = b.Build(bounded(t), "schoolbell/no/such/package")
	require.ErrorContains(t, err, "no/such/package")
}

func output(t *testing.T, path string, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	p, err := StartProgram(bounded(t), ProgramConfig{Path: path, Args: args, Stdout: &out, Stderr: &out})
	require.NoError(t, err)
	_, err = p.Wait(bounded(t))
	require.NoError(t, err)
	require.NoError(t, p.Close())
	return out.String()
}

func TestProgramLife(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	b := builder(t)
	path, err := b.Build(ctx, testProgram)
	require.NoError(t, err)

	start := func(t *testing.T, cfg ProgramConfig) *Program {
		t.Helper()
		cfg.Path = path
		p, err := StartProgram(ctx, cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, p.Close()) })
		return p
	}
	serve := func(t *testing.T) *Program {
		t.Helper()
		file := filepath.Join(t.TempDir(), "ready")
		return start(t, ProgramConfig{Args: []string{"serve", file}, Ready: func(context.Context) error {
			_, err := os.Stat(file)
			return err
		}})
	}
	waited := func(t *testing.T, p *Program) int {
		t.Helper()
		code, err := p.Wait(ctx)
		require.NoError(t, err)
		return code
	}

	t.Run("exit code", func(t *testing.T) {
		p := start(t, ProgramConfig{Args: []string{"exit", "3"}})
		require.Equal(t, 3, waited(t, p))
		require.Equal(t, 3, waited(t, p), "again")
		<-p.Exited()
		require.ErrorIs(t, p.Signal(syscall.SIGTERM), os.ErrProcessDone)
		require.ErrorIs(t, p.Pause(), os.ErrProcessDone)
		require.ErrorIs(t, p.Resume(), os.ErrProcessDone)
		p.Kill()
	})
	t.Run("environment and output", func(t *testing.T) {
		var out bytes.Buffer
		p := start(t, ProgramConfig{
			Args: []string{"print", "TONE"}, Env: []string{"TONE=low", "TONE=high"}, Stdout: &out,
		})
		require.Zero(t, waited(t, p))
		require.Equal(t, "high\n", out.String())
	})
	t.Run("signal", func(t *testing.T) {
		p := serve(t)
		require.NoError(t, p.Signal(syscall.SIGTERM))
		require.Equal(t, 7, waited(t, p))
	})
	t.Run("kill", func(t *testing.T) {
		p := serve(t)
		p.Kill()
		require.True(t, gone(p.PID()))
		require.Equal(t, 128+9, waited(t, p))
	})
	t.Run("pause", func(t *testing.T) {
		p := serve(t)
		require.NoError(t, p.Pause())
		require.NoError(t, p.Signal(syscall.SIGTERM))
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, err := p.Wait(short)
		require.ErrorIs(t, err, context.DeadlineExceeded, "it takes no signal while it stands still")
		require.NoError(t, p.Resume())
		require.Equal(t, 7, waited(t, p))
	})
	t.Run("stop", func(t *testing.T) {
		code, err := serve(t).Stop(ctx)
		require.NoError(t, err)
		require.Equal(t, 7, code)
	})
	t.Run("stop of one that does not listen", func(t *testing.T) {
		var out syncBuffer
		p := start(t, ProgramConfig{Args: []string{"deaf"}, Stdout: &out, Ready: func(context.Context) error {
			if out.empty() {
				return errors.New("does not ignore it yet")
			}
			return nil
		}})
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		_, err := p.Stop(short)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.True(t, gone(p.PID()))
	})
	t.Run("close", func(t *testing.T) {
		p := serve(t)
		require.NoError(t, p.Pause())
		require.NoError(t, p.Close())
		require.True(t, gone(p.PID()))
	})
}

func TestProgramTakesItsChildrenAlong(t *testing.T) {
	t.Parallel()
	ctx := bounded(t)
	var out bytes.Buffer
	p, err := StartProgram(ctx, ProgramConfig{
		Path: "sh", Args: []string{"-c", "sleep 3600 >/dev/null 2>&1 & echo $!"}, Stdout: &out,
	})
	require.NoError(t, err)
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.Zero(t, code)
	child, err := strconv.Atoi(strings.TrimSpace(out.String()))
	require.NoError(t, err)
	eventually(t, "its child is gone", func() bool { return gone(child) })
	require.NoError(t, p.Close())

	p, rep, err := startFamily(ctx)
	require.NoError(t, err)
	p.Kill()
	for _, id := range rep.PIDs {
		eventually(t, "everybody is gone", func() bool { return gone(id) })
	}
	require.NoError(t, p.Close())
}

func TestProgramThatIsNeverReady(t *testing.T) {
	t.Parallel()
	why := errors.New("not listening")
	never := func(context.Context) error { return why }

	_, err := StartProgram(bounded(t), ProgramConfig{Path: "false", Ready: never})
	require.ErrorIs(t, err, why)
	require.ErrorContains(t, err, "exit status 1")

	short, cancel := context.WithTimeout(bounded(t), 50*time.Millisecond)
	defer cancel()
	_, err = StartProgram(short, ProgramConfig{Path: "sleep", Args: []string{"3600"}, Ready: never})
	require.ErrorIs(t, err, why)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	_, err = StartProgram(bounded(t), ProgramConfig{Path: "/nowhere/program"})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// syncBuffer is written by a program while a test reads it.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) empty() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Len() == 0
}
