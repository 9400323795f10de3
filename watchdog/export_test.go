package watchdog

import "time"

// Clocks is one reading of the three clocks.
type Clocks struct {
	Mono, Wall time.Time
	Boot       time.Duration
}

func (c Clocks) instant() instant { return instant{at: c.Mono, wall: c.Wall.Round(0), boot: c.Boot} }

// SetClocks makes k read its clocks through now.
func (k *Keeper) SetClocks(now func() Clocks) { k.now = func() instant { return now().instant() } }

// WindowRemaining is what is left at now of the trust in a lease taken at from.
func WindowRemaining(lease time.Duration, from, now Clocks) time.Duration {
	return newWindow(from.instant(), lease).remaining(now.instant())
}

var CallTimeout = callTimeout
