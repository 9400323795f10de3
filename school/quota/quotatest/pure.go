package quotatest

import (
	"schoolbell/school"
	"schoolbell/school/quota"
)

// Pure is the rule on a variable in memory.
type Pure struct {
	Now   int64
	State quota.State
}

var _ Subject = (*Pure)(nil)

func (p *Pure) At(ms int64)       { p.Now = ms }
func (p *Pure) Own(string, int64) {}
func (p *Pure) Save() any         { return p.State }
func (p *Pure) Load(saved any)    { p.State, _ = saved.(quota.State) }

func (p *Pure) Reserve(r school.Reservation) (g school.Grant, err error) {
	p.State, g, err = p.State.Reserve(p.Now, r)
	return g, err
}

func (p *Pure) Settle(x school.Settlement) error {
	next, did, err := p.State.Settle(p.Now, x)
	p.State = next
	if err == nil && did == quota.Unknown {
		return school.ErrReservationUnknown
	}
	return err
}

func (p *Pure) Reconcile(l school.Ledger, r school.Rule) (err error) {
	p.State, _, err = p.State.Reconcile(p.Now, l, r)
	return err
}

func (p *Pure) Rebuild(_ string, _ int64, l school.Ledger, r school.Rule) (err error) {
	p.State, _, err = p.State.Rebuild(p.Now, l, r)
	return err
}

func (p *Pure) Peek() (school.Peek, error) { return p.State.Peek(p.Now), nil }
