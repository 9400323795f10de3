package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator"
	"schoolbell/coordinator/node/settings"
	"schoolbell/sender"
	"schoolbell/sender/fcm"
	"schoolbell/sender/logsender"
	"schoolbell/sender/relay"
)

// guardClose is how long calls that overran are waited for at the stop.
const guardClose = 2 * time.Second

// fcmRamp is how long FCM asks traffic to take from nothing to its whole rate
// (firebase.google.com/docs/cloud-messaging/scale-fcm).
const fcmRamp = time.Minute

// limits are what the senders keep to across the cluster. One that writes to the log
// has nothing to keep to.
func limits(s settings.Settings) map[string]sender.Limit {
	all := map[string]sender.Limit{}
	for name, cfg := range s.Senders {
		l := sender.Limit{PerMinute: cfg.RatePerMinute, Batch: s.Dispatch.Batch}
		switch cfg.Kind {
		case settings.KindLog:
			continue
		case settings.KindFCM:
			l.Ramp = fcmRamp
		}
		all[name] = l
	}
	return all
}

// lanes builds the configured senders, each measured and guarded, with room for
// its messages in flight. stop ends them; their calls have returned by then.
func lanes(s settings.Settings, only allowed, log *slog.Logger, reg prometheus.Registerer) (all []coordinator.Lane, stop func() error, err error) {
	var closers []func() error
	stop = func() error {
		var errs []error
		for _, c := range closers {
			errs = append(errs, c())
		}
		return errors.Join(errs...)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Senders)) {
		cfg := s.Senders[name]
		var made sender.Sender
		end := func() {}
		switch cfg.Kind {
		case settings.KindRelay:
			r, err := relay.New(relay.Config{
				Name: name, URL: string(cfg.URL), Token: string(cfg.Token), StatusURL: string(cfg.StatusURL),
				ConnectTimeout: cfg.ConnectTimeout, ReadTimeout: cfg.ReadTimeout, CallTimeout: cfg.CallTimeout,
			}, reg)
			if err != nil {
				return nil, nil, errors.Join(err, stop())
			}
			made, end = r, r.Close
		case settings.KindFCM:
			f, err := fcm.New(fcm.Config{
				Name: name, Project: cfg.Project, CredentialsFile: cfg.CredentialsFile, Endpoint: cfg.Endpoint,
				CallTimeout: cfg.CallTimeout, InFlight: cfg.InFlight, DryRun: cfg.DryRun,
			}, log, reg)
			if err != nil {
				return nil, nil, errors.Join(senderError(s, name, err), stop())
			}
			made, end = f, f.Close
		case settings.KindLog:
			made, err = logsender.New(name, log)
			if err != nil {
				return nil, nil, errors.Join(err, stop())
			}
		default:
			return nil, nil, errors.Join(fmt.Errorf("sender %s: kind %q is not available in this version", name, cfg.Kind), stop())
		}
		measured, err := sender.Measure(name, made, reg)
		if err != nil {
			end()
			return nil, nil, errors.Join(err, stop())
		}
		guard, err := sender.NewGuard(sender.GuardConfig{Name: name}, measured, log)
		if err != nil {
			end()
			return nil, nil, errors.Join(err, stop())
		}
		closers = append(closers, func() error {
			defer end() // behind its calls, which it joins
			ctx, cancel := context.WithTimeout(context.Background(), guardClose)
			defer cancel()
			return guard.Close(ctx)
		})
		room, err := sender.NewRoom(cfg.InFlight)
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("sender %s: %w", name, err), stop())
		}
		all = append(all, coordinator.Lane{Name: name, Sender: guard, Room: room, Local: cfg.Kind == settings.KindLog, Only: only.of(name), Dry: cfg.DryRun})
	}
	return all, stop, nil
}

// tellTrials says at each start which senders do not send as they would: a trial
// that was forgotten looks like success or like silence.
func tellTrials(s settings.Settings, only allowed, log *slog.Logger) {
	for _, name := range s.SenderNames() {
		if s.Senders[name].DryRun {
			log.Warn("dry_run: FCM checks every message of this sender and delivers none", "event", "sender_dry_run", "sender", name)
		}
		if tokens, limited := only[name]; limited {
			log.Warn("only_tokens_file: this sender sends to the listed devices alone; all others are skipped as NOT_ALLOWED",
				"event", "sender_limited", "sender", name, "devices", len(tokens))
		}
	}
}
