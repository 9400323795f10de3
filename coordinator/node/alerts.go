package node

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/coordinator"
	"schoolbell/coordinator/alert"
	"schoolbell/coordinator/hook"
)

// alertStore is all that alerts need of the database.
type alertStore interface {
	alert.Outbox
	alert.Conditions
	alert.Failing
	// StartDigest lets the digest begin now, if it has not begun before.
	StartDigest(ctx context.Context) error
}

// alerts builds what tells operators, where a webhook is set for it: the events are
// for the scheduler, nil where nobody is to be told.
func (n *Node) alerts(ctx context.Context, reg prometheus.Registerer) (coordinator.Events, error) {
	s := n.conf.Alerts
	if s.WebhookURL == "" {
		return nil, nil
	}
	c, err := n.client("alerts.webhook_url", hook.Config{URL: string(s.WebhookURL)})
	if err != nil {
		return nil, err
	}
	pump, err := alert.NewPump(alert.Config{Kind: s.Kind, Link: s.PageURL, Zone: n.conf.Location()}, n.outbox, c, n.log, reg)
	if err != nil {
		return nil, err
	}
	if err := n.outbox.StartDigest(ctx); err != nil {
		return nil, err
	}
	board := alert.NewBoard(n.outbox, pump.Wake, n.log)
	n.digest = func(ctx context.Context) error {
		err := alert.Digest(ctx, n.outbox)
		pump.Wake()
		return err
	}
	watch := &senderWatch{board: board, told: map[string]bool{},
		lanes:  func() []coordinator.LaneState { return n.coord.Lanes() },
		silent: func(name string) bool { return n.roster.OthersUnanswered(name) },
	}
	n.pumps = append(n.pumps, board.Run, pump.Run, watch.run)
	return teller{board}, nil
}

// codeThirdParty is FCM's for a wrong APNs or web push key (R32).
const codeThirdParty = "THIRD_PARTY_AUTH_ERROR"

// teller hands the scheduler's events to the board.
type teller struct{ board *alert.Board }

func (t teller) SenderStopped(e coordinator.SenderStopped) {
	t.board.Raise(alert.SenderStopped, alert.Event{Sender: e.Sender, School: e.School, Code: e.Code}, 1)
}

func (t teller) SenderResumed(e coordinator.SenderResumed) {
	t.board.End(alert.SenderStopped, alert.SenderResumed, alert.Event{Sender: e.Sender})
}

func (t teller) SenderMisfit(e coordinator.SenderMisfit) {
	kind := alert.SenderMismatch
	if e.Code == codeThirdParty {
		kind = alert.ThirdPartyAuth
	}
	t.board.Raise(kind, alert.Event{Sender: e.Sender, School: e.School, Code: e.Code}, e.Count)
}

func (t teller) BrakeTripped(e coordinator.BrakeTripped) {
	t.board.Raise(alert.UnregisteredBrake, alert.Event{Sender: e.Sender, School: e.School, Unregistered: e.Unregistered, Size: e.Size}, 1)
}

// watchEvery is how often the senders are looked at for what goes on: a stop is
// told at once, that it lasts is not urgent.
const watchEvery = 15 * time.Second

// senderWatch says of senders that they are still stopped, and of those whose
// receiver answers none of the replicas that this is so: no single batch shows that.
type senderWatch struct {
	board  *alert.Board
	lanes  func() []coordinator.LaneState
	silent func(name string) bool // no other replica hears from its receiver
	told   map[string]bool        // senders that this replica said are not answered
}

func (w *senderWatch) run(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			w.look()
		}
	}
}

func (w *senderWatch) look() {
	for _, l := range w.lanes() {
		e := alert.Event{Sender: l.Name, Code: l.Code}
		if l.Stopped {
			w.board.Remind(alert.SenderStopped, e)
		}
		switch silent := l.Broken && w.silent(l.Name); {
		case silent:
			w.board.Raise(alert.SenderUnanswered, e, 1)
			w.told[l.Name] = true
		case w.told[l.Name]:
			w.board.End(alert.SenderUnanswered, alert.SenderAnswered, alert.Event{Sender: l.Name})
			delete(w.told, l.Name)
		}
	}
}
