package verdict

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"schoolbell/sender/simulator"
)

// Rule is the sending rule of a school: at most Limit attempts, then Rest.
type Rule struct {
	Limit int
	Rest  time.Duration
}

func (r Rule) check() error {
	if r.Limit < 1 || r.Rest <= 0 {
		return fmt.Errorf("rule of %d attempts and a rest of %v: both must be positive", r.Limit, r.Rest)
	}
	return nil
}

// Config is what is known of a run beforehand.
type Config struct {
	Rule     Rule
	Rules    map[string]Rule // schools with a rule of their own
	Retries  int             // after the first attempt; 0: 3
	Start    time.Time       // zero: the first arrival
	Seed     int64
	Replicas int

	// Unfinished says that the run was ended before its work was: recipients
	// whose state has not ended are counted and are no violation.
	Unfinished bool
}

// Notice is a notice that was accepted for sending: its recipients are the
// message ids "<ID>.1" to "<ID>.<Total>".
type Notice struct {
	ID     string
	School string
	Total  int
	At     time.Time // of its acceptance; zero: before everything else

	// Maybe says that nobody learnt whether it was accepted (its answer got
	// lost): its messages are neither missed nor strangers.
	Maybe bool
}

// NoticeCounts is what a notice says of its recipients.
type NoticeCounts struct {
	Notice                                                              string
	Total                                                               int
	Waiting, InProgress, RetryPending                                   int
	Success, Fail, RetrySuccess, RetryFail, PermanentFail, SkippedAtAll int
}

// State is a recipient's final state.
type State int

// The states, as the outbox names them.
const (
	Pending State = iota + 1
	InProgress
	RetryPending
	Success
	Fail
	PermanentFail
	Skipped
)

var stateNames = map[string]State{
	"PENDING": Pending, "IN_PROGRESS": InProgress, "RETRY_PENDING": RetryPending,
	"SUCCESS": Success, "FAIL": Fail, "PERMANENT_FAIL": PermanentFail, "SKIPPED": Skipped,
}

// ParseState reads a state's name, such as "PERMANENT_FAIL".
func ParseState(s string) (State, error) {
	if state, ok := stateNames[s]; ok {
		return state, nil
	}
	return 0, fmt.Errorf("state %q is none of a recipient's", s)
}

// Kinds of faults that the judge knows. Others are shown and mean nothing to it.
const (
	Kill           = "kill"            // the process is gone
	Pause          = "pause"           // the process is stopped (SIGSTOP) until Until
	PartitionDB    = "partition-db"    // the process alone has lost its way to the database until Until
	PartitionRedis = "partition-redis" // the same of Redis
	Stall          = "stall"           // the machine gave the whole run no time until Until: nobody did this to it
)

// Fault is something that was done to the run.
type Fault struct {
	At     time.Time
	Until  time.Time // when it was mended: a paused process went on; zero: never
	Kind   string
	Target string // of what is done to one process: the instance id, as in Batch.Owner
	Detail string // for people

	// Unsettled are the sizes of the target's batches that were unsettled at
	// that moment, and Schools those whose owner it was. Where Unsettled is
	// nil, both are worked out from the batches given to the judge.
	Unsettled []int
	Schools   []string
}

// Batch is a claim as the database has it. Times are of the database's clock,
// which must be the receiver's.
type Batch struct {
	ID           string
	School       string
	Owner        string
	Fence        int64
	Size         int
	ClaimedAt    time.Time
	SendDeadline time.Time
	SettledAt    time.Time // zero: unsettled
	TakenOver    bool      // it was settled by another than its owner, who did not know what became of it
}

// Term is a school's fence as it rose: from that moment on no claim of a lower one
// may be taken.
type Term struct {
	School   string
	Fence    int64
	OpenedAt time.Time // of the database's clock
}

// Judge collects what is known of a run and judges it. It is not safe for
// concurrent use. Arrivals may be given in any order.
type Judge struct {
	cfg     Config
	schools map[string]*school
	ids     map[string]int32 // message key → index of messages
	keep    []message
	batchID map[string]int32
	batches []Batch // by index; those without ID were named by arrivals alone
	notice  map[string]int32
	notices []Notice // by index; those without ID were named by messages alone
	counts  []NoticeCounts
	faults  []Fault
	terms   map[string][]Term // by school

	accepting bool // acceptances were given, so strangers can be told
	first     int64
	last      int64
}

type school struct {
	name     string
	arrivals []arrival
}

