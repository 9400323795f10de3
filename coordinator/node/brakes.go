package node

import (
	"context"
	"fmt"

	"schoolbell/coordinator/web"
)

// brakesOff is what /readyz asks about brakes: that one is on stops nothing, but
// devices pile up that nobody has looked at.
func brakesOff(store web.Brakes) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		n, err := store.OpenBrakes(ctx)
		if err != nil || n == 0 {
			return nil // that the database is away is said already
		}
		return brakesOn(n)
	}
}

// brakesOn is how many brakes are on.
type brakesOn int

func (n brakesOn) Error() string { return n.State() }

// State is what /readyz shows.
func (n brakesOn) State() string {
	if n == 1 {
		return "1 brake is on"
	}
	return fmt.Sprintf("%d brakes are on", int(n))
}
