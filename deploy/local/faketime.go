package local

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// FakeClock is a wall clock that can be stepped while a program goes by it: a
// file that says how far it is off, in the form "+3600s".
type FakeClock struct{ path string }

// NewFakeClock makes the file, in a folder that the caller removes; the clock is
// right at first.
func NewFakeClock(path string) (FakeClock, error) {
	c := FakeClock{path}
	return c, c.Set(0)
}

// Path is the file.
func (c FakeClock) Path() string { return c.path }

// Set steps the clock: it is off by that many whole seconds from now on.
func (c FakeClock) Set(off time.Duration) error {
	// In one step: a reader never sees half of it.
	part := c.path + ".part"
	if err := os.WriteFile(part, fmt.Appendf(nil, "%+ds\n", int64(off/time.Second)), 0o644); err != nil {
		return fmt.Errorf("set a clock: %w", err)
	}
	if err := os.Rename(part, c.path); err != nil {
		return fmt.Errorf("set a clock: %w", err)
	}
	return nil
}

// Env are the variables by which redis-server, or any program that asks libc for
// the time (a Go program does not), goes by the clock; for RedisConfig.Env. The
// file is read whenever the time is asked for, which costs a Redis two thirds of
// its speed. The monotonic clock is left alone. It fails where libfaketime is not
// installed.
func (c FakeClock) Env() ([]string, error) {
	library, err := fakeTime()
	if err != nil {
		return nil, err
	}
	return []string{
		// libc again, behind it: Debian's redis-server has jemalloc as a library,
		// which asks for the time before libfaketime can answer. So it is libc
		// that allocates.
		"LD_PRELOAD=" + library + " libc.so.6",
		"FAKETIME_TIMESTAMP_FILE=" + c.path,
		"FAKETIME_NO_CACHE=1",
		"DONT_FAKE_MONOTONIC=1",
	}, nil
}

func fakeTime() (string, error) {
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1"} {
		if found, err := filepath.Glob(pattern); err != nil {
			return "", fmt.Errorf("look for libfaketime: %w", err)
		} else if len(found) > 0 {
			return found[0], nil
		}
	}
	return "", fmt.Errorf("install the Debian package faketime: %w", exec.ErrNotFound)
}
