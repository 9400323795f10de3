package store_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestListenHearsAndListensAgain(t *testing.T) {
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

func TestAcceptNotifiesNobody(t *testing.T) {
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
