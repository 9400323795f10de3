//go:build mutations

package settings

import (
	"slices"
	"strings"
)

// mutations are the ways in which a program built with the tag mutations can be
// broken on purpose, to show that chaos notices.
var mutations = []string{"no-provisional-rest", "no-ledger-floors", "lease-end-after-call", "settle-twice", "claim-unfenced"}

// mutation reports whether a variable is SCHOOLBELL_MUTATE, and refuses a name
// that is none.
func mutation(name, text string, origin Origin, ps *problems) bool {
	if name != envPrefix+"MUTATE" {
		return false
	}
	if text != "" && !slices.Contains(mutations, text) {
		ps.add(name, origin, "no such mutation; write one of "+strings.Join(mutations, ", "))
	}
	return true
}
