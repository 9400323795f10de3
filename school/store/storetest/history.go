package storetest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/school"
)

var historyTests = []test{
	{"History/whatever happens in whatever order, counts equal recipients and nobody is lost", func(w *world) {
		serial := 0
		rapid.Check(w.t, func(t *rapid.T) {
			serial++
			h := &history{world: w, rt: t, school: fmt.Sprint("school-", serial), final: map[string]string{}}
			h.owners = map[string]*school.Term{}
			t.Repeat(map[string]func(*rapid.T){
				"accept":   h.accepts,
				"open":     h.opens,
				"claim":    h.claims,
				"send":     h.sends,
				"skip":     h.skips,
				"record":   h.records,
				"withdraw": h.withdraws,
				"takeover": h.takesOver,
				"cancel":   h.cancels,
				"expire":   h.expires,
				"requeue":  h.requeues,
				"pause":    h.pauses,
				"elapse":   h.elapses,
				"":         h.holds,
			})
			h.drain()
			w.forget()
		})
	}},
}

// forget empties the store, so that the next history is not judged together with
// those before it: all of it is looked at after each step.
func (w *world) forget() {
	for _, table := range []string{"push_cluster_tokens", "push_clusters", "push_batch_ranges", "push_batches", "school_terms", "schools"} {
		w.Exec(w.t, `DELETE FROM `+table)
	}
}

// history is one school's life at random.
type history struct {
	*world
	rt      *rapid.T
	school  string
	notices []int64
	owners  map[string]*school.Term // the term each replica believes in
	open    []openClaim
	final   map[string]string // recipients that reached a final state
	total   int
}

type openClaim struct {
	term  school.Term
	claim school.Claim
}

func (h *history) owner(t *rapid.T) string {
	return rapid.SampledFrom([]string{"x", "y"}).Draw(t, "owner")
}

// expected is an error that the interleaving may well have earned.
func (h *history) expected(t *rapid.T, err error, kinds ...error) bool {
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			return true
		}
	}
	if err != nil {
		t.Fatalf("unexpected: %v", err)
	}
	return false
}

func (h *history) accepts(t *rapid.T) {
	if len(h.notices) >= 6 {
		t.Skip("enough notices")
	}
	n := plain(h.school)
	n.Priority = rapid.SampledFrom([]school.Priority{school.Urgent, school.Normal, school.Low}).Draw(t, "priority")
	n.Delivery = rapid.SampledFrom([]school.Delivery{school.AtLeastOnce, school.AtMostOnce}).Draw(t, "delivery")
	switch rapid.IntRange(0, 4).Draw(t, "time") {
	case 0:
		n.ExpiresAt = time.Now().Add(10 * time.Minute)
	case 1:
		n.ScheduledAt = time.Now().Add(5 * time.Minute)
	}
	size := rapid.IntRange(1, 25).Draw(t, "size")
	h.total += size
	recipients := make([]school.NewRecipient, size)
	for i := range recipients {
		recipients[i].Token = fmt.Sprint("token-", rapid.IntRange(0, 40).Draw(t, "token"))
		if rapid.IntRange(0, 9).Draw(t, "off") == 0 {
			off := false
			recipients[i].Enabled = &off
		}
	}
	h.notices = append(h.notices, h.accept(n, list(recipients...)))
}

func (h *history) opens(t *rapid.T) {
	if len(h.notices) == 0 {
		t.Skip("no school yet")
	}
	term := h.term(h.school, h.owner(t))
	h.owners[term.Owner] = &term
}

func (h *history) believed(t *rapid.T) school.Term {
	term := h.owners[h.owner(t)]
	if term == nil {
		t.Skip("no term")
	}
	return *term
}

func (h *history) claims(t *rapid.T) {
	term := h.believed(t)
	work := h.page(term, 30).Work
	if len(work) == 0 {
		t.Skip("nothing to do")
	}
	work = work[:rapid.IntRange(1, len(work)).Draw(t, "cut")]
	c := h.claimOf(work, 100)
	if c.Size() == 0 {
		t.Skip("nothing to send")
	}
	c.Grant.Cycle = term.Ledger.Cycle + int64(rapid.IntRange(0, 1).Draw(t, "cycle"))
	c.Grant.Filled = rapid.Bool().Draw(t, "filled")
	c.UrgentFirst = true // nothing came since the page was read
	err := h.Store.Claim(h.ctx(), term, c)
	if h.expected(t, err, school.ErrFenced, school.ErrPaused, school.ErrConflict) {
		return
	}
	h.open = append(h.open, openClaim{term, c})
}

