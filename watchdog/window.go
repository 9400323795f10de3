package watchdog

import "time"

// skew is what two Redis nodes' clocks may differ by, or one may step, without
// harm: the TTL runs on their wall clock.
const skew = 500 * time.Millisecond

// LeaseFor returns how long a lock is taken for when the work in hand is expected
// to take etc (R11).
func LeaseFor(etc time.Duration) time.Duration { return etc * 3 / 2 }

// TickFor returns how often the lease of such work is extended, at the latest (R11).
func TickFor(etc time.Duration) time.Duration { return etc / 2 }

// Margin returns how much earlier than the lease the trust in it ends: 1 % for
// clocks that run at different rates, 500 ms (at most a tenth of the lease) for
// clocks that differ or step, and 100 ms.
func Margin(lease time.Duration) time.Duration {
	return lease/100 + slackFor(lease) + 100*time.Millisecond
}

func slackFor(lease time.Duration) time.Duration { return min(skew, lease/10) }

// LeastETC returns the smallest etc, in whole milliseconds, at which work that
// takes up to longest still fits in what is left of the trust when a renewal is
// due: etc ≥ longest + Margin(LeaseFor(etc)).
func LeastETC(longest time.Duration) time.Duration {
	// Margin grows by at most 16.5 % of etc, so this closes in from below.
	etc := longest
	for {
		need := longest + Margin(LeaseFor(etc))
		if rest := need % time.Millisecond; rest > 0 {
			need += time.Millisecond - rest
		}
		if need <= etc {
			return etc
		}
		etc = need
	}
}

// callTimeout bounds one call to the backend: a tenth of etc and at most 1 s, so
// that several fit into a lease; with short times at least 250 ms or a quarter
// of etc, since a busy machine alone may take a tenth of a second.
func callTimeout(etc time.Duration) time.Duration {
	return max(min(etc/10, time.Second), min(250*time.Millisecond, etc/4))
}

// instant is one moment by three clocks. Go's monotonic clock stops while a
// machine or its hypervisor sleeps, the lock server's does not; the boot-time
// clock goes on in a sleep of the machine, and the wall clock is put right after
// one of the hypervisor.
type instant struct {
	at   time.Time     // compared by its monotonic reading
	wall time.Time     // without one
	boot time.Duration // CLOCK_BOOTTIME; 0 where the system has none
}

// systemClock reads the three clocks, two of them by system.
func systemClock(system func() time.Time) func() instant {
	return func() instant {
		now := system()
		return instant{at: now, wall: now.Round(0), boot: bootTime()}
	}
}

// elapsed returns how long ago from was, by each clock; boot is 0 where unknown.
func (now instant) elapsed(from instant) (mono, wall, boot time.Duration) {
	mono = now.at.Sub(from.at)
	wall = now.wall.Sub(from.wall)
	if now.boot > 0 && from.boot > 0 {
		boot = now.boot - from.boot
	}
	return mono, wall, boot
}

// window is the time in which a lease may be trusted, by the answer to one call.
type window struct {
	from   instant       // before the call was made
	length time.Duration // the lease less its margin
	slack  time.Duration // what the wall clock may be ahead without ending the trust
}

func newWindow(from instant, lease time.Duration) window {
	return window{from: from, length: lease - Margin(lease), slack: slackFor(lease)}
}

// remaining returns what is left of the window by the clock that leaves least,
// never below 0. The wall clock is allowed the slack that the margin has for a
// step of the server's clock, so that slewing here does not end the trust.
func (w window) remaining(now instant) time.Duration {
	mono, wall, boot := now.elapsed(w.from)
	return max(0, min(w.length-mono, w.length+w.slack-wall, w.length-boot))
}

// slept tells whether the monotonic clock stood still since the window began
// while another clock went on.
func (w window) slept(now instant) bool {
	mono, wall, boot := now.elapsed(w.from)
	return max(wall, boot)-mono > time.Second
}
