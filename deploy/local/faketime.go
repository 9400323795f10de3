package local

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
)

// FakeTime finds libfaketime, by which a program that asks libc for the time
// (redis-server does; a Go program does not) can be told another one:
// LD_PRELOAD in RedisConfig.Env.
func FakeTime() (string, error) {
	for _, pattern := range []string{"/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1", "/usr/local/lib/faketime/libfaketime.so.1"} {
		if found, err := filepath.Glob(pattern); err != nil {
			return "", errors.Join(errors.New("look for libfaketime"), err)
		} else if len(found) > 0 {
			return found[0], nil
		}
	}
	return "", fmt.Errorf("install the Debian package faketime: %w", exec.ErrNotFound)
}
