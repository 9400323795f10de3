package node

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator"
	"schoolbell/coordinator/fallback"
	"schoolbell/coordinator/hook"
	"schoolbell/school"
)

// hookConnect bounds the way to a connection to a webhook.
const hookConnect = 3 * time.Second

// client makes a client of a webhook, whose connections hang on the replica's line.
func (n *Node) client(name string, cfg hook.Config) (*hook.Client, error) {
	if n.line != nil {
		dialer := net.Dialer{Timeout: hookConnect}
		cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, done := n.line.bind(ctx)
			defer done()
			c, err := dialer.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return n.line.hang(c), nil
		}
	}
	c, err := hook.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	n.cleanup.add(name, func() error { c.Close(); return nil })
	return c, nil
}

// fallbacks builds what posts fallbacks, where a webhook is set for them, and lets
// it hear of each record that makes one.
func (n *Node) fallbacks(queue coordinator.Queue, reg prometheus.Registerer) (coordinator.Queue, error) {
	s := n.conf.Fallback
	if s.URL == "" {
		return queue, nil
	}
	c, err := n.client("fallback.url", hook.Config{URL: string(s.URL), Token: string(s.Token)})
	if err != nil {
		return nil, err
	}
	pump, err := fallback.New(n.outbox, c, n.log, reg)
	if err != nil {
		return nil, err
	}
	n.pumps = append(n.pumps, pump.Run)
	return listened{queue, pump.Wake}, nil
}

// listened tells of the records that make fallbacks.
type listened struct {
	coordinator.Queue
	made func()
}

func (q listened) Record(ctx context.Context, r school.BatchRecord) error {
	err := q.Queue.Record(ctx, r)
	if err != nil {
		return err
	}
	for i := range r.Results {
		if r.Results[i].Fallback {
			q.made()
			break
		}
	}
	return nil
}
