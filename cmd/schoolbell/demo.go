package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node/demo"
	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

func newDemo(w surroundings, p printer) *cobra.Command {
	c := &cobra.Command{
		Use:   "demo",
		Short: "Try everything on this machine, with nothing installed",
		Long: `demo runs a small production in one process: replicas on a temporary SQLite file
and a Redis in memory, a simulated FCM, and applications that hand in notices
over HTTP. With --kill-every it kills the replicas in turn while they work. At
the end it judges from the simulator's log what was kept: nothing lost, nothing
sent twice beyond what a kill explains, no school above its limit, every rest
kept. It exits with 1 if a promise was broken. Ctrl-C ends it with the verdict
so far.

While it runs, the first replica answers on --http (an address without a host is
this machine only); where that is taken, on a free port, which is said.`,
		Example: `  schoolbell demo
  schoolbell demo --kill-every 3s
  schoolbell demo --schools 100 --recipients 100000 --duration 1m --output json
  schoolbell notice send --server http://127.0.0.1:8080 --school A --title Hello --tokens-file tokens.txt`,
		Args: cobra.NoArgs,
	}
	cfg := demo.Config{Latency: simulator.Latency{Base: 20 * time.Millisecond, Spread: 10 * time.Millisecond}}
	var log string
	f := c.Flags()
	f.IntVar(&cfg.Schools, "schools", 12, "how many schools")
	f.IntVar(&cfg.Recipients, "recipients", 24_000, "devices of all schools together")
	f.IntVar(&cfg.Replicas, "replicas", 3, "how many replicas")
	f.IntVar(&cfg.Limit, "limit", 500, "attempts per school and cycle")
	f.DurationVar(&cfg.Rest, "rest", 5*time.Second, "a school's rest after a full cycle")
	f.DurationVar(&cfg.KillEvery, "kill-every", 0, "kill and restart one replica this often; 0: none")
	f.DurationVar(&cfg.Duration, "duration", 0, "go on handing in notices for so long; 0: --recipients and no more")
	f.DurationVar(&cfg.GiveUpAfter, "give-up-after", 0, "end a run that takes longer; 0: ten times what it should take")
	f.StringVar(&cfg.Listen, "http", ":8080", "`address` of the first replica")
	f.StringVar(&log, "log", "", "write the replicas' log to this `file`")
	c.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		view := newDemoView(w)
		cfg.Watch, cfg.Version = view.show, api.Version{Version: w.build.Version, Commit: w.build.Commit, Go: w.build.Go}
		if log != "" {
			file, err := os.Create(log)
			if err != nil {
				return fmt.Errorf("open the log: %w", err)
			}
			defer func() { err = errors.Join(err, file.Close()) }()
			cfg.Log = slog.New(slog.NewJSONHandler(file, &slog.HandlerOptions{Level: slog.LevelDebug}))
		}
		v, err := w.replica.demo(cmd.Context(), cfg)
		view.end()
		if wrong, ok := errors.AsType[*demo.ConfigError](err); ok {
			return usagef("%s", wrong.Error())
		}
		overdue, late := errors.AsType[*demo.OverdueError](err)
		if err != nil && !late {
			return err
		}
		if err := p.print(v, func() { p.verdict(v) }); err != nil {
			return err
		}
		if !v.OK {
			return fmt.Errorf("a promise was broken: %s", strings.Join(firstOf(v.Violations, 3), "; "))
		}
		if late {
			return overdue
		}
		return nil
	}
	return c
}

func firstOf(lines []string, n int) []string {
	if len(lines) > n {
		return append(lines[:n:n], fmt.Sprintf("and %d more", len(lines)-n))
	}
	return lines
}

