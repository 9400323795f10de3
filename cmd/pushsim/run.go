package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"schoolbell/sender/simulator"
)

// stopTimeout bounds a graceful stop; answers under way end at once, so only
// a client that does not read can use it up.
const stopTimeout = 5 * time.Second

type options struct {
	listen, addrFile, log, latency, outcomes, token string
	reset, loseAnswer                               float64
	quota, retryAfter                               int
	keep, dedupe                                    bool
	seed                                            uint64
}

// usageError is a wrong command line: exit code 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func exitCode(err error) int {
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

func (o options) behaviour() (simulator.Behaviour, error) {
	latency, err := simulator.ParseLatency(o.latency)
	if err != nil {
		return simulator.Behaviour{}, err
	}
	outcomes, err := simulator.ParseOutcomes(o.outcomes)
	if err != nil {
		return simulator.Behaviour{}, err
	}
	return simulator.Behaviour{
		Latency: latency, Outcomes: outcomes, Reset: o.reset, LoseAnswer: o.loseAnswer,
		Quota: o.quota, RetryAfter: o.retryAfter, Dedupe: o.dedupe,
	}, nil
}

// run serves until ctx ends, then writes the log out. What it says of itself
// goes to stderr.
func run(ctx context.Context, o options, stderr io.Writer) (result error) {
	behaviour, err := o.behaviour()
	if err != nil {
		return usageError{err}
	}
	cfg := simulator.Config{
		Behaviour: behaviour, Keep: o.keep, Seed: o.seed, Token: o.token,
		Logger: slog.New(slog.NewTextHandler(stderr, nil)),
	}
	if o.log != "" {
		file, err := os.Create(o.log)
		if err != nil {
			return fmt.Errorf("open the arrival log: %w", err)
		}
		defer func() { result = errors.Join(result, file.Close()) }()
		cfg.Log = file
	}
	engine, err := simulator.New(cfg)
	if err != nil {
		return usageError{err}
	}
	defer func() { result = errors.Join(result, engine.Close()) }()

	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", o.listen, err)
	}
	addr := listener.Addr().String()
	if o.addrFile != "" {
		if err := writeAddr(o.addrFile, addr); err != nil {
			return errors.Join(err, listener.Close())
		}
	}
	fmt.Fprintf(stderr, "listening on http://%s\n", addr)
	return serve(ctx, listener, engine)
}

func serve(ctx context.Context, listener net.Listener, engine *simulator.Engine) error {
	server := &http.Server{Handler: engine, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	engine.Stop()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	err := server.Shutdown(stopping)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop: %w", err), server.Close())
	}
	<-served
	return err
}

// writeAddr makes the file appear with its content, so that who waits for it
// never reads half an address.
func writeAddr(path, addr string) error {
	part := path + ".part"
	if err := os.WriteFile(part, []byte(addr+"\n"), 0o644); err != nil {
		return fmt.Errorf("write the address: %w", err)
	}
	if err := os.Rename(part, path); err != nil {
		return fmt.Errorf("write the address: %w", err)
	}
	return nil
}
