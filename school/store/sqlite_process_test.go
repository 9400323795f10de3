package store_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// A test that kills a process runs this binary again, with the file to work on
// and where to stop in its environment.
const (
	childFile = "STORE_TEST_CHILD_FILE"
	childStop = "STORE_TEST_CHILD_STOP"
)

// child works on a file until it is killed, and says on standard output what the
// store told it had happened. stop is where it stands still: "" for nowhere.
func child(path, stop string) error {
	go func() { // it does not outlive the test
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	ctx := context.Background()
	db, err := store.OpenSQLite(ctx, store.SQLiteConfig{Path: path})
	if err != nil {
		return err
	}
	say := func(words ...any) { fmt.Println(words...) }
	still := func(at string) {
		if stop == at {
			say("still", at)
			select {}
		}
	}
	say("open")
	still("open")
	var committing atomic.Value // what the commit at hand is of
	committing.Store("")
	db.BeforeCommit(func() { still("commit of a " + committing.Load().(string)) })
	for round := 0; ; round++ {
		committing.Store("notice")
		n := 300
		if round%5 == 4 {
			n = 5000
		}
		r, err := db.Accept(ctx, notice("A"), n, func(yield func(school.NewRecipient, error) bool) {
			for i := range n {
				if i == n-1 && n > 2000 {
					still("long notice")
				}
				if !yield(school.NewRecipient{Token: fmt.Sprint(round, "-", i)}, nil) {
					return
				}
			}
		})
		if err != nil {
			return err
		}
		say("accepted", r.ID, n)
		term, err := db.OpenTerm(ctx, "A", "acq", strconv.Itoa(os.Getpid()))
		if err != nil {
			return err
		}
		for b := range 3 {
			page, err := db.Page(ctx, term, 100)
			if err != nil {
				return err
			}
			c := claimOf(fmt.Sprint(os.Getpid(), "-", round, "-", b), page.Work)
			committing.Store("claim")
			if err := db.Claim(ctx, term, c); err != nil {
				return err
			}
			say("claimed", c.Batch, c.Size())
			still("claimed")
			record := school.BatchRecord{Batch: c.Batch, School: "A", Owner: term.Owner, Fence: term.Fence, Cycle: 1}
			for i := range c.Work {
				e := school.Event{Outcome: []school.Outcome{school.Accepted, school.Gone, school.Accepted}[i%3]}
				change, err := school.Next(c.Work[i].Standing, e, school.RetryPolicy{Max: 3, Base: time.Minute})
				if err != nil {
					return err
				}
				record.Results = append(record.Results, school.Recorded{Notice: c.Work[i].Notice.ID, Seq: c.Work[i].Seq, Change: change})
			}
			committing.Store("record")
			if err := db.Record(ctx, record); err != nil {
				return err
			}
			say("recorded", c.Batch)
		}
	}
}

// process is a child under test.
type process struct {
	cmd   *osexec.Cmd
	lines *bufio.Scanner
}

func startChild(t *testing.T, path, stop string) *process {
	t.Helper()
	cmd := osexec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childFile+"="+path, childStop+"="+stop)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return &process{cmd, bufio.NewScanner(out)}
}

// until reads lines, the one that begins with the word included.
func (p *process) until(t *testing.T, word string) (lines []string) {
	t.Helper()
	for p.lines.Scan() {
		lines = append(lines, p.lines.Text())
		if strings.HasPrefix(p.lines.Text(), word) {
			return lines
		}
	}
	t.Fatalf("the process ended before it said %q: %v", word, p.lines.Err())
	return nil
}

// kill kills the process and returns what it had said and nobody had read.
func (p *process) kill(t *testing.T) (lines []string) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Kill())
	for p.lines.Scan() {
		lines = append(lines, p.lines.Text())
	}
	_ = p.cmd.Wait()
	return lines
}

func TestInterleaving22SQLiteFileIsForOneProcess(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	p := startChild(t, path, "open")
	p.until(t, "still")
	_, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path})
	require.ErrorIs(t, err, store.ErrInUse)
	require.ErrorContains(t, err, fmt.Sprintf("process %d has %s", p.cmd.Process.Pid, path))
	p.kill(t)
	openFile(t, path) // the kernel gave it back
}

