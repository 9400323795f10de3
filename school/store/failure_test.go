package store_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
)

// through returns the URL of a database behind a fault proxy.
func through(t *testing.T, databaseURL string) (string, *local.Proxy) {
	t.Helper()
	u, err := url.Parse(databaseURL)
	require.NoError(t, err)
	proxy := localtest.Proxy(t, u.Host)
	u.Host = proxy.Addr()
	return u.String(), proxy
}

func states(t *testing.T, databaseURL string, notice int64) string {
	t.Helper()
	var words []string
	for _, r := range query(t, connect(t, databaseURL), `SELECT job_status, count(*) FROM push_cluster_token_states
		WHERE cluster_id = $1 GROUP BY 1 ORDER BY 1`, notice) {
		words = append(words, r[0]+"="+r[1])
	}
	return strings.Join(words, " ")
}

func TestInterleaving12ClaimWhoseAnswerIsLostIsUnknownAndCanBeWithdrawn(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	behind, proxy := through(t, direct)
	db := open(t, behind)
	id := accept(t, db, "A", 10)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)

	proxy.SwallowReply(local.RequestContains("batch-lost-answer"), 1)
	err = db.Claim(t.Context(), term, claimOf("batch-lost-answer", page.Work))
	require.ErrorIs(t, err, school.ErrCommitUnknown)
	require.NotErrorIs(t, err, school.ErrUnavailable)
	require.Equal(t, 1, proxy.Swallowed())
	require.Equal(t, "IN_PROGRESS=10", states(t, direct, id), "it was committed")

	// The owner opens a new term, which makes the claim's fate final, and
	// withdraws it.
	next, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	require.Len(t, next.Unsettled, 1)
	require.NoError(t, db.Withdraw(t.Context(), next, "batch-lost-answer"))
	require.Equal(t, "PENDING=10", states(t, direct, id))
	page, err = db.Page(t.Context(), next, 10)
	require.NoError(t, err)
	require.Len(t, page.Work, 10)
	sendBatch(t, t.Context(), db, next, "batch-2", page.Work, accepted)
	require.Equal(t, school.NoticeCompleted, progress(t, db, id).Status)
}

func TestInterleaving11RecordWhoseAnswerIsLostIsRecordedOnce(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	behind, proxy := through(t, direct)
	db := open(t, behind)
	id := accept(t, db, "A", 10)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	c := claimOf("batch-recorded", page.Work)
	require.NoError(t, db.Claim(t.Context(), term, c))
	r := recordOf(t, term, c, accepted)
	proxy.SwallowReply(local.RequestContains("batch-recorded"), 1)
	require.ErrorIs(t, db.Record(t.Context(), r), school.ErrCommitUnknown)
	require.NoError(t, db.Record(t.Context(), r))
	require.Equal(t, 10, progress(t, db, id).Counts.Success)
}

func TestAcceptWhoseAnswerIsLostLooksForItsNotice(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	behind, proxy := through(t, direct)
	db := open(t, behind)
	accept(t, db, "A", 1)
	for _, size := range []int{10, 5000} {
		proxy.SwallowReply(local.RequestContains("COMMIT"), 1)
		if size == 10 {
			proxy.SwallowReply(local.RequestContains("0000007fcm"), 1)
		}
		n := notice("A")
		r, err := db.Accept(t.Context(), n, size, devices(size))
		require.NoError(t, err)
		require.Equal(t, school.Receipt{ID: n.ID, School: "A", Status: school.NoticePending, Total: size}, r)
		require.Equal(t, size, progress(t, db, r.ID).Counts.Waiting)
	}
	require.Equal(t, 2, proxy.Swallowed())
}

