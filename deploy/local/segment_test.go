package local

import (
	"testing"

	"golang.org/x/sys/unix"
)

func segmentExists(t *testing.T, id int) bool {
	t.Helper()
	var desc unix.SysvShmDesc
	_, err := unix.SysvShmCtl(id, unix.IPC_STAT, &desc)
	return err == nil
}
