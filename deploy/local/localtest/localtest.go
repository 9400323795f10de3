// Package localtest gives tests private servers of package local. Each test
// binary that uses it has
//
//	func TestMain(m *testing.M) { localtest.Main(m) }
//
// Nothing is skipped where a server is not installed: the test fails and says
// which package to install.
package localtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"go.uber.org/goleak"

	"schoolbell/deploy/local"
)

// startTimeout bounds the start of one server. Generous: several test binaries
// may be starting servers on the same few cores.
const startTimeout = 60 * time.Second

// shared is the one thing that outlives a test: PostgreSQL takes over a second
// to initialise, so the tests of a binary share a server, each in a database of
// its own. It is a package variable since a test binary has no other place for
// what TestMain and tests share.
var shared struct {
	mu       sync.Mutex
	closed   bool
	postgres *local.Postgres
	err      error
	serial   int
	prepared map[string]*prepared
	builder  *local.Builder
}

type prepared struct {
	once sync.Once
	err  error
}

// Main runs the tests, ends the shared servers, fails the run if goroutines
// are left, and exits. Further goleak options are for goroutines that a
// library starts for good.
func Main(m *testing.M, options ...goleak.Option) {
	goleak.VerifyTestMain(runner{m}, options...)
}

type runner struct{ m *testing.M }

func (r runner) Run() int { return Run(r.m) }

// Run is Main for a TestMain that has more to do: it runs the tests, ends the
// shared servers and returns the exit code. A binary that panics or is killed
// gets there never; its servers end all the same, as package local promises.
func Run(m *testing.M) int {
	code := m.Run()
	if err := closeShared(); err != nil {
		fmt.Fprintf(os.Stderr, "close shared servers: %v\n", err)
		if code == 0 {
			code = 1
		}
	}
	return code
}

func closeShared() error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	shared.closed = true
	var errs []error
	if shared.postgres != nil {
		errs = append(errs, shared.postgres.Close())
	}
	if shared.builder != nil {
		errs = append(errs, shared.builder.Close())
	}
	return errors.Join(errs...)
}

// Redis starts a redis-server for this test alone, which ends with it.
func Redis(tb testing.TB) *local.Redis {
	tb.Helper()
	return RedisWith(tb, local.RedisConfig{})
}

// RedisWith is Redis with a configuration.
func RedisWith(tb testing.TB, cfg local.RedisConfig) *local.Redis {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), startTimeout)
	defer cancel()
	r, err := local.StartRedis(ctx, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := r.Close(); err != nil {
			tb.Error(err)
		}
	})
	return r
}

// Postgres returns the server that this test binary's tests share, started by
// the first that asks (fast settings: not durable). Do not restart, pause or
// kill it: use OwnPostgres for that.
func Postgres(tb testing.TB) *local.Postgres {
	tb.Helper()
	p, err := sharedPostgres()
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func sharedPostgres() (*local.Postgres, error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.closed {
		return nil, errors.New("the shared servers have been closed already")
	}
	if shared.postgres == nil && shared.err == nil {
		// Not the test's context: the server outlives the test.
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		shared.postgres, shared.err = local.StartPostgres(ctx, local.PostgresConfig{Fast: true})
	}
	return shared.postgres, shared.err
}

// ExampleDatabase is Database for the Example functions of a test binary, which
// have no testing.TB: they share what they make once under this name, and it ends
// with the server.
func ExampleDatabase(ctx context.Context, name string) (url string, err error) {
	server, err := sharedPostgres()
	if err != nil {
		return "", err
	}
	return server.CreateDatabase(ctx, name)
}

// OwnPostgres starts a server for this test alone, which ends with it.
func OwnPostgres(tb testing.TB, cfg local.PostgresConfig) *local.Postgres {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), startTimeout)
	defer cancel()
	p, err := local.StartPostgres(ctx, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// Database makes an empty database for this test on the shared server and
// returns its URL. It is dropped after the test, with whatever sessions are
// still open in it.
func Database(tb testing.TB) string {
	tb.Helper()
	return clone(tb, "template1")
}

// PreparedDatabase is Database for tests that all begin with the same content,
// such as the migrated schema: prepare fills a database once for each name and
// test binary, and every test gets a copy of that. prepare must leave no
// session open.
func PreparedDatabase(tb testing.TB, name string, prepare func(ctx context.Context, url string) error) string {
	tb.Helper()
	server := Postgres(tb)
	template := "prepared_" + name
	shared.mu.Lock()
	p := shared.prepared[name]
	if p == nil {
		p = new(prepared)
		if shared.prepared == nil {
			shared.prepared = make(map[string]*prepared)
		}
		shared.prepared[name] = p
	}
	shared.mu.Unlock()
	p.once.Do(func() {
		// What a panic or tb.FailNow inside prepare leaves for the other tests.
		p.err = errors.New("prepare did not return")
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		url, err := server.CreateDatabase(ctx, template)
		if err == nil {
			err = prepare(ctx, url)
		}
		p.err = err
	})
	if p.err != nil {
		tb.Fatalf("prepare database %s: %v", template, p.err)
	}
	return clone(tb, template)
}

// Proxy starts a fault proxy before the server at target ("host:port") for
// this test.
func Proxy(tb testing.TB, target string) *local.Proxy {
	tb.Helper()
	p, err := local.StartProxy(target)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// Build builds one of our programs, once for each test binary, and returns its
// path.
func Build(tb testing.TB, pkg string, tags ...string) string {
	tb.Helper()
	shared.mu.Lock()
	if shared.closed {
		shared.mu.Unlock()
		tb.Fatal("the shared builder has been closed already")
	}
	if shared.builder == nil {
		b, err := local.NewBuilder(false)
		if err != nil {
			shared.mu.Unlock()
			tb.Fatal(err)
		}
		shared.builder = b
	}
	b := shared.builder
	shared.mu.Unlock()
	path, err := b.Build(tb.Context(), pkg, tags...)
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

// Program starts a program for this test, which is killed after it if it still
// runs.
func Program(tb testing.TB, cfg local.ProgramConfig) *local.Program {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), startTimeout)
	defer cancel()
	p, err := local.StartProgram(ctx, cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

func clone(tb testing.TB, template string) string {
	tb.Helper()
	server := Postgres(tb)
	shared.mu.Lock()
	shared.serial++
	name := databaseName(shared.serial, tb.Name())
	shared.mu.Unlock()
	url, err := server.CloneDatabase(tb.Context(), name, template)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		if err := server.DropDatabase(ctx, name); err != nil {
			tb.Error(err)
		}
	})
	return url
}

// databaseName is unique by its number; the rest is for people who look into
// the server's sessions. PostgreSQL cuts names at 63 bytes.
func databaseName(serial int, test string) string {
	clean := strings.Map(func(r rune) rune {
		if r < unicode.MaxASCII && (unicode.IsLetter(r) || unicode.IsDigit(r)) {
			return unicode.ToLower(r)
		}
		return '_'
	}, test)
	return fmt.Sprintf("t%d_%.40s", serial, clean)
}
