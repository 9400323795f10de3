// Package local starts private servers on this machine for tests, chaos runs
// and benchmarks: redis-server (single, Cluster, Sentinel), PostgreSQL, our own
// programs as real processes, and a TCP proxy that injects faults between
// them.
//
// Everything listens on 127.0.0.1, on a port of its own, with its data in a
// temporary folder of its own, and without a password. Nothing here is meant
// for production, and nothing here touches a server that it did not start.
//
// Invariants:
//
//   - No process and no folder outlives the program that started it: not after
//     Close, and neither after a panic, os.Exit, SIGINT, SIGTERM or SIGKILL of
//     that program. DESIGN.md says how.
//   - A server that reports ready is the process that was started here, not
//     another one that happened to take the port.
//   - A server keeps its port across Kill and Restart.
//   - Close joins every goroutine that the value started, and may be called
//     more than once.
//
// Linux only; elsewhere every Start function answers errors.ErrUnsupported.
package local
