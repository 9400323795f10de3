package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"schoolbell/sender/simulator"
)

// stopTimeout bounds a graceful stop; answers under way end at once, so only
// a client that does not read can use it up.
const stopTimeout = 5 * time.Second

type options struct {
	listen, addrFile, log, latency, outcomes, token string
	tlsListen, tlsAddrFile, tlsCA                   string
	project, account                                string
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
		Project: o.project, Authorize: o.account != "",
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

	plain, err := listen(ctx, "--listen", o.listen, o.addrFile)
	if err != nil {
		return err
	}
	listening := []listener{{plain, false}}
	fmt.Fprintf(stderr, "listening on http://%s\n", plain.Addr())
	var certificate *tls.Certificate
	if o.tlsListen != "" {
		secure, made, err := o.secure(ctx)
		if err != nil {
			return errors.Join(err, plain.Close())
		}
		certificate = made
		listening = append(listening, listener{secure, true})
		fmt.Fprintf(stderr, "listening on https://%s\n", secure.Addr())
	}
	if o.account != "" {
		if err := o.writeAccount(plain.Addr().String()); err != nil {
			for _, l := range listening {
				err = errors.Join(err, l.Close())
			}
			return err
		}
	}
	return serve(ctx, listening, engine, certificate)
}

// listener is a place to listen on, with TLS or without.
type listener struct {
	net.Listener
	secure bool
}

// listen listens and writes the address to addrFile, if there is one.
func listen(ctx context.Context, flag, on, addrFile string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", on)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("another program listens on %s; give another %s or stop that program", on, flag)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", flag, on, err)
	}
	if addrFile != "" {
		if err := writeWhole(addrFile, []byte(l.Addr().String()+"\n"), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("write the address: %w", err), l.Close())
		}
	}
	return l, nil
}

// secure listens for TLS with a certificate made for it, and writes out the
// authority behind it, before the address that callers may wait for.
func (o options) secure(ctx context.Context) (net.Listener, *tls.Certificate, error) {
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	host, _, err := net.SplitHostPort(o.tlsListen)
	if err != nil {
		return nil, nil, usageError{fmt.Errorf("tls-listen %q is not host:port", o.tlsListen)}
	}
	if host != "" {
		hosts = append(hosts, host)
	}
	if name, err := os.Hostname(); err == nil {
		hosts = append(hosts, name)
	}
	certificate, authority, err := simulator.SelfSigned(hosts...)
	if err != nil {
		return nil, nil, err
	}
	if o.tlsCA != "" {
		if err := writeWhole(o.tlsCA, authority, 0o644); err != nil {
			return nil, nil, fmt.Errorf("write the authority: %w", err)
		}
	}
	l, err := listen(ctx, "--tls-listen", o.tlsListen, o.tlsAddrFile)
	return l, certificate, err
}

// writeAccount writes a service account whose access tokens this simulator gives.
func (o options) writeAccount(addr string) error {
	project := o.project
	if project == "" {
		project = "simulated"
	}
	text, err := simulator.ServiceAccount(project, "http://"+addr+"/token")
	if err != nil {
		return err
	}
	if err := writeWhole(o.account, text, 0o600); err != nil {
		return fmt.Errorf("write the service account: %w", err)
	}
	return nil
}

func serve(ctx context.Context, listening []listener, engine *simulator.Engine, certificate *tls.Certificate) error {
	server := simulator.NewServer(engine, certificate)
	served := make(chan error, len(listening))
	for _, l := range listening {
		go func() {
			if l.secure {
				served <- server.ServeTLS(l, "", "")
			} else {
				served <- server.Serve(l)
			}
		}()
	}
	left := len(listening)
	select {
	case err := <-served:
		left--
		err = errors.Join(fmt.Errorf("serve: %w", err), server.Close())
		for ; left > 0; left-- {
			<-served
		}
		return err
	case <-ctx.Done():
	}
	engine.Stop()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	err := server.Shutdown(stopping)
	if err != nil {
		err = errors.Join(fmt.Errorf("stop: %w", err), server.Close())
	}
	for ; left > 0; left-- {
		<-served
	}
	return err
}

// writeWhole makes the file appear with its content, so that who waits for it
// never reads half of it.
func writeWhole(path string, content []byte, mode os.FileMode) error {
	part := path + ".part"
	if err := os.WriteFile(part, content, mode); err != nil {
		return err
	}
	return os.Rename(part, path)
}
