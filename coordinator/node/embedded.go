package node

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"

	"schoolbell/school/store"
)

// embeddedFile is where a replica that is told of no servers keeps its data: in
// the directory that it was started in.
const embeddedFile = "schoolbell.db"

// EmbeddedConfig says where the embedded stores keep what has to survive.
type EmbeddedConfig struct {
	File string // an SQLite file, made where there is none; required

	// Throwaway gives up what a loss of power would cost, for stores that nobody
	// opens a second time.
	Throwaway bool

	Log        *slog.Logger          // nil: none
	Registerer prometheus.Registerer // nil: the file's metrics are not registered
}

// Embedded are the stores of replicas that run in one process and on no server:
// a Redis in memory and an SQLite file. What the first forgets with the process,
// the ledger in the second gives back.
type Embedded struct {
	file   string // absolute
	redis  memoryRedis
	outbox *store.SQLite
}

var _ outbox = (*store.SQLite)(nil)

// OpenEmbedded opens the file and brings its schema up to date. A file is good
// for one Embedded at a time: store.ErrInUse says who has it. Close it after the
// replicas that use it have ended.
func OpenEmbedded(ctx context.Context, cfg EmbeddedConfig) (*Embedded, error) {
	file, err := filepath.Abs(cfg.File)
	if err != nil {
		return nil, err
	}
	db, err := store.OpenSQLite(ctx, store.SQLiteConfig{Path: file, Relaxed: cfg.Throwaway, Log: cfg.Log, Registerer: cfg.Registerer})
	if err != nil {
		return nil, err
	}
	return &Embedded{file: file, redis: newMemoryRedis(), outbox: db}, nil
}

// Close forgets the Redis and closes the file.
func (e *Embedded) Close() {
	e.redis.close()
	e.outbox.Close()
}

// tellEmbedded says in one line what a replica that was told nothing does.
func (n *Node) tellEmbedded(e *Embedded) {
	n.log.Info("no database_url and no redis.url: everything is kept in this process and one file, for this machine alone",
		"event", "embedded", "file", e.file, "address", n.Addr(), "http_auth", n.conf.HTTP.Auth, "default_sender", n.conf.DefaultSender)
}
