package redisquota

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/school"
	"schoolbell/school/quota"
	"schoolbell/school/quota/quotatest"
	"schoolbell/scripts"
)

// A machine runs all nine scripts of one school on its two keys, as several
// owners and a bad network would: each request may be sent again at once, late,
// in any order, or only after its caller has gone; keys expire, get lost, or go
// back to what they were. The rule has a comparison of its own (quotatest), and
// the lock scripts have one with the package that runs them; here they meet.
//
// Two judges look at every step. One knows what should happen: package quota,
// and a lock in a few lines. The other looks only at what is in Redis, and only
// at requests that come again.
type machine struct {
	src  quotatest.Source
	l    *live
	runs map[string]*redis.Script
	now  int64 // the scripts' clock; the keys' own runs on the server's

	lock  lockState
	quota quota.State

	sent    []*request
	serial  int
	saved   map[string]string // the quota of some time ago
	savedAs quota.State
	losses  int // times that the quota was lost or went back
	locked  int // times that the lock was taken

	mute   bool           // only the second judge looks
	judged map[string]int // repeats of which nothing but a TTL was accepted
}

// lockState is the lock hash as it should be.
type lockState struct {
	held               bool
	owner, acquisition string
	fence              int64
	renewals           int64
	etc                int64
	lease              int64 // the longest that was asked for, ms
	batch, acquiredAt  string
	until              time.Time // by the server's clock, which is this machine's
}

// request is one run of a script, with everything in it, so that it can come
// again.
type request struct {
	script      string
	owner       string
	acquisition string
	fence       int64
	lease, etc  int64
	notAfter    int64
	renewal     int64
	batch       string
	want        int
	longest     int64
	margin      int64
	ledger      school.Ledger
	rule        school.Rule
	cycle       int64
	attempted   int

	ran    bool // it was executed before
	losses int  // how often the quota had been lost by then
	locked int  // how often the lock had been taken by then
	answer string
}

func (q *request) String() string {
	return fmt.Sprintf("%s %v", q.script, q.args())
}

func (q *request) keys(l *live) []string {
	lock, quota := l.keys.Lock(l.id), l.keys.Quota(l.id)
	switch q.script {
	case "reserve", "rebuild", "peek":
		return []string{lock, quota}
	case "settle", "reconcile":
		return []string{quota}
	}
	return []string{lock}
}

func (q *request) args() []any {
	switch q.script {
	case "acquire":
		return []any{q.owner, q.acquisition, q.lease, q.etc, q.notAfter}
	case "bind":
		return []any{q.acquisition, q.fence}
	case "extend":
		return []any{q.acquisition, q.lease, q.renewal}
	case "release":
		return []any{q.acquisition}
	case "reconcile":
		return ledgerArgs(q.ledger, q.rule)
	case "rebuild":
		return append([]any{q.acquisition, q.fence}, ledgerArgs(q.ledger, q.rule)...)
	case "reserve":
		return []any{q.acquisition, q.fence, q.batch, q.want, q.longest, q.margin,
			q.rule.Limit, quota.Millis(q.rule.Rest), q.rule.Version,
			q.ledger.Cycle, q.ledger.Attempted, flag(q.ledger.Filled), quota.Millis(q.ledger.Resting)}
	case "settle":
		return []any{q.batch, q.cycle, q.attempted}
	}
	return nil // peek
}

func newMachine(tb testing.TB, src quotatest.Source, s *server, edits ...edit) *machine {
	m := &machine{src: src, l: s.subject(tb), runs: map[string]*redis.Script{}, now: quotatest.Epoch, judged: map[string]int{}}
	all, err := scripts.All()
	require.NoError(tb, err)
	for _, sc := range all {
		text := strings.Replace(sc.Source, timeLine, "redis.call('LRANGE', '"+m.l.clock+"', 0, 1)", 1)
		for _, e := range edits {
			if e.script == sc.Name {
				require.Equal(tb, 1, strings.Count(text, e.old), "%s holds what is to be mutated once: %s", sc.Name, e.old)
				text = strings.Replace(text, e.old, e.new, 1)
			}
		}
		m.runs[sc.Name] = redis.NewScript(text)
	}
	return m
}

