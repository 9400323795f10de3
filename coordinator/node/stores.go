package node

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"schoolbell/coordinator"
	"schoolbell/coordinator/fallback"
	"schoolbell/coordinator/web"
	"schoolbell/school"
	"schoolbell/school/store"
	"schoolbell/watchdog/redislease"
)

// outbox is all that a replica asks of its database, whichever engine it is.
type outbox interface {
	coordinator.Queue
	web.Notices
	web.Schools
	web.Devices
	web.Brakes
	stock
	fallback.Store
	alertStore
	// Purge removes what ended at least after ago, until nothing is left or ctx ends.
	Purge(ctx context.Context, after time.Duration) (school.Purged, error)
	// Listen hears of schools that were given work inside an application's own
	// transaction until ctx ends.
	Listen(ctx context.Context, onReady func(), onSchool func(schoolID string)) error
	Close()
}

var _ outbox = (*store.DB)(nil)

// openStores opens the way to the database and says where Redis is: the servers
// that the settings name, or what is embedded. What it opens is closed by the
// node's cleanup.
func (n *Node) openStores(ctx context.Context, embedded *Embedded, now func() time.Time, reg prometheus.Registerer) (*redis.UniversalOptions, error) {
	if embedded != nil {
		n.outbox = n.line.outbox(embedded.outbox)
		where := embedded.redis.options()
		where.Dialer = n.line.dial(where)
		return where, nil
	}
	where, err := redislease.ParseURL(string(n.conf.Redis.URL))
	if err != nil {
		return nil, fmt.Errorf("redis.url: %w", err)
	}
	where.Dialer = newRedisWatch(where, setting(n.conf, "redis.url"), n.log).dial(where, n.line.dial(where))
	db, err := store.Open(ctx, store.Config{URL: string(n.conf.DatabaseURL), MaxConns: n.conf.Database.MaxConns, Log: n.log, Registerer: reg, Now: now})
	if err != nil {
		return nil, databaseError(n.conf, err)
	}
	n.cleanup.add("store", func() error { db.Close(); return nil })
	n.outbox = n.line.outbox(db)
	return where, nil
}
