package arena

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
	"schoolbell/coordinator/api"
	"schoolbell/deploy/local/localtest"
)

// death is how a process is brought to a point, with which batches, and if not
// with both, why.
type death struct {
	point coordinator.Point
	only  string // why only once: before a reservation nobody knows what it will reach
	fcm   bool   // only there messages leave one by one

	school string            // what there is to do: the schools of prepared
	env    map[string]string // of the process
	filled int               // limit with which the batch fills the cycle; 0: the second batch does
	first  map[string]string // a process that dies before it, and leaves something
	meddle func(ctx context.Context, a *Arena) error
}

const (
	nothing    = "nothing is reserved yet: no batch can have reached the limit"
	watching   = "the watchdog does not know of batches"
	throttling = "there is one such batch"
	curing     = "the attempts that it is about were not granted yet"
)

// deaths says for every point how a process comes there.
func deaths() []death {
	stands := func(p coordinator.Point, d time.Duration) map[string]string {
		return map[string]string{"FAILPOINT_WAIT": string(p) + ":" + d.String()}
	}
	// Time to meddle, before the watchdog extends; and longer than a claim may take.
	meddled := stands(coordinator.Ensured, 900*time.Millisecond)
	slow := stands(coordinator.Claimed, 1500*time.Millisecond)
	sent := map[string]string{"FAILPOINT": "sent"}
	limited := map[string]string{"SCHOOLBELL_SENDERS_RELAY_RATE_PER_MINUTE": "600"} // a batch a second
	return []death{
		{point: coordinator.Sighted, only: nothing, env: limited},
		{point: coordinator.Peeked, only: nothing},
		{point: coordinator.Pinged, only: nothing},
		{point: coordinator.Looked, only: nothing},
		{point: coordinator.Acquired, only: nothing},
		{point: coordinator.Opened, only: nothing},
		{point: coordinator.Bound, only: nothing},
		{point: coordinator.TakenOver, only: nothing, first: sent},
		{point: coordinator.Drained, only: nothing, first: sent},
		{point: coordinator.Reconciled, only: nothing},
		{point: coordinator.Paged, only: nothing},
		{point: coordinator.Skipped, only: nothing, school: "off"},
		{point: coordinator.Asked, only: nothing, school: "lost"},
		{point: coordinator.Confirmed, only: nothing, school: "lost"},
		{point: coordinator.Metered, only: nothing},
		{point: coordinator.Ensured, only: nothing},
		{point: coordinator.Reserved},
		{point: coordinator.Lengthened, only: curing, env: meddled, meddle: shortenLock},
		{point: coordinator.Rebuilt, only: curing, env: meddled, meddle: turnClockBack},
		{point: coordinator.Reopened, only: curing, env: meddled, meddle: turnClockBack},
		{point: coordinator.Rebound, only: curing, env: meddled, meddle: turnClockBack},
		{point: coordinator.Checked},
		{point: coordinator.Claimed},
		{point: coordinator.Cleared},
		{point: coordinator.HalfSent, fcm: true, env: stands(coordinator.HalfSent, 600*time.Millisecond)}, // until the first half is there
		{point: coordinator.Sent},
		{point: coordinator.Reported, only: throttling, school: "quota"},
		{point: coordinator.Recorded},
		{point: coordinator.Settled},
		{point: coordinator.Withdrawn, env: slow, filled: batch},
		{point: coordinator.GivenBack, env: slow, filled: batch},
		{point: coordinator.Ended},
		{point: coordinator.Released},
		{point: coordinator.Extended, only: watching, env: stands(coordinator.Cleared, 2*time.Second)},
	}
}

// Of a school with everything to do: five batches, the second and the fourth of
// which fill a cycle.
const (
	batch   = 10
	devices = 45
)

