package local

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echo is a server that answers every line with the same line, and keeps what
// it has received.
type echo struct {
	listener net.Listener
	wg       sync.WaitGroup

	mu    sync.Mutex
	lines []string
	ends  []error // how connections ended: nil for a FIN
	conns []net.Conn
}

func startEcho(t *testing.T) *echo {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	e := &echo{listener: l}
	e.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			e.mu.Lock()
			e.conns = append(e.conns, conn)
			e.mu.Unlock()
			e.wg.Go(func() { e.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		e.mu.Lock()
		for _, c := range e.conns {
			_ = c.Close()
		}
		e.mu.Unlock()
		e.wg.Wait()
	})
	return e
}

func (e *echo) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	for {
		line, err := in.ReadString('\n')
		e.mu.Lock()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			e.ends = append(e.ends, err)
			e.mu.Unlock()
			return
		}
		e.lines = append(e.lines, strings.TrimSpace(line))
		e.mu.Unlock()
		_, _ = io.WriteString(conn, line)
	}
}

func (e *echo) received() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.lines...)
}

func (e *echo) ended() []error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]error(nil), e.ends...)
}

func startedProxy(t *testing.T) (*Proxy, *echo) {
	t.Helper()
	e := startEcho(t)
	p, err := StartProxy(e.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p, e
}

// client is one connection through a proxy.
type client struct {
	net.Conn
	in *bufio.Reader
}

func dialled(t *testing.T, p *Proxy) *client {
	t.Helper()
	conn, err := net.DialTimeout("tcp", p.Addr(), 5*time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &client{Conn: conn, in: bufio.NewReader(conn)}
}

func (c *client) send(line string) error {
	_, err := fmt.Fprintln(c, line)
	return err
}

func (c *client) receive(within time.Duration) (string, error) {
	_ = c.SetReadDeadline(time.Now().Add(within))
	line, err := c.in.ReadString('\n')
	return strings.TrimSpace(line), err
}

func (c *client) ask(line string) (string, error) {
	if err := c.send(line); err != nil {
		return "", err
	}
	return c.receive(5 * time.Second)
}

func (c *client) mustAnswer(t *testing.T, line string) {
	t.Helper()
	answer, err := c.ask(line)
	require.NoError(t, err)
	require.Equal(t, line, answer)
}

// mustBeReset opens a connection that gets an RST, maybe while it is still
// being opened.
func mustBeReset(t *testing.T, p *Proxy) {
	t.Helper()
	conn, err := net.DialTimeout("tcp", p.Addr(), 5*time.Second)
	if err == nil {
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err = conn.Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

// silence is long enough for an answer on this machine, were there one.
const silence = 150 * time.Millisecond

func (c *client) mustBeSilent(t *testing.T) {
	t.Helper()
	_, err := c.receive(silence)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestProxyPasses(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	c := dialled(t, p)
	c.mustAnswer(t, "one")
	big := strings.Repeat("x", 1<<20)
	c.mustAnswer(t, big)
	require.Equal(t, 1, p.Conns())

	require.NoError(t, c.Conn.(*net.TCPConn).CloseWrite())
	_, err := c.receive(5 * time.Second)
	require.ErrorIs(t, err, io.EOF, "the end is passed on both ways")
	eventually(t, "the server saw a FIN", func() bool { return len(e.ended()) == 1 && e.ended()[0] == nil })
	eventually(t, "the link has ended", func() bool { return p.Conns() == 0 })
}

func TestProxyToServerThatIsDownResets(t *testing.T) {
	t.Parallel()
	port, err := FreePort()
	require.NoError(t, err)
	p, err := StartProxy(loopback(port))
	require.NoError(t, err)
	defer p.Close()
	mustBeReset(t, p)
	_, err = StartProxy("no port")
	require.Error(t, err)
}

func TestProxyDelays(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	c := dialled(t, p)
	c.mustAnswer(t, "fast")
	require.NoError(t, p.Delay(60*time.Millisecond, 10*time.Millisecond))
	begin := time.Now()
	c.mustAnswer(t, "slow")
	require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond, "once each way")
	require.NoError(t, p.Delay(time.Hour, 0))
	require.NoError(t, c.send("for an hour"))
	c.mustBeSilent(t) // and Close, in the cleanup, does not wait for it
}

func TestFaultDelayStaysWithinItsJitter(t *testing.T) {
	t.Parallel()
	f := fault{kind: delaying, delay: 10, jitter: 4}
	seen := map[time.Duration]bool{}
	for range 1000 {
		seen[f.wait()] = true
	}
	require.Len(t, seen, 9)
	for d := range seen {
		require.True(t, 6 <= d && d <= 14, d)
	}
	for range 100 {
		require.GreaterOrEqual(t, fault{delay: 1, jitter: 50}.wait(), time.Duration(0))
	}
}

func TestProxyStallsAndDeliversLate(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	old := dialled(t, p)
	old.mustAnswer(t, "before")
	require.NoError(t, p.Stall())
	fresh := dialled(t, p)
	for _, c := range []*client{old, fresh} {
		require.NoError(t, c.send("meanwhile"))
		c.mustBeSilent(t)
	}
	require.Equal(t, []string{"before"}, e.received())
	require.NoError(t, p.Pass())
	for _, c := range []*client{old, fresh} {
		answer, err := c.receive(5 * time.Second)
		require.NoError(t, err)
		require.Equal(t, "meanwhile", answer)
	}
}

func TestProxyBlackHoleLosesEverything(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	old, idle, closing := dialled(t, p), dialled(t, p), dialled(t, p)
	for _, c := range []*client{old, idle, closing} {
		c.mustAnswer(t, "before")
	}
	require.NoError(t, p.BlackHole())
	fresh := dialled(t, p)
	for _, c := range []*client{old, fresh} {
		require.NoError(t, c.send("lost"))
		c.mustBeSilent(t)
	}
	_ = closing.Close()
	require.NotContains(t, e.received(), "lost")
	require.Empty(t, e.ended(), "the end of a connection is lost too")
	require.Equal(t, 4, p.Conns())

	require.NoError(t, p.Pass())
	for _, c := range []*client{old, fresh} {
		_, err := c.receive(5 * time.Second)
		require.ErrorIs(t, err, syscall.ECONNRESET, "a stream with a hole does not go on")
	}
	idle.mustAnswer(t, "nothing of mine was lost")
	dialled(t, p).mustAnswer(t, "after")
}

func TestProxyRefusesAndComesBack(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	old := dialled(t, p)
	old.mustAnswer(t, "before")
	require.NoError(t, p.Refuse())
	require.NoError(t, p.Refuse(), "again")
	_, err := net.Dial("tcp", p.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	old.mustAnswer(t, "goes on")
	p.CloseConns()
	_, err = old.receive(5 * time.Second)
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, p.Pass())
	dialled(t, p).mustAnswer(t, "after")
}

func TestProxyThatLostItsPortSaysSo(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	require.NoError(t, p.Refuse())
	thief, err := net.Listen("tcp4", p.Addr())
	require.NoError(t, err)
	require.ErrorIs(t, p.Pass(), syscall.EADDRINUSE)
	require.NoError(t, thief.Close())
	require.NoError(t, p.Pass())
	dialled(t, p).mustAnswer(t, "after")
}

func TestProxyResets(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	old := dialled(t, p)
	old.mustAnswer(t, "before")
	require.NoError(t, p.Reset())
	_, err := old.receive(5 * time.Second)
	require.ErrorIs(t, err, syscall.ECONNRESET)
	eventually(t, "the server saw an RST", func() bool {
		return len(e.ended()) == 1 && errors.Is(e.ended()[0], syscall.ECONNRESET)
	})
	mustBeReset(t, p)
	require.NoError(t, p.Pass())
	dialled(t, p).mustAnswer(t, "after")
}

func TestProxySwallowsReplies(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	c := dialled(t, p)
	c.mustAnswer(t, "evalsha before")
	p.SwallowReply(RequestContains("EVALSHA"), 2)
	c.mustAnswer(t, "get other")
	for i := range 2 {
		c := dialled(t, p)
		_, err := c.ask(fmt.Sprintf("evalsha lost %d", i))
		require.ErrorIs(t, err, io.EOF)
		require.Contains(t, e.received(), fmt.Sprintf("evalsha lost %d", i), "the server has executed it")
		require.Equal(t, i+1, p.Swallowed())
	}
	c.mustAnswer(t, "evalsha after")

	p.SwallowReply(RequestContains("lost"), 1)
	require.NoError(t, p.Pass())
	c.mustAnswer(t, "lost, but disarmed")
	require.Equal(t, 2, p.Swallowed())
}

// A request may arrive in pieces; the words that match may lie across them.
func TestProxySwallowsReplyOfRequestInPieces(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	c := dialled(t, p)
	var (
		mu   sync.Mutex
		seen []string
	)
	p.SwallowReply(func(request []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, string(request))
		return strings.Contains(string(request), "split")
	}, 1)
	c.mustAnswer(t, "another")
	_, err := io.WriteString(c, "a request spl")
	require.NoError(t, err)
	eventually(t, "the first piece has passed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == 2
	})
	_, err = c.ask("it in two")
	require.ErrorIs(t, err, io.EOF)
	require.Contains(t, e.received(), "a request split in two")
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []string{"another\n", "a request spl", "a request split in two\n"}, seen, "nothing of the request before")
}

func TestProxyDeliversARequestLate(t *testing.T) {
	t.Parallel()
	p, e := startedProxy(t)
	c := dialled(t, p)
	p.HoldRequest(RequestContains("claim"), 1)
	c.mustAnswer(t, "another")
	require.NoError(t, c.send("claim"))
	require.NoError(t, c.send("what follows"))
	c.mustBeSilent(t)
	dialled(t, p).mustAnswer(t, "claim of somebody else") // one was to be held
	require.NotContains(t, e.received(), "claim")
	require.NoError(t, c.Close(), "it has given up")
	require.NotContains(t, e.received(), "claim")
	require.NoError(t, p.Pass())
	eventually(t, "it is delivered all the same", func() bool {
		got := e.received()
		return len(got) >= 2 && got[len(got)-2] == "claim" && got[len(got)-1] == "what follows"
	})

	p.HoldRequest(RequestContains("claim"), 1)
	held := dialled(t, p)
	require.NoError(t, held.send("claim"))
	held.mustBeSilent(t)
	p.CloseConns()
	_, err := held.receive(5 * time.Second)
	require.Error(t, err)
	dialled(t, p).mustAnswer(t, "after")
}

func TestProxyRewritesReplies(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	p.Rewrite(func(reply []byte) []byte { return []byte(strings.ReplaceAll(string(reply), "there", "here")) })
	got, err := dialled(t, p).ask("it is there")
	require.NoError(t, err)
	require.Equal(t, "it is here", strings.TrimSpace(got))
}

func TestProxyBeforeRedis(t *testing.T) {
	t.Parallel()
	r := startedRedis(t, RedisConfig{Memory: true})
	p, err := StartProxy(r.Addr())
	require.NoError(t, err)
	defer p.Close()
	p.SwallowReply(RequestContains("incr"), 1)
	_, err = ask(p.Addr(), "INCR n")
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "1", asked(t, p.Addr(), "GET n"), "executed all the same")
}

