// Command schoolbell is the one program of the project: a replica (serve), its
// schema (migrate), and a client of a running replica (notice).
//
// It holds no logic of its own: serve and migrate go through package node, the
// client commands through package api.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	_ "time/tzdata" // schools have a time zone, a container may have no zone files

	"golang.org/x/term"
)

// version and commit are set at link time by release builds; others carry what
// the go command recorded.
var version, commit string

func main() {
	// The first signal ends the context and gives the signals back, so that the
	// second one kills the process at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)

	os.Exit(run(ctx, os.Args[1:], process()))
}

// process is the surroundings of the real program.
func process() surroundings {
	return surroundings{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		terminal:   term.IsTerminal(int(os.Stderr.Fd())),
		environ:    os.Environ(),
		readFile:   os.ReadFile,
		open:       func(name string) (io.ReadCloser, error) { return os.Open(name) },
		instanceID: newInstanceID(),
		build:      newBuild(),
		replica:    replica(),
		pollEvery:  pollEvery,
	}
}

// newInstanceID names this process: the host for people, a random part because
// a host can run several replicas and a restarted one is another.
func newInstanceID() string {
	host, err := os.Hostname()
	if err != nil {
		host = "schoolbell"
	}
	random := make([]byte, 4)
	_, _ = rand.Read(random) // never fails
	return cleanHost(host) + "-" + hex.EncodeToString(random)
}

func newBuild() build {
	b := build{Version: version, Commit: commit}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b.orUnknown()
	}
	b.Go = info.GoVersion
	if b.Version == "" && info.Main.Version != "(devel)" {
		b.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && b.Commit == "" {
			b.Commit = s.Value
		}
	}
	return b.orUnknown()
}