// sends is a claim and its record with nothing in between: the usual way, by which
// a history gets far.
func (h *history) sends(t *rapid.T) {
	if len(h.notices) == 0 {
		t.Skip("no school yet")
	}
	term := h.term(h.school, h.owner(t))
	h.owners[term.Owner] = &term
	work := h.page(term, 30).Work
	c := h.claimOf(work, 100)
	if c.Size() == 0 {
		t.Skip("nothing to send")
	}
	c.Grant.Cycle, c.UrgentFirst = term.Ledger.Cycle+1, true
	if h.expected(t, h.Store.Claim(h.ctx(), term, c), school.ErrFenced, school.ErrPaused, school.ErrConflict) {
		return
	}
	usual := rapid.SampledFrom([]school.Outcome{school.Accepted, school.Rejected, school.Unknown, school.Unavailable}).Draw(t, "usual")
	h.record(term, c, func(i int, _ *school.Work) school.Event {
		if i%4 == 3 {
			return school.Event{Outcome: school.Rejected, Code: codes[school.Rejected]}
		}
		return school.Event{Outcome: usual, Code: codes[usual]}
	})
}

func (h *history) skips(t *rapid.T) {
	term := h.believed(t)
	var idle []school.Work
	for _, k := range h.page(term, 30).Work {
		if k.Sendable() {
			break
		}
		idle = append(idle, k)
	}
	if len(idle) == 0 {
		t.Skip("nothing to skip")
	}
	h.expected(t, h.Store.Skip(h.ctx(), term, idle), school.ErrFenced, school.ErrPaused)
}

func (h *history) pick(t *rapid.T) openClaim {
	if len(h.open) == 0 {
		t.Skip("no open batch")
	}
	return h.open[rapid.IntRange(0, len(h.open)-1).Draw(t, "batch")]
}

func (h *history) records(t *rapid.T) {
	o := h.pick(t)
	r := h.recordOf(o.term, o.claim, func(int, *school.Work) school.Event {
		outcome := rapid.SampledFrom(everyOutcome).Draw(t, "outcome")
		return school.Event{Outcome: outcome, Code: codes[outcome]}
	})
	h.expected(t, h.Store.Record(h.ctx(), r), school.ErrTakenOver)
}

func (h *history) withdraws(t *rapid.T) {
	o := h.pick(t)
	term := h.believed(t)
	h.expected(t, h.Store.Withdraw(h.ctx(), term, o.claim.Batch), school.ErrFenced, school.ErrTakenOver, school.ErrConflict)
}

func (h *history) takesOver(t *rapid.T) {
	term := h.believed(t)
	_, err := h.Store.Takeover(h.ctx(), term, policy)
	h.expected(t, err, school.ErrFenced)
}

func (h *history) cancels(t *rapid.T) {
	if len(h.notices) == 0 || rapid.IntRange(0, 3).Draw(t, "rarely") > 0 {
		t.Skip("not now")
	}
	h.expected(t, h.Store.Cancel(h.ctx(), rapid.SampledFrom(h.notices).Draw(t, "notice")), school.ErrConflict)
}

func (h *history) expires(t *rapid.T) {
	_, err := h.Store.Expire(h.ctx(), 100)
	h.expected(t, err)
}

