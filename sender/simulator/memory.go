package simulator

import (
	"maps"
	"net"
	"net/http"
	"sync"
	"time"
)

// memory is what the receiver remembers between requests.
type memory struct {
	mu       sync.Mutex
	accepted map[string]int  // message key → times accepted
	scripted map[string]int  // token → times its scripted outcome was given
	batches  map[string]bool // Idempotency-Keys seen
	windows  map[string]*window
	counts   Counts
}

// Counts are sums over everything that came in.
type Counts struct {
	Requests       int64            `json:"requests"`        // of the sending protocol
	Replays        int64            `json:"replays"`         // requests whose Idempotency-Key, or with FCM whose message of the same batch, came before
	ProtocolErrors int64            `json:"protocol_errors"` // refused with 400
	Aborted        int64            `json:"aborted"`         // broke off before the body's end
	Arrivals       int64            `json:"arrivals"`        // messages
	Accepted       int64            `json:"accepted"`        // messages accepted, repeats among them
	Distinct       int64            `json:"distinct"`        // different messages accepted
	Repeated       int64            `json:"repeated"`        // different messages accepted more than once
	Dropped        int64            `json:"dropped"`         // repeats that were dropped
	Lost           int64            `json:"lost"`            // accepted, the answer lost
	InFlight       int64            `json:"in_flight"`       // messages being answered
	Unauthorized   int64            `json:"unauthorized"`    // FCM requests without a valid access token
	TokenRequests  int64            `json:"token_requests"`
	Connections    int64            `json:"connections"` // opened so far, with NewServer
	Open           int64            `json:"open_connections"`
	Answers        map[string]int64 `json:"answers"`
	LastProtocol   string           `json:"last_protocol_error,omitempty"`
}

func newMemory() *memory {
	return &memory{
		accepted: map[string]int{}, scripted: map[string]int{},
		batches: map[string]bool{}, windows: map[string]*window{},
		counts: Counts{Answers: map[string]int64{}},
	}
}

func (m *memory) snapshot() Counts {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.counts
	c.Answers = maps.Clone(c.Answers)
	return c
}

// request notes a request and its messages.
func (m *memory) request(batch string, messages int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.Requests++
	if m.batches[batch] {
		m.counts.Replays++
	}
	m.batches[batch] = true
	m.counts.Arrivals += int64(messages)
	m.counts.InFlight += int64(messages)
}

func (m *memory) protocolError(text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.ProtocolErrors++
	m.counts.LastProtocol = text
}

func (m *memory) aborted() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.Aborted++
}

func (m *memory) unauthorized() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.Unauthorized++
}

func (m *memory) tokenRequest() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.TokenRequests++
}

// connection counts the connections of a server.
func (m *memory) connection(_ net.Conn, s http.ConnState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch s {
	case http.StateNew:
		m.counts.Connections++
		m.counts.Open++
	case http.StateClosed, http.StateHijacked:
		m.counts.Open--
	}
}

// stillScripted reports whether token is to get its scripted outcome once more.
func (m *memory) stillScripted(token string, times int) bool {
	if times == 0 {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.scripted[token]++
	return m.scripted[token] <= times
}

// decide fixes what becomes of the arrivals, in one step for all of them, so
// that two requests with the same message cannot both be the first.
func (m *memory) decide(arrivals []Arrival, dedupe bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range arrivals {
		a := &arrivals[i]
		if a.Answer != AnswerAccepted {
			continue
		}
		key := a.Key()
		if dedupe && m.accepted[key] > 0 {
			a.Repeat = true
			m.counts.Dropped++
			continue
		}
		m.accepted[key]++
		m.counts.Accepted++
		switch m.accepted[key] {
		case 1:
			m.counts.Distinct++
		case 2:
			m.counts.Repeated++
		}
	}
}

// ended counts the answers.
func (m *memory) ended(arrivals []Arrival) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts.InFlight -= int64(len(arrivals))
	for i := range arrivals {
		m.counts.Answers[arrivals[i].Answer]++
		if arrivals[i].Lost {
			m.counts.Lost++
		}
	}
}

// statusOf answers for a message id. A receiver that remembers everything
// knows of an id it never met that it was not accepted.
func (m *memory) statusOf(id string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.accepted[id] > 0 {
		return "accepted"
	}
	return "not_accepted"
}

// takeQuota takes n messages out of what name may have in any 60 s, or says in
// how many seconds that may work.
func (m *memory) takeQuota(name string, n, quota int, now int64) (wait int, ok bool) {
	if quota == 0 {
		return 0, true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.windows[name]
	if w == nil {
		w = new(window)
		m.windows[name] = w
	}
	return w.take(n, quota, now/int64(time.Second))
}

// window counts by second over the last minute.
type window struct {
	counts [60]int
	newest int64 // the second that was counted last
}

func (w *window) take(n, quota int, second int64) (wait int, ok bool) {
	for s := max(w.newest+1, second-59); s <= second; s++ {
		w.counts[s%60] = 0
	}
	w.newest = max(w.newest, second)
	used := 0
	for _, c := range w.counts {
		used += c
	}
	if used+n <= quota {
		w.counts[w.newest%60] += n
		return 0, true
	}
	// The oldest seconds leave first.
	for age := 59; age >= 0; age-- {
		used -= w.counts[((w.newest-int64(age))%60+60)%60]
		if used+n <= quota {
			return 60 - age, false
		}
	}
	return 60, false // more than a whole minute's quota: never
}
