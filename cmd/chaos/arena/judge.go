package arena

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"schoolbell/sender/simulator"
	"schoolbell/sender/simulator/verdict"
)

// States counts recipients by state, IN_PROGRESS worked out, in SQL.
func (a *Arena) States(ctx context.Context) (map[string]int, error) {
	rows, err := a.DB.Query(ctx, `SELECT job_status, count(*) FROM push_cluster_token_states GROUP BY 1`)
	if err != nil {
		return nil, fmt.Errorf("count states: %w", err)
	}
	defer rows.Close()
	counts := map[string]int{}
	for rows.Next() {
		var state string
		var n int
		if err := rows.Scan(&state, &n); err != nil {
			return nil, err
		}
		counts[state] = n
	}
	return counts, rows.Err()
}

// Open is how many notices have not ended.
func (a *Arena) Open(ctx context.Context) (n int, err error) {
	err = a.DB.QueryRow(ctx, `SELECT count(*) FROM push_clusters WHERE ended_at IS NULL`).Scan(&n)
	return n, err
}

// WaitEnded waits until every notice has ended.
func (a *Arena) WaitEnded(ctx context.Context) error {
	for {
		n, err := a.Open(ctx)
		if err == nil && n == 0 {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			states, _ := a.States(context.WithoutCancel(ctx))
			return errors.Join(fmt.Errorf("%d notices have not ended, recipients by state %v: %w", n, states, context.Cause(ctx)), err)
		}
	}
}

// Stranded are recipients behind their notice's frontier that no open batch
// covers and no time brings back.
func (a *Arena) Stranded(ctx context.Context) (n int, err error) {
	err = a.DB.QueryRow(ctx, `
SELECT count(*) FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
WHERE t.job_status IN ('PENDING', 'RETRY_PENDING') AND t.seq <= c.frontier AND t.retry_after IS NULL
AND NOT EXISTS (SELECT FROM push_batch_ranges r JOIN push_batches b ON b.id = r.batch_id
	WHERE b.settled_at IS NULL AND r.cluster_id = t.cluster_id AND t.seq > r.from_seq AND t.seq <= r.to_seq)`).Scan(&n)
	return n, err
}

// Verdict judges everything that happened so far. It is to be asked when the
// work has ended.
func (a *Arena) Verdict(ctx context.Context) (verdict.Verdict, error) {
	return a.judge(ctx, a.Receiver.Arrivals())
}

func (a *Arena) judge(ctx context.Context, arrivals []simulator.Arrival) (verdict.Verdict, error) {
	j, err := verdict.New(verdict.Config{
		Rule: verdict.Rule{Limit: a.cfg.Limit, Rest: a.cfg.Rest}, Start: a.began, Seed: a.cfg.Seed, Replicas: len(a.all()),
	})
	if err != nil {
		return verdict.Verdict{}, err
	}
	for _, p := range a.Accepted() {
		if err := j.AcceptNotice(verdict.Notice{ID: p.ID, School: p.School, Total: p.Total, At: p.At}); err != nil {
			return verdict.Verdict{}, err
		}
	}
	if err := a.tellUnanswered(ctx, j); err != nil {
		return verdict.Verdict{}, err
	}
	for _, f := range a.broken() {
		j.Fault(f)
	}
	for _, tell := range []func(context.Context, *verdict.Judge) error{a.tellStates, a.tellCounts, a.tellBatches, a.tellTerms} {
		if err := tell(ctx, j); err != nil {
			return verdict.Verdict{}, err
		}
	}
	for _, x := range arrivals {
		j.Arrival(x)
	}
	v := j.Verdict()
	stranded, err := a.Stranded(ctx)
	if err != nil {
		return v, err
	}
	lines, err := a.atMostOnce(ctx, arrivals)
	if err != nil {
		return v, err
	}
	if stranded > 0 {
		lines = append(lines, fmt.Sprintf("stranded: %d recipients behind their notice's frontier are in no open batch and no time brings them back", stranded))
	}
	for _, line := range lines {
		v.OK = false
		v.Violations = append(v.Violations, line)
		v.Details = append(v.Details, verdict.Violation{Text: line})
	}
	return v, nil
}

