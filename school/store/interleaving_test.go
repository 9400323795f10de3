package store_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/school"
	"schoolbell/school/store"
)

// TestInterleaving07NoIndexNamesWhatMoves: an index that names what most updates
// change ends their being heap-only, also where only its condition does.
func TestInterleaving07NoIndexNamesWhatMoves(t *testing.T) {
	t.Parallel()
	moves := regexp.MustCompile(`\b(frontier|job_status|attempts|attempted|closing_seq|\w+_count)\b`)
	indexes := query(t, connect(t, migrated(t)), `SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema() ORDER BY indexname`)
	defs := map[string]string{}
	for _, r := range indexes {
		defs[r[0]] = r[1]
		require.Empty(t, moves.FindString(r[1]), r[1])
	}
	require.Contains(t, defs["push_clusters_open"], "WHERE (ended_at IS NULL)")
	require.Contains(t, defs["push_cluster_tokens_retry"], "(school_id, retry_after) WHERE (retry_after IS NOT NULL)")
}

// TestInterleaving09OneRoundTripEach: once the one request of a step has reached
// the server nothing more of its owner is needed. The owner never hears the
// answer, as if it had been stopped right after it asked; its step is committed,
// and its successor waits for nothing.
func TestInterleaving09OneRoundTripEach(t *testing.T) {
	t.Parallel()
	direct := migrated(t)
	behind, proxy := through(t, direct)
	owner, successor := open(t, behind), open(t, direct)
	conn := connect(t, direct)
	begin := func(t *testing.T, schoolID string) (term school.Term, work []school.Work) {
		accept(t, successor, schoolID, 10)
		term, err := successor.OpenTerm(t.Context(), schoolID, "first-"+schoolID, "x")
		require.NoError(t, err)
		page, err := successor.Page(t.Context(), term, 10)
		require.NoError(t, err)
		return term, page.Work
	}
	claimed := func(t *testing.T, schoolID string, longest time.Duration) (school.Term, school.Claim) {
		term, work := begin(t, schoolID)
		c := claimOf("batch-"+schoolID, work)
		c.Longest, c.Record = longest, 0
		require.NoError(t, successor.Claim(t.Context(), term, c))
		return term, c
	}
	settledAs := func(schoolID string) string {
		return `SELECT settled_as FROM push_batches WHERE id = 'batch-` + schoolID + `'`
	}
	for _, c := range []struct {
		school string
		// step returns the step, and a word of its one request alone.
		step func(t *testing.T) (call func() error, word string)
		// committed is a question whose answer shows it.
		committed, answer string
	}{
		{"open-term", func(t *testing.T) (func() error, string) {
			begin(t, "open-term")
			return func() error {
				_, err := owner.OpenTerm(t.Context(), "open-term", "second-open-term", "x")
				return err
			}, "second-open-term"
		}, `SELECT fence FROM school_terms WHERE school_id = 'open-term'`, "2"},
		{"claim", func(t *testing.T) (func() error, string) {
			term, work := begin(t, "claim")
			return func() error { return owner.Claim(t.Context(), term, claimOf("batch-claim", work)) }, "batch-claim"
		}, `SELECT size FROM push_batches WHERE id = 'batch-claim'`, "10"},
		{"skip", func(t *testing.T) (func() error, string) {
			term, work := begin(t, "skip")
			for i := range work {
				work[i].Skip = school.Disabled
			}
			return func() error { return owner.Skip(t.Context(), term, work) }, "first-skip"
		}, `SELECT frontier FROM push_clusters WHERE school_id = 'skip'`, "10"},
		{"record", func(t *testing.T) (func() error, string) {
			term, c := claimed(t, "record", time.Minute)
			r := recordOf(t, term, c, accepted)
			return func() error { return owner.Record(t.Context(), r) }, "batch-record"
		}, settledAs("record"), "recorded"},
		{"withdraw", func(t *testing.T) (func() error, string) {
			term, c := claimed(t, "withdraw", time.Minute)
			return func() error { return owner.Withdraw(t.Context(), term, c.Batch) }, "batch-withdraw"
		}, settledAs("withdraw"), "withdrawn"},
		{"takeover", func(t *testing.T) (func() error, string) {
			claimed(t, "takeover", time.Microsecond)
			term, err := successor.OpenTerm(t.Context(), "takeover", "second-takeover", "y")
			require.NoError(t, err)
			return func() error {
				_, err := owner.Takeover(t.Context(), term, school.RetryPolicy{})
				return err
			}, "second-takeover"
		}, settledAs("takeover"), "taken_over"},
	} {
		t.Run(c.school, func(t *testing.T) {
			call, word := c.step(t)
			before := proxy.Swallowed()
			proxy.SwallowReply(local.RequestContains(word), 1)
			require.ErrorIs(t, call(), school.ErrCommitUnknown)
			require.Equal(t, before+1, proxy.Swallowed())
			require.Equal(t, [][]string{{c.answer}}, query(t, conn, c.committed))
			_, err := successor.OpenTerm(t.Context(), c.school, "successor", "z")
			require.NoError(t, err)
		})
	}
}

