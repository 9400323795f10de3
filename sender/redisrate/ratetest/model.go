// Package ratetest is the rule of a sender's rate in plain Go, step for step what
// the scripts do in Redis, with the cases, the random histories and the judge that
// hold the two together. Tests of others use Memory in Redis's place.
package ratetest

import (
	"math"
	"slices"
	"strings"
	"time"

	"schoolbell/sender"
)

// The constants of scripts/shared/rate.lua, under the same names.
const (
	unit       = 60000
	holds      = 2000
	late       = 1000
	idle       = 5000
	coldPart   = 10
	lowerFor   = 60000
	lowest     = 62
	recover_   = 300000
	probeFirst = 5000
	probeMost  = 300000
	slotFor    = 10000
	keep       = 64
	lineMost   = 10000
	rebase     = 1000000000000
	gapMost    = 3600000
)

// place is a school's stretch of what is minted, which ends at ends.
type place struct {
	school string
	n      int64
	ends   int64
}

type answered struct {
	id    string
	n     int64
	probe bool
}

// Model is what is known of one sender. The zero value knows nothing, as Redis
// does after it lost everything. Every method takes the time, in ms.
type Model struct {
	Limit sender.Limit

	known                                                     bool
	now                                                       int64
	clock, minted, sold, warm                                 int64
	level, levelUntil, levelHold, lowered, base               int64
	slot, usedNow, usedLast                                   int64
	epoch, stopped, pause, probeAt, probeIn                   int64
	proberUntil, proberFor                                    int64
	line                                                      []place
	taken                                                     []answered
	loweredBy, loweredCode, stoppedBy, stoppedCode, resumedBy string
	prober, probeID                                           string
}

// Forget loses everything.
func (m *Model) Forget() { *m = Model{Limit: m.Limit} }

// load reports whether nothing was known.
func (m *Model) load(now int64) (fresh bool) {
	m.now = now
	if fresh = !m.known; fresh {
		*m = Model{Limit: m.Limit, known: true, now: now, clock: now, epoch: now, level: 1000}
	}
	m.clock = min(m.clock, now)
	m.levelUntil = min(m.levelUntil, now+m.levelHold)
	m.lowered = min(m.lowered, now)
	m.probeAt = min(m.probeAt, now+m.probeIn)
	m.proberUntil = min(m.proberUntil, now+m.proberFor)
	m.stopped = min(m.stopped, now)
	return fresh
}

func (m *Model) believe(fresh bool, code string) {
	if !fresh || code == "" {
		return
	}
	m.stopped, m.stoppedCode = m.now, code
	m.pause, m.probeIn, m.probeAt = probeFirst, 0, m.now
}

func (m *Model) levelAt(at int64) int64 {
	past := at - m.levelUntil
	if past <= 0 {
		return m.level
	}
	return min(1000, m.level+past*1000/recover_)
}

func (m *Model) limit() int64 { return int64(m.Limit.PerMinute) }
func (m *Model) ramp() int64  { return m.Limit.Ramp.Milliseconds() }
func (m *Model) cold() int64 {
	return min(m.limit(), max(m.limit()/coldPart, int64(m.Limit.Batch)*60))
}

func (m *Model) rate(at int64) int64 {
	r := m.limit()
	if m.ramp() > 0 && r > 0 {
		r = m.cold() + (m.limit()-m.cold())*m.warm/m.ramp()
	}
	if l := m.levelAt(at); l < 1000 {
		if m.limit() == 0 {
			r = m.base
		}
		r = max(1, r*l/1000)
	}
	return r
}

func (m *Model) waitFor(units int64) int64 {
	r, l := float64(m.rate(m.now)), m.levelAt(m.now)
	grows := 0.0
	if m.limit() > 0 && m.ramp() > 0 && m.warm < m.ramp() {
		grows = float64((m.limit()-m.cold())*l) / 1000 / float64(m.ramp())
	}
	if l < 1000 && m.now >= m.levelUntil {
		whole := m.limit()
		if whole == 0 {
			whole = m.base
		}
		grows += float64(whole) / recover_
	}
	if grows == 0 {
		return max(1, int64(math.Ceil(float64(units)/r)))
	}
	// The conversions keep a compiler from fusing the operations, which Lua does not.
	return max(1, int64(math.Ceil((math.Sqrt(float64(r*r)+float64(2*grows*float64(units)))-r)/grows)))
}

func (m *Model) holds(n int64) int64 {
	r := m.rate(m.now)
	return max(r*holds, n*unit+r*late)
}

