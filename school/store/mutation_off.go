//go:build !mutations

package store

import "context"

// mutate leaves the schema as it is. Built with the tag mutations it can break it
// on purpose; see mutation_on.go.
func (*DB) mutate(context.Context) error { return nil }
