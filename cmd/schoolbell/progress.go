package main

import (
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/schollz/progressbar/v3"

	"schoolbell/coordinator/api"
)

// lineEvery is how often progress says something where it may not move the
// cursor, such as in the log of a job.
const lineEvery = 5 * time.Second

// progress shows on stderr how far something is: a bar on a terminal, plain
// lines elsewhere. It has one user at a time.
type progress struct {
	out   io.Writer
	what  string
	total int // below 0: not known
	bar   *progressbar.ProgressBar
	now   int
	said  time.Time
}

func newProgress(w surroundings, what string, total int) *progress {
	p := &progress{out: w.stderr, what: what, total: total, said: time.Now()}
	if w.terminal {
		p.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(w.stderr), progressbar.OptionSetDescription(what), progressbar.OptionShowCount(),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionSetSpinnerChangeInterval(0),
			progressbar.OptionClearOnFinish(), progressbar.OptionSetPredictTime(total > 0))
	}
	return p
}

// set says how much is done.
func (p *progress) set(n int) {
	changed := n != p.now
	p.now = n
	if p.bar != nil {
		_ = p.bar.Set(n) // a bar that cannot be drawn stops nothing
		return
	}
	if changed && time.Since(p.said) >= lineEvery {
		p.line()
	}
}

// say writes a line beside the bar; an empty one is none.
func (p *progress) say(line string) {
	if line == "" {
		return
	}
	if p.bar != nil {
		_ = p.bar.Clear() // it is drawn again when it moves
	}
	fmt.Fprintln(p.out, line)
}

// end takes the bar away, or writes the last line where there were others or
// the total is known.
func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Finish()
		return
	}
	if p.total >= 0 {
		p.line()
	}
}

func (p *progress) line() {
	p.said = time.Now()
	if p.total < 0 {
		fmt.Fprintf(p.out, "%s: %d\n", p.what, p.now)
		return
	}
	fmt.Fprintf(p.out, "%s: %d of %d\n", p.what, p.now, p.total)
}

// counting passes a sequence on and shows how much of it was taken.
func (p *progress) counting(in iter.Seq2[api.Recipient, error]) iter.Seq2[api.Recipient, error] {
	return func(yield func(api.Recipient, error) bool) {
		n := 0
		for r, err := range in {
			if err == nil {
				n++
				p.set(n)
			}
			if !yield(r, err) {
				return
			}
		}
	}
}