func TestProxyClosedStaysClosed(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	c := dialled(t, p)
	c.mustAnswer(t, "before")
	require.NoError(t, p.Stall())
	require.NoError(t, c.send("held"))
	require.NoError(t, p.Close())
	require.NoError(t, p.Close(), "again")
	require.ErrorIs(t, p.Pass(), os.ErrClosed)
	require.ErrorIs(t, p.Reset(), os.ErrClosed)
	_, err := net.Dial("tcp", p.Addr())
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.Zero(t, p.Conns())
}

// The faults may be switched while traffic runs; no request may hang, be
// answered with another's answer, or leave a goroutine.
func TestProxySwitchedUnderLoad(t *testing.T) {
	t.Parallel()
	p, _ := startedProxy(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				conn, err := net.DialTimeout("tcp", p.Addr(), time.Second)
				if err != nil {
					continue
				}
				c := &client{Conn: conn, in: bufio.NewReader(conn)}
				for k := range 5 {
					want := fmt.Sprintf("%d %d %d", i, n, k)
					if c.send(want) != nil {
						break
					}
					answer, err := c.receive(100 * time.Millisecond)
					if err != nil {
						break
					}
					if answer != want {
						t.Errorf("asked %q, answered %q", want, answer)
					}
				}
				_ = conn.Close()
			}
		})
	}
	for range 10 {
		for _, set := range []func() error{
			p.Stall, p.Pass, p.BlackHole, p.Pass, p.Reset, p.Refuse,
			func() error { p.SwallowReply(RequestContains("1"), 3); return nil },
			func() error { return p.Delay(time.Millisecond, time.Millisecond) },
			func() error { p.CloseConns(); return nil },
		} {
			require.NoError(t, set())
			time.Sleep(3 * time.Millisecond)
		}
	}
	require.NoError(t, p.Pass())
	close(stop)
	wg.Wait()
	dialled(t, p).mustAnswer(t, "still passes")
}
