package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// ErrInUse says that another process, or another store of this one, works on the
// database file.
var ErrInUse = errors.New("the database file is in use")

// fileLock is held on a file beside the database, of which the kernel knows: it
// ends with the process, however that ends. The file stays, since removing it
// would let two processes hold locks on two files of one name. It says who
// holds it, for people.
type fileLock struct{ f *os.File }

// lockFile takes the lock of a database file.
func lockFile(database string) (*fileLock, error) {
	path := database + ".lock"
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock file: %w", err)
	}
	free, err := tryLock(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if !free {
		holder := "another process"
		if pid := readPID(f); pid > 0 {
			holder = fmt.Sprintf("process %d", pid)
			if pid == os.Getpid() {
				holder = "this process"
			}
		}
		f.Close()
		return nil, fmt.Errorf("%w: %s has %s (its lock is %s); stop it first, or use a file of its own for each", ErrInUse, holder, database, path)
	}
	if err := writePID(f, strconv.Itoa(os.Getpid())+"\n"); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock file: %w", err)
	}
	return &fileLock{f}, nil
}

// release gives the lock back; the kernel does so when the file is closed.
func (l *fileLock) release() {
	if l == nil {
		return
	}
	// For people only; whoever takes the lock writes it anew.
	_ = writePID(l.f, "")
	l.f.Close()
}

func writePID(f *os.File, text string) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// readPID returns 0 where it is not told.
func readPID(f *os.File) int {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 32))
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0
	}
	return pid
}
