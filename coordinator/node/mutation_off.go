//go:build !mutations

package node

import "schoolbell/coordinator"

// mutated are the ledger and the arbiter as the scheduler sees them: as they are.
// Built with the tag mutations they can be broken on purpose; see mutation_on.go.
func mutated(q coordinator.Queue, b coordinator.Budget) (coordinator.Queue, coordinator.Budget) {
	return q, b
}