func (m *Model) lapsed(p place) bool { return m.minted-(p.ends-p.n*unit) > m.holds(p.n) }

func (m *Model) find(school string) int {
	return slices.IndexFunc(m.line, func(p place) bool { return p.school == school })
}

func (m *Model) mint() {
	gap, r := m.now-m.clock, m.rate(m.clock)
	if r > 0 {
		busy := max(0, int64(math.Ceil(float64(m.sold-m.minted)/float64(r)))) + idle
		m.minted += r * min(gap, gapMost)
		if gap <= busy {
			m.warm = min(m.ramp(), m.warm+gap)
		} else {
			m.warm = max(0, min(m.ramp(), m.warm)-gap)
		}
	}
	m.clock = m.now
	if m.level < 1000 && m.levelAt(m.now) >= 1000 {
		m.level, m.base, m.levelHold = 1000, 0, 0
	}
	if m.rate(m.now) == 0 {
		m.line, m.sold = nil, m.minted
	}
	for len(m.line) > 0 && m.lapsed(m.line[0]) {
		m.line = slices.Delete(m.line, 0, 1)
	}
	if m.minted > rebase {
		for i := range m.line {
			m.line[i].ends -= m.minted
		}
		m.sold, m.minted = m.sold-m.minted, 0
	}
	if slot := m.now / slotFor; slot != m.slot {
		if m.usedLast = 0; slot == m.slot+1 {
			m.usedLast = m.usedNow
		}
		m.usedNow, m.slot = 0, slot
	}
}

func (m *Model) used() int64 {
	return int64(math.Floor((float64(m.usedNow) + float64(m.usedLast*(slotFor-m.now%slotFor))/slotFor) * (60000 / slotFor)))
}

func (m *Model) free() (units, from int64) {
	from = max(m.sold, m.minted-m.rate(m.now)*holds)
	return m.minted - from, from
}

// Take is take.lua.
func (m *Model) Take(now int64, t sender.Take) sender.Ticket {
	m.believe(m.load(now), t.Believed)
	m.mint()
	granted := func(n int64, probe bool) sender.Ticket {
		return sender.Ticket{Kind: sender.Taken, ID: t.ID, Size: int(n), Probe: probe, Epoch: m.epoch}
	}
	if i := slices.IndexFunc(m.taken, func(a answered) bool { return a.id == t.ID }); i >= 0 && (m.stopped == 0 || m.probeID == t.ID) {
		return granted(m.taken[i].n, m.taken[i].probe)
	}
	grant := func(n int64, probe bool) sender.Ticket {
		if m.taken = append(m.taken, answered{t.ID, n, probe}); len(m.taken) > keep {
			m.taken = slices.Delete(m.taken, 0, 1)
		}
		m.usedNow += n
		return granted(n, probe)
	}
	want := int64(t.Want)
	if m.stopped > 0 {
		wait := m.probeAt - now
		if wait <= 0 && m.proberUntil > now && m.prober != t.School {
			wait = min(m.proberUntil-now, probeFirst)
		}
		if wait > 0 {
			return sender.Ticket{Kind: sender.TakeStopped, ID: t.ID, Wait: ms(wait), Code: m.stoppedCode, Stopped: ms(now - m.stopped)}
		}
		m.prober, m.probeID = t.School, t.ID
		m.proberFor = t.Longest.Milliseconds()
		m.proberUntil = now + m.proberFor
		if m.rate(now) > 0 {
			_, from := m.free()
			m.sold = from + unit
		}
		return grant(1, true)
	}
	if m.rate(now) == 0 {
		return grant(want, false)
	}
	later := func(ends int64, joined bool) sender.Ticket {
		return sender.Ticket{Kind: sender.TakeLater, ID: t.ID, Wait: ms(m.waitFor(ends - m.minted)), Joined: joined}
	}
	if i := m.find(t.School); i >= 0 {
		p := m.line[i]
		if m.minted < p.ends {
			return later(p.ends, false)
		}
		m.line = slices.Delete(m.line, i, i+1)
		if !m.lapsed(p) {
			size := min(want, p.n)
			if left, from := m.free(); want > size && left >= unit {
				more := min(want-size, left/unit)
				m.sold = from + more*unit
				size += more
			}
			return grant(size, false)
		}
	}
	_, from := m.free()
	ends := from + want*unit
	if ends > m.minted && len(m.line) >= lineMost {
		return later(ends, false)
	}
	if m.sold = ends; ends <= m.minted {
		return grant(want, false)
	}
	m.line = append(m.line, place{t.School, want, ends})
	return later(ends, true)
}

