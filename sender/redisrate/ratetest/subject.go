package ratetest

import "schoolbell/sender"

// Epoch is a moment to begin at, in ms.
const Epoch int64 = 1_800_000_000_000

// Subject is the rule of one sender, run by whatever is tested, under a clock that
// the test sets.
type Subject interface {
	// At sets the clock, in ms since 1970.
	At(ms int64)
	// Limit sets what the sender is told to keep to.
	Limit(l sender.Limit)
	Take(t sender.Take) sender.Ticket
	Report(r sender.Report) sender.Reported
	Look(l sender.Look) sender.RateState
	// Forget loses everything.
	Forget()
}

// Pure is the model as a Subject.
type Pure struct {
	Model
	at int64
}

// NewPure returns a sender of which nothing is known.
func NewPure() *Pure { return &Pure{at: Epoch} }

// At implements Subject.
func (p *Pure) At(ms int64) { p.at = ms }

// Limit implements Subject.
func (p *Pure) Limit(l sender.Limit) { p.Model.Limit = l }

// Take implements Subject.
func (p *Pure) Take(t sender.Take) sender.Ticket { return p.Model.Take(p.at, t) }

// Report implements Subject.
func (p *Pure) Report(r sender.Report) sender.Reported { return p.Model.Report(p.at, r) }

// Look implements Subject.
func (p *Pure) Look(l sender.Look) sender.RateState { return p.Model.Look(p.at, l) }
