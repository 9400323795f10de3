package demo

import (
	"fmt"
	"net"
	"sync"
	"time"

	"schoolbell/sender/simulator/verdict"
)

// meter notes when the machine gave this process no time. It sends itself a sign
// of life by the way that messages take: a write, the kernel, and a reader that
// has to get its turn among the others. A ticker alone would not see a process
// that gets so little time that what is ready waits in it for seconds.
type meter struct {
	write, read net.Conn
	end         chan struct{}
	running     sync.WaitGroup
	gaps        gaps // the reader's, until it has ended
}

const (
	signEvery  = 20 * time.Millisecond
	stallLeast = 100 * time.Millisecond // a shorter one explains nothing
)

func newMeter() (*meter, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("measure stalls: %w", err)
	}
	defer l.Close()
	m := &meter{end: make(chan struct{})}
	if m.write, err = net.Dial("tcp", l.Addr().String()); err != nil {
		return nil, fmt.Errorf("measure stalls: %w", err)
	}
	if m.read, err = l.Accept(); err != nil {
		_ = m.write.Close()
		return nil, fmt.Errorf("measure stalls: %w", err)
	}
	m.gaps.last = time.Now()
	m.running.Go(m.send)
	m.running.Go(m.listen)
	return m, nil
}

func (m *meter) send() {
	defer m.write.Close()
	tick := time.NewTicker(signEvery)
	defer tick.Stop()
	for {
		select {
		case <-m.end:
			return
		case <-tick.C:
			if _, err := m.write.Write([]byte{0}); err != nil {
				return
			}
		}
	}
}

func (m *meter) listen() {
	defer m.read.Close()
	signs := make([]byte, 1024)
	for {
		_, err := m.read.Read(signs)
		m.gaps.sign(time.Now())
		if err != nil {
			return
		}
	}
}

// close ends it and returns the stalls.
func (m *meter) close() []verdict.Fault {
	close(m.end)
	m.running.Wait()
	return m.gaps.stalls
}

// gaps makes stalls of the times of signs of life.
type gaps struct {
	last   time.Time
	stalls []verdict.Fault
}

func (g *gaps) sign(now time.Time) {
	from := g.last.Add(signEvery) // none was to come sooner
	g.last = now
	if now.Sub(from) < stallLeast {
		return
	}
	if n := len(g.stalls) - 1; n >= 0 && from.Sub(g.stalls[n].Until) <= signEvery {
		g.stalls[n].Until = now // nothing was done in between
		return
	}
	g.stalls = append(g.stalls, verdict.Fault{At: from, Until: now, Kind: verdict.Stall, Target: "machine"})
}