// arrival is kept small: there may be a million.
type arrival struct {
	t, end  int64 // end is 0 while it is being answered
	fence   int64
	message int32
	batch   int32
	attempt int32
	answer  answer
	lost    bool
	excused bool // worked out by Verdict: late, because its owner was paused on the way
}

type answer uint8

const (
	unanswered answer = iota
	accepted
	dropped   // a repeat that the receiver dropped
	final     // refused for good
	retryable // refused for now, or nobody knows
)

// message is one message in the receiver's eyes; a requeued one is another.
type message struct {
	state    State
	expected bool // accepted for sending
	maybe    bool
	requeue  bool
	base     int32 // of a requeued one: the first
	notice   int32

	// Worked out by Verdict.
	last      int64 // arrival
	arrivals  int32
	taken     int32 // times accepted
	learnt    bool  // the sender could learn of an acceptance
	unexcused bool  // accepted again after one that it could have learnt of
	refusal   answer
}

// New returns a judge that knows nothing yet.
func New(cfg Config) (*Judge, error) {
	if err := cfg.Rule.check(); err != nil {
		return nil, err
	}
	for name, r := range cfg.Rules {
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("school %s: %w", name, err)
		}
	}
	if cfg.Retries == 0 {
		cfg.Retries = 3
	}
	return &Judge{
		cfg: cfg, schools: map[string]*school{}, ids: map[string]int32{}, batchID: map[string]int32{},
		notice: map[string]int32{}, terms: map[string][]Term{}, first: math.MaxInt64, last: math.MinInt64,
	}, nil
}

func (j *Judge) rule(school string) Rule {
	if r, ok := j.cfg.Rules[school]; ok {
		return r
	}
	return j.cfg.Rule
}

// AcceptNotice tells of a notice that was accepted for sending.
func (j *Judge) AcceptNotice(n Notice) error {
	if n.ID == "" {
		return errors.New("a notice has no id")
	}
	i := j.noticeIndex(n.ID)
	if j.notices[i].ID != "" {
		return fmt.Errorf("notice %s is told of twice", n.ID)
	}
	j.notices[i] = n
	j.accepting = true
	j.school(n.School)
	for seq := 1; seq <= n.Total; seq++ {
		m := &j.keep[j.message(n.ID+"."+strconv.Itoa(seq))]
		m.expected, m.maybe = !n.Maybe, n.Maybe
	}
	return nil
}

// AcceptMessages tells of single messages that were accepted for sending.
func (j *Judge) AcceptMessages(ids ...string) {
	j.accepting = true
	for _, id := range ids {
		j.keep[j.message(id)].expected = true
	}
}

// FinalState tells how a recipient ended. Once one state is told, all have to
// be: an accepted recipient without a state is judged from the log alone.
func (j *Judge) FinalState(id string, s State) { j.keep[j.message(id)].state = s }

// NoticeCounts tells what a notice says of its recipients.
func (j *Judge) NoticeCounts(c NoticeCounts) { j.counts = append(j.counts, c) }

// Fault tells of something that was done to the run.
func (j *Judge) Fault(f Fault) { j.faults = append(j.faults, f) }

// Term tells of a fence that rose. Where terms are told, a claim is held against
// them; else against the claims of higher fences alone.
func (j *Judge) Term(t Term) { j.terms[t.School] = append(j.terms[t.School], t) }

// Batch tells of a claim.
func (j *Judge) Batch(b Batch) error {
	if b.ID == "" {
		return errors.New("a batch has no id")
	}
	i := j.batch(b.ID)
	if j.batches[i].ID != "" {
		return fmt.Errorf("batch %s is told of twice", b.ID)
	}
	j.batches[i] = b
	return nil
}

// Arrival tells of one arrival, as it is in its second line.
func (j *Judge) Arrival(a simulator.Arrival) {
	s, i := j.begin(a)
	j.end(&s.arrivals[i], a)
}

// begin keeps what an arrival's first line says.
func (j *Judge) begin(a simulator.Arrival) (s *school, index int) {
	s = j.school(a.School)
	m := j.message(a.Key())
	if a.Requeued > 0 {
		base := j.message(a.Message)
		j.keep[m].requeue, j.keep[m].base = true, base
	}
	s.arrivals = append(s.arrivals, arrival{
		t: a.T, fence: a.Fence, message: m, batch: j.batch(a.Batch), attempt: int32(min(a.Attempt, math.MaxInt32)),
	})
	j.first, j.last = min(j.first, a.T), max(j.last, a.T)
	return s, len(s.arrivals) - 1
}

