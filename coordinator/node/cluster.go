package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"schoolbell/coordinator"
	"schoolbell/coordinator/node/settings"
	"schoolbell/coordinator/web"
	"schoolbell/watchdog"
)

// cluster answers GET /v1/cluster: the replicas from the roster, the senders as
// this replica sees them.
type cluster struct {
	self   string
	roster *watchdog.Roster
	coord  *coordinator.Coordinator
	conf   settings.Settings
	only   allowed
}

var _ web.Cluster = cluster{}

func (c cluster) Replicas(ctx context.Context) ([]web.Replica, error) {
	members, err := c.roster.Members(ctx)
	if err != nil {
		return nil, err
	}
	all := make([]web.Replica, len(members))
	for i, m := range members {
		all[i] = web.Replica{
			Instance: m.Instance, Version: m.Version, Address: m.Address, Since: m.Since,
			SchoolsHeld: m.SchoolsHeld, RatePerSecond: m.Rate, Self: m.Instance == c.self,
		}
	}
	return all, nil
}

func (c cluster) Senders(ctx context.Context) ([]web.SenderStatus, error) {
	members, _ := c.roster.Members(ctx) // what this replica knows by itself is shown without it
	lanes := c.coord.Lanes()
	all := make([]web.SenderStatus, len(lanes))
	for i, l := range lanes {
		conf := c.conf.Senders[l.Name]
		all[i] = web.SenderStatus{Name: l.Name, Kind: conf.Kind, RatePerMinute: conf.RatePerMinute, RatePerSecond: l.Rate, DryRun: conf.DryRun,
			RateNow: l.Shared.PerMinute, RateUsed: l.Shared.Used, Waiting: l.Shared.Waiting, Lowered: l.Shared.Lowered}
		if tokens, limited := c.only[l.Name]; limited {
			n := len(tokens)
			all[i].OnlyTokens = &n
		}
		if all[i].Stopped, all[i].Reason = stateOf(l, c.self, members); all[i].Stopped {
			all[i].Code, all[i].Since, all[i].NextProbe = l.Code, l.StoppedFor, l.ResumeIn
		}
	}
	return all, nil
}

// stateOf says in words what keeps a sender from sending. Where its receiver
// answers some replicas it is not stopped: these send.
func stateOf(l coordinator.LaneState, self string, members []watchdog.Member) (stopped bool, reason string) {
	next := "; next try with the next message"
	if l.ResumeIn > 0 {
		next = "; next try in " + max(time.Second, l.ResumeIn.Round(time.Second)).String()
	}
	if l.Stopped {
		why := "the receiver does not let this sender in"
		if l.Code != "" {
			why += ": " + l.Code
		}
		return true, why + next
	}
	var silent []string // the others as of their last heartbeat
	live := 1
	for _, m := range members {
		if m.Instance == self {
			continue
		}
		live++
		if slices.Contains(m.Unanswered, l.Name) {
			silent = append(silent, m.Instance)
		}
	}
	here := ": " + l.Code + next
	switch {
	case l.Broken && len(silent) == live-1:
		return true, "no answer" + here
	case l.Broken:
		return false, fmt.Sprintf("no answer at %d of %d replicas, this one among them%s", len(silent)+1, live, here)
	case len(silent) > 0:
		return false, fmt.Sprintf("no answer at %d of %d replicas: %s", len(silent), live, strings.Join(silent, ", "))
	case l.Shared.Lowered && l.Shared.LowerFor > 0:
		return false, fmt.Sprintf("the receiver asks for less: %s; the rate is lowered and grows again in %s", l.Shared.LowerBy, max(time.Second, l.Shared.LowerFor.Round(time.Second)))
	case l.Shared.Lowered:
		return false, fmt.Sprintf("the receiver asked for less: %s; the rate was lowered and grows again", l.Shared.LowerBy)
	}
	return false, ""
}

// senderChecks are what /readyz says of the senders: one that is stopped degrades
// the replica, which goes on taking notices.
func senderChecks(coord *coordinator.Coordinator, roster *watchdog.Roster, names []string) map[string]func(context.Context) error {
	all := map[string]func(context.Context) error{}
	for _, name := range names {
		all["sender "+name] = func(context.Context) error {
			for _, l := range coord.Lanes() {
				if l.Name == name && (l.Stopped || l.Broken && roster.OthersUnanswered(name)) {
					return stoppedSender{l.Code}
				}
			}
			return nil
		}
	}
	return all
}

// stoppedSender is a sender whose receiver does not let it in, or answers nobody.
type stoppedSender struct{ code string }

func (e stoppedSender) Error() string { return "the sender is stopped: " + e.code }

// State is what /readyz shows.
func (e stoppedSender) State() string { return "stopped" }