// atMostOnce says what was not kept of the notices that are to be sent at most
// once: a message that the receiver took twice, whatever was done to the run, and a
// recipient whose owner died with it and that is not told to be unknown.
func (a *Arena) atMostOnce(ctx context.Context, arrivals []simulator.Arrival) (lines []string, err error) {
	rows, err := a.DB.Query(ctx, `SELECT id::text FROM push_clusters WHERE delivery = 'at_most_once'`)
	if err != nil {
		return nil, fmt.Errorf("read notices: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	once := map[string]bool{}
	for _, id := range ids {
		once[id] = true
	}
	taken := map[string]int{}
	for _, x := range arrivals {
		if !once[x.Notice] || x.Answer != simulator.AnswerAccepted {
			continue
		}
		if taken[x.Key()]++; taken[x.Key()] == 2 {
			lines = append(lines, fmt.Sprintf("at most once: message %s was taken twice", x.Message))
		}
	}
	var untold int
	err = a.DB.QueryRow(ctx, `SELECT count(*) FROM push_cluster_tokens t JOIN push_clusters c ON c.id = t.cluster_id
		WHERE c.delivery = 'at_most_once' AND t.orphan_count > 0
			AND (t.job_status <> 'PERMANENT_FAIL' OR t.reason <> 'OUTCOME_UNKNOWN')`).Scan(&untold)
	if untold > 0 {
		lines = append(lines, fmt.Sprintf("at most once: %d recipients whose owner died are not told to be unknown", untold))
	}
	return lines, err
}

// Unknown are the recipients of which it is said that they may have arrived.
func (a *Arena) Unknown(ctx context.Context) (n int, err error) {
	err = a.DB.QueryRow(ctx, `SELECT count(*) FROM push_cluster_tokens WHERE job_status = 'PERMANENT_FAIL' AND reason = 'OUTCOME_UNKNOWN'`).Scan(&n)
	return n, err
}

// tellUnanswered tells of the notices that are stored although nobody was told so:
// the answer got lost, and whoever asked gave up. They may be sent or not.
func (a *Arena) tellUnanswered(ctx context.Context, j *verdict.Judge) error {
	known := map[string]bool{}
	for _, p := range a.Accepted() {
		known[p.ID] = true
	}
	a.mu.Lock()
	gaveUp := maps.Clone(a.gaveUp)
	a.mu.Unlock()
	rows, err := a.DB.Query(ctx, `SELECT id::text, school_id, total_count FROM push_clusters`)
	if err != nil {
		return fmt.Errorf("read notices: %w", err)
	}
	n := verdict.Notice{Maybe: true}
	_, err = pgx.ForEachRow(rows, []any{&n.ID, &n.School, &n.Total}, func() error {
		if known[n.ID] || !gaveUp[n.School] {
			return nil
		}
		return j.AcceptNotice(n)
	})
	if err != nil {
		return fmt.Errorf("read notices: %w", err)
	}
	return nil
}

func (a *Arena) tellStates(ctx context.Context, j *verdict.Judge) error {
	rows, err := a.DB.Query(ctx, `SELECT cluster_id::text || '.' || seq, job_status FROM push_cluster_token_states`)
	if err != nil {
		return fmt.Errorf("read final states: %w", err)
	}
	var id, name string
	_, err = pgx.ForEachRow(rows, []any{&id, &name}, func() error {
		state, err := verdict.ParseState(name)
		if err == nil {
			j.FinalState(id, state)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("read final states: %w", err)
	}
	return nil
}

func (a *Arena) tellCounts(ctx context.Context, j *verdict.Judge) error {
	rows, err := a.DB.Query(ctx, `
SELECT id::text, total_count, in_progress_count, retry_pending_count, success_count, fail_count, retry_success_count, retry_fail_count, permanent_fail_count,
	skipped_disabled_count + skipped_cancelled_count + skipped_expired_count + skipped_duplicate_count + skipped_not_allowed_count
FROM push_clusters`)
	if err != nil {
		return fmt.Errorf("read counts: %w", err)
	}
	var c verdict.NoticeCounts
	_, err = pgx.ForEachRow(rows, []any{&c.Notice, &c.Total, &c.InProgress, &c.RetryPending, &c.Success, &c.Fail, &c.RetrySuccess, &c.RetryFail, &c.PermanentFail, &c.SkippedAtAll}, func() error {
		c.Waiting = c.Total - c.InProgress - c.RetryPending - c.Success - c.Fail - c.RetrySuccess - c.RetryFail - c.PermanentFail - c.SkippedAtAll
		j.NoticeCounts(c)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read counts: %w", err)
	}
	return nil
}

func (a *Arena) tellBatches(ctx context.Context, j *verdict.Judge) error {
	rows, err := a.DB.Query(ctx, `
SELECT id::text, school_id, owner, fence, size, claimed_at, send_deadline, coalesce(settled_at, 'epoch'), coalesce(settled_as = 'taken_over', false) FROM push_batches`)
	if err != nil {
		return fmt.Errorf("read batches: %w", err)
	}
	var b verdict.Batch
	_, err = pgx.ForEachRow(rows, []any{&b.ID, &b.School, &b.Owner, &b.Fence, &b.Size, &b.ClaimedAt, &b.SendDeadline, &b.SettledAt, &b.TakenOver}, func() error {
		one := b
		if one.SettledAt.Unix() == 0 {
			one.SettledAt = time.Time{}
		}
		return j.Batch(one)
	})
	if err != nil {
		return fmt.Errorf("read batches: %w", err)
	}
	return nil
}

// audit is what the arena keeps for itself beside the schema: when each fence
// rose, under the lock of the ledger's row and by the clock that claims go by.
const audit = `
CREATE SCHEMA arena;
CREATE TABLE arena.terms (school_id text NOT NULL, fence bigint NOT NULL, opened_at timestamptz NOT NULL);
CREATE FUNCTION arena.note_term() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO arena.terms VALUES (NEW.school_id, NEW.fence, clock_timestamp());
	RETURN NULL;
END $$;
CREATE TRIGGER arena_note_term AFTER UPDATE OF fence ON school_terms
	FOR EACH ROW WHEN (NEW.fence > OLD.fence) EXECUTE FUNCTION arena.note_term();`

func (a *Arena) tellTerms(ctx context.Context, j *verdict.Judge) error {
	rows, err := a.DB.Query(ctx, `SELECT school_id, fence, opened_at FROM arena.terms`)
	if err != nil {
		return fmt.Errorf("read terms: %w", err)
	}
	var t verdict.Term
	_, err = pgx.ForEachRow(rows, []any{&t.School, &t.Fence, &t.OpenedAt}, func() error {
		j.Term(t)
		return nil
	})
	if err != nil {
		return fmt.Errorf("read terms: %w", err)
	}
	return nil
}

func (a *Arena) broken() []verdict.Fault {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.faults)
}
