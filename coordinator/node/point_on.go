//go:build failpoints

package node

import (
	"context"
	"time"

	"schoolbell/coordinator"
	"schoolbell/watchdog"
)

// pointed is the lock server with the point behind each extension.
func pointed(b watchdog.Backend) watchdog.Backend { return extending{b} }

type extending struct{ watchdog.Backend }

func (e extending) Extend(ctx context.Context, name, acquisition string, lease time.Duration, renewal int64) error {
	err := e.Backend.Extend(ctx, name, acquisition, lease, renewal)
	coordinator.Pass(coordinator.Extended)
	return err
}