// shortenLock makes the lock end soon by the arbiter's word, as after a failover
// that lost the last extension. It waits for a lock that carries its fence.
func shortenLock(ctx context.Context, a *Arena) error {
	lock := a.cfg.Within.Name + ":{A}:lock"
	if err := a.await(ctx, lock, "fence"); err != nil {
		return err
	}
	_, err := a.tell(ctx, "PEXPIRE "+lock+" 1900") // B is 2 s
	return err
}

// turnClockBack makes a rest lie further ahead than it was ever set to, as if the
// clock of Redis had gone back by an hour.
func turnClockBack(ctx context.Context, a *Arena) error {
	quota := a.cfg.Within.Name + ":{A}:quota"
	if err := a.await(ctx, quota, "inc"); err != nil {
		return err
	}
	_, err := a.tell(ctx, fmt.Sprintf("HSET %s nextEligibleMs %d", quota, time.Now().Add(time.Hour).UnixMilli()))
	return err
}

// await waits until a field is there and not 0.
func (a *Arena) await(ctx context.Context, key, field string) error {
	for ctx.Err() == nil {
		value, err := a.tell(ctx, "HGET "+key+" "+field)
		if err != nil || !slices.Contains([]string{"$-1", "", "0"}, value) {
			return err
		}
		wait(ctx, 10*time.Millisecond)
	}
	return context.Cause(ctx)
}

// tell gives Redis a command that may come twice; a busy machine may need longer
// than one try.
func (a *Arena) tell(ctx context.Context, command string) (answer string, err error) {
	for range 10 {
		if answer, err = a.Redis.Do(ctx, command); err == nil || ctx.Err() != nil {
			break
		}
	}
	return answer, err
}

// dying is one run of a death.
type dying struct {
	death
	kind string // "", ordinary or filled

	killed  time.Duration // after the process got its work
	before  int64         // messages that had arrived by then
	done    time.Duration // after its successor was ready
	repeats int
	bound   int
	outcome string // "": it was not run
}

func (d *dying) name() string {
	return strings.TrimSpace(string(d.point) + " " + d.kind)
}

// pick says which deaths the suite takes without -full: each point once, and
// those that leave most behind with both kinds of batch.
func (d *dying) pick() bool {
	most := []coordinator.Point{coordinator.Reserved, coordinator.Claimed, coordinator.Sent, coordinator.Recorded}
	return *full || d.kind != "filled" || slices.Contains(most, d.point)
}

// atOnce is how many processes die at a time: they mostly wait for leases.
const atOnce = 12

