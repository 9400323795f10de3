package watchdogtest_test

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"schoolbell/watchdog"
	"schoolbell/watchdog/watchdogtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemoryIsABackend(t *testing.T) {
	watchdogtest.TestBackend(t, 40*time.Second, func(t *testing.T, test func(t *testing.T, s watchdogtest.Server)) {
		synctest.Test(t, func(t *testing.T) { test(t, watchdogtest.NewMemory()) })
	})
}

func TestMemoryIsARegistry(t *testing.T) {
	watchdogtest.TestRegistry(t, 15*time.Second, func(t *testing.T, test func(t *testing.T, r watchdog.Registry, forget func())) {
		synctest.Test(t, func(t *testing.T) {
			m := watchdogtest.NewMemory()
			test(t, m, m.Forget)
		})
	})
}
