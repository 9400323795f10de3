package verdict

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"schoolbell/sender/simulator"
)

// maxLine bounds a line of the log.
const maxLine = 64 << 10

// ReadLog reads an arrival log line by line. It may be called for several logs
// of one run. An error means that the log is not exact, so nothing can be
// judged from it: a line that cannot be read, an answer without an arrival, a
// second answer to one arrival. An arrival without an answer is none: it was
// being answered when the log ended.
func (j *Judge) ReadLog(r io.Reader) error {
	type place struct {
		school *school
		index  int
	}
	open := map[int64]place{} // n → an arrival that has no answer yet
	var last int64            // the highest n that began
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, maxLine), maxLine)
	for number := 1; lines.Scan(); number++ {
		var a simulator.Arrival
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			return fmt.Errorf("arrival log, line %d: %w", number, err)
		}
		if a.Answer == "" {
			if a.N != last+1 {
				return fmt.Errorf("arrival log, line %d: arrival %d comes after %d", number, a.N, last)
			}
			last = a.N
			s, i := j.begin(a)
			open[a.N] = place{s, i}
			continue
		}
		p, ok := open[a.N]
		if !ok {
			return fmt.Errorf("arrival log, line %d: an answer to arrival %d, which waits for none", number, a.N)
		}
		if a.Ended == 0 {
			return fmt.Errorf("arrival log, line %d: an answer without ended_ns", number)
		}
		delete(open, a.N)
		j.end(&p.school.arrivals[p.index], a)
	}
	if err := lines.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			return fmt.Errorf("arrival log: a line is longer than %d bytes", maxLine)
		}
		return fmt.Errorf("arrival log: %w", err)
	}
	return nil
}