// run does steps of the machine until one is wrong.
func (m *machine) run(steps int) error {
	for i := range steps {
		what, err := m.step()
		if err == nil && !m.mute {
			err = m.compare()
		}
		if err != nil {
			return fmt.Errorf("step %d at %d, %s: %w", i, m.now-quotatest.Epoch, what, err)
		}
	}
	return nil
}

func (m *machine) step() (string, error) {
	switch m.src.Intn(12) {
	case 0, 1:
		m.now += int64(m.src.Intn(60))
	case 2:
		m.now += int64(m.src.Intn(700))
	case 3:
		if m.src.Intn(6) == 0 {
			m.now -= int64(m.src.Intn(2500))
		}
	}
	m.l.At(m.now)

	ctx := context.Background()
	switch m.src.Intn(40) {
	case 0:
		m.lock = lockState{}
		return "the lock ends", m.l.c.Del(ctx, m.l.keys.Lock(m.l.id)).Err()
	case 1:
		if m.src.Intn(3) == 0 {
			m.quota, m.losses = quota.State{}, m.losses+1
			return "the quota is lost", m.l.c.Del(ctx, m.l.keys.Quota(m.l.id)).Err()
		}
	case 2:
		if m.src.Intn(3) == 0 {
			m.lock, m.quota, m.losses = lockState{}, quota.State{}, m.losses+1
			return "everything is lost", m.l.c.Del(ctx, m.l.keys.Lock(m.l.id), m.l.keys.Quota(m.l.id)).Err()
		}
	case 3:
		m.saved, m.savedAs = maps.Clone(m.l.hash()), m.quota
		return "a replica stops following", nil
	case 4:
		if m.saved != nil && m.src.Intn(3) == 0 {
			m.l.Load(m.saved)
			m.quota, m.losses = m.savedAs, m.losses+1
			return "the quota goes back", nil
		}
	}
	if len(m.sent) > 0 && m.src.Intn(5) < 2 {
		q := m.earlier()
		return "late: " + q.String(), m.late(q)
	}
	q := m.draw()
	m.sent = append(m.sent, q)
	if m.src.Intn(8) == 0 {
		return "under way: " + q.String(), nil
	}
	return q.String(), m.execute(q)
}

// earlier is a request of not long ago; reservations are met more often, since
// most that can go wrong is about them.
func (m *machine) earlier() *request {
	recent := m.sent[max(0, len(m.sent)-20):]
	q := recent[m.src.Intn(len(recent))]
	for i := 0; i < 2 && q.script != "reserve"; i++ {
		q = recent[m.src.Intn(len(recent))]
	}
	return q
}

// acquisition is one that has the lock, mostly, or any other.
func (m *machine) acquisition() string {
	if m.lock.held && m.src.Intn(8) > 0 {
		return m.lock.acquisition
	}
	return fmt.Sprintf("acq-%d", m.src.Intn(m.serial+1))
}

func (m *machine) fence() int64 {
	if m.lock.fence > 0 && m.src.Intn(8) > 0 {
		return m.lock.fence
	}
	return 1 + int64(m.src.Intn(6))
}

// hours are spans that the time which a test takes makes no difference to.
func (m *machine) hours(n ...int64) int64 {
	return n[m.src.Intn(len(n))] * time.Hour.Milliseconds()
}

func (m *machine) rule() school.Rule {
	return school.Rule{
		Limit:   []int{1, 20, 50, 80}[m.src.Intn(4)],
		Rest:    []time.Duration{1, 100, 200, 300}[m.src.Intn(4)] * time.Millisecond,
		Version: int64(m.src.Intn(4)),
	}
}

func (m *machine) ledger() school.Ledger {
	s := &m.quota
	l := school.Ledger{Cycle: s.Cycle, Attempted: max(0, s.Attempted-m.src.Intn(3)), Filled: s.Next > 0 && m.src.Intn(3) > 0}
	switch m.src.Intn(8) {
	case 0:
		return school.Ledger{}
	case 1, 2:
		l.Cycle = max(0, l.Cycle-1+int64(m.src.Intn(3)))
	case 3:
		l.Attempted += m.src.Intn(6)
	case 4:
		l.Filled, l.Resting = true, time.Duration(m.src.Intn(300))*time.Millisecond
	}
	if m.src.Intn(3) > 0 {
		l.Rule = m.rule()
	}
	return l
}

