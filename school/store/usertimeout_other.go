//go:build !linux

package store

import "syscall"

// setUserTimeout does nothing where the option does not exist; keepalive and
// the callers' deadlines remain.
func setUserTimeout(string, string, syscall.RawConn) error { return nil }
