package coordinator

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails the package when anything outlives the tests.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
