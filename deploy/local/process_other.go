//go:build !linux

package local

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
)

func childAttributes(command) (*syscall.SysProcAttr, error) {
	return nil, fmt.Errorf("private processes on %s: %w", runtime.GOOS, errors.ErrUnsupported)
}

func awaitExit(int) {}

func removeSegment(int) {}