// TestInterleaving09SessionsBoundTheirWaits: on a server whose own settings are
// all wrong.
func TestInterleaving09SessionsBoundTheirWaits(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	for _, wrong := range []string{
		"default_transaction_isolation = 'repeatable read'", "default_transaction_read_only = on", "lock_timeout = 0",
		"statement_timeout = 0", "idle_in_transaction_session_timeout = 0", "timezone = 'Asia/Seoul'",
	} {
		exec(t, admin, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET `+strings.ReplaceAll(wrong, "'", "''")+`', current_database()); END $$`)
	}
	db := open(t, url)
	for _, c := range []struct{ pool, idle, statement string }{
		{"ingest", "1min", "5min"}, {"dispatch", "2s", "5s"}, {"reads", "5s", "10s"},
	} {
		for setting, want := range map[string]string{
			"application_name": "schoolbell-" + c.pool, "transaction_isolation": "read committed", "transaction_read_only": "off",
			"lock_timeout": "2s", "idle_in_transaction_session_timeout": c.idle, "statement_timeout": c.statement, "timezone": "UTC",
			"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3", "tcp_user_timeout": "10000",
		} {
			got, err := db.Setting(t.Context(), c.pool, setting)
			require.NoError(t, err)
			require.Equal(t, want, got, "%s of %s", setting, c.pool)
		}
	}
}

// TestInterleaving09NoKindOfWorkStarvesAnother fills the connections of ingest
// and those of the reads: the dispatcher works on.
func TestInterleaving09NoKindOfWorkStarvesAnother(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db, err := store.Open(t.Context(), store.Config{URL: url, MaxConns: 5})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	accept(t, db, "A", 10)

	const ingest, reads = 2, 1
	reading, proceed := make(chan struct{}, ingest), make(chan struct{})
	var busy sync.WaitGroup
	for range ingest { // uploads whose clients are slow
		busy.Go(func() {
			_, err := db.Accept(t.Context(), notice("B"), 3000, func(yield func(school.NewRecipient, error) bool) {
				i := 0
				for r := range devices(3000) {
					if i++; i == 2500 {
						reading <- struct{}{}
						<-proceed
					}
					if !yield(r, nil) {
						return
					}
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for range ingest {
		<-reading
	}
	held, release := make(chan struct{}), make(chan struct{})
	for range reads {
		busy.Go(func() {
			if err := db.HoldSession(t.Context(), "reads", func() { close(held); <-release }); err != nil {
				t.Error(err)
			}
		})
	}
	<-held
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = db.Accept(short, notice("C"), 0, devices(1))
	require.ErrorIs(t, err, school.ErrUnavailable, "ingest is full")
	_, err = db.School(short, "A")
	require.ErrorIs(t, err, school.ErrUnavailable, "and so are the reads")

	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	sendBatch(t, t.Context(), db, term, "batch", page.Work, accepted)

	close(proceed)
	close(release)
	busy.Wait()
	require.Equal(t, "SUCCESS=10", states(t, url, page.Work[0].Notice.ID))
}

// TestInterleaving10NobodyIsLockedOutByAReference: an insert that refers to a row
// holds its key. No step of the dispatcher asks for more of a school, a term, a
// notice or a recipient than the row without its key, so none waits for it; only
// the deletion of a school does.
func TestInterleaving10NobodyIsLockedOutByAReference(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	db := open(t, url)
	ids := []int64{accept(t, db, "A", 5), accept(t, db, "A", 5), accept(t, db, "A", 5)}
	tx, err := connect(t, url).Begin(t.Context())
	require.NoError(t, err)
	for _, table := range []string{"schools", "school_terms", "push_clusters", "push_cluster_tokens"} {
		_, err = tx.Exec(t.Context(), `SELECT FROM `+table+` FOR KEY SHARE`)
		require.NoError(t, err)
	}
	limit := 4000
	_, _, err = db.PutSchool(t.Context(), "A", school.SchoolChange{Limit: &limit})
	require.NoError(t, err)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "x")
	require.NoError(t, err)
	page, err := db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	claim := func(id string, work []school.Work, longest time.Duration) school.Claim {
		c := claimOf(id, work)
		c.Rule.Version, c.Longest, c.Record = 2, longest, 0
		require.NoError(t, db.Claim(t.Context(), term, c))
		return c
	}
	require.NoError(t, db.Withdraw(t.Context(), term, claim("withdrawn", page.Work, time.Minute).Batch))
	page, err = db.Page(t.Context(), term, 10)
	require.NoError(t, err)
	require.NoError(t, db.Record(t.Context(), recordOf(t, term, claim("recorded", page.Work[:8], time.Minute), accepted)))
	claim("orphaned", page.Work[8:], time.Microsecond)
	term, err = db.OpenTerm(t.Context(), "A", "acq", "y")
	require.NoError(t, err)
	o, err := db.Takeover(t.Context(), term, school.RetryPolicy{})
	require.NoError(t, err)
	require.Equal(t, 2, o.Recipients)
	require.NoError(t, db.Cancel(t.Context(), ids[2]))
	_, err = db.Expire(t.Context(), 10)
	require.NoError(t, err)
	require.NoError(t, db.Pause(t.Context(), "A"))
	require.NoError(t, db.Resume(t.Context(), "A"))
	accept(t, db, "A", 5)
	require.NoError(t, tx.Rollback(t.Context()))
}

// TestInterleaving10NoticesAreLockedInOneOrder stops a record in the middle of its
// notices and lets another step of the same notices come. Let go, both go on: the
// second waits before it holds anything that the first still needs, be it a
// notice or, where the recorded batch filled its cycle, the term.
func TestInterleaving10NoticesAreLockedInOneOrder(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	admin := connect(t, url)
	quickDeadlocks(t, url)
	db := open(t, url)
	second := map[string]func(t *testing.T, x school.Term, rest []school.Work) func() error{
		"claim": func(t *testing.T, x school.Term, rest []school.Work) func() error {
			y := openTerm(t, db, x.School, "y")
			return func() error { return db.Claim(t.Context(), y, claimOf("second-"+x.School, rest)) }
		},
		"withdraw": func(t *testing.T, x school.Term, rest []school.Work) func() error {
			y := openTerm(t, db, x.School, "y")
			require.NoError(t, db.Claim(t.Context(), y, claimOf("second-"+x.School, rest)))
			return func() error { return db.Withdraw(t.Context(), y, "second-"+x.School) }
		},
		"takeover": func(t *testing.T, x school.Term, rest []school.Work) func() error {
			c := claimOf("second-"+x.School, rest)
			c.Longest, c.Record = time.Microsecond, 0
			require.NoError(t, db.Claim(t.Context(), x, c))
			y := openTerm(t, db, x.School, "y")
			return func() error { _, err := db.Takeover(t.Context(), y, school.RetryPolicy{}); return err }
		},
		"record": func(t *testing.T, x school.Term, rest []school.Work) func() error {
			c := claimOf("second-"+x.School, rest)
			require.NoError(t, db.Claim(t.Context(), x, c))
			r := recordOf(t, x, c, accepted)
			return func() error { return db.Record(t.Context(), r) }
		},
	}
	for name, prepare := range second {
		for _, filled := range []bool{false, true} {
			id := fmt.Sprint(name, "-", filled)
			t.Run(id, func(t *testing.T) {
				middle := []int64{accept(t, db, id, 10), accept(t, db, id, 10), accept(t, db, id, 10)}[1]
				x := openTerm(t, db, id, "x")
				page, err := db.Page(t.Context(), x, 100)
				require.NoError(t, err)
				c := claimOf("first-"+id, someOfEach(page.Work, 2))
				c.Grant.Filled = filled
				require.NoError(t, db.Claim(t.Context(), x, c))
				page, err = db.Page(t.Context(), x, 100)
				require.NoError(t, err)
				then := prepare(t, x, someOfEach(page.Work, 2))
				r := recordOf(t, x, c, accepted)
				r.Filled = filled

				stopped, err := connect(t, url).Begin(t.Context())
				require.NoError(t, err)
				_, err = stopped.Exec(t.Context(), `SELECT FROM push_clusters WHERE id = $1 FOR NO KEY UPDATE`, middle)
				require.NoError(t, err)
				ended := make(chan error, 2)
				for i, step := range []func() error{func() error { return db.Record(t.Context(), r) }, then} {
					go func() { ended <- step() }()
					require.Eventually(t, func() bool {
						return len(ended) > 0 || query(t, admin, `SELECT count(*) FROM pg_stat_activity
							WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0][0] == fmt.Sprint(i+1)
					}, 10*time.Second, time.Millisecond)
				}
				require.NoError(t, stopped.Rollback(t.Context()))
				for range 2 {
					err := <-ended
					if err != nil && strings.Contains(err.Error(), "55P03") {
						t.Log("the machine is too busy to show it:", err)
						continue
					}
					require.NoError(t, err)
				}
			})
		}
	}
}

func openTerm(t *testing.T, db *store.DB, schoolID, owner string) school.Term {
	t.Helper()
	term, err := db.OpenTerm(t.Context(), schoolID, "acq-"+owner, owner)
	require.NoError(t, err)
	return term
}

// quickDeadlocks lets the server break deadlocks long before anybody's patience
// ends.
func quickDeadlocks(t *testing.T, url string) {
	t.Helper()
	exec(t, connect(t, url), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''20ms''', current_database()); END $$`)
}

// TestInterleaving10NothingDeadlocks lets everything that locks more than one row
// meet on few of them: owners that claim, record, withdraw, die and take over,
// who cancels, expires, sweeps, pauses and accepts. PostgreSQL breaks a deadlock
// by an error, which nobody may get.
func TestInterleaving10NothingDeadlocks(t *testing.T) {
	t.Parallel()
	url := migrated(t)
	quickDeadlocks(t, url)
	db, err := store.Open(t.Context(), store.Config{URL: url, MaxConns: 30})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	var (
		wg      sync.WaitGroup
		ids     sync.Map // of notices, by number
		notices atomic.Int64
		counts  [8]atomic.Int64 // what really happened
		names   = [8]string{"accepted", "claimed", "recorded", "withdrawn", "taken over", "cancelled", "closed", "fenced"}
	)
	const enough = 5 // of each, and everything has met everything
	did := func(what int) { counts[what].Add(1) }
	// steady repeats f, once for each turn of an owner where it is given turns,
	// until enough has happened. What the interleaving may well have earned is no
	// failure.
	steady := func(n int, turns <-chan struct{}, f func(r *rand.Rand, i int) error) {
		for g := range n {
			wg.Go(func() {
				defer stop() // without this one nothing would be shown
				r := rand.New(rand.NewPCG(uint64(g), 7))
				for i := 0; ctx.Err() == nil; i++ {
					if turns != nil {
						select {
						case <-turns:
						case <-ctx.Done():
							return
						}
					}
					err := f(r, g<<20|i)
					switch {
					case err == nil || ctx.Err() != nil || errors.Is(err, school.ErrStalePage) || errors.Is(err, school.ErrPaused) ||
						errors.Is(err, school.ErrTakenOver) || errors.Is(err, school.ErrConflict) || errors.Is(err, school.ErrRuleChanged):
					case errors.Is(err, school.ErrFenced):
						did(7)
					default:
						t.Error(err)
						return
					}
				}
			})
		}
	}
	schools := []string{"A", "B"}
	accepts := func(r *rand.Rand, _ int) error {
		n := notice(schools[r.IntN(2)])
		if r.IntN(2) == 0 {
			n.ExpiresAt = time.Now().Add(time.Duration(50+r.IntN(300)) * time.Millisecond)
		}
		got, err := db.Accept(ctx, n, 0, devices(1+r.IntN(30)))
		if err == nil {
			ids.Store(notices.Add(1), got.ID)
			did(0)
		}
		if _, late := errors.AsType[*school.FieldError](err); late {
			return nil // it expired on its way
		}
		return err
	}
	for first := rand.New(rand.NewPCG(0, 0)); notices.Load() < 20; {
		require.NoError(t, accepts(first, 0))
	}
	filled, emptied := make(chan struct{}, 1), make(chan struct{}, 1)
	steady(2, filled, accepts)
	steady(3, nil, func(r *rand.Rand, i int) error {
		least := counts[0].Load()
		for k := range counts {
			least = min(least, counts[k].Load())
		}
		if least >= enough {
			stop()
		}
		for _, turn := range []chan struct{}{filled, emptied} {
			select {
			case turn <- struct{}{}:
			default:
			}
		}
		id, name := schools[r.IntN(2)], fmt.Sprint("owner-", i>>20)
		term, err := db.OpenTerm(ctx, id, fmt.Sprint("acq-", i), name)
		if err != nil {
			return err
		}
		o, err := db.Takeover(ctx, term, school.RetryPolicy{})
		if err != nil {
			return err
		}
		if len(o.Batches) > 0 {
			did(4)
		}
		for j := range 3 {
			page, err := db.Page(ctx, term, 60)
			if err != nil || len(page.Work) == 0 {
				return err
			}
			c := claimOf(fmt.Sprint("batch-", i, "-", j), someOfEach(page.Work, 1+r.IntN(4)))
			if c.Size() == 0 {
				return db.Skip(ctx, term, page.Work)
			}
			c.Grant.Attempted, c.Grant.Filled = 10, r.IntN(4) == 0
			c.Rule.Version, c.Longest, c.Record = 1000, time.Duration(1+r.IntN(20))*time.Millisecond, 0
			if err := db.Claim(ctx, term, c); err != nil {
				return err
			}
			did(1)
			switch r.IntN(3) {
			case 0: // it dies
				return nil
			case 1:
				if err := db.Withdraw(ctx, term, c.Batch); err != nil {
					return err
				}
				did(3)
			default:
				rec := recordOf(t, term, c, func(i int) school.Outcome {
					return []school.Outcome{school.Accepted, school.Gone, school.NotSent, school.Rejected}[(i+j)%4]
				})
				rec.Filled = c.Grant.Filled
				if err := db.Record(ctx, rec); err != nil {
					return err
				}
				did(2)
			}
		}
		return nil
	})
	steady(2, emptied, func(r *rand.Rand, _ int) error {
		id, ok := ids.Load(notices.Load() - int64(r.IntN(10)))
		if !ok {
			return nil
		}
		err := db.Cancel(ctx, id.(int64))
		if err == nil {
			did(5)
		}
		return err
	})
	steady(2, nil, func(*rand.Rand, int) error {
		n, err := db.Expire(ctx, 20)
		counts[6].Add(int64(n))
		return err
	})
	steady(1, nil, func(*rand.Rand, int) error { _, err := db.Sweep(ctx); return err })
	steady(1, nil, func(r *rand.Rand, _ int) error {
		id, rest := schools[r.IntN(2)], time.Duration(1+r.IntN(1000))*time.Second
		if err := db.Pause(ctx, id); err != nil {
			return err
		}
		if _, _, err := db.PutSchool(ctx, id, school.SchoolChange{Rest: &rest}); err != nil {
			return err
		}
		return db.Resume(ctx, id)
	})
	wg.Wait()
	for i := range counts {
		t.Logf("%s: %d", names[i], counts[i].Load())
		require.GreaterOrEqual(t, counts[i].Load(), int64(enough), "%s: too few to show anything", names[i])
	}
	stranded, err := db.Sweep(t.Context())
	require.NoError(t, err)
	require.Zero(t, stranded)
}

// someOfEach takes the first n recipients of each notice, so that the batches of
// two owners are of the same notices.
func someOfEach(page []school.Work, n int) (work []school.Work) {
	taken := map[int64]int{}
	for _, k := range page {
		if taken[k.Notice.ID]++; taken[k.Notice.ID] <= n {
			work = append(work, k)
		}
	}
	return work
}
