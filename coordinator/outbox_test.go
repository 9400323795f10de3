package coordinator_test

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

// outbox is a small model of the store: schools with fence and ledger, notices
// with a frontier, recipients, and open batches. It refuses what the store
// refuses.
type outbox struct {
	script *script

	mu      sync.Mutex
	schools map[string]*schoolRow
	notices []*noticeRow // by id, from 1
	batches map[string]*batchRow

	brakes   []bool     // of each recorded batch
	stranded int        // what the next sweep finds
	expire   func() int // how many notices a step of closing touches; nil: none
}

type schoolRow struct {
	settings    school.School
	fence       int64
	acquisition string
	cycle       int64
	attempted   int
	filled      bool
	eligible    time.Time // end of the rest; zero: none set
	rule        school.Rule
	notices     []*noticeRow
	batches     map[string]*batchRow // not settled when last looked at
}

type noticeRow struct {
	notice     *school.Notice
	created    time.Time
	frontier   int
	recipients []*recipientRow
}

type recipientRow struct {
	school.Standing
	token    string // empty: secretToken
	disabled bool
	due      time.Time // behind the frontier: when to try again; zero: never
	batch    string    // open batch that covers it
	reason   school.Reason
	code     string
}

type batchRow struct {
	school   string
	owner    string
	fence    int64
	cycle    int64
	size     int
	deadline time.Time
	settled  string // by whom
	covers   []covered
}

type covered struct {
	notice *noticeRow
	seq    int
}

func newOutbox(s *script) *outbox {
	return &outbox{script: s, schools: map[string]*schoolRow{}, batches: map[string]*batchRow{}}
}

// put makes a school or changes its settings.
func (o *outbox) put(s school.School) {
	o.mu.Lock()
	defer o.mu.Unlock()
	s.SettingsVersion++
	if row := o.schools[s.ID]; row != nil {
		s.SettingsVersion = row.settings.SettingsVersion + 1
		row.settings = s
		return
	}
	o.schools[s.ID] = newSchool(s)
}

// accept stores a notice of n recipients, made if need be with its school.
func (o *outbox) accept(schoolID string, n int, change ...func(*school.Notice)) *noticeRow {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.schools[schoolID] == nil {
		o.schools[schoolID] = newSchool(school.School{ID: schoolID, SettingsVersion: 1})
	}
	row := &noticeRow{created: time.Now(), notice: &school.Notice{
		ID: int64(len(o.notices) + 1), School: schoolID, Priority: school.Normal, Delivery: school.AtLeastOnce,
		Content: school.Content{Title: secretTitle, Body: secretBody},
	}}
	for _, f := range change {
		f(row.notice)
	}
	for range n {
		row.recipients = append(row.recipients, &recipientRow{Standing: school.Standing{State: school.Pending}})
	}
	o.notices = append(o.notices, row)
	o.schools[schoolID].notices = append(o.schools[schoolID].notices, row)
	return row
}

func newSchool(s school.School) *schoolRow {
	return &schoolRow{settings: s, batches: map[string]*batchRow{}}
}

// open returns the batches of the school that nobody has settled.
func (s *schoolRow) open() map[string]*batchRow {
	maps.DeleteFunc(s.batches, func(_ string, b *batchRow) bool { return b.settled != "" })
	return s.batches
}

// states counts the recipients of a school by state.
func (o *outbox) states(schoolID string) map[school.State]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	counts := map[school.State]int{}
	for _, n := range o.schools[schoolID].notices {
		for _, r := range n.recipients {
			if r.batch != "" {
				counts[school.InProgress]++
			} else {
				counts[r.State]++
			}
		}
	}
	return counts
}

// ledger is what is written about the school's quota.
func (o *outbox) ledger(schoolID string) school.Ledger {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.schools[schoolID].ledger()
}

