//go:build !mutations

package scripts

// mutated is the text that is run: the one that is embedded. Built with the tag
// mutations it can be another; see mutation_on.go.
func mutated(_, source string) string { return source }