// what is the script to run next: mostly the one that a turn would need.
func (m *machine) what() string {
	if m.src.Intn(2) == 0 {
		switch {
		case !m.lock.held:
			return "acquire"
		case m.lock.fence == 0:
			return "bind"
		case !m.quota.Known:
			return "reconcile"
		case len(m.quota.Open) > 0 && m.src.Intn(2) == 0:
			return "settle"
		}
		return "reserve"
	}
	return []string{"acquire", "bind", "extend", "extend", "release", "reconcile", "reconcile", "rebuild", "rebuild", "settle", "settle", "reserve", "peek", "peek"}[m.src.Intn(14)]
}

// draw makes a request that was not made before.
func (m *machine) draw() *request {
	q := &request{script: m.what(), acquisition: m.acquisition(), fence: m.fence(), rule: m.rule()}
	m.serial++
	switch q.script {
	case "acquire":
		// An acquisition is made anew for each; what it is called decides nothing.
		q.owner, q.acquisition = fmt.Sprintf("host-%d", m.src.Intn(2)), fmt.Sprintf("acq-%d", m.serial)
		q.lease, q.etc, q.notAfter = m.hours(2, 4, 8), m.hours(1, 2), m.now+int64(m.src.Intn(300))-20
	case "bind":
		q.fence = max(1, m.lock.fence-1+int64(m.src.Intn(3)))
	case "extend":
		q.lease, q.renewal = m.hours(1, 2, 4, 8), m.lock.renewals+int64(m.src.Intn(3))
	case "reconcile", "rebuild":
		q.ledger = m.ledger()
	case "settle":
		q.batch, q.cycle = fmt.Sprintf("b%d", m.src.Intn(m.serial)), m.quota.Cycle
		if n := len(m.quota.Open); n > 0 && m.src.Intn(6) > 0 {
			o := m.quota.Open[m.src.Intn(n)]
			q.batch, q.cycle, q.attempted = o.Batch, o.Cycle, m.src.Intn(o.Size+1)
			if m.src.Intn(8) == 0 {
				q.cycle++
			}
		}
	case "reserve":
		q.batch, q.want, q.ledger = fmt.Sprintf("b%d", m.serial), 1+m.src.Intn(25), m.ledger()
		q.longest, q.margin = 1+int64(m.src.Intn([]int{120, 120, 3000}[m.src.Intn(3)])), 0
		if m.src.Intn(10) == 0 {
			q.margin = m.hours(1, 3, 7)
		}
	}
	return q
}

// ask runs q in Redis; what it answers is text.
func (m *machine) ask(q *request) (string, error) {
	v, err := m.runs[q.script].Run(context.Background(), m.l.c, q.keys(m.l), q.args()...).Slice()
	switch {
	case err != nil && strings.HasPrefix(err.Error(), "ERR quota: settle: attempted more"):
		return "too many", nil
	case err != nil:
		return "", err
	}
	// What is left of a lease moves while the test runs.
	for i, n := range v {
		if ttl, ok := n.(int64); ok && i >= 2 && ttl > time.Hour.Milliseconds()/2 && ttl < 24*time.Hour.Milliseconds() {
			v[i] = fmt.Sprintf("%dh", (ttl+time.Hour.Milliseconds()/2)/time.Hour.Milliseconds())
		}
	}
	return line(v...), nil
}

// execute runs q for the first time, and once more at once.
func (m *machine) execute(q *request) error {
	answer, err := m.both(q)
	if err != nil {
		return err
	}
	m.note(q, answer)
	if m.src.Intn(3) > 0 {
		return nil
	}
	if strings.HasPrefix(answer, line("RESTING", m.now, 0, "")) {
		return nil // the rest has passed by the time it was set: the next ask begins the cycle
	}
	before := m.look()
	again, err := m.both(q)
	if err != nil {
		return err
	}
	if err := m.unchanged(q, before); err != nil {
		return fmt.Errorf("asked again at once: %w", err)
	}
	return sameAnswer(q, answer, again)
}

// both runs q in Redis and in the model.
func (m *machine) both(q *request) (string, error) {
	want := m.expect(q)
	got, err := m.ask(q)
	if err != nil {
		return "", err
	}
	if got != want && !m.mute {
		return "", fmt.Errorf("Redis answers %q, should %q", got, want)
	}
	return got, nil
}