// TestKilledAtEveryPoint kills a real process behind each step of a turn: with an
// ordinary batch and with the one that fills the cycle, where that can be told.
// Another one finishes, and what came of it is judged from the receiver's log and
// in SQL. The table of all points is in the verbose output; with -full each is
// there with every batch that it can have.
func TestKilledAtEveryPoint(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	all, whole := []*dying{}, 0
	add := func(d *dying) {
		if whole++; d.pick() {
			all = append(all, d)
		}
	}
	points := map[coordinator.Point]bool{}
	for _, d := range deaths() {
		points[d.point] = true
		if d.only != "" {
			add(&dying{death: d})
			continue
		}
		add(&dying{death: d, kind: "ordinary"})
		add(&dying{death: d, kind: "filled"})
	}
	for _, p := range coordinator.Points() {
		require.True(t, points[p], "nobody is killed at %s", p)
	}
	require.Len(t, points, len(coordinator.Points()))

	servers := Servers{Redis: localtest.Redis(t), Postgres: localtest.Postgres(t), Template: "points"}
	posted := prepared(ctx, t, servers)
	var running sync.WaitGroup
	room := make(chan struct{}, atOnce)
	for i, d := range all {
		running.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			own := servers
			own.Name = fmt.Sprintf("point%02d", i)
			t.Run(d.name(), func(t *testing.T) { // the room bounds them, not -parallel
				if err := d.run(ctx, own, posted); err != nil {
					d.outcome = err.Error()
					t.Error(err)
				}
			})
		})
	}
	running.Wait()

	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "point\tbatch\tdied after\tarrived\tdone after\trepeats\toutcome")
	for _, d := range all {
		if d.outcome == "" {
			continue
		}
		kind := d.kind
		if kind == "" {
			kind = "not known"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%d of %d\t%s\n", d.point, kind, d.killed.Round(time.Millisecond), d.before, d.done.Round(time.Millisecond), d.repeats, d.bound, d.outcome)
	}
	require.NoError(t, w.Flush())
	why := map[string][]string{}
	for _, d := range deaths() {
		if d.only != "" {
			why[d.only] = append(why[d.only], string(d.point))
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(why)) {
		fmt.Fprintf(&table, "once only, since %s: %s\n", reason, strings.Join(why[reason], ", "))
	}
	t.Logf("%d points, %d deaths of %d\n%s", len(points), len(all), whole, table.String())
}

// prepared makes the template: four schools, paused, with a notice each.
func prepared(ctx context.Context, t *testing.T, s Servers) map[string]Posted {
	t.Helper()
	own := s
	own.Template, own.Name = "", s.Template
	a, err := New(ctx, Config{Program: programWithPoints, Replicas: -1, Limit: 2 * batch, Rest: time.Second, Settings: short(), Within: &own})
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	r, err := a.StartReplica(ctx, nil)
	require.NoError(t, err)
	posted := map[string]Posted{}
	for name, recipients := range map[string]iter.Seq2[api.Recipient, error]{
		"A": Devices("A", devices), "off": changed(Devices("off", 5), func(r *api.Recipient) { r.Enabled = new(bool) }),
		"lost":  changed(Devices("lost", 5), func(r *api.Recipient) { r.Token = "loseanswer1-" + r.Token }),
		"quota": changed(Devices("quota", 5), func(r *api.Recipient) { r.Token = "quota1-" + r.Token }),
	} {
		_, err := a.DB.Exec(ctx, `SELECT schoolbell_put_school($1, NULL, NULL, NULL, NULL)`, name)
		require.NoError(t, err)
		_, err = a.DB.Exec(ctx, `UPDATE school_terms SET paused = true WHERE school_id = $1`, name)
		require.NoError(t, err)
		n := 5
		if name == "A" {
			n = devices
		}
		posted[name], err = a.PostNotice(ctx, notice(name), recipients, n)
		require.NoError(t, err)
	}
	_, err = r.Stop(ctx)
	require.NoError(t, err)
	return posted
}

func changed(recipients iter.Seq2[api.Recipient, error], change func(*api.Recipient)) iter.Seq2[api.Recipient, error] {
	return func(yield func(api.Recipient, error) bool) {
		for r, err := range recipients {
			change(&r)
			if !yield(r, err) {
				return
			}
		}
	}
}

func (d *dying) run(ctx context.Context, own Servers, posted map[string]Posted) (err error) {
	if d.school == "" {
		d.school = "A"
	}
	limit := 2 * batch
	if d.kind == "filled" && d.filled > 0 {
		limit = d.filled
	}
	settings := short()
	settings["SCHOOLBELL_DISPATCH_BATCH"] = fmt.Sprint(batch)
	settings["SCHOOLBELL_DATABASE_MAX_CONNS"] = "4" // many replicas share one server
	if d.fcm {
		delete(settings, "SCHOOLBELL_SENDERS_RELAY_CALL_TIMEOUT")
		settings["SCHOOLBELL_SENDERS_FCM_CALL_TIMEOUT"] = "1s"
	}
	a, err := New(ctx, Config{Program: programWithPoints, Replicas: -1, Limit: limit, Rest: time.Second, FCM: d.fcm, Settings: settings, Within: &own})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	if d.school == "lost" { // elsewhere repeats are to be seen
		settings["SCHOOLBELL_SENDERS_RELAY_STATUS_URL"] = strings.TrimSuffix(a.Receiver.URL(), "/relay") + "/status"
	}
	a.posted = []Posted{posted[d.school]}
	for _, sql := range []string{
		`DELETE FROM push_cluster_tokens WHERE school_id <> $1`, `DELETE FROM push_clusters WHERE school_id <> $1`,
	} {
		if _, err := a.DB.Exec(ctx, sql, d.school); err != nil {
			return err
		}
	}
	if d.first != nil {
		if _, err := d.die(ctx, a, d.first); err != nil {
			return fmt.Errorf("the one before: %w", err)
		}
	}
	name := string(d.point)
	if d.kind != "" {
		name += ":" + d.kind
	}
	env := map[string]string{"FAILPOINT": name}
	maps.Copy(env, d.env)
	if d.killed, err = d.die(ctx, a, env); err != nil {
		return err
	}
	d.before = a.Receiver.Counts().Arrivals
	if _, err := a.DB.Exec(ctx, `UPDATE school_terms SET paused = false`); err != nil {
		return err
	}
	if _, err := a.StartReplica(ctx, nil); err != nil {
		return err
	}
	began := time.Now()
	if err := a.WaitEnded(ctx); err != nil {
		return err
	}
	d.done = time.Since(began)
	v, err := a.Verdict(ctx)
	if err != nil {
		return err
	}
	d.repeats, d.bound = v.Repeated-v.RepeatedAfterLoss, v.RepeatBound
	// The dead owner's lease, or its batch's deadline where that is later (B, and
	// two seconds to record), two rests, and room for a busy machine.
	most := lease + 2*time.Second + 2*time.Second + 20*time.Second
	switch {
	case !v.OK:
		return fmt.Errorf("%d lost, %d violations of the rule: %s", v.Lost, v.Rule.Violations, strings.Join(v.Violations, "; "))
	case d.bound > batch:
		return fmt.Errorf("%d messages were in its hands, more than a batch of %d", d.bound, batch)
	case d.school == "A" && v.Arrived != devices:
		return fmt.Errorf("%d of %d arrived", v.Arrived, devices)
	case d.done > most:
		return fmt.Errorf("it took %s until all was sent, more than %s", d.done, most)
	}
	d.outcome = fmt.Sprintf("kept: %d arrived, none lost, %d rests", v.Arrived, v.Rule.Cycles)
	return nil
}

// die starts a process that is to die, gives it its work, and returns how long it
// lived after that.
func (d *dying) die(ctx context.Context, a *Arena, env map[string]string) (time.Duration, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 60*time.Second, errors.New("the process did not die"))
	defer cancel()
	if _, err := a.DB.Exec(ctx, `UPDATE school_terms SET paused = true WHERE school_id = $1`, d.school); err != nil {
		return 0, err
	}
	r, err := a.StartReplica(ctx, env)
	if err != nil {
		// A heartbeat passes some points, and so does a turn for what a dead owner
		// left, before anybody is ready.
		if strings.Contains(err.Error(), "signal: killed") {
			return 0, nil
		}
		return 0, err
	}
	began := time.Now()
	if _, err := a.DB.Exec(ctx, `UPDATE school_terms SET paused = false WHERE school_id = $1`, d.school); err != nil {
		return 0, err
	}
	if _, err := a.tell(ctx, "PUBLISH "+a.cfg.Within.Name+":wake "+d.school); err != nil {
		return 0, err
	}
	if d.meddle != nil && env["FAILPOINT_WAIT"] != "" {
		if err := d.meddle(ctx, a); err != nil {
			return 0, err
		}
	}
	select {
	case <-r.Exited():
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	code, err := r.process.Load().Wait(ctx)
	if err == nil && code != 128+9 {
		err = fmt.Errorf("the process ended with %d and was not killed", code)
	}
	return time.Since(began), errors.Join(err, r.Died(time.Now()))
}
