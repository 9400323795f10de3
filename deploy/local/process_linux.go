package local

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

func childAttributes(c command) (*syscall.SysProcAttr, error) {
	return &syscall.SysProcAttr{
		Setpgid:    true,
		Pdeathsig:  c.deathSignal,
		Credential: c.credential,
	}, nil
}

// awaitExit blocks until the process has ended, and leaves it unreaped.
func awaitExit(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// removeSegment removes a System V shared memory segment that nobody is
// attached to any more.
func removeSegment(id int) {
	var desc unix.SysvShmDesc
	if _, err := unix.SysvShmCtl(id, unix.IPC_STAT, &desc); err != nil || desc.Nattch > 0 {
		return
	}
	_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
}
