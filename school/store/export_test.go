package store

import (
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// OnNotice hears what the server says beside its answers.
func (c Config) OnNotice(f func(*pgconn.Notice)) Config {
	c.onNotice = f
	return c
}

// ListenProbe sets how long a listening connection may be silent.
func (c Config) ListenProbe(d time.Duration) Config {
	c.listenProbe = d
	return c
}
