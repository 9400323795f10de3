//go:build !mutations

package settings

// mutation reports whether a variable is SCHOOLBELL_MUTATE, which is known only
// to programs built with the tag mutations; see mutation_on.go.
func mutation(string, string, Origin, *problems) bool { return false }