// late runs q when its caller is gone or has had its answer.
func (m *machine) late(q *request) error {
	// Whatever is overdue closes whoever comes. Where the second judge looks, it is
	// closed before, so that what is seen is q's own doing.
	judged := m.mute || m.src.Intn(2) == 0
	if judged {
		if _, err := m.both(&request{script: "settle", batch: "none"}); err != nil {
			return err
		}
	}
	before := m.look()
	first := *q
	answer, err := m.both(q)
	if err != nil {
		return err
	}
	if !q.ran {
		m.note(q, answer)
	}
	if !judged {
		return nil
	}
	return m.judgeLate(&first, before)
}

// note keeps how q was answered when it was executed first.
func (m *machine) note(q *request, answer string) {
	q.ran, q.losses, q.locked, q.answer = true, m.losses, m.locked, answer
}

// compare holds what is in Redis against the model.
func (m *machine) compare() error {
	if d := cmp.Diff(m.quota, m.l.state(), cmpopts.EquateEmpty()); d != "" {
		return fmt.Errorf("quota (-should +is): %s", d)
	}
	want := map[string]string{}
	if k := &m.lock; k.held {
		want = map[string]string{"owner": k.owner, "acq": k.acquisition, "fence": fmt.Sprint(k.fence), "renewals": fmt.Sprint(k.renewals),
			"etc_ms": fmt.Sprint(k.etc), "lease_ms": fmt.Sprint(k.lease), "batch": k.batch, "acquired_at": k.acquiredAt}
	}
	got := m.look()
	if !maps.Equal(want, got.lock) {
		return fmt.Errorf("lock (-should +is): %s", cmp.Diff(want, got.lock))
	}
	if left := time.Until(m.lock.until); m.lock.held && (got.ttl-left).Abs() > 10*time.Minute {
		return fmt.Errorf("the lock has %s left, should have %s", got.ttl, left)
	}
	return nil
}

// expect does q in the model and returns what Redis should answer.
func (m *machine) expect(q *request) string {
	k := &m.lock
	mine := k.held && k.acquisition == q.acquisition
	left := func() string { return fmt.Sprintf("%dh", (time.Until(k.until)+time.Hour/2)/time.Hour) }
	switch q.script {
	case "acquire":
		switch {
		case m.now > q.notAfter:
			return line("STALE", m.now)
		case mine:
			return line("OK_AGAIN", m.now, left())
		case k.held:
			return line("BUSY", m.now, left(), k.owner, fmt.Sprintf("%dh", k.etc/time.Hour.Milliseconds()))
		}
		m.locked++
		*k = lockState{held: true, owner: q.owner, acquisition: q.acquisition, etc: q.etc, lease: q.lease, until: time.Now().Add(time.Duration(q.lease) * time.Millisecond),
			acquiredAt: time.UnixMilli(m.now).UTC().Format("2006-01-02T15:04:05.000Z")}
		return line("OK", m.now, left())
	case "bind":
		if !mine {
			return line("LOST", m.now, k.owner)
		}
		k.fence = max(k.fence, q.fence)
		return line("OK", m.now, k.fence)
	case "extend":
		if !mine {
			return line("LOST", m.now, k.owner)
		}
		k.renewals, k.lease = max(k.renewals, q.renewal), max(k.lease, q.lease)
		if until := time.Now().Add(time.Duration(q.lease) * time.Millisecond); until.After(k.until) {
			k.until = until
		}
		return line("OK", m.now, left())
	case "release":
		if !mine {
			return line("NOT_HELD", m.now, k.owner)
		}
		*k = lockState{}
		return line("OK", m.now)
	case "peek":
		p := m.quota.Peek(m.now)
		word, ttl := "UNKNOWN", "0"
		if p.Known {
			word = "KNOWN"
		}
		if k.held {
			ttl = left()
		}
		return line(word, m.now, p.Attempted, p.Limit, p.Cycle, p.Resting.Milliseconds(), ttl, k.owner, fmt.Sprint(k.fence), flag(p.Orphaned))
	case "reconcile":
		s, how, err := m.quota.Reconcile(m.now, q.ledger, q.rule)
		return m.take(s, err, line(merges[how], m.now))
	case "rebuild":
		if !mine || k.fence != q.fence {
			return line("NOT_OWNER", m.now)
		}
		s, how, err := m.quota.Rebuild(m.now, q.ledger, q.rule)
		return m.take(s, err, line(merges[how], m.now))
	case "settle":
		s, did, err := m.quota.Settle(m.now, school.Settlement{Batch: q.batch, Cycle: q.cycle, Attempted: q.attempted})
		if err != nil {
			return "too many"
		}
		return m.take(s, nil, line(settlements[did], m.now))
	}
	return m.expectReserve(q, mine, left)
}

