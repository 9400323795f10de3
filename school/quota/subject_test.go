package quota_test

import (
	"testing"

	"schoolbell/school"
	"schoolbell/school/quota"
	"schoolbell/school/quota/quotatest"
)

// pure is the rule on a variable in memory.
type pure struct {
	now   int64
	state quota.State
}

func fresh(testing.TB) quotatest.Subject { return &pure{} }

func (p *pure) At(ms int64)       { p.now = ms }
func (p *pure) Own(string, int64) {}
func (p *pure) Save() any         { return p.state }
func (p *pure) Load(saved any)    { p.state, _ = saved.(quota.State) }

func (p *pure) Reserve(r school.Reservation) (g school.Grant, err error) {
	p.state, g, err = p.state.Reserve(p.now, r)
	return g, err
}

func (p *pure) Settle(x school.Settlement) error {
	next, did, err := p.state.Settle(p.now, x)
	p.state = next
	if err == nil && did == quota.Unknown {
		return school.ErrReservationUnknown
	}
	return err
}

func (p *pure) Reconcile(l school.Ledger, r school.Rule) (err error) {
	p.state, _, err = p.state.Reconcile(p.now, l, r)
	return err
}

func (p *pure) Rebuild(_ string, _ int64, l school.Ledger, r school.Rule) (err error) {
	p.state, _, err = p.state.Rebuild(p.now, l, r)
	return err
}

func (p *pure) Peek() (school.Peek, error) { return p.state.Peek(p.now), nil }
