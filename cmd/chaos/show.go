package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"schoolbell/cmd/chaos/plan"
	"schoolbell/cmd/chaos/storm"
	"schoolbell/sender/simulator/verdict"
)

const examples = `  chaos
  chaos --faults kill,pause,redis-flush --for 30s --recipients 50000
  chaos --seed 3 --for 3m --output json > verdict.json
  chaos --scenario pause
  chaos --scenario takeover
  chaos --mutate claim-unfenced --for 1m        # has to exit with 1`

// long explains the program, every fault, scenario and defect.
func long() string {
	var b strings.Builder
	b.WriteString(`chaos starts a private Redis, a private PostgreSQL, a simulated receiver and
replicas of schoolbell as real processes, which it builds itself. Applications
hand in notices over HTTP at any replica and ask again, with the same
idempotency key, where no answer came. Meanwhile things break, as the seed
plans it: the same seed breaks the same kinds of things at the same moments.
Then everything is mended, the work ends, and what was promised is judged from
the receiver's arrival log, from the answers that applications got, and from
SQL; never from what the replicas say of themselves.

It needs Go, redis-server, PostgreSQL, and for the fault clock the Debian package
faketime (deploy/install-test-deps.sh installs them). It listens on 127.0.0.1
alone, and everything that it starts ends with it, also after an interrupt.

Exit codes: 0 every promise was kept, 1 one was broken (or the run failed),
2 wrong usage.

Faults:
`)
	listFaults(&b)
	b.WriteString("\nScenarios (--scenario), each an exact story; --replicas, --limit and --rest are theirs:\n")
	table(&b, func(row func(...string)) {
		for _, s := range storm.Scenarios() {
			row("  "+s.Name, s.What)
		}
	})
	b.WriteString("\nDefects on purpose (--mutate), with faults that show them unless --faults is given:\n")
	table(&b, func(row func(...string)) {
		for _, m := range mutations() {
			row("  "+m.name, m.what)
		}
	})
	return strings.TrimRight(b.String(), "\n")
}

func listFaults(w io.Writer) {
	table(w, func(row func(...string)) {
		for _, e := range plan.Catalogue() {
			var ways []string
			for _, w := range e.Ways {
				ways = append(ways, string(w))
			}
			row("  "+string(e.Kind), e.What, strings.Join(ways, ", "))
		}
	})
}

func scenarioNames() string {
	var names []string
	for _, s := range storm.Scenarios() {
		names = append(names, s.Name)
	}
	return strings.Join(names, ", ")
}

func table(w io.Writer, fill func(row func(cells ...string))) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fill(func(cells ...string) { fmt.Fprintln(tw, strings.Join(cells, "\t")) })
	_ = tw.Flush() // a writer that is broken shows at the next write, or to nobody
}

// show prints how the run ended: one JSON object, or for people.
func (o options) show(res storm.Result, w io.Writer) error {
	v := res.Verdict
	if o.output == outputJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			return fmt.Errorf("print the verdict: %w", err)
		}
	} else {
		text(w, res)
	}
	if !v.OK {
		return errBroken
	}
	return nil
}

func text(w io.Writer, res storm.Result) {
	v := res.Verdict
	fmt.Fprintf(w, "\nTimeline\n\n")
	for _, e := range res.Timeline {
		fmt.Fprintf(w, "%7.1fs  %s\n", e.At.Seconds(), e.What)
	}
	fmt.Fprintf(w, "\n%d messages for %d schools through %d replicas in %.1f s, %.0f a second, %d faults, seed %d\n\n",
		v.Arrived, v.Schools, v.Replicas, v.Seconds, v.RatePerSecond, len(v.Faults), v.Seed)
	shortest := "no full cycle"
	if v.Rule.ShortestRestMS != nil {
		shortest = millis(float64(*v.Rule.ShortestRestMS))
	}
	table(w, func(row func(...string)) {
		row("", "PROMISED", "SEEN")
		row("accepted recipients that arrived", strconv.Itoa(v.Accepted), strconv.Itoa(v.Arrived))
		row("lost", "0", strconv.Itoa(v.Lost))
		row("not come to an end", "0", strconv.Itoa(v.Waiting))
		row("sent twice", "at most "+strconv.Itoa(v.RepeatBound), strconv.Itoa(v.Repeated-v.RepeatedAfterLoss))
		row("sent again after an answer that got lost", "", strconv.Itoa(v.RepeatedAfterLoss))
		row("most attempts between two rests", "at most "+strconv.Itoa(v.Rule.Limit), strconv.Itoa(v.Rule.WorstCount))
		row("shortest rest", "at least "+millis(float64(v.Rule.RestMS)), shortest)
		row("rests that were kept", strconv.Itoa(v.Rule.Cycles), strconv.Itoa(v.Rule.Cycles-v.Rule.Violations))
		row("sent after the lease's end", "0", strconv.Itoa(v.LateAfterLease-v.LateByPause))
		row("sent after it by a stopped process that went on", "at most "+strconv.Itoa(v.LateBound), strconv.Itoa(v.LateByPause))
		row("claims of a former owner", "0", strconv.Itoa(v.FencedWritesTaken))
		row("notices whose counts are wrong", "0", strconv.Itoa(v.CountsWrong))
		row("resumed after a rest's end", "", spread(v.ResumeLagMS))
		row("from a fault to the next send", "", spread(v.RecoveryMS))
	})
	if len(v.Faults) > 0 {
		fmt.Fprintln(w)
		byKind(w, v.Faults)
	}
	if v.OK {
		fmt.Fprintln(w, "\nEvery promise was kept.")
		return
	}
	fmt.Fprintln(w)
	for _, line := range v.Violations {
		fmt.Fprintf(w, "BROKEN %s\n", line)
		for _, around := range res.Around[line] {
			fmt.Fprintf(w, "       %s\n", around)
		}
	}
}

// byKind shows how long each kind of fault kept sending from going on.
func byKind(w io.Writer, faults []verdict.FaultLine) {
	kinds := map[string][]float64{}
	var names []string
	for _, f := range faults {
		if _, ok := kinds[f.Kind]; !ok {
			names = append(names, f.Kind)
			kinds[f.Kind] = nil
		}
		if f.NextSendMS != nil {
			kinds[f.Kind] = append(kinds[f.Kind], *f.NextSendMS)
		}
	}
	count := map[string]int{}
	for _, f := range faults {
		count[f.Kind]++
	}
	slices.Sort(names)
	table(w, func(row func(...string)) {
		row("FAULT", "TIMES", "TO THE NEXT SEND, MEDIAN", "LONGEST")
		for _, n := range names {
			took := kinds[n]
			slices.Sort(took)
			median, most := "-", "-"
			if len(took) > 0 {
				median, most = millis(took[(len(took)-1)/2]), millis(took[len(took)-1])
			}
			row(n, strconv.Itoa(count[n]), median, most)
		}
	})
}

func spread(p *verdict.Percentiles) string {
	if p == nil {
		return "-"
	}
	return fmt.Sprintf("p50 %s, p99 %s, max %s", millis(p.P50), millis(p.P99), millis(p.Max))
}

func millis(ms float64) string {
	return (time.Duration(ms*1000) * time.Microsecond).Round(100 * time.Microsecond).String()
}