func (m *machine) expectReserve(q *request, mine bool, left func() string) string {
	if !mine || m.lock.fence != q.fence {
		return line("NOT_OWNER", m.now)
	}
	again := slices.ContainsFunc(m.quota.Open, func(o quota.Open) bool { return o.Batch == q.batch })
	s, g, err := m.quota.Reserve(m.now, school.Reservation{Batch: q.batch, Want: q.want,
		Longest: time.Duration(q.longest) * time.Millisecond, Floor: q.ledger, Rule: q.rule})
	switch {
	case err != nil:
		return err.Error()
	case g.Kind == school.BatchSettled:
		return m.take(s, nil, line("SETTLED", m.now))
	case !again && time.Until(m.lock.until) < time.Duration(q.longest+q.margin)*time.Millisecond:
		return line("LEASE_SHORT", m.now, left())
	case g.Kind == school.NeedRebuild:
		why := "behind"
		switch {
		case !m.quota.Known:
			why = "missing"
		case g.ClockJumped:
			why = "clock"
		}
		return line("NEED_REBUILD", m.now, why)
	case g.Kind == school.Resting:
		return m.take(s, nil, line("RESTING", m.now, g.Wait.Milliseconds(), g.Cycle, g.Attempted, g.Rule.Limit, g.Rule.Rest.Milliseconds(), g.Rule.Version))
	}
	if !again {
		m.lock.batch = q.batch
	}
	o := s.Open[slices.IndexFunc(s.Open, func(o quota.Open) bool { return o.Batch == q.batch })]
	return m.take(s, nil, line("GRANTED", m.now, g.Size, g.Cycle, g.Attempted, flag(g.Filled), o.Rested, g.Rule.Limit, g.Rule.Rest.Milliseconds(), g.Rule.Version, flag(again)))
}

var (
	merges      = map[quota.Merge]string{quota.Kept: "KEPT", quota.Created: "CREATED", quota.Raised: "RAISED", quota.Reset: "RESET"}
	settlements = map[quota.Outcome]string{quota.Settles: "OK", quota.Duplicate: "DUP", quota.Late: "LATE", quota.Unknown: "UNKNOWN"}
)

func (m *machine) take(s quota.State, err error, answer string) string {
	if err != nil {
		return err.Error()
	}
	m.quota = s
	return answer
}

// seen is what Redis holds, without what may change: the end of the lease in
// words, and for people when the school may go on, which the quota says as well.
type seen struct {
	lock, quota map[string]string
	ttl         time.Duration
}

func (m *machine) look() seen {
	ctx := context.Background()
	p := m.l.c.Pipeline()
	lock, quota, ttl := p.HGetAll(ctx, m.l.keys.Lock(m.l.id)), p.HGetAll(ctx, m.l.keys.Quota(m.l.id)), p.PTTL(ctx, m.l.keys.Lock(m.l.id))
	_, err := p.Exec(ctx)
	require.NoError(m.l.tb, err)
	delete(lock.Val(), "expires_at")
	return seen{lock: lock.Val(), quota: quota.Val(), ttl: ttl.Val()}
}

// unchanged: nothing but a TTL, and that only longer.
func (m *machine) unchanged(q *request, before seen) error {
	m.judged[q.script]++
	now := m.look()
	if !maps.Equal(before.lock, now.lock) || !maps.Equal(before.quota, now.quota) {
		return fmt.Errorf("it changed (-before +after): %s%s", cmp.Diff(before.lock, now.lock), cmp.Diff(before.quota, now.quota))
	}
	if len(now.lock) > 0 && now.ttl < before.ttl-time.Minute {
		return fmt.Errorf("it shortened the lease from %s to %s", before.ttl, now.ttl)
	}
	return nil
}

