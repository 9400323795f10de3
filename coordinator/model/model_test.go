package model

import (
	"flag"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

var full = flag.Bool("full", false, "search as far as the whole bounds reach: millions of states")

// mostStates is far above what the bounds below have, and what fits in memory.
const mostStates = 8_000_000

var (
	// single: a batch is one message, a cycle two.
	single = Bounds{Recipients: 3, Batch: 1, Limit: 2, Rest: 3, Claim: 1, Call: 1, Record: 1, Lease: 3, Patience: 1}
	// cut: the second batch of a cycle is cut at the limit, a call outlasts a message.
	cut = Bounds{Recipients: 4, Batch: 2, Limit: 3, Rest: 3, Claim: 1, Call: 2, Record: 1, Lease: 4, Patience: 1}
	// whole: each batch fills a cycle.
	whole = Bounds{Recipients: 4, Batch: 2, Limit: 2, Rest: 3, Claim: 1, Call: 2, Record: 1, Lease: 4, Patience: 1}
	// lowered: the limit is lowered at any moment, also to what was attempted already.
	lowered = Bounds{Recipients: 4, Batch: 2, Limit: 3, Lowered: 2, Rest: 3, Claim: 1, Call: 1, Record: 1, Lease: 3, Patience: 1}
)

// mixed returns n faults, each kind at most once.
func mixed(n int) Faults {
	return Faults{All: n, Kill: 1, Pause: 1, LostReply: 1, Late: 1, Flush: 1, Failover: 1, Unknown: 1}
}

// awake is mixed without a process that stands still, which multiplies the states.
func awake(n int) Faults {
	f := mixed(n)
	f.Pause = 0
	return f
}

func (b Bounds) with(f Faults) Bounds { b.Faults = f; return b }

func (b Bounds) without(broken Broken) Bounds { b.Broken = broken; return b }

func (b Bounds) only(invariant string) Bounds { b.Only = invariant; return b }

// TestProtocolKeepsItsPromises searches everything: 120,000 states, or with the
// whole bounds 4,200,000, in half a minute where the machine is free: make model.
func TestProtocolKeepsItsPromises(t *testing.T) {
	t.Parallel()
	searches := map[string]Bounds{
		"single, no fault":   single,
		"single, one fault":  single.with(mixed(1)),
		"cut, one fault":     cut.with(awake(1)),
		"lowered, one fault": lowered.with(awake(1)),
	}
	if *full {
		searches = map[string]Bounds{
			"single, two faults":                                single.with(mixed(2)),
			"cut, two faults":                                   cut.with(awake(2)),
			"cut, one fault":                                    cut.with(mixed(1)),
			"whole, one fault":                                  whole.with(mixed(1)),
			"lowered, one fault":                                lowered.with(mixed(1)),
			"single, two faults of the same kind":               single.with(Faults{All: 2, Kill: 2, Flush: 2, Pause: 2, Failover: 1}),
			"single, a lost answer and a late request with any": single.with(Faults{All: 3, LostReply: 1, Late: 1, Flush: 1}),
		}
	}
	for name, b := range searches {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, err := Search(b, mostStates)
			require.NoError(t, err)
			t.Logf("%d states, %d moves, at most %d moves deep, %s", res.States, res.Moves, res.Depth, res.Took)
			if res.Violation != nil {
				t.Fatal(res.Violation)
			}
		})
	}
}