// verdict writes what was promised beside what the receiver saw.
func (p printer) verdict(v verdict.Verdict) {
	kills := 0
	for _, f := range v.Faults {
		if f.Kind == verdict.Kill {
			kills++
		}
	}
	fmt.Fprintf(p.out, "%d messages for %d schools through %d replicas in %.1f s, %.0f a second, %s killed\n\n",
		v.Arrived, v.Schools, v.Replicas, v.Seconds, v.RatePerSecond, strconv.Itoa(kills))
	shortest := "no full cycle"
	if v.Rule.ShortestRestMS != nil {
		shortest = millis(float64(*v.Rule.ShortestRestMS))
	}
	rows := [][]string{
		{"", "PROMISED", "RECEIVER SAW"},
		{"accepted messages that arrived", strconv.Itoa(v.Accepted - v.Waiting), strconv.Itoa(v.Arrived)},
		{"lost", "0", strconv.Itoa(v.Lost)},
		{"sent twice", "at most " + strconv.Itoa(v.RepeatBound), strconv.Itoa(v.Repeated)},
		{"most attempts between two rests", "at most " + strconv.Itoa(v.Rule.Limit), strconv.Itoa(v.Rule.WorstCount)},
		{"shortest rest", "at least " + millis(float64(v.Rule.RestMS)), shortest},
		{"rests that were kept", strconv.Itoa(v.Rule.Cycles), strconv.Itoa(v.Rule.Cycles - v.Rule.Violations)},
		{"sent after losing the lock", "0", strconv.Itoa(v.LateAfterLease)},
		{"claims of a former owner", "0", strconv.Itoa(v.FencedWritesTaken)},
		{"notices whose counts are wrong", "0", strconv.Itoa(v.CountsWrong)},
	}
	if l := v.ResumeLagMS; l != nil {
		rows = append(rows, []string{"resumed after a rest's end", "", fmt.Sprintf("p50 %s, p99 %s, max %s", millis(l.P50), millis(l.P99), millis(l.Max))})
	}
	if r := v.RecoveryMS; r != nil {
		rows = append(rows, []string{"taken over after a kill", "", fmt.Sprintf("p50 %s, p99 %s, max %s", millis(r.P50), millis(r.P99), millis(r.Max))})
	}
	if s := v.Stalls; s.Count > 0 {
		rows = append(rows, []string{"this machine stood still", "", fmt.Sprintf("%d times, longest %s, %s in all", s.Count, millis(float64(s.LongestMS)), millis(float64(s.TotalMS)))})
	}
	if v.LateByPause > 0 {
		rows = append(rows, []string{"late because it did", "", strconv.Itoa(v.LateByPause)})
	}
	if v.Waiting > 0 {
		rows = append(rows, []string{"not sent yet", "", strconv.Itoa(v.Waiting)})
	}
	p.table(rows)
	if v.OK {
		fmt.Fprintln(p.out, "\nEvery promise was kept.")
		return
	}
	fmt.Fprintln(p.out)
	for _, line := range v.Violations {
		fmt.Fprintf(p.out, "BROKEN %s\n", line)
	}
}

func millis(ms float64) string {
	return (time.Duration(ms*1000) * time.Microsecond).Round(100 * time.Microsecond).String()
}

// demoView shows on stderr how far the demonstration is: a bar on a terminal,
// a line now and then elsewhere.
type demoView struct {
	out  io.Writer
	bar  *progressbar.ProgressBar
	told bool // where it listens
	said time.Duration
	last demo.Progress
}

func newDemoView(w surroundings) *demoView {
	v := &demoView{out: w.stderr}
	if w.terminal {
		v.bar = progressbar.NewOptions(1,
			progressbar.OptionSetWriter(w.stderr), progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(false), progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(12))
	}
	return v
}

// show is called by one goroutine.
func (v *demoView) show(p demo.Progress) {
	v.last = p
	if !v.told {
		v.told = true
		if p.Moved {
			fmt.Fprintln(v.out, "the address asked for is taken; a free port is used")
		}
		fmt.Fprintf(v.out, "the first replica answers on http://%s\n", p.Address)
	}
	if v.bar == nil {
		if p.Elapsed-v.said >= lineEvery {
			v.said = p.Elapsed
			fmt.Fprintf(v.out, "%s: %d of %d sent, %s\n", p.Elapsed.Round(100*time.Millisecond), p.Arrived, p.Planned, doing(p))
		}
		return
	}
	v.bar.ChangeMax(max(1, p.Planned))
	// Of one width, so that the bar stays where it is.
	v.bar.Describe(fmt.Sprintf("%5.0f/s %d/%d replicas %3d sending %3d resting", p.PerSecond, p.Alive, p.Replicas, p.Schools[api.Sending], p.Schools[api.Resting]))
	_ = v.bar.Set(min(p.Arrived, p.Planned)) // a bar that cannot be drawn stops nothing
}

func (v *demoView) end() {
	if v.bar != nil {
		_ = v.bar.Finish()
	}
}

// doing says in a few words what is going on.
func doing(p demo.Progress) string {
	parts := []string{fmt.Sprintf("%.0f/s", p.PerSecond), fmt.Sprintf("%d of %d replicas", p.Alive, p.Replicas)}
	if p.Kills > 0 {
		parts = append(parts, fmt.Sprintf("%d killed", p.Kills))
	}
	for _, state := range api.SchoolStates() {
		if n := p.Schools[state]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, strings.ReplaceAll(string(state), "_", " ")))
		}
	}
	return strings.Join(parts, ", ")
}
