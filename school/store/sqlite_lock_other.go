//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package store

import (
	"fmt"
	"os"
	"runtime"
)

// tryLock refuses where no lock ends with the process that holds it: without one
// two processes could send from one file.
func tryLock(*os.File) (free bool, err error) {
	return false, fmt.Errorf("the embedded database is not available on %s: use PostgreSQL", runtime.GOOS)
}
