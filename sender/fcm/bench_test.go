package fcm

import (
	"crypto/x509"
	"encoding/pem"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
	"schoolbell/sender/simulator"
)

// BenchmarkSend sends messages with 200 in flight to a receiver that answers
// after 50 ms, so 4,000 a second are possible, and tells the connections it took.
func BenchmarkSend(b *testing.B) {
	for _, p := range protocols {
		b.Run(string(p), func(b *testing.B) {
			const inFlight, latency = 200, 50 * time.Millisecond
			engine, err := simulator.New(simulator.Config{Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: latency}}})
			require.NoError(b, err)
			certificate, authority, err := simulator.SelfSigned("127.0.0.1")
			require.NoError(b, err)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(b, err)
			server := simulator.NewServer(engine, certificate)
			cfg := Config{Name: "bench", Project: "p", Endpoint: "http://" + l.Addr().String(), PriorKnowledge: p == h2c, InFlight: inFlight}
			serve := server.Serve
			if p == h2TLS {
				block, _ := pem.Decode(authority)
				ca, err := x509.ParseCertificate(block.Bytes)
				require.NoError(b, err)
				cfg.RootCAs = x509.NewCertPool()
				cfg.RootCAs.AddCert(ca)
				cfg.Endpoint = "https://" + l.Addr().String()
				serve = func(l net.Listener) error { return server.ServeTLS(l, "", "") }
			}
			var served sync.WaitGroup
			served.Go(func() { _ = serve(l) }) // ends with Close
			f, err := New(cfg, nil, nil)
			require.NoError(b, err)
			send := func(n int) {
				const batch = 100
				batches := make(chan int)
				var senders sync.WaitGroup
				for range inFlight / batch {
					senders.Go(func() {
						for size := range batches {
							messages := make([]string, size)
							for i := range messages {
								messages[i] = "12." + strconv.Itoa(i)
							}
							for _, r := range f.Send(b.Context(), batchOf(messages...)) {
								if r.Class != sender.Accepted {
									b.Errorf("%+v", r)
								}
							}
						}
					})
				}
				for ; n > 0; n -= batch {
					batches <- min(n, batch)
				}
				close(batches)
				senders.Wait()
			}
			send(inFlight) // warm
			b.ResetTimer()
			send(b.N)
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			b.ReportMetric(float64(engine.Counts().Connections), "conns")
			f.Close()
			require.NoError(b, engine.Close())
			require.NoError(b, server.Close())
			served.Wait()
		})
	}
}