func (s *schoolRow) ledger() school.Ledger {
	l := school.Ledger{Cycle: s.cycle, Attempted: s.attempted, Filled: s.filled, Rule: s.rule}
	if s.filled {
		l.Resting = max(0, time.Until(s.eligible))
	}
	return l
}

// fence is the school's newest.
func (o *outbox) fence(schoolID string) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.schools[schoolID].fence
}

// unsettled is how many batches of the school are open.
func (o *outbox) unsettled(schoolID string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.schools[schoolID].open())
}

// sound fails where a recipient behind a frontier is neither final, nor in an
// open batch, nor to be tried again.
func (o *outbox) sound(t require.TestingT) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, n := range o.notices {
		for i, r := range n.recipients {
			if i+1 <= n.frontier && !r.State.Final() && r.batch == "" && r.due.IsZero() {
				require.Fail(t, "stranded", "recipient %d.%d in state %s", n.notice.ID, i+1, r.State)
			}
			if r.batch != "" && o.batches[r.batch].settled != "" {
				require.Fail(t, "covered by a settled batch", "recipient %d.%d", n.notice.ID, i+1)
			}
		}
	}
}

func (o *outbox) Ping(ctx context.Context) error { return o.script.enter(ctx, "ping", "", "") }

func (o *outbox) Due(ctx context.Context, horizon time.Duration) ([]school.Due, error) {
	if err := o.script.enter(ctx, "due", "", ""); err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	earliest := map[string]time.Time{}
	work := func(schoolID string, at time.Time) {
		if o.schools[schoolID].settings.Paused {
			return
		}
		if e, ok := earliest[schoolID]; !ok || at.Before(e) {
			earliest[schoolID] = at
		}
	}
	for _, n := range o.notices {
		if n.frontier < len(n.recipients) {
			work(n.notice.School, n.from())
		}
		for _, r := range n.recipients {
			if r.batch == "" && r.State == school.RetryPending {
				work(n.notice.School, r.due)
			}
		}
	}
	for _, b := range o.batches {
		if e, ok := earliest[b.school]; b.settled == "" && (!ok || b.deadline.Before(e)) {
			earliest[b.school] = b.deadline // of a paused school as well
		}
	}
	var due []school.Due
	for id, at := range earliest {
		row := o.schools[id]
		if at.After(now.Add(horizon)) {
			continue
		}
		d := school.Due{School: id, Sender: row.settings.Sender, In: max(0, at.Sub(now))}
		if d.In == 0 {
			d.Since = now.Sub(at)
		}
		due = append(due, d)
	}
	slices.SortFunc(due, func(a, b school.Due) int { return cmp.Compare(a.School, b.School) })
	return due, nil
}