// end keeps what its second line adds.
func (j *Judge) end(kept *arrival, a simulator.Arrival) {
	kept.end, kept.lost, kept.answer = a.Ended, a.Lost, answerOf(a)
	j.last = max(j.last, a.Ended)
}

func answerOf(a simulator.Arrival) answer {
	switch {
	case a.Answer == "":
		return unanswered
	case a.Accepted():
		return accepted
	case a.Repeat:
		return dropped
	}
	switch a.Answer {
	case "UNAVAILABLE", "INTERNAL", "QUOTA_EXCEEDED":
		return retryable
	}
	if c := a.Answer[0]; c >= 'A' && c <= 'Z' {
		return final // any other error code: the message is refused for what it is
	}
	return retryable
}

func (j *Judge) school(name string) *school {
	s := j.schools[name]
	if s == nil {
		s = &school{name: name}
		j.schools[name] = s
	}
	return s
}

func (j *Judge) message(key string) int32 {
	i, ok := j.ids[key]
	if !ok {
		i = int32(len(j.keep))
		j.ids[key] = i
		j.keep = append(j.keep, message{notice: j.noticeIndex(noticeOf(key))})
	}
	return i
}

func (j *Judge) noticeIndex(id string) int32 {
	i, ok := j.notice[id]
	if !ok {
		i = int32(len(j.notices))
		j.notice[id] = i
		j.notices = append(j.notices, Notice{})
	}
	return i
}

// noticeOf is the notice id in a message id "<notice id>.<seq>".
func noticeOf(message string) string {
	if i := strings.LastIndexByte(message, '.'); i >= 0 {
		return message[:i]
	}
	return message
}

func (j *Judge) batch(id string) int32 {
	i, ok := j.batchID[id]
	if !ok {
		i = int32(len(j.batches))
		j.batchID[id] = i
		j.batches = append(j.batches, Batch{})
	}
	return i
}

// Verdict judges what has been told so far.
func (j *Judge) Verdict() Verdict {
	v := Verdict{
		Seed: j.cfg.Seed, Replicas: j.cfg.Replicas, Schools: len(j.schools),
		Faults: []FaultLine{}, Violations: []string{},
	}
	var lines violations
	schools := make([]*school, 0, len(j.schools))
	for _, s := range j.schools {
		slices.SortStableFunc(s.arrivals, func(a, b arrival) int { return cmp.Compare(a.t, b.t) })
		schools = append(schools, s)
	}
	slices.SortFunc(schools, func(a, b *school) int { return cmp.Compare(a.name, b.name) })

	j.judgeFaults(&v)
	j.judgeLateness(&v, &lines, schools)
	j.judgeRule(&v, &lines, schools)
	j.judgeDelivery(&v, &lines, schools)
	j.judgeCounts(&v, &lines)
	j.judgeSpeed(&v)

	v.OK = lines.count == 0
	v.Violations, v.Details = lines.text(), lines.kept
	return v
}

func (j *Judge) judgeSpeed(v *Verdict) {
	if j.last < j.first {
		return
	}
	start := j.first
	if !j.cfg.Start.IsZero() {
		start = min(start, j.cfg.Start.UnixNano())
	}
	v.Seconds = time.Duration(j.last - start).Seconds()
	if v.Seconds > 0 {
		v.RatePerSecond = math.Round(10*float64(v.Arrived)/v.Seconds) / 10
	}
}

// violations collects lines within bounds.
type violations struct {
	kept  []Violation
	count int
}

func (v *violations) add(format string, args ...any) { v.of("", "", 0, format, args...) }

// of is add with the school, message and moment (ns) where there is one.
func (v *violations) of(school, message string, at int64, format string, args ...any) {
	v.count++
	if v.count > maxViolations {
		return
	}
	one := Violation{Text: fmt.Sprintf(format, args...), School: school, Message: message}
	if at != 0 {
		one.At = time.Unix(0, at)
	}
	v.kept = append(v.kept, one)
}

func (v *violations) text() []string {
	lines := []string{}
	for _, one := range v.kept {
		lines = append(lines, one.Text)
	}
	if v.count > maxViolations {
		lines = append(lines, fmt.Sprintf("and %d more", v.count-maxViolations))
	}
	return lines
}

// instant writes a time of the log for people, to the microsecond.
func instant(ns int64) string {
	return time.Unix(0, ns).UTC().Format("15:04:05.000000")
}