// TestSQLiteSurvivesAKill kills a process at every place that matters and in the
// middle of its work, again and again on one file: what it was told is there,
// what it was not told is there whole or not at all, and all of it goes on.
func TestSQLiteSurvivesAKill(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "school.db")
	var accepted, claimed, recorded []string
	note := func(lines []string) {
		for _, line := range lines {
			word, rest, _ := strings.Cut(line, " ")
			switch word {
			case "accepted":
				accepted = append(accepted, rest)
			case "claimed":
				claimed = append(claimed, rest)
			case "recorded":
				recorded = append(recorded, rest)
			}
		}
	}
	for _, stop := range []string{"commit of a notice", "commit of a claim", "claimed", "commit of a record", "long notice", "", "", ""} {
		p := startChild(t, path, stop)
		if stop != "" {
			note(p.until(t, "still"))
		} else {
			for range 3 { // somewhere in a later round, wherever that is
				note(p.until(t, "accepted"))
			}
		}
		note(p.kill(t))

		db, err := store.OpenSQLite(t.Context(), store.SQLiteConfig{Path: path})
		require.NoError(t, err, "after a kill at %q", stop)
		ok, err := db.OnWriter(t.Context(), `PRAGMA integrity_check`)
		require.NoError(t, err)
		require.Equal(t, "ok", ok)
		stranded, err := db.Sweep(t.Context())
		require.NoError(t, err)
		require.Zero(t, stranded)
		db.Close()
	}
	require.NotEmpty(t, recorded)
	require.Greater(t, len(claimed), len(recorded), "some were killed with a batch open")

	look := beside(t, path)
	has := func(query string, args ...any) {
		t.Helper()
		require.Equal(t, "1", rowsOf(t, look, query, args...)[0][0], "%s %v", query, args)
	}
	for _, a := range accepted {
		id, n, _ := strings.Cut(a, " ")
		has(`SELECT count(*) FROM push_clusters WHERE id = ? AND total_count = ?`, id, n)
		has(`SELECT count(*) = CAST(?2 AS INTEGER) FROM push_cluster_tokens WHERE cluster_id = ?1`, id, n)
	}
	for _, c := range claimed {
		id, n, _ := strings.Cut(c, " ")
		has(`SELECT count(*) FROM push_batches WHERE id = ? AND size = ?`, id, n)
	}
	for _, id := range recorded {
		has(`SELECT count(*) FROM push_batches WHERE id = ? AND settled_as = 'recorded'`, id)
	}
	require.Equal(t, "0", rowsOf(t, look, `SELECT count(*) FROM push_cluster_tokens WHERE cluster_id NOT IN (SELECT id FROM push_clusters)`)[0][0])

	// The next one takes over what was open and brings everything to its end.
	db := openFile(t, path)
	elapseFile(t, look, time.Hour)
	term, err := db.OpenTerm(t.Context(), "A", "acq", "next")
	require.NoError(t, err)
	orphans, err := db.Takeover(t.Context(), term, school.RetryPolicy{Max: 3, Base: time.Minute})
	require.NoError(t, err)
	require.NotEmpty(t, orphans.Batches)
	for i := 0; ; i++ {
		page, err := db.Page(t.Context(), term, 1000)
		require.NoError(t, err)
		if len(page.Work) == 0 {
			break
		}
		sendBatch(t, t.Context(), db, term, fmt.Sprint("end-", i), page.Work, func(int) school.Outcome { return school.Accepted })
	}
	counts, err := db.RecipientCounts(t.Context())
	require.NoError(t, err)
	require.Equal(t, store.RecipientCounts{}, counts)
	list, err := db.Notices(t.Context(), school.NoticeFilter{Limit: 1000})
	require.NoError(t, err)
	for _, p := range list {
		require.Equal(t, school.NoticeCompleted, p.Status)
		require.Equal(t, p.Counts.Total, p.Counts.Sum())
	}
}