func TestAcceptCutOffStoresNothing(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	behind, proxy := through(t, direct)
	db := open(t, behind)
	_, err := db.Accept(t.Context(), notice("A"), 0, func(yield func(school.NewRecipient, error) bool) {
		i := 0
		for r := range devices(20_000) {
			if i++; i == 10_000 {
				require.NoError(t, proxy.Reset())
			}
			if !yield(r, nil) {
				return
			}
		}
	})
	require.Error(t, err)
	require.True(t, errors.Is(err, school.ErrCommitUnknown) || errors.Is(err, school.ErrUnavailable), "%v", err)
	require.NoError(t, proxy.Pass())
	conn := connect(t, direct)
	require.Eventually(t, func() bool {
		return query(t, conn, `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'schoolbell-ingest' AND state <> 'idle'
			AND datname = current_database()`)[0][0] == "0"
	}, 20*time.Second, 10*time.Millisecond)
	require.Equal(t, "0", query(t, conn, `SELECT count(*) FROM push_cluster_tokens`)[0][0])
	require.Equal(t, "0", query(t, conn, `SELECT count(*) FROM schools`)[0][0])
}

// TestAwayIsUnavailable goes through every method: none may say anything else
// of a database that cannot be reached, since nothing was changed.
func TestAwayIsUnavailable(t *testing.T) {
	t.Parallel()
	behind, proxy := through(t, migrated(t))
	db := open(t, behind)
	id := accept(t, db, "A", 10)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	require.NoError(t, proxy.Refuse())
	proxy.CloseConns()
	ctx, one := t.Context(), func(_ any, err error) error { return err }
	c := claimOf("batch", page.Work)
	for name, call := range map[string]func() error{
		"ping":     func() error { return db.Ping(ctx) },
		"due":      func() error { return one(db.Due(ctx, 0)) },
		"term":     func() error { return one(db.OpenTerm(ctx, "A", "acq", "x")) },
		"takeover": func() error { return one(db.Takeover(ctx, term, school.RetryPolicy{})) },
		"page":     func() error { return one(db.Page(ctx, term, 10)) },
		"claim":    func() error { return db.Claim(ctx, term, c) },
		"withdraw": func() error { return db.Withdraw(ctx, term, "batch") },
		"record":   func() error { return db.Record(ctx, recordOf(t, term, c, accepted)) },
		"expire":   func() error { return one(db.Expire(ctx, 10)) },
		"sweep":    func() error { return one(db.Sweep(ctx)) },
		"accept":   func() error { return one(db.Accept(ctx, notice("A"), 10, devices(10))) },
		"stream":   func() error { return one(db.Accept(ctx, notice("A"), 5000, devices(5000))) },
		"notice":   func() error { return one(db.Notice(ctx, id)) },
		"notices":  func() error { return one(db.Notices(ctx, school.NoticeFilter{Limit: 1})) },
		"rows":     func() error { return one(db.Recipients(ctx, id, school.RecipientFilter{Limit: 1})) },
		"cancel":   func() error { return db.Cancel(ctx, id) },
		"school":   func() error { return one(db.School(ctx, "A")) },
		"schools":  func() error { return one(db.Schools(ctx, "", 1)) },
		"pause":    func() error { return db.Pause(ctx, "A") },
		"delete":   func() error { return db.DeleteSchool(ctx, "A") },
		"counts":   func() error { return one(db.RecipientCounts(ctx)) },
	} {
		// A pooled connection that died while it was idle may be noticed only by
		// using it, and then nobody knows whether the server saw the statement.
		require.Eventually(t, func() bool { return errors.Is(call(), school.ErrUnavailable) }, 5*time.Second, time.Millisecond, name)
	}
	_, err = store.Open(ctx, store.Config{URL: behind})
	require.ErrorIs(t, err, school.ErrUnavailable)
	require.NoError(t, proxy.Pass())
	require.NoError(t, db.Ping(ctx))
	require.Equal(t, 10, progress(t, db, id).Counts.Waiting)
}

