//go:build mutations

package scripts

import (
	"fmt"
	"os"
	"strings"
)

// edit breaks a script on purpose: old, which is in its text once, becomes new.
type edit struct{ script, old, new string }

// mutations are rules that were tried and failed. Chaos runs them to show that it
// would have noticed. Each takes away one protection and, in the scripts, what
// makes up for it: a full cycle without a rest would get one at the next reserve,
// and an owner that trusts a lease for too long would be told so by reserve.
var mutations = map[string][]edit{
	"no-provisional-rest": {
		{"reserve", "  set_rest(latest() + s.rest_ms)\n", ""},
		{"reserve", "elseif s.nextEligibleMs > 0 then", "elseif s.nextEligibleMs > 0 or s.attempted >= s.limit then"},
		{"settle", "else\n  exact()\nend", "else\n  if o.filled == 1 and s.nextEligibleMs == 0 then set_rest(now + s.rest_ms) end\n  exact()\nend"},
	},
	"settle-twice": {
		{"settle", "if is_settled(batch) then", "if false then"},
		{"settle", "table.remove(s.open, at)", "if attempted == o.size then table.remove(s.open, at) end"},
	},
	"lease-end-after-call": {
		{"reserve", "if held[1] ~= acq or held[2] ~= fence then", "if false then"},
		{"reserve", "if pttl < longest + margin then", "if false then"},
		{"reserve", "redis.call('HSET', lock, 'batch', batch)\n", ""}, // it would make a lock that nobody holds
	},
}

// mutated is the text that is run: broken as SCHOOLBELL_MUTATE asks.
func mutated(name, source string) string {
	for _, e := range mutations[os.Getenv("SCHOOLBELL_MUTATE")] {
		if e.script != name {
			continue
		}
		if n := strings.Count(source, e.old); n != 1 {
			panic(fmt.Sprintf("scripts: %s has %d times what a mutation changes: %s", name, n, e.old))
		}
		source = strings.Replace(source, e.old, e.new, 1)
	}
	return source
}
