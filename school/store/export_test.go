package store

import "github.com/jackc/pgx/v5/pgconn"

// OnNotice hears what the server says beside its answers.
func (c Config) OnNotice(f func(*pgconn.Notice)) Config {
	c.onNotice = f
	return c
}
