package store_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school/store"
)

func TestInterleaving06ListenHearsAndListensAgain(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	behind, proxy := through(t, url)
	db := open(t, behind)
	conn := connect(t, url)
	ctx, cancel := context.WithCancel(t.Context())
	ready, heard, ended := make(chan struct{}, 10), make(chan string, 10), make(chan error, 1)
	go func() {
		ended <- db.Listen(ctx, func() { ready <- struct{}{} }, func(id string) { heard <- id })
	}()
	wait := func(what string, ch <-chan struct{}) {
		t.Helper()
		select {
		case <-ch:
		case <-time.After(20 * time.Second):
			t.Fatal("never " + what)
		}
	}
	for i := range 3 {
		wait("ready", ready)
		id := fmt.Sprint("school-", i)
		exec(t, conn, `SELECT pg_notify('schoolbell_wake', $1)`, id)
		select {
		case got := <-heard:
			require.Equal(t, id, got)
		case <-time.After(20 * time.Second):
			t.Fatal("not heard")
		}
		switch i {
		case 0:
			exec(t, conn, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'schoolbell-listen' AND datname = current_database()`)
		case 1:
			require.NoError(t, proxy.Reset())
			require.NoError(t, proxy.Pass())
		}
	}
	cancel()
	require.NoError(t, <-ended)
}

// TestListenNoticesAPeerThatVanished: a dead peer says nothing, and neither does
// a quiet one.
func TestListenNoticesAPeerThatVanished(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	behind, proxy := through(t, url)
	db, err := store.Open(t.Context(), store.Config{URL: behind}.ListenProbe(20*time.Millisecond))
	require.NoError(t, err)
	t.Cleanup(db.Close)
	conn := connect(t, url)
	sessions := func() string {
		return query(t, conn, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'schoolbell-listen' AND datname = current_database()`)[0][0]
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan struct{}, 10), make(chan error, 1)
	go func() { ended <- db.Listen(ctx, func() { ready <- struct{}{} }, func(string) {}) }()
	<-ready
	// Many probes are answered, and the session stays the one it was.
	began := query(t, conn, `SELECT clock_timestamp()`)[0][0]
	require.Eventually(t, func() bool {
		return query(t, conn, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'schoolbell-listen'
			AND datname = current_database() AND query_start > $1::timestamptz + interval '200 ms'`, began)[0][0] == "1"
	}, 20*time.Second, 10*time.Millisecond)
	require.Empty(t, ready)
	require.Equal(t, "1", sessions())

	require.NoError(t, proxy.BlackHole())
	require.Never(t, func() bool { return len(ready) > 0 }, 100*time.Millisecond, 10*time.Millisecond)
	require.NoError(t, proxy.Pass())
	select {
	case <-ready:
	case <-time.After(30 * time.Second):
		t.Fatal("never ready again")
	}
	cancel()
	require.NoError(t, <-ended)
}

func TestInterleaving19AcceptNotifiesNobody(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db := open(t, url)
	conn := connect(t, url)
	exec(t, conn, `LISTEN schoolbell_wake`)
	accept(t, db, "A", 10)
	accept(t, db, "A", 5000)
	exec(t, conn, `SELECT pg_notify('schoolbell_wake', 'mark')`)
	n, err := conn.WaitForNotification(t.Context())
	require.NoError(t, err)
	require.Equal(t, "mark", n.Payload)
}
