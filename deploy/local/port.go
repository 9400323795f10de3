package local

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

const (
	lowestPort = 10240

	// busOffset is the distance from a Redis Cluster node's port to the port
	// of its cluster bus, fixed by Redis before version 7.
	busOffset = 10000

	// portAttempts bounds how often a start is repeated with another port
	// after losing the race between choosing a port and binding it.
	portAttempts = 8
)

// FreePort returns a TCP port that nobody listens on at 127.0.0.1 now. Another
// process may take it before the caller does, so callers repeat on EADDRINUSE.
//
// The port lies below the kernel's range for outgoing connections. A port in
// that range can be taken by any outgoing connection while its server is down,
// even by a client that redials that very server: TCP then connects the client
// to itself and the server can't come back.
func FreePort() (int, error) { return freePort() }

// freePort is FreePort for a server that also needs the ports at the given
// offsets from the first.
func freePort(offsets ...int) (int, error) {
	highest := firstEphemeralPort() - 1
	for _, o := range offsets {
		highest = min(highest, firstEphemeralPort()-1-o)
	}
	if highest <= lowestPort {
		return 0, fmt.Errorf("choose a port: none between %d and the range of outgoing connections", lowestPort)
	}
	var err error
	for range 100 {
		port := lowestPort + rand.IntN(highest-lowestPort+1)
		if err = bindable(port); err != nil {
			continue
		}
		free := true
		for _, o := range offsets {
			if err = bindable(port + o); err != nil {
				free = false
				break
			}
		}
		if free {
			return port, nil
		}
	}
	return 0, fmt.Errorf("choose a port: %w", err)
}

// onFreePort starts a server with one port after the other until start does not
// report that somebody else took it in between.
func onFreePort(start func(port int) error, offsets ...int) error {
	for i := 1; ; i++ {
		port, err := freePort(offsets...)
		if err != nil {
			return err
		}
		if err = start(port); !errors.Is(err, errAddressInUse) || i == portAttempts {
			return err
		}
	}
}

func bindable(port int) error {
	l, err := net.Listen("tcp4", loopback(port))
	if err != nil {
		return err
	}
	return l.Close()
}

// listen binds a port that FreePort would choose.
func listen() (net.Listener, error) {
	var err error
	for range portAttempts {
		var port int
		if port, err = freePort(); err != nil {
			return nil, err
		}
		var l net.Listener
		if l, err = net.Listen("tcp4", loopback(port)); err == nil {
			return l, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
	return nil, err
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// firstEphemeralPort reads where the kernel's range for outgoing connections
// starts; Linux's default where that can't be read.
func firstEphemeralPort() int {
	const linuxDefault = 32768
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return linuxDefault
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(b)), "\t")
	n, err := strconv.Atoi(first)
	if err != nil || n <= lowestPort+1000 {
		return linuxDefault
	}
	return n
}
