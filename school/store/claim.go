package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"schoolbell/school"
)

const (
	claimArgs = `($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,
	$21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31)`
	claimSQL       = `SELECT schoolbell_claim` + claimArgs
	claimUrgentSQL = `SELECT schoolbell_claim_urgent_first` + claimArgs
)

// Claim writes the batch with exactly the recipients it covers, moves the
// frontiers, writes the skipped ones and advances the ledger, in one round trip:
// all or nothing (R24). Within its cycle the ledger's count never falls; where
// the grant fills the cycle, a rest is set from the latest moment the call can
// end.
//
// Not one recipient is claimed with school.ErrFenced (a newer term exists),
// school.ErrPaused, school.ErrRuleChanged (the school's settings are newer than
// the claim's rule), school.ErrStalePage (a notice or a retry has moved, was
// cancelled or has expired since the page was read; with UrgentFirst also where
// an urgent notice waits that the claim leaves behind), school.ErrConflict (the
// grant is of an older cycle than the ledger's) and school.ErrUnavailable. With
// school.ErrCommitUnknown it may be claimed: nothing of it may be sent, and a
// new term and Withdraw settle it.
func (db *DB) Claim(ctx context.Context, t school.Term, c school.Claim) error {
	op := "claim batch " + c.Batch
	b, err := claimedOf(t, c)
	if err != nil {
		return err
	}
	statement := claimSQL
	if c.UrgentFirst {
		statement = claimUrgentSQL
	}
	return db.take(ctx, op, statement, t, c.Work, []any{
		c.Batch, c.Sender, b.size, c.Grant.Cycle, b.attempted, b.filled,
		c.Longest.Microseconds(), c.Record.Microseconds(), c.Rule.Limit, restMillis(c.Rule.Rest), c.Rule.Version,
	})
}

// claimed is what a claim makes of its grant.
type claimed struct {
	size      int  // recipients to be handed over
	attempted int  // of the cycle, these included
	filled    bool // they reach the limit
}

// claimedOf checks a claim. One that got fewer than were reserved gives the
// difference back, and does not fill the cycle then.
func claimedOf(t school.Term, c school.Claim) (claimed, error) {
	size := c.Size()
	switch {
	case c.Batch == "":
		return claimed{}, fmt.Errorf("claim for school %s: no batch id", t.School)
	case c.Grant.Kind != school.Granted || size < 1 || size > c.Grant.Size:
		return claimed{}, fmt.Errorf("claim batch %s: %d recipients for a grant of %d", c.Batch, size, c.Grant.Size)
	case c.Longest <= 0 || c.Record < 0 || c.Rule.Limit < 1 || c.Rule.Rest <= 0:
		return claimed{}, fmt.Errorf("claim batch %s: longest %s, record %s, limit %d, rest %s: must be positive",
			c.Batch, c.Longest, c.Record, c.Rule.Limit, c.Rule.Rest)
	}
	short := c.Grant.Size - size
	return claimed{size: size, attempted: c.Grant.Attempted - short, filled: c.Grant.Filled && short == 0}, nil
}

// Skip moves frontiers over recipients that are not to be sent, when there is
// nothing else in the page. Errors as Claim; school.ErrCommitUnknown asks for
// nothing but a new page.
func (db *DB) Skip(ctx context.Context, t school.Term, work []school.Work) error {
	op := "skip recipients of school " + t.School
	if err := checkSkips(op, work); err != nil || len(work) == 0 {
		return err
	}
	return db.take(ctx, op, claimSQL, t, work, []any{nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil})
}

// checkSkips refuses to pass over a recipient that is to be sent.
func checkSkips(op string, work []school.Work) error {
	for i := range work {
		if work[i].Sendable() {
			return fmt.Errorf("%s: recipient %s is to be sent", op, school.MessageID(work[i].Notice.ID, work[i].Seq))
		}
	}
	return nil
}

func (db *DB) take(ctx context.Context, op, statement string, t school.Term, work []school.Work, batch []any) error {
	m, err := movesOf(work)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	args := append([]any{t.School, t.Fence, t.Acquisition, t.Owner}, batch...)
	args = append(args, m.notice, m.from, m.to, m.taken, m.retries,
		m.againNotice, m.againSeq, m.againAttempts,
		m.skipNotice, m.skipSeq, m.skipAttempts, m.skipReason,
		m.rangeNotice, m.rangeFrom, m.rangeTo, m.rangeKind)
	return change(ctx, db.dispatch, op, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, statement, args...)
		return err
	})
}

// moves are a claim's work as the arrays that schoolbell_claim takes. They are
// never nil, since the cardinality of NULL is not 0.
type moves struct {
	notice         []int64 // sorted, distinct
	from, to       []*int32
	taken, retries []int32

	againNotice             []int64
	againSeq, againAttempts []int32

	skipNotice            []int64
	skipSeq, skipAttempts []int32
	skipReason            []string

	rangeNotice        []int64
	rangeFrom, rangeTo []int32
	rangeKind          []string
}