func (o *outbox) WorkIn(ctx context.Context, schoolID string) (time.Duration, error) {
	if err := o.script.enter(ctx, "work in", schoolID, ""); err != nil {
		return 0, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	in := school.Never
	row := o.schools[schoolID]
	if row == nil {
		return in, nil
	}
	now := time.Now()
	work := func(at time.Time) {
		if d := max(0, at.Sub(now)); in == school.Never || d < in {
			in = d
		}
	}
	for _, b := range row.open() {
		work(b.deadline)
	}
	if row.settings.Paused {
		return in, nil
	}
	for _, n := range row.notices {
		if n.frontier < len(n.recipients) {
			work(n.from())
		}
		for _, r := range n.recipients {
			if r.batch == "" && r.State == school.RetryPending {
				work(r.due)
			}
		}
	}
	return in, nil
}

func (o *outbox) Confirm(ctx context.Context, t school.Term, confirmed []school.Recorded) error {
	if err := o.script.enter(ctx, "confirm", t.School, ""); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.fenced(t); err != nil {
		return err
	}
	for _, c := range confirmed {
		r := o.find(c.Notice).recipients[c.Seq-1]
		if r.State == school.RetryPending && r.batch == "" && r.Attempts == c.Change.Attempts {
			covered{notice: o.find(c.Notice), seq: c.Seq}.write(c.Change, time.Now())
		}
	}
	return nil
}

// from is when first attempts of the notice may begin.
func (n *noticeRow) from() time.Time {
	if n.notice.ScheduledAt.After(n.created) {
		return n.notice.ScheduledAt
	}
	return n.created
}

func (o *outbox) OpenTerm(ctx context.Context, schoolID, acquisition, owner string) (school.Term, error) {
	if err := o.script.enter(ctx, "open", schoolID, ""); err != nil {
		return school.Term{}, err
	}
	o.mu.Lock()
	row := o.schools[schoolID]
	if row == nil {
		o.mu.Unlock()
		return school.Term{}, fmt.Errorf("school %s: %w", schoolID, school.ErrNotFound)
	}
	row.fence++
	row.acquisition = acquisition
	t := school.Term{School: schoolID, Acquisition: acquisition, Owner: owner, Fence: row.fence, Ledger: row.ledger(), Settings: row.settings}
	for id, b := range row.open() {
		t.Unsettled = append(t.Unsettled, school.OpenBatch{ID: id, Fence: b.fence, Cycle: b.cycle, Size: b.size, Remaining: time.Until(b.deadline)})
	}
	o.mu.Unlock()
	return t, o.script.leave(ctx, "open")
}

// fenced is the guard that every step of a term begins with.
func (o *outbox) fenced(t school.Term) error {
	row := o.schools[t.School]
	if row.fence != t.Fence || row.acquisition != t.Acquisition {
		return fmt.Errorf("fence %d: %w", t.Fence, school.ErrFenced)
	}
	return nil
}

func (o *outbox) Takeover(ctx context.Context, t school.Term, policy school.RetryPolicy) (school.Orphans, error) {
	if err := o.script.enter(ctx, "takeover", t.School, ""); err != nil {
		return school.Orphans{}, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.fenced(t); err != nil {
		return school.Orphans{}, err
	}
	var did school.Orphans
	now := time.Now()
	for id, b := range o.schools[t.School].open() {
		if b.fence >= t.Fence {
			continue
		}
		if left := b.deadline.Sub(now); left > 0 {
			did.Wait = max(did.Wait, left)
			continue
		}
		b.settled = t.Owner
		did.Batches = append(did.Batches, school.OpenBatch{ID: id, Fence: b.fence, Cycle: b.cycle, Size: b.size})
		for _, c := range b.covers {
			change, err := school.Next(c.row().Standing, school.Event{Outcome: school.OrphanedUnsure, Delivery: c.notice.notice.Delivery}, policy)
			if err != nil {
				return did, err
			}
			c.write(change, now)
			did.Recipients++
		}
	}
	return did, nil
}

func (c covered) row() *recipientRow { return c.notice.recipients[c.seq-1] }

func (c covered) write(change school.Change, now time.Time) {
	r := c.row()
	r.Standing = school.Standing{State: change.State, Attempts: change.Attempts, Retries: change.Retries, Orphanings: change.Orphanings}
	r.batch, r.due, r.reason, r.code = "", time.Time{}, change.Reason, change.Code
	if change.State == school.RetryPending {
		r.due = now.Add(change.RetryIn)
	}
}

func (o *outbox) Page(ctx context.Context, t school.Term, limit int) (school.Page, error) {
	if err := o.script.enter(ctx, "page", t.School, ""); err != nil {
		return school.Page{}, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	now := time.Now()
	row := o.schools[t.School]
	var page school.Page
	later := func(at time.Time) {
		if in := at.Sub(now); page.NextDue == 0 || in < page.NextDue {
			page.NextDue = in
		}
	}
	add := func(n *noticeRow, seq int, kind school.WorkKind) {
		if len(page.Work) == limit {
			page.More = true
			return
		}
		r := n.recipients[seq-1]
		w := school.Work{Notice: n.notice, Seq: seq, Kind: kind, Token: cmp.Or(r.token, secretToken), Standing: r.Standing, Uncertain: r.State == school.RetryPending && r.reason == school.OutcomeUnknown}
		if r.disabled {
			w.Skip = school.Disabled
		}
		page.Work = append(page.Work, w)
	}
	firsts := func(urgent bool) {
		for _, n := range row.notices {
			if n.frontier >= len(n.recipients) || (n.notice.Priority == school.Urgent) != urgent {
				continue
			}
			if at := n.from(); at.After(now) {
				later(at)
				continue
			}
			for seq := n.frontier + 1; seq <= len(n.recipients) && !page.More; seq++ {
				add(n, seq, school.First)
			}
		}
	}
	firsts(true)
	for _, n := range row.notices {
		for i, r := range n.recipients {
			if r.batch != "" || r.State != school.RetryPending {
				continue
			}
			if r.due.After(now) {
				later(r.due)
				continue
			}
			add(n, i+1, school.Again)
		}
	}
	firsts(false)
	return page, nil
}

func (o *outbox) Claim(ctx context.Context, t school.Term, c school.Claim) error {
	if err := o.script.enter(ctx, "claim", t.School, fmt.Sprint(c.Size())); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return fmt.Errorf("claim: %w: %w", school.ErrUnavailable, ctx.Err())
	}
	if err := o.claim(t, c); err != nil {
		return err
	}
	return o.script.leave(ctx, "claim")
}

func (o *outbox) claim(t school.Term, c school.Claim) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	row := o.schools[t.School]
	if err := o.fenced(t); err != nil {
		return err
	}
	if row.settings.Paused {
		return fmt.Errorf("school %s: %w", t.School, school.ErrPaused)
	}
	if row.settings.SettingsVersion > c.Rule.Version {
		return fmt.Errorf("school %s: %w", t.School, school.ErrRuleChanged)
	}
	if c.Size() == 0 || c.Size() > c.Grant.Size {
		return fmt.Errorf("claim of %d with a grant of %d", c.Size(), c.Grant.Size)
	}
	now := time.Now()
	if err := o.fresh(c.Work, now); err != nil {
		return err
	}
	if c.UrgentFirst && row.passesUrgent(c.Work, now) {
		return fmt.Errorf("an urgent notice waits: %w", school.ErrStalePage)
	}
	b := &batchRow{
		school: t.School, owner: t.Owner, fence: t.Fence, cycle: c.Grant.Cycle, size: c.Size(),
		deadline: now.Add(c.Longest + c.Record),
	}
	b.covers = o.move(c.Work, c.Batch)
	o.batches[c.Batch], row.batches[c.Batch] = b, b
	if c.Grant.Cycle > row.cycle {
		row.cycle, row.attempted, row.filled, row.eligible = c.Grant.Cycle, 0, false, time.Time{}
	}
	row.attempted = max(row.attempted, c.Grant.Attempted)
	row.rule = c.Rule
	if c.Grant.Filled {
		row.filled, row.eligible = true, now.Add(c.Longest+c.Rule.Rest)
	}
	return nil
}

// fresh fails where the work is not what the store would show now.
func (o *outbox) fresh(work []school.Work, now time.Time) error {
	frontier := map[int64]int{}
	for i := range work {
		w := &work[i]
		n := o.find(w.Notice.ID)
		r := n.recipients[w.Seq-1]
		if w.Kind == school.Again {
			if r.State != school.RetryPending || r.batch != "" || r.due.IsZero() || r.due.After(now) {
				return fmt.Errorf("recipient %d.%d: %w", w.Notice.ID, w.Seq, school.ErrStalePage)
			}
			continue
		}
		at, seen := frontier[w.Notice.ID]
		if !seen {
			at = n.frontier
		}
		if w.Seq != at+1 {
			return fmt.Errorf("notice %d: frontier is %d, page goes on with %d: %w", w.Notice.ID, at, w.Seq, school.ErrStalePage)
		}
		frontier[w.Notice.ID] = w.Seq
	}
	return nil
}

// passesUrgent reports whether work leaves first attempts of an urgent notice
// behind for anything else.
func (s *schoolRow) passesUrgent(work []school.Work, now time.Time) bool {
	after := map[*school.Notice]int{}
	others := false
	for i := range work {
		w := &work[i]
		if w.Kind == school.First {
			after[w.Notice] = w.Seq
		}
		others = others || w.Sendable() && (w.Kind != school.First || w.Notice.Priority != school.Urgent)
	}
	return others && slices.ContainsFunc(s.notices, func(n *noticeRow) bool {
		return n.notice.Priority == school.Urgent && !n.from().After(now) && max(n.frontier, after[n.notice]) < len(n.recipients)
	})
}

// move takes work out of the queue: into the batch, or skipped.
func (o *outbox) move(work []school.Work, batch string) []covered {
	var covers []covered
	for i := range work {
		w := &work[i]
		n := o.find(w.Notice.ID)
		r := n.recipients[w.Seq-1]
		if w.Kind == school.First {
			n.frontier = w.Seq
		}
		if w.Skip != "" {
			r.State, r.reason, r.due = school.Skipped, w.Skip, time.Time{}
			if r.Attempts > 0 {
				r.State = school.PermanentFail
			}
			continue
		}
		r.batch = batch
		covers = append(covers, covered{notice: n, seq: w.Seq})
	}
	return covers
}

func (o *outbox) find(id int64) *noticeRow {
	return o.notices[id-1]
}

func (o *outbox) Skip(ctx context.Context, t school.Term, work []school.Work) error {
	if err := o.script.enter(ctx, "skip", t.School, fmt.Sprint(len(work))); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.fenced(t); err != nil {
		return err
	}
	if err := o.fresh(work, time.Now()); err != nil {
		return err
	}
	o.move(work, "")
	return nil
}

func (o *outbox) Withdraw(ctx context.Context, t school.Term, batch string) error {
	if err := o.script.enter(ctx, "withdraw", t.School, ""); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.fenced(t); err != nil {
		return err
	}
	b := o.batches[batch]
	if b == nil || b.settled != "" {
		return nil
	}
	b.settled = t.Owner
	for _, c := range b.covers {
		r := c.row()
		r.State, r.batch, r.due = school.RetryPending, "", time.Now()
	}
	if row := o.schools[t.School]; row.cycle == b.cycle {
		row.attempted -= b.size
		row.filled, row.eligible = false, time.Time{}
	}
	return nil
}

func (o *outbox) Record(ctx context.Context, r school.BatchRecord) error {
	if err := o.script.enter(ctx, "record", r.School, fmt.Sprint(len(r.Results))); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.batches[r.Batch]
	switch {
	case b.settled == r.Owner:
		return nil
	case b.settled != "":
		return fmt.Errorf("batch %s: %w", r.Batch, school.ErrTakenOver)
	}
	b.settled = r.Owner
	o.brakes = append(o.brakes, r.Brake)
	now := time.Now()
	for _, res := range r.Results {
		c := covered{notice: o.find(res.Notice), seq: res.Seq}
		c.write(res.Change, now)
	}
	if row := o.schools[r.School]; r.Filled && row.cycle == r.Cycle {
		row.filled, row.eligible = true, now.Add(r.Rest)
	}
	return nil
}

// braked tells of each recorded batch whether its unregistered devices are not believed.
func (o *outbox) braked() []bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.brakes)
}

func (o *outbox) Expire(ctx context.Context, limit int) (int, error) {
	if err := o.script.enter(ctx, "expire", "", ""); err != nil || o.expire == nil {
		return 0, err
	}
	return o.expire(), nil
}

func (o *outbox) Sweep(ctx context.Context) (int, error) {
	return o.stranded, o.script.enter(ctx, "sweep", "", "")
}