// requeues puts back what failed for good, by one way or another, and compares each
// recipient with what it was: nothing else moves, and all that may does.
func (h *history) requeues(t *rapid.T) {
	if len(h.notices) == 0 {
		t.Skip("no school yet")
	}
	o := school.RequeueOrder{Limit: 1000, FailureFilter: school.FailureFilter{
		School: rapid.SampledFrom([]string{"", h.school}).Draw(t, "of the school"),
		Code:   rapid.SampledFrom([]string{"", "", "", "INVALID_ARGUMENT", "CANCELLED", "OUTCOME_UNKNOWN", "TIMEOUT"}).Draw(t, "code"),
	}}
	if rapid.Bool().Draw(t, "of a notice") {
		o.Notice = rapid.SampledFrom(h.notices).Draw(t, "notice")
	}
	const rows = `SELECT s.cluster_id, s.seq, s.job_status, s.error_code, s.reason, s.attempts, s.requeued, c.closing, c.delivery,
		CASE WHEN c.expires_at IS NULL THEN '' ELSE 'expires' END FROM push_cluster_token_states s JOIN push_clusters c ON c.id = s.cluster_id ORDER BY s.cluster_id, s.seq`
	before := h.Query(h.t, rows)
	r, err := h.Store.Requeue(h.ctx(), o)
	if errors.Is(err, school.ErrConflict) && o.Notice != 0 {
		return
	}
	if err != nil {
		t.Fatalf("requeue: %v", err)
	}
	moved, left := 0, 0
	for i, now := range h.Query(h.t, rows) {
		was := before[i]
		matches := was[2] == string(school.PermanentFail) && (o.Notice == 0 || was[0] == fmt.Sprint(o.Notice)) &&
			(o.Code == "" || was[3] == o.Code || was[4] == o.Code)
		unknown := was[8] == string(school.AtMostOnce) && was[4] == string(school.OutcomeUnknown) && o.Code != string(school.OutcomeUnknown)
		switch {
		case slices.Equal(was, now):
			if matches {
				left++
				if was[7] == "" && was[9] == "" && !unknown {
					t.Fatalf("%v matches %+v and was left", was, o)
				}
			}
		case !matches || unknown || was[7] != "" || now[2] != string(school.RetryPending) || now[5] != was[5] || now[6] == was[6]:
			t.Fatalf("%+v made of %v %v", o, was, now)
		default:
			moved++
			delete(h.final, now[0]+"."+now[1])
		}
	}
	if r.Recipients != moved || r.Left.Sum() != left {
		t.Fatalf("%+v put back %d and left %d, and says %+v", o, moved, left, r)
	}
}

func (h *history) pauses(t *rapid.T) {
	if len(h.notices) == 0 {
		t.Skip("no school yet")
	}
	if rapid.Bool().Draw(t, "pause") {
		h.expected(t, h.Store.Pause(h.ctx(), h.school))
	} else {
		h.expected(t, h.Store.Resume(h.ctx(), h.school))
	}
}

func (h *history) elapses(t *rapid.T) {
	h.Elapse(h.t, rapid.SampledFrom([]time.Duration{5 * time.Second, 20 * time.Second, 3 * time.Minute}).Draw(t, "time"))
}

// holds is checked after every step.
func (h *history) holds(t *rapid.T) {
	if faults := h.faults(); len(faults) > 0 {
		t.Fatalf("%v", faults)
	}
	if len(h.notices) == 0 {
		return
	}
	now := map[string]string{}
	rows := h.Query(h.t, `SELECT cluster_id, seq, job_status, attempts, reason FROM push_cluster_token_states WHERE school_id = '`+h.school+`'`)
	if len(rows) != h.total {
		t.Fatalf("%d recipients of %d", len(rows), h.total)
	}
	for _, r := range rows {
		key := r[0] + "." + r[1]
		if school.State(r[2]).Final() {
			now[key] = fmt.Sprint(r[2:])
		}
	}
	for key, was := range h.final {
		if now[key] != was {
			t.Fatalf("recipient %s was final as %s and is %q", key, was, now[key])
		}
	}
	h.final = now
	stranded, err := h.Store.Sweep(h.ctx())
	if err != nil || stranded != 0 {
		t.Fatalf("sweep: %d stranded, %v", stranded, err)
	}
}

// drain lets everything come to its end: whatever happened, it does.
func (h *history) drain() {
	if len(h.notices) == 0 {
		return
	}
	require.NoError(h.t, h.Store.Resume(h.ctx(), h.school))
	h.Elapse(h.t, time.Hour)
	term := h.term(h.school, "last")
	_, err := h.Store.Takeover(h.ctx(), term, policy)
	require.NoError(h.t, err)
	for range 100 {
		_, err := h.Store.Expire(h.ctx(), 100)
		require.NoError(h.t, err)
		h.send(term, school.Accepted)
		ended := !slices.ContainsFunc(h.notices, func(id int64) bool { return h.progress(id).EndedAt.IsZero() })
		if ended {
			h.holds(h.rt)
			return
		}
		h.Elapse(h.t, time.Hour)
	}
	h.rt.Fatalf("notices do not end")
}
