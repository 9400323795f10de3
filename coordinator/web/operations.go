package web

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"schoolbell/coordinator/api"
)

func (s *Server) getCluster(ctx context.Context, _ nothing) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	senders, err := s.deps.Cluster.Senders(ctx)
	if err != nil {
		return answer{}, fmt.Errorf("list senders: %w", err)
	}
	replicas, err := s.deps.Cluster.Replicas(ctx)
	out := api.Cluster{Replicas: []api.Replica{}, Senders: []api.Sender{}, Degraded: err != nil}
	out.OpenBrakes, _ = s.deps.Brakes.OpenBrakes(ctx) // unknown while the database is away, which /readyz says
	for _, r := range replicas {
		out.Replicas = append(out.Replicas, api.Replica{Instance: r.Instance, Version: r.Version, Address: r.Address,
			Since: r.Since.UTC(), SchoolsHeld: r.SchoolsHeld, RatePerSecond: r.RatePerSecond, Self: r.Self})
	}
	for _, sn := range senders {
		state := "running"
		if sn.Stopped {
			state = "stopped"
		}
		one := api.Sender{Name: sn.Name, Kind: sn.Kind, State: state, Reason: sn.Reason,
			RatePerMinute: sn.RatePerMinute, RatePerSecond: sn.RatePerSecond, DryRun: sn.DryRun, OnlyTokens: sn.OnlyTokens,
			RateNowPerMinute: sn.RateNow, RateUsedPerMinute: sn.RateUsed, SchoolsWaiting: sn.Waiting, RateLowered: sn.Lowered}
		if sn.Stopped {
			one.Stop = &api.SenderStop{Code: sn.Code, Seconds: sn.Since.Seconds(), NextProbeSeconds: sn.NextProbe.Seconds()}
		}
		out.Senders = append(out.Senders, one)
	}
	return answer{body: out}, nil
}

func (s *Server) getVersion(context.Context, nothing) (answer, error) {
	return answer{body: s.cfg.Version}, nil
}

// getHealth says that the process answers; nothing else, so that nobody
// restarts a replica because its database is away.
func (s *Server) getHealth(context.Context, nothing) (answer, error) {
	return answer{body: map[string]string{"status": "ok"}}, nil
}

// getReady says whether the replica can accept notices: it is not draining and
// the database answers. Everything else only degrades it.
func (s *Server) getReady(ctx context.Context, _ nothing) (answer, error) {
	checks := s.health.look(ctx, s)
	out := api.Ready{Ready: true, Draining: s.draining.Load(), Checks: checks, Degraded: []string{}}
	for name, state := range checks {
		switch {
		case state == stateOK:
		case name == database:
			out.Ready = false
		default:
			out.Degraded = append(out.Degraded, name)
		}
	}
	slices.Sort(out.Degraded)
	a := answer{body: &out}
	if out.Draining {
		out.Ready = false
	}
	if !out.Ready {
		a.status = http.StatusServiceUnavailable
		a.header = http.Header{"Retry-After": {"1"}}
	}
	return a, nil
}

const (
	database   = "database"
	stateOK    = "ok"
	stateAway  = "unreachable"
	probeTime  = time.Second
	probeValid = 500 * time.Millisecond
)

// health remembers the last look at the parts for a moment: the endpoint is
// open, and whoever asks it often must not ask the database as often.
type health struct {
	mu     sync.Mutex
	looked time.Time
	checks map[string]string
}

// look asks all parts at once. The answer says which part is away, not why:
// that stands in the log, once for each change.
func (h *health) look(ctx context.Context, s *Server) map[string]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.checks != nil && time.Since(h.looked) < probeValid {
		return h.checks
	}
	// Others wait for this look: it must not end with the request that began it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTime)
	defer cancel()
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		checks = make(map[string]string)
	)
	probe := func(name string, ask func(context.Context) error) {
		wg.Go(func() {
			err := ask(ctx)
			state := stateOK
			var told interface{ State() string }
			switch {
			case errors.As(err, &told):
				state = told.State()
			case err != nil:
				state = stateAway
			}
			mu.Lock()
			defer mu.Unlock()
			checks[name] = state
			if before, asked := h.checks[name]; (asked && before != state) || (!asked && err != nil) {
				attrs := []slog.Attr{slog.String("event", "health_changed"), slog.String("part", name), slog.String("state", state)}
				if err != nil {
					attrs = append(attrs, slog.String("error", err.Error()))
				}
				s.log.LogAttrs(ctx, slog.LevelWarn, "health changed", attrs...)
			}
		})
	}
	probe(database, s.deps.Database.Ping)
	for name, ask := range s.deps.Checks {
		probe(name, ask)
	}
	wg.Wait()
	h.looked, h.checks = time.Now(), checks
	return checks
}

//go:embed openapi.yaml
var openAPI []byte

func serveOpenAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(openAPI)
}