// TestEveryPartIsNeeded takes one part of the protocol away, and the search must
// find what that breaks.
func TestEveryPartIsNeeded(t *testing.T) {
	t.Parallel()
	pauses := Faults{All: 2, Pause: 2}
	repeats := Faults{All: 2, LostReply: 2}
	for _, c := range []struct {
		name      string
		bounds    Bounds
		invariant string
	}{
		{"no-provisional-rest", single.without(Broken{NoProvisionalRest: true}), "R4"},
		{"no-provisional-rest and roll-over", single.with(mixed(1)).without(Broken{NoProvisionalRest: true, RollOver: true}).only("I1"), "I1"},
		{"no-ledger-floors", single.with(mixed(1)).without(Broken{NoLedgerFloors: true}).only("I1"), "I1"},
		{"lease-end-after-call", single.with(pauses).without(Broken{LeaseEndAfterCall: true}), "I4"},
		{"settle-twice", single.with(repeats).without(Broken{SettleTwice: true}), "I6"},
		{"settle-twice and no-ledger-floors", single.with(repeats).without(Broken{SettleTwice: true, NoLedgerFloors: true}).only("I1"), "I1"},
		{"claim-unfenced", single.with(mixed(2)).without(Broken{ClaimUnfenced: true}), "I4"},
		{"claim-unfenced, at the receiver", single.with(Faults{All: 2, Flush: 1, Pause: 1}).without(Broken{ClaimUnfenced: true}).only("I1"), "I1"},
		{"roll-over", lowered.without(Broken{RollOver: true}), "I1"},
		{"no-drain", single.with(mixed(1)).without(Broken{NoDrain: true}), "I4"},
		{"call-beyond-batch", single.with(mixed(1)).without(Broken{CallBeyondBatch: true}), "I3"},
		{"release-by-anybody", single.with(pauses).without(Broken{ReleaseByAnybody: true}), "R10"},
		{"record-over-takeover", single.with(mixed(1)).without(Broken{RecordOverTakeover: true}), "I2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			res, err := Search(c.bounds, mostStates)
			require.NoError(t, err)
			require.NotNil(t, res.Violation, "nothing found in %d states", res.States)
			t.Logf("%d states\n%s", res.States, res.Violation)
			require.Equal(t, c.invariant, res.Violation.Invariant)
		})
	}
}

// TestWhatThePartsCoverTogether: two parts cover each other here, so that one of
// them alone may be missing without a receiver seeing it. It is no reason to
// take one out.
func TestWhatThePartsCoverTogether(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]Broken{
		"no-provisional-rest: a full cycle without a rest never begins the next one": {NoProvisionalRest: true},
		"settle-twice: the ledger raises what was given back twice":                  {SettleTwice: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, err := Search(single.with(awake(1)).without(broken).only("I1"), mostStates)
			require.NoError(t, err)
			require.Nil(t, res.Violation)
		})
	}
}

// TestStuckIsNoticed: a search that finds no way to the end must say so.
func TestStuckIsNoticed(t *testing.T) {
	t.Parallel()
	s := search{nodes: make([]node, 4), edges: []edge{{0, 1}, {1, 2}, {0, 3}}, ended: []uint32{2}}
	s.stuck()
	require.NotNil(t, s.found)
	require.EqualValues(t, 3, s.foundAt)
}

func TestBoundsAreChecked(t *testing.T) {
	t.Parallel()
	b := single
	b.Lease, b.Batch = 1, 9
	_, err := Search(b, 1)
	require.ErrorContains(t, err, "Batch is 9, must be 1 to 2")
	require.ErrorContains(t, err, "Lease is 1, must be 2 to 30")
	_, err = Search(single.with(mixed(1)), 100)
	require.ErrorContains(t, err, "more than 100 states")
}

// Which replica is which, and when it is, must make no difference.
func TestWhatLooksTheSameIsTheSame(t *testing.T) {
	t.Parallel()
	w := begin(single.with(mixed(2)))
	seen := 0
	s := newSearch(single.with(mixed(2)))
	var visit func(w world, depth int)
	visit = func(w world, depth int) {
		if depth == 0 {
			return
		}
		g := generator{b: s.b, emit: func(n *world, m move) {
			n.tidy(s.b)
			swapped := *n
			swapped.replicas[0], swapped.replicas[1] = n.replicas[1], n.replicas[0]
			if swapped.late.kind != askNothing {
				swapped.late.replica = 1 - swapped.late.replica
			}
			require.Equal(t, s.key(n), s.key(&swapped), fmt.Sprint(m))
			again := *n
			again.tidy(s.b)
			require.Equal(t, s.key(n), s.key(&again), "tidy is done: %v", m)
			seen++
			visit(*n, depth-1)
		}}
		g.next(&w)
	}
	visit(w, 5)
	require.Greater(t, seen, 1000)
}
