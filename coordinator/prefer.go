package coordinator

import "hash/fnv"

// preferred reports whether instance is the one of live that should try the
// school first: the highest of a hash of (instance, school), so that members
// agree without talking and a change of members moves few schools. It is a
// preference, not an assignment: the others try a moment later, and with a
// stale list two prefer themselves, which the lock decides.
func preferred(instance, schoolID string, live []string) bool {
	mine := weight(instance, schoolID)
	for _, other := range live {
		if other == instance {
			continue
		}
		if w := weight(other, schoolID); w > mine || w == mine && other > instance {
			return false
		}
	}
	return true
}

func weight(instance, schoolID string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(instance))
	_, _ = h.Write([]byte{0})
	_, _ = h.Write([]byte(schoolID))
	// FNV's low bits depend on the last bytes only weakly spread; one round of a
	// finalizer makes neighbouring ids independent.
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return x
}
