package scripts

import (
	_ "embed"
	"strings"
)

// quotaRule is what the quota's scripts have in common. Redis scripts cannot
// call one another, so it is put in where a script says so.
//
//go:embed shared/quota.lua
var quotaRule string

const includeQuota = "-- include quota.lua\n"

// include puts shared text in the place of its include line.
func include(src string) string {
	return strings.Replace(src, includeQuota, quotaRule, 1)
}

// Reserve grants attempts to a school's owner: reserve.lua.
func Reserve() Script { return load("reserve") }

// Settle says what became of a reservation: settle.lua.
func Settle() Script { return load("settle") }

// Reconcile raises a quota to what the ledger says: reconcile.lua.
func Reconcile() Script { return load("reconcile") }

// Rebuild sets a rest anew after the clock went back: rebuild.lua.
func Rebuild() Script { return load("rebuild") }

// Peek looks at a school's lock and quota: peek.lua.
func Peek() Script { return load("peek") }
