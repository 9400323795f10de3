package redisquota

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/school/quota/quotatest"
	"schoolbell/scripts"
)

func TestCases(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	quotatest.RunCases(t, "../testdata/rule.json", func(tb testing.TB) quotatest.Subject { return srv.subject(tb) })
}

func TestSentences(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	quotatest.RunSentences(t, func(tb testing.TB) quotatest.Subject { return srv.subject(tb) })
}

type seeded struct{ *rand.Rand }

func newSeeded(seed uint64) seeded { return seeded{rand.New(rand.NewPCG(seed, 2))} }

func (s seeded) Intn(n int) int { return s.IntN(n) }

func TestHistories(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	cycles := 0
	for seed := range uint64(8) {
		for _, plan := range []quotatest.Plan{{Terms: 40, Lossless: true}, {Terms: 40}, {Terms: 40, Settings: true}} {
			h, err := quotatest.Happen(newSeeded(seed), srv.subject(t), plan)
			require.NoError(t, err, "seed %d, %+v", seed, plan)
			require.Empty(t, h.Wrong(), "seed %d, %+v", seed, plan)
			cycles += h.Cycles
		}
	}
	require.Greater(t, cycles, 150, "histories too tame to judge")
}

func forever() bool { return false }

type drawn struct{ t *rapid.T }

func (d drawn) Intn(n int) int { return rapid.IntRange(0, n-1).Draw(d.t, "n") }

func TestLuaIsThePureRule(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	t.Run("properties", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(rt *rapid.T) {
			l := srv.subject(t)
			if err := quotatest.Compare(drawn{rt}, l, l.state, 40, forever); err != nil {
				rt.Fatal(err)
			}
		})
	})
	t.Run("long", func(t *testing.T) {
		t.Parallel()
		for seed := range uint64(2) { // beyond the number of settled batches that are remembered
			l := srv.subject(t)
			require.NoError(t, quotatest.Compare(newSeeded(seed), l, l.state, 1500, forever), "seed %d", seed)
		}
	})
}

// fuzzed takes its choices from a fuzzer's bytes, two for each.
type fuzzed struct{ data []byte }

func (f *fuzzed) Intn(n int) int {
	if len(f.data) < 2 {
		f.data = nil
		return 0
	}
	v := int(f.data[0])<<8 | int(f.data[1])
	f.data = f.data[2:]
	return v % n
}

// FuzzLuaIsThePureRule needs -fuzzminimizetime 5x: coverage differs a little from
// run to run, as a server answers in its own time, and the default would spend
// the whole run on making each new input smaller.
func FuzzLuaIsThePureRule(f *testing.F) {
	srv := startServer(f)
	for seed := range uint64(3) {
		data := make([]byte, 600)
		r := newSeeded(seed)
		for i := range data {
			data[i] = byte(r.Intn(256))
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		src := &fuzzed{data}
		l := srv.subject(t)
		if err := quotatest.Compare(src, l, l.state, len(data), func() bool { return len(src.data) == 0 }); err != nil {
			t.Fatal(err)
		}
	})
}

// TestBrokenRulesAreCaught takes one part away at a time. judge: what a
// receiver sees must show it; otherwise the comparison with the pure rule must.
// Some only show where the owners bring no ledger, whose floors would make up
// for them; nothing is lost there, so that the whole rule needs none.
func TestBrokenRulesAreCaught(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	rollOver := edit{"reserve", "elseif s.nextEligibleMs > 0 then", "elseif s.nextEligibleMs > 0 or s.attempted >= s.limit then"}
	for name, c := range map[string]struct {
		edits []edit
		plan  quotatest.Plan
		judge bool
	}{
		"a full cycle without a rest rolls over": {[]edit{rollOver}, quotatest.Plan{Terms: 60, Lossless: true, Settings: true}, true},
		"no provisional rest, and it rolls over": {[]edit{rollOver,
			{"reserve", "set_rest(latest() + s.rest_ms)", ""}}, quotatest.Plan{Terms: 60, Lossless: true}, true},
		"no provisional rest": {[]edit{{"reserve", "set_rest(latest() + s.rest_ms)", ""}}, quotatest.Plan{}, false},
		"the provisional rest runs from the reservation": {[]edit{
			{"reserve", "set_rest(latest() + s.rest_ms)", "set_rest(now + s.rest_ms)"},
			{"reserve", "if closed then exact() end", ""}, {"reconcile", "if closed then exact() end", ""},
			{"settle", "if closed then exact() end", ""}}, quotatest.Plan{Terms: 60, Lossless: true, NoFloors: true}, true},
		"settled twice gives back twice": {[]edit{
			{"settle", "if is_settled(batch) then", "if false then"},
			{"settle", "table.remove(s.open, at)", ""}}, quotatest.Plan{Terms: 60, Lossless: true, NoFloors: true}, true},
		"a settlement of an older cycle gives back": {[]edit{
			{"settle", "if o.cycle ~= s.cycle then", "if false then"}}, quotatest.Plan{}, false},
		"overdue reservations stay open": {[]edit{
			{"reserve", "if o.deadline > now then", "if true then"}}, quotatest.Plan{}, false},
		"the ledger raises no count": {[]edit{
			{"reconcile", "s.attempted = l.attempted\n", ""}}, quotatest.Plan{}, false},
		"a jumped clock goes unnoticed": {[]edit{{"reserve", "elseif jumped() then", "elseif false then"}}, quotatest.Plan{Terms: 60}, true},
		"a rest unknown to the ledger ends the cycle": {[]edit{
			{"reserve", "elseif unconfirmed(floor) then", "elseif false then"}}, quotatest.Plan{}, false},
		"nobody brings the ledger": {nil, quotatest.Plan{Terms: 60, NoFloors: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(60) {
				l := srv.subject(t, c.edits...)
				if c.judge {
					h, err := quotatest.Happen(newSeeded(seed), l, c.plan)
					if err != nil || len(h.Wrong()) > 0 {
						t.Logf("seed %d: %v %v", seed, err, first(h.Wrong()))
						return
					}
				} else if err := quotatest.Compare(newSeeded(seed), l, l.state, 150, forever); err != nil {
					return
				}
			}
			t.Fatal("nothing noticed")
		})
	}
}

func first(lines []string) string {
	if len(lines) == 0 {
		return ""
	}
	return lines[0]
}

func TestTextOfTheMoment(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	head, _, ok := strings.Cut(scripts.Settle().Source, "local quota = KEYS[1]")
	require.True(t, ok)
	text := redis.NewScript(head + "return rfc3339(tonumber(ARGV[1]))")
	at := []time.Time{
		time.UnixMilli(1), time.UnixMilli(1000), time.Date(2000, 2, 29, 23, 59, 59, 0, time.UTC),
		time.Date(2026, 12, 31, 23, 59, 59, 1e6, time.UTC), time.Date(2100, 2, 28, 23, 59, 59, 1e6, time.UTC),
		time.Date(2400, 2, 29, 0, 0, 0, 0, time.UTC), time.Date(2026, 12, 1, 3, 4, 5, 0, time.UTC),
	}
	r := newSeeded(1)
	for range 300 {
		at = append(at, time.UnixMilli(r.Int64N(16_725_225_600_000)))
	}
	for _, m := range at {
		got, err := text.Run(t.Context(), srv.client, nil, fmt.Sprint(m.UnixMilli())).Text()
		require.NoError(t, err)
		want := m.Add(999 * time.Millisecond).UTC().Truncate(time.Second)
		require.Equal(t, want.Format(time.RFC3339), got)
	}
}
