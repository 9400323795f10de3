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
		all[i] = web.SenderStatus{Name: l.Name, Kind: conf.Kind, RatePerSecond: l.Rate, DryRun: conf.DryRun}
		if tokens, limited := c.only[l.Name]; limited {
			n := len(tokens)
			all[i].OnlyTokens = &n
		}
		all[i].Stopped, all[i].Reason = stateOf(l, c.self, members)
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
		return true, "the receiver does not let this sender in" + next
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
	}
	return false, ""
}
