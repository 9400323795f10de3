package quotatest

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"schoolbell/school"
	"schoolbell/school/quota"
)

// Compare does steps random operations on the pure rule and on s and returns
// the first difference in an answer or in the state that read finds behind s.
// The operations make no sense as a whole: they are late, doubled, with other
// ledgers and settings, under a clock that goes anywhere, on data that gets
// lost. dry reports that src has run out.
func Compare(src Source, s Subject, read func() quota.State, steps int, dry func() bool) error {
	c := &comparison{src: src, a: &Pure{}, b: s, read: read, now: Epoch, wants: map[string]int{}}
	c.b.Own("acq", 1)
	for i := range steps {
		if dry() {
			return nil
		}
		what, err := c.step()
		if err == nil {
			if d := cmp.Diff(c.a.State, read(), cmpopts.EquateEmpty()); d != "" {
				err = fmt.Errorf("states differ (-pure +other): %s", d)
			}
		}
		if err != nil {
			return fmt.Errorf("step %d at %d, %s: %w", i, c.now-Epoch, what, err)
		}
	}
	return nil
}

type comparison struct {
	src    Source
	a      *Pure
	b      Subject
	read   func() quota.State
	now    int64
	serial int
	wants  map[string]int
	saved  [2]any
}

// near is n or a few off, 0 at least.
func (c *comparison) near(n, off int) int { return max(0, n-off+c.src.Intn(2*off+1)) }

func (c *comparison) rule() school.Rule {
	return school.Rule{
		Limit:   []int{1, 20, 50, 80}[c.src.Intn(4)],
		Rest:    []time.Duration{1, 100, 200, 300}[c.src.Intn(4)] * time.Millisecond,
		Version: int64(c.src.Intn(4)),
	}
}

func (c *comparison) ledger() school.Ledger {
	l := school.Ledger{}
	if c.src.Intn(3) == 0 {
		return l
	}
	l.Cycle = int64(c.near(int(c.a.State.Cycle), 1))
	l.Attempted = c.near(c.a.State.Attempted, 6)
	if c.src.Intn(2) == 0 {
		l.Attempted = c.a.State.Attempted
	}
	l.Filled = c.src.Intn(3) == 0
	if c.src.Intn(4) == 0 {
		l.Resting = time.Duration(c.src.Intn(300)) * time.Millisecond
	}
	if c.src.Intn(3) > 0 {
		l.Rule = c.rule()
	}
	return l
}

// batch is a new id or one of the last few.
func (c *comparison) batch(fresh bool) string {
	if fresh {
		c.serial++
		return fmt.Sprintf("b%d", c.serial)
	}
	return fmt.Sprintf("b%d", max(0, c.serial-c.src.Intn(6)))
}

func (c *comparison) step() (string, error) {
	switch c.src.Intn(12) {
	case 0, 1:
		c.now += int64(c.src.Intn(50))
	case 2:
		c.now += int64(c.src.Intn(600))
	case 3:
		if c.src.Intn(3) == 0 {
			c.now -= int64(c.src.Intn(2500))
		}
	}
	c.a.At(c.now)
	c.b.At(c.now)

	switch op := c.src.Intn(20); op {
	case 0:
		if c.src.Intn(3) == 0 {
			c.a.Load(nil)
			c.b.Load(nil)
		}
		return "flush", nil
	case 1:
		c.saved = [2]any{c.a.Save(), c.b.Save()}
		return "save", nil
	case 2:
		if c.saved[0] != nil && c.src.Intn(3) == 0 {
			c.a.Load(c.saved[0])
			c.b.Load(c.saved[1])
		}
		return "load", nil
	case 3, 4, 5:
		l, r := c.ledger(), c.rule()
		return fmt.Sprintf("reconcile %+v %+v", l, r), same(c.a.Reconcile(l, r), c.b.Reconcile(l, r))
	case 6:
		l, r := c.ledger(), c.rule()
		return fmt.Sprintf("rebuild %+v %+v", l, r), same(c.a.Rebuild("acq", 1, l, r), c.b.Rebuild("acq", 1, l, r))
	case 7, 8, 9, 10, 11:
		x := school.Settlement{
			School:    "A",
			Batch:     c.batch(false),
			Cycle:     c.a.State.Cycle,
			Attempted: c.src.Intn(22),
		}
		if n := len(c.a.State.Open); n > 0 && c.src.Intn(4) > 0 {
			o := c.a.State.Open[c.src.Intn(n)]
			x.Batch, x.Cycle, x.Attempted = o.Batch, o.Cycle, min(x.Attempted, o.Size)
		}
		return fmt.Sprintf("settle %+v", x), same(c.a.Settle(x), c.b.Settle(x))
	default:
		r := school.Reservation{
			School: "A", Acquisition: "acq", Fence: 1, Batch: c.batch(c.src.Intn(4) > 0),
			Want:    1 + c.src.Intn(25),
			Longest: time.Duration(1+c.src.Intn(120)) * time.Millisecond,
			Rule:    c.rule(),
		}
		if want := c.wants[r.Batch]; want > 0 {
			r.Want = want // asking again is asking for the same
		}
		c.wants[r.Batch] = r.Want
		if c.src.Intn(3) == 0 {
			r.Floor = c.ledger()
		} else if c.a.State.Next > 0 {
			r.Floor = school.Ledger{Cycle: c.a.State.Cycle, Attempted: c.a.State.Attempted, Filled: true}
		}
		g, err := c.a.Reserve(r)
		h, err2 := c.b.Reserve(r)
		if err := same(err, err2); err != nil {
			return fmt.Sprintf("reserve %+v", r), err
		}
		if d := cmp.Diff(g, h); d != "" {
			return fmt.Sprintf("reserve %+v", r), fmt.Errorf("answers differ (-pure +other): %s", d)
		}
		return "reserve", nil
	}
}

// same reports an error where one refused and the other did not.
func same(a, b error) error {
	if (a == nil) == (b == nil) && errors.Is(a, school.ErrReservationUnknown) == errors.Is(b, school.ErrReservationUnknown) {
		return nil
	}
	return fmt.Errorf("pure rule answers %w, the other %w", orNone(a), orNone(b))
}

var errNone = errors.New("no error")

func orNone(err error) error {
	if err == nil {
		return errNone
	}
	return err
}