// Report is report.lua.
func (m *Model) Report(now int64, r sender.Report) sender.Reported {
	fresh := m.load(now)
	m.mint()
	var out sender.Reported
	wish := r.RetryAfter.Milliseconds()
	stopFor := func(pause int64) {
		m.pause, m.probeIn = pause, max(pause, wish)
		m.probeAt = now + m.probeIn
	}
	probe := m.stopped > 0 && m.probeID == r.Ticket
	if probe {
		m.prober, m.probeID, m.proberUntil = "", "", 0
	}
	probing := func() {
		stopFor(min(m.pause*2, probeMost))
		out.Change, out.ProbeIn = sender.ChangeProbing, ms(m.probeIn)
	}
	switch {
	case r.Heard == sender.HeardRefusal && m.stopped > 0 && m.stoppedBy == r.Ticket:
		out.Change, out.ProbeIn = sender.ChangeStopped, ms(max(0, m.probeAt-now))
	case r.Heard == sender.HeardRefusal && m.stopped == 0 && (r.Epoch == m.epoch || fresh):
		stopFor(probeFirst)
		m.stopped, m.stoppedBy, m.stoppedCode = now, r.Ticket, r.Code
		m.epoch++
		m.prober, m.probeID, m.proberUntil = "", "", 0
		out.Change, out.ProbeIn = sender.ChangeStopped, ms(m.probeIn)
	case r.Heard == sender.HeardRefusal && probe:
		m.stoppedCode = r.Code
		probing()
	case r.Heard == sender.HeardSilence && probe:
		probing()
	case (r.Heard == sender.HeardAnswer || r.Heard == sender.HeardThrottled) && probe:
		out.Change, out.Stopped = sender.ChangeResumed, ms(now-m.stopped)
		m.resumedBy = r.Ticket
		m.stopped, m.stoppedBy, m.stoppedCode = 0, "", ""
		m.pause, m.probeIn, m.probeAt = 0, 0, 0
	case (r.Heard == sender.HeardAnswer || r.Heard == sender.HeardThrottled) && m.stopped == 0 && m.resumedBy == r.Ticket:
		out.Change = sender.ChangeResumed
	}
	if r.Heard == sender.HeardThrottled {
		hold := wish
		if hold == 0 {
			hold = lowerFor
		}
		switch {
		case m.loweredBy == r.Ticket:
			out.Lowered = true
		case m.levelAt(now) < 1000 && now-r.Age.Milliseconds() <= m.lowered:
			if now+hold > m.levelUntil && now < m.levelUntil {
				m.levelUntil, m.levelHold = now+hold, hold
			}
		default:
			if m.limit() == 0 && m.levelAt(now) == 1000 {
				m.base = max(m.used(), int64(m.Limit.Batch)*60)
			}
			before := m.levelAt(now)
			m.level = max(lowest, before/2)
			m.levelUntil, m.levelHold = now+hold, hold
			if m.lowered = now; m.level < before {
				m.loweredBy, m.loweredCode = r.Ticket, r.Code
				out.Lowered = true
			}
		}
	}
	out.PerMinute = int(m.rate(now))
	return out
}

// Look is look.lua.
func (m *Model) Look(now int64, l sender.Look) sender.RateState {
	was := *m
	was.line, was.taken = slices.Clone(m.line), slices.Clone(m.taken)
	fresh := m.load(now)
	if !fresh {
		defer func() { *m = was }() // it changes nothing
	}
	m.believe(fresh, l.Believed)
	m.mint()
	s := sender.RateState{PerMinute: int(m.rate(now)), Used: int(m.used()), Waiting: len(m.line)}
	if i := m.find(l.School); i >= 0 && !m.lapsed(m.line[i]) {
		if s.Placed = true; m.minted < m.line[i].ends {
			s.PlaceIn = ms(m.waitFor(m.line[i].ends - m.minted))
		}
	}
	if m.stopped > 0 {
		s.Stopped, s.Since, s.Code = true, ms(now-m.stopped), m.stoppedCode
		s.ProbeIn, s.Probing = ms(max(0, m.probeAt-now)), m.proberUntil > now
	}
	if m.levelAt(now) < 1000 {
		s.Lowered, s.LowerFor, s.LowerBy = true, ms(max(0, m.levelUntil-now)), m.loweredCode
	}
	return s
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// Waiting lists the schools in the line, in its order.
func (m *Model) Waiting() []string {
	var all []string
	for _, p := range m.line {
		all = append(all, p.school)
	}
	return all
}

// String is the line, for the message of a failed test.
func (m *Model) String() string { return strings.Join(m.Waiting(), " ") }
