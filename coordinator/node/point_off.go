//go:build !failpoints

package node

import "schoolbell/watchdog"

// pointed is the lock server as the watchdog sees it. Built with the tag
// failpoints, the process can be made to die after an extension.
func pointed(b watchdog.Backend) watchdog.Backend { return b }