// movesOf sorts the work by notice and checks that the first attempts of each
// are one range without a gap, which is what a frontier can move over.
func movesOf(work []school.Work) (*moves, error) {
	m := &moves{
		notice: []int64{}, from: []*int32{}, to: []*int32{}, taken: []int32{}, retries: []int32{},
		againNotice: []int64{}, againSeq: []int32{}, againAttempts: []int32{},
		skipNotice: []int64{}, skipSeq: []int32{}, skipAttempts: []int32{}, skipReason: []string{},
		rangeNotice: []int64{}, rangeFrom: []int32{}, rangeTo: []int32{}, rangeKind: []string{},
	}
	order := make([]*school.Work, len(work))
	for i := range work {
		order[i] = &work[i]
	}
	slices.SortStableFunc(order, func(a, b *school.Work) int {
		return cmp.Or(cmp.Compare(a.Notice.ID, b.Notice.ID), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Seq, b.Seq))
	})
	firstTaken := 0 // of the notice at hand, beyond its frontier
	closeFirst := func() {
		if firstTaken > 0 {
			i := len(m.notice) - 1
			m.addRange(m.notice[i], *m.from[i], *m.to[i], school.First)
		}
		firstTaken = 0
	}
	for _, w := range order {
		id, seq := w.Notice.ID, int32(w.Seq)
		if n := len(m.notice); n == 0 || m.notice[n-1] != id {
			closeFirst()
			m.notice = append(m.notice, id)
			m.from, m.to = append(m.from, nil), append(m.to, nil)
			m.taken, m.retries = append(m.taken, 0), append(m.retries, 0)
		}
		i := len(m.notice) - 1
		switch w.Kind {
		case school.First:
			switch {
			case m.to[i] == nil:
				from, to := seq-1, seq
				m.from[i], m.to[i] = &from, &to
			case *m.to[i] != seq-1:
				return nil, fmt.Errorf("first attempts of notice %d leap from %d to %d", id, *m.to[i], seq)
			default:
				*m.to[i] = seq
			}
			if w.Sendable() {
				firstTaken++
				m.taken[i]++
			}
		case school.Again:
			if w.Sendable() {
				m.taken[i]++
				if w.Standing.State == school.RetryPending {
					m.retries[i]++
				}
				m.againNotice = append(m.againNotice, id)
				m.againSeq = append(m.againSeq, seq)
				m.againAttempts = append(m.againAttempts, int32(w.Standing.Attempts))
				m.addAgain(id, seq)
			}
		default:
			return nil, fmt.Errorf("recipient %s: kind %q", school.MessageID(id, w.Seq), w.Kind)
		}
		if w.Skip != "" && !w.Settled {
			if w.Skip != school.Disabled && w.Skip != school.NotAllowed {
				return nil, fmt.Errorf("recipient %s: a claim cannot skip for %s", school.MessageID(id, w.Seq), w.Skip)
			}
			m.skipNotice = append(m.skipNotice, id)
			m.skipSeq = append(m.skipSeq, seq)
			m.skipAttempts = append(m.skipAttempts, int32(w.Standing.Attempts))
			m.skipReason = append(m.skipReason, string(w.Skip))
		}
	}
	closeFirst()
	return m, nil
}

func (m *moves) addRange(notice int64, from, to int32, kind school.WorkKind) {
	m.rangeNotice = append(m.rangeNotice, notice)
	m.rangeFrom, m.rangeTo = append(m.rangeFrom, from), append(m.rangeTo, to)
	m.rangeKind = append(m.rangeKind, string(kind))
}

// addAgain joins neighbours, which often failed together, into one range. A
// range holds claimed retries only.
func (m *moves) addAgain(notice int64, seq int32) {
	if i := len(m.rangeNotice) - 1; i >= 0 && m.rangeNotice[i] == notice && m.rangeKind[i] == string(school.Again) && m.rangeTo[i] == seq-1 {
		m.rangeTo[i] = seq
		return
	}
	m.addRange(notice, seq-1, seq, school.Again)
}

// Withdraw takes back a claim of which nothing was handed to a sender: its
// recipients are due again at once, its attempts leave the ledger, and so does
// the rest that it had set (R2). Recipients of a notice that closed meanwhile
// are ended instead. A claim that never committed, or was withdrawn before, is
// no error; its fate is final when this returns.
//
// t is the newest term, the claim's own or one of the same owner after it.
// school.ErrFenced, school.ErrTakenOver (it was settled otherwise),
// school.ErrConflict (it is another owner's), school.ErrUnavailable,
// school.ErrCommitUnknown (asking again is harmless).
func (db *DB) Withdraw(ctx context.Context, t school.Term, batch string) error {
	return change(ctx, db.dispatch, "withdraw batch "+batch, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, `SELECT schoolbell_withdraw($1, $2, $3, $4, $5)`, t.School, t.Fence, t.Acquisition, t.Owner, batch)
		return err
	})
}