// heardAgain are the answers to a repeat that say that it is done.
var heardAgain = map[string][]string{"OK": {"OK", "OK_AGAIN", "NOT_HELD", "DUP"}, "LATE": {"DUP"}, "CREATED": {"KEPT"}, "RAISED": {"KEPT"}, "RESET": {"KEPT"}}

// line is an answer as text.
func line(v ...any) string {
	words := make([]string, len(v))
	for i := range v {
		words[i] = fmt.Sprint(v[i])
	}
	return strings.Join(words, "|")
}

// sameAnswer: who asks again at once hears the same, or that it is done.
func sameAnswer(q *request, first, again string) error {
	a, b := strings.Split(first, "|"), strings.Split(again, "|")
	if done, ok := heardAgain[a[0]]; ok && slices.Contains(done, b[0]) {
		return nil
	}
	if a[0] == "GRANTED" {
		a, b = a[:len(a)-1], b[:len(b)-1] // the last word says that it is an earlier answer
	}
	if !slices.Equal(a, b) {
		return fmt.Errorf("asked again at once, %s answers %q, first %q", q.script, again, first)
	}
	return nil
}

// judgeLate looks at what q did that comes when nobody waits for it; q tells how
// it had been executed before, if it was.
func (m *machine) judgeLate(q *request, before seen) error {
	after := m.look()
	repeated := q.ran && q.losses == m.losses
	switch q.script {
	case "peek":
		return m.unchanged(q, before)
	case "acquire":
		if m.now > q.notAfter || len(before.lock) > 0 {
			return m.unchanged(q, before)
		}
	case "bind", "extend", "release":
		if q.acquisition != before.lock["acq"] {
			return m.unchanged(q, before)
		}
		if q.script != "release" && q.ran && q.locked == m.locked {
			return m.unchanged(q, before)
		}
	case "settle":
		if repeated && q.answer != "too many" && !strings.HasPrefix(q.answer, "UNKNOWN") {
			return m.unchanged(q, before)
		}
	case "reserve":
		if repeated && strings.HasPrefix(q.answer, "GRANTED") {
			return m.unchanged(q, before)
		}
		if q.acquisition != before.lock["acq"] || strconv.FormatInt(q.fence, 10) != before.lock["fence"] {
			return m.unchanged(q, before)
		}
	case "rebuild":
		if q.acquisition != before.lock["acq"] || strconv.FormatInt(q.fence, 10) != before.lock["fence"] {
			return m.unchanged(q, before)
		}
	case "reconcile":
		// An old ledger makes a rest longer at most, and no count smaller.
		for _, name := range []string{"cycle", "attempted", "nextEligibleMs", "floor_attempted", "floor_next_ms"} {
			was, is := number(before.quota[name]), number(after.quota[name])
			if is < was && number(before.quota["cycle"]) == number(after.quota["cycle"]) {
				return fmt.Errorf("a late ledger lowers %s from %d to %d", name, was, is)
			}
		}
		if len(before.quota) > 0 && number(after.quota["cycle"]) < number(before.quota["cycle"]) {
			return fmt.Errorf("a late ledger lowers the cycle")
		}
	}
	return nil
}

func number(text string) int64 {
	n, _ := strconv.ParseInt(text, 10, 64)
	return n
}

func TestScriptsAsAMachine(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	t.Run("properties", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(rt *rapid.T) {
			if err := newMachine(t, drawn{rt}, srv).run(40); err != nil {
				rt.Fatal(err)
			}
		})
	})
	t.Run("long", func(t *testing.T) {
		t.Parallel()
		judged := map[string]int{}
		for seed := range uint64(3) {
			m := newMachine(t, newSeeded(seed), srv)
			require.NoError(t, m.run(1000), "seed %d", seed)
			for name, n := range m.judged {
				judged[name] += n
			}
		}
		for _, name := range []string{"acquire", "bind", "extend", "release", "reconcile", "rebuild", "reserve", "settle", "peek"} {
			require.Greater(t, judged[name], 20, "%s: too tame to judge", name)
		}
	})
}