func TestRestartIsSurvived(t *testing.T) {
	t.Parallel()
	server := localtest.OwnPostgres(t, local.PostgresConfig{})
	address, err := server.CreateDatabase(t.Context(), "restarted")
	require.NoError(t, err)
	_, err = store.Migrate(t.Context(), address)
	require.NoError(t, err)
	db := open(t, address)
	accept(t, db, "A", 10)
	require.NoError(t, server.Restart(t.Context(), local.Immediate))
	for i := range 3 {
		require.Eventually(t, func() bool {
			_, err := db.OpenTerm(t.Context(), "A", "acq", "x")
			if err != nil {
				require.True(t, errors.Is(err, school.ErrUnavailable) || errors.Is(err, school.ErrCommitUnknown), "%d: %v", i, err)
			}
			return err == nil
		}, 10*time.Second, time.Millisecond)
	}
}

func TestInterleaving09LockIsNotWaitedForLong(t *testing.T) {
	t.Parallel()
	address := migrated(t)
	db := open(t, address)
	id := accept(t, db, "A", 10)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	other := connect(t, address)
	tx, err := other.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM push_clusters WHERE id = $1 FOR NO KEY UPDATE`, id)
	require.NoError(t, err)
	began := time.Now()
	err = db.Claim(t.Context(), term, claimOf("batch", page.Work))
	require.ErrorIs(t, err, school.ErrUnavailable, "a lock that was not got is a definite failure")
	require.Less(t, time.Since(began), 8*time.Second)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "PENDING=10", states(t, address, id))
	require.NoError(t, db.Claim(t.Context(), term, claimOf("batch", page.Work)))
}

func TestCallersDeadlineLeavesTheFateOpen(t *testing.T) {
	t.Parallel()
	address := migrated(t)
	db := open(t, address)
	id := accept(t, db, "A", 10)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	tx, err := connect(t, address).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM push_clusters WHERE id = $1 FOR NO KEY UPDATE`, id)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, db.Claim(ctx, term, claimOf("batch", page.Work)), school.ErrCommitUnknown)
	require.NoError(t, tx.Rollback(t.Context()))
	next, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	require.NoError(t, db.Withdraw(t.Context(), next, "batch"))
	require.Equal(t, "PENDING=10", states(t, address, id))
}

// TestErrorsTellNothingOfPeople makes the server refuse what it quotes.
func TestErrorsTellNothingOfPeople(t *testing.T) {
	t.Parallel()
	db := open(t, migrated(t))
	secret := "secret-\x00-token"
	for _, size := range []int{1, 3000} {
		_, err := db.Accept(t.Context(), notice("A"), 0, func(yield func(school.NewRecipient, error) bool) {
			for r := range devices(size) {
				if !yield(r, nil) {
					return
				}
			}
			yield(school.NewRecipient{Token: secret}, nil)
		})
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
		require.NotContains(t, err.Error(), "token")
	}
	n := notice("A")
	n.Content.Title = "secret\x00"
	_, err := db.Accept(t.Context(), n, 0, devices(1))
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, c := range []store.Config{{}, {URL: "postgres://x", MaxConns: 2}, {URL: "postgres://x", ReadTimeout: -1}, {URL: "postgres://user:secret@[bad"}} {
		_, err := store.Open(t.Context(), c)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
	}
}

// TestCloseDoesNotWaitForADatabaseThatIsAway: a call that was given up leaves the
// driver asking on another connection for its cancellation, for 15 s where nobody
// answers; a replica that stops has less.
func TestCloseDoesNotWaitForADatabaseThatIsAway(t *testing.T) {
	t.Parallel()
	behind, proxy := through(t, migrated(t))
	db, err := store.Open(t.Context(), store.Config{URL: behind})
	require.NoError(t, err)
	require.NoError(t, db.Ping(t.Context()))
	require.NoError(t, proxy.BlackHole())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, db.Ping(ctx), school.ErrUnavailable)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		db.Close()
	}()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Error("still closing after 10 s")
		<-closed
	}
}
