package arena

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"schoolbell/sender/simulator/verdict"
)

// Ranked is a replica and how many batches it has in its hands.
type Ranked struct {
	*Replica
	Batches int
}

// Ranking lists the replicas, the one with the most batches in its hands first.
// While the database does not answer all count as empty-handed.
func (a *Arena) Ranking(ctx context.Context) []Ranked {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	hands := map[string]int{}
	if rows, err := a.DB.Query(ctx, `SELECT owner, count(*) FROM push_batches WHERE settled_at IS NULL GROUP BY 1`); err == nil {
		for rows.Next() {
			var owner string
			var n int
			if rows.Scan(&owner, &n) == nil {
				hands[owner] = n
			}
		}
		rows.Close()
	}
	var list []Ranked
	for _, r := range a.all() {
		list = append(list, Ranked{r, hands[r.Name]})
	}
	slices.SortStableFunc(list, func(x, y Ranked) int { return cmp.Compare(y.Batches, x.Batches) })
	return list
}

// Owners are the replicas that hold the schools now, by what Redis says; schools
// that nobody holds are missing.
func (a *Arena) Owners(ctx context.Context, schools []string) (map[string]string, error) {
	masters, err := a.Masters(ctx)
	if err != nil {
		return nil, err
	}
	owners := map[string]string{}
	for _, school := range schools {
		for _, m := range masters {
			// A node of a Cluster that is not the key's refuses.
			if owner, err := m.Do(ctx, "HGET schoolbell:{"+school+"}:lock owner"); err == nil && owner != "" && owner[0] != '$' {
				owners[school] = owner
			}
		}
	}
	return owners, nil
}

// mostAround bounds what is shown around one violation.
const mostAround = 40

type moment struct {
	at   time.Time
	what string
}

// Around tells what happened around a violation, in the order of time: faults,
// the school's batches, and where it is of one message, its arrivals.
func (a *Arena) Around(ctx context.Context, v verdict.Violation, within time.Duration) ([]string, error) {
	if v.At.IsZero() {
		return nil, nil
	}
	from, to := v.At.Add(-within), v.At.Add(within/4)
	var all []moment
	for _, f := range a.broken() {
		if f.At.Before(to) && (f.At.After(from) || f.Until.After(from)) {
			what := strings.TrimSpace(fmt.Sprintf("fault %s of %s %s", f.Kind, f.Target, f.Detail))
			all = append(all, moment{f.At, what})
			if !f.Until.IsZero() {
				all = append(all, moment{f.Until, what + " is mended"})
			}
		}
	}
	batches, err := a.batchesAround(ctx, v.School, from, to)
	if err != nil {
		return nil, err
	}
	all = append(all, batches...)
	type sum struct {
		first, last, ended time.Time
		n                  int
		fence              int64
	}
	sums := map[string]*sum{}
	for _, x := range a.Receiver.Arrivals() {
		at := time.Unix(0, x.T)
		switch {
		case v.Message != "" && x.Message == v.Message:
			all = append(all, moment{at, fmt.Sprintf("message %s arrives, attempt %d, batch %s, fence %d: answer %q lost=%t after %s", x.Message, x.Attempt, x.Batch, x.Fence, x.Answer, x.Lost, time.Duration(x.Ended-x.T))})
		case v.Message == "" && x.School == v.School && at.After(from) && at.Before(to):
			s := sums[x.Batch]
			if s == nil {
				s = &sum{first: at, fence: x.Fence}
				sums[x.Batch] = s
			}
			s.n, s.last = s.n+1, at
			if end := time.Unix(0, x.Ended); end.After(s.ended) {
				s.ended = end
			}
		}
	}
	for batch, s := range sums {
		all = append(all, moment{s.first, fmt.Sprintf("%d messages of batch %s with fence %d arrive until %s, the last is answered at %s", s.n, batch, s.fence, clock(s.last), clock(s.ended))})
	}
	slices.SortStableFunc(all, func(x, y moment) int { return x.at.Compare(y.at) })
	if n := len(all); n > mostAround {
		// What came last before it says most.
		i := slices.IndexFunc(all, func(m moment) bool { return m.at.After(v.At) })
		if i < 0 {
			i = n
		}
		end := min(n, i+mostAround/4)
		all = all[max(0, end-mostAround):end]
	}
	var lines []string
	for _, m := range all {
		lines = append(lines, clock(m.at)+"  "+m.what)
	}
	return lines, nil
}

func (a *Arena) batchesAround(ctx context.Context, school string, from, to time.Time) ([]moment, error) {
	rows, err := a.DB.Query(ctx, `
SELECT id::text, owner, fence, cycle, size, claimed_at, send_deadline, coalesce(settled_at, 'epoch'), coalesce(settled_as, ''), coalesce(settled_by::text, '')
FROM push_batches WHERE school_id = $1 AND claimed_at < $3 AND coalesce(settled_at, 'infinity') > $2`, school, from, to)
	if err != nil {
		return nil, fmt.Errorf("read batches of school %s: %w", school, err)
	}
	defer rows.Close()
	var all []moment
	for rows.Next() {
		var id, owner, as, by string
		var fence, cycle int64
		var size int
		var claimed, deadline, settled time.Time
		if err := rows.Scan(&id, &owner, &fence, &cycle, &size, &claimed, &deadline, &settled, &as, &by); err != nil {
			return nil, fmt.Errorf("read batches of school %s: %w", school, err)
		}
		all = append(all, moment{claimed, fmt.Sprintf("%s claims batch %s of %d with fence %d in cycle %d, to be sent by %s", owner, id, size, fence, cycle, clock(deadline))})
		if settled.Unix() != 0 {
			all = append(all, moment{settled, fmt.Sprintf("batch %s is settled as %s by %s", id, as, by)})
		}
	}
	return all, rows.Err()
}

func clock(t time.Time) string { return t.UTC().Format("15:04:05.000000") }
