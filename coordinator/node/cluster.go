package node

import (
	"context"
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

func (c cluster) Senders(context.Context) ([]web.SenderStatus, error) {
	lanes := c.coord.Lanes()
	all := make([]web.SenderStatus, len(lanes))
	for i, l := range lanes {
		conf := c.conf.Senders[l.Name]
		all[i] = web.SenderStatus{Name: l.Name, Kind: conf.Kind, Stopped: l.Stopped || l.Broken, RatePerSecond: l.Rate}
		switch {
		case l.Stopped:
			all[i].Reason = "the receiver does not let this sender in; next probe in " + l.ResumeIn.Round(time.Second).String()
		case l.Broken:
			all[i].Reason = "no answer from the receiver; next try in " + l.ResumeIn.Round(time.Second).String()
		}
	}
	return all, nil
}
