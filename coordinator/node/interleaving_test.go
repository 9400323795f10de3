package node

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// TestInterleaving06WorkIsAskedForAfterEachReconnect: what came while a replica
// did not listen was told to nobody. It asks the store as soon as it listens
// again, long before its first tick.
func TestInterleaving06WorkIsAskedForAfterEachReconnect(t *testing.T) {
	t.Parallel()
	srv := startServers(t)
	s := srv.settings("one")
	s.Dispatch.FirstTick, s.Dispatch.Tick = time.Hour, time.Hour
	one := run(t, s, Deps{})
	direct, err := store.Open(t.Context(), store.Config{URL: srv.database})
	require.NoError(t, err)
	defer direct.Close()
	conn, err := pgx.Connect(t.Context(), srv.database)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(t.Context())) }()
	c := redis.NewClient(&redis.Options{Addr: srv.redis.Addr()})
	defer func() { require.NoError(t, c.Close()) }()
	sessions := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE application_name = 'schoolbell-listen' AND state = 'idle' AND datname = current_database()`).Scan(&n))
		return n
	}
	for i, reconnect := range []func(){
		func() {
			_, err := conn.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE application_name = 'schoolbell-listen' AND datname = current_database()`)
			require.NoError(t, err)
		},
		func() { require.NoError(t, c.ClientKillByFilter(t.Context(), "TYPE", "pubsub").Err()) },
	} {
		eventually(t, "it listens to both", func() bool {
			channels, err := c.PubSubNumSub(t.Context(), testKeys(t).Wake()).Result()
			require.NoError(t, err)
			return sessions() == 1 && channels[testKeys(t).Wake()] == 1
		})
		n := &school.Notice{School: "A", Content: school.Content{Title: "T"}, Priority: school.Normal, Delivery: school.AtLeastOnce}
		_, err := direct.Accept(t.Context(), n, 0, func(yield func(school.NewRecipient, error) bool) {
			yield(school.NewRecipient{Token: "a device"}, nil)
		})
		require.NoError(t, err)
		reconnect()
		eventually(t, "it is sent", func() bool { return srv.receiver.Counts().Distinct == int64(i+1) })
	}
	require.NoError(t, one.end(t))
}