// TestBrokenScriptsAreCaught takes one line of a script away at a time. mute:
// the judge that knows nothing but what a repeat may do must see it; otherwise
// the other one.
func TestBrokenScriptsAreCaught(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	for name, c := range map[string]struct {
		edits []edit
		mute  bool
	}{
		"a repeated reservation is a new one":     {[]edit{{"reserve", "if o.batch == batch then", "if false then"}}, true},
		"a settled reservation is granted again":  {[]edit{{"reserve", "if is_settled(batch) then", "if false then"}}, true},
		"a reservation asks for no fence":         {[]edit{{"reserve", "or held[2] ~= fence then", "then"}}, true},
		"a reservation asks for no lock":          {[]edit{{"reserve", "if held[1] ~= acq or held[2] ~= fence then", "if false then"}}, true},
		"a reservation asks for no lease":         {[]edit{{"reserve", "if pttl < longest + margin then", "if false then"}}, false},
		"a reservation touches the lease":         {[]edit{{"reserve", "redis.call('HSET', lock, 'batch', batch)", "redis.call('HSET', lock, 'batch', batch, 'fence', 1)"}}, false},
		"settled twice gives back twice":          {[]edit{{"settle", "if is_settled(batch) then", "if false then"}, {"settle", "table.remove(s.open, at)", ""}}, true},
		"a settlement of an older cycle acts":     {[]edit{{"settle", "if o.cycle ~= s.cycle then", "if false then"}}, false},
		"a settlement of another cycle is taken":  {[]edit{{"settle", "and o.cycle == cycle then", "then"}}, false},
		"an old ledger lowers the count":          {[]edit{{"reconcile", "if s.attempted < l.attempted then", "if s.attempted ~= l.attempted then"}}, true},
		"an old ledger brings its cycle back":     {[]edit{{"reconcile", "elseif s.cycle < l.cycle then", "elseif s.cycle ~= l.cycle then"}}, true},
		"an old ledger shortens the rest":         {[]edit{{"reconcile", "elseif resting > 0 and next > s.nextEligibleMs then", "elseif resting > 0 then"}}, true},
		"anybody rebuilds":                        {[]edit{{"rebuild", "if held[1] ~= acq or held[2] ~= fence then", "if false then"}}, true},
		"a former term rebuilds":                  {[]edit{{"rebuild", "or held[2] ~= fence then", "then"}}, true},
		"an acquire comes late":                   {[]edit{{"acquire", "if now > not_after then", "if false then"}}, true},
		"an acquire takes what is held":           {[]edit{{"acquire", "if redis.call('EXISTS', lock) == 1 then", "if false then"}}, false},
		"a repeated acquire is told that it lost": {[]edit{{"acquire", "if held[1] == acq then", "if false then"}}, true},
		"a repeated acquire begins anew":          {[]edit{{"acquire", "if held[1] == acq then\n", "if false then\n"}, {"acquire", "if redis.call('EXISTS', lock) == 1 then", "if held[1] ~= acq and redis.call('EXISTS', lock) == 1 then"}}, true},
		"an older fence is bound":                 {[]edit{{"bind", "if fence > bound then", "if true then"}}, true},
		"anybody binds":                           {[]edit{{"bind", "if held[1] ~= acq then", "if false then"}}, true},
		"an extension creates":                    {[]edit{{"extend", "if held[1] ~= acq then", "if held[1] and held[1] ~= acq then"}}, true},
		"anybody extends":                         {[]edit{{"extend", "if held[1] ~= acq then", "if not held[1] then"}}, true},
		"a late extension shortens":               {[]edit{{"extend", "if pttl < lease then", "if true then"}}, true},
		"a late extension counts back":            {[]edit{{"extend", "if renewal > (tonumber(held[3]) or 0) then", "if true then"}}, true},
		"anybody releases":                        {[]edit{{"release", "if held[1] ~= acq then", "if not held[1] then"}}, true},
		"a look leaves something behind":          {[]edit{{"peek", "return answer", "redis.call('HSET', KEYS[2], 'seen', 1)\nreturn answer"}}, true},
		"a look sees no orphans":                  {[]edit{{"peek", "if tonumber(deadline) <= now then", "if false then"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(60) {
				m := newMachine(t, newSeeded(seed), srv, c.edits...)
				m.mute = c.mute
				if err := m.run(250); err != nil {
					t.Logf("seed %d: %v", seed, err)
					return
				}
			}
			t.Fatal("nothing noticed")
		})
	}
}
