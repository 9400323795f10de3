package storetest

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
)

func (w *world) put(schoolID string, devices ...school.NewDevice) school.Devices {
	w.t.Helper()
	done, err := w.Store.PutDevices(w.ctx(), schoolID, devices)
	require.NoError(w.t, err)
	return done
}

func (w *world) devices(schoolID string, f school.DeviceFilter) []school.Device {
	w.t.Helper()
	if f.Limit == 0 {
		f.Limit = 1000
	}
	list, err := w.Store.Devices(w.ctx(), schoolID, f)
	require.NoError(w.t, err)
	return list
}

// known shows a school's registry: token, ref, enabled, retired, topics.
func (w *world) known(schoolID string) (lines []string) {
	w.t.Helper()
	for _, r := range w.Query(w.t, fmt.Sprintf(`SELECT d.token, d.ref, CASE WHEN d.enabled THEN 'on' ELSE 'off' END,
			CASE WHEN d.retired_at IS NULL THEN '' ELSE 'retired' END, t.topic
		FROM devices d LEFT JOIN device_topics t ON t.school_id = d.school_id AND t.token_sha = d.token_sha
		WHERE d.school_id = '%s' ORDER BY d.token, t.topic`, schoolID)) {
		lines = append(lines, strings.TrimRight(strings.Join(r, " "), " "))
	}
	return lines
}

func ptr[T any](v T) *T { return &v }

var deviceTests = []test{
	{"Devices/what a registration leaves out stays, and topics are replaced as a set", func(w *world) {
		require.Equal(w.t, school.Devices{Registered: 2, Created: 2}, w.put("A",
			school.NewDevice{Token: "a", Ref: ptr("member-1"), Enabled: ptr(false), Topics: []string{"x", "y"}}, school.NewDevice{Token: "b"}))
		require.Equal(w.t, []string{"a member-1 off  x", "a member-1 off  y", "b  on"}, w.known("A"))
		require.Equal(w.t, school.Devices{Registered: 2}, w.put("A", school.NewDevice{Token: "a"}, school.NewDevice{Token: "b", Topics: []string{"y"}}))
		require.Equal(w.t, []string{"a member-1 off  x", "a member-1 off  y", "b  on  y"}, w.known("A"))
		w.put("A", school.NewDevice{Token: "a", Ref: ptr(""), Enabled: ptr(true), Topics: []string{"z", "y", "z"}}, school.NewDevice{Token: "b", Topics: []string{}})
		require.Equal(w.t, []string{"a  on  y", "a  on  z", "b  on"}, w.known("A"))
	}},
	{"Devices/a registration makes its school and its ledger", func(w *world) {
		w.put("A", school.NewDevice{Token: "a"})
		_, err := w.Store.School(w.ctx(), "A")
		require.NoError(w.t, err)
		require.NoError(w.t, w.Store.DeleteSchool(w.ctx(), "A"))
		require.Empty(w.t, w.known("A"), "they go with their school")
	}},
	{"Devices/of a token that comes twice the later counts, where it says something", func(w *world) {
		require.Equal(w.t, school.Devices{Registered: 1, Created: 1}, w.put("A",
			school.NewDevice{Token: "a", Ref: ptr("one"), Topics: []string{"x"}}, school.NewDevice{Token: "a", Enabled: ptr(false)}, school.NewDevice{Token: "a", Topics: []string{"y"}}))
		require.Equal(w.t, []string{"a one off  y"}, w.known("A"))
	}},
	{"Devices/the same token in two schools is two devices", func(w *world) {
		w.put("A", school.NewDevice{Token: "a", Topics: []string{"x"}})
		w.put("B", school.NewDevice{Token: "a", Enabled: ptr(false)})
		require.NoError(w.t, w.Store.DeleteDevice(w.ctx(), "B", "a"))
		require.Equal(w.t, []string{"a  on  x"}, w.known("A"))
		require.Empty(w.t, w.known("B"))
	}},
	{"interleaving 15: Devices/a registration revives a device, which an older answer does not retire", func(w *world) {
		w.put("A", school.NewDevice{Token: "token-0000001", Ref: ptr("m"), Topics: []string{"x"}}, school.NewDevice{Token: "token-0000002"})
		w.Elapse(w.t, time.Minute)
		w.notice("A", 2)
		term := w.term("A", "x")
		w.record(term, w.claim(term, w.page(term, 2).Work), all(school.Gone))
		require.Equal(w.t, []string{"token-0000001 m on retired x", "token-0000002  on retired"}, w.known("A"))

		w.notice("A", 2)
		c := w.claim(term, w.page(term, 2).Work)
		w.Elapse(w.t, time.Second)
		require.Equal(w.t, school.Devices{Registered: 1, Revived: 1}, w.put("A", school.NewDevice{Token: "token-0000001"}))
		w.record(term, c, all(school.Gone))
		require.Equal(w.t, []string{"token-0000001 m on  x", "token-0000002  on retired"}, w.known("A"))

		w.Elapse(w.t, time.Second)
		w.notice("A", 2)
		w.record(term, w.claim(term, w.page(term, 2).Work), all(school.Gone))
		require.Equal(w.t, []string{"token-0000001 m on retired x", "token-0000002  on retired"}, w.known("A"), "a newer answer does")
	}},
	{"Devices/switched off they are skipped, also in notices accepted before", func(w *world) {
		id := w.notice("A", 3)
		w.put("A", school.NewDevice{Token: "token-0000002", Enabled: ptr(false)})
		require.Equal(w.t, 2, w.send(w.term("A", "x"), school.Accepted))
		require.Equal(w.t, school.Counts{Total: 3, Success: 2, Skipped: school.Skips{Disabled: 1}}, w.progress(id).Counts)
		w.put("A", school.NewDevice{Token: "token-0000002", Enabled: ptr(true)})
		w.notice("A", 3)
		require.Equal(w.t, 3, w.send(w.term("A", "x"), school.Accepted))
	}},
	{"Devices/a topic's next notice goes to who is registered then", func(w *world) {
		w.put("A", school.NewDevice{Token: "a", Topics: []string{"x"}}, school.NewDevice{Token: "b", Topics: []string{"x"}})
		require.Equal(w.t, 2, w.acceptTopic(toTopic("A", "x")).Total)
		require.NoError(w.t, w.Store.DeleteDevice(w.ctx(), "A", "a"))
		require.Equal(w.t, 1, w.acceptTopic(toTopic("A", "x")).Total)
		w.put("A", school.NewDevice{Token: "b", Topics: []string{}})
		require.Equal(w.t, 0, w.acceptTopic(toTopic("A", "x")).Total)
	}},
	{"Devices/delete of one that is not there says so", func(w *world) {
		require.ErrorIs(w.t, w.Store.DeleteDevice(w.ctx(), "A", "a"), school.ErrNotFound)
		w.put("A", school.NewDevice{Token: "a/b:c%2F 가", Topics: []string{"x"}})
		require.ErrorIs(w.t, w.Store.DeleteDevice(w.ctx(), "A", "a"), school.ErrNotFound)
		require.NoError(w.t, w.Store.DeleteDevice(w.ctx(), "A", "a/b:c%2F 가"))
		require.ErrorIs(w.t, w.Store.DeleteDevice(w.ctx(), "A", "a/b:c%2F 가"), school.ErrNotFound)
		require.Empty(w.t, w.Query(w.t, `SELECT topic FROM device_topics`))
	}},
	{"Devices/are listed by key, filtered, and never with a whole token", func(w *world) {
		var all []school.NewDevice
		for i := range 25 {
			d := school.NewDevice{Token: fmt.Sprintf("a-device-token-%02d", i), Ref: ptr(fmt.Sprint("r", i))}
			if i%5 == 0 {
				d.Topics = []string{"fifth", "all"}
			}
			all = append(all, d)
		}
		w.put("A", all...)
		w.put("B", school.NewDevice{Token: "another", Topics: []string{"fifth"}})
		w.Exec(w.t, `UPDATE devices SET retired_at = registered_at WHERE token = 'a-device-token-05'`)

		var seen []school.Device
		f := school.DeviceFilter{Limit: 10}
		for {
			page := w.devices("A", f)
			seen = append(seen, page...)
			if len(page) < f.Limit {
				break
			}
			f.After = page[len(page)-1].Key
		}
		require.Len(w.t, seen, 25)
		refs := map[string]bool{}
		for i, d := range seen {
			require.Equal(w.t, "a-devi"[:len("a-device-token-00")/3]+"…", d.Token)
			require.WithinDuration(w.t, time.Now(), d.RegisteredAt, time.Minute)
			require.True(w.t, i == 0 || seen[i-1].Key < d.Key)
			refs[d.Ref] = true
		}
		require.Len(w.t, refs, 25)
		require.Len(w.t, w.devices("A", school.DeviceFilter{Topic: "fifth"}), 5)
		require.Equal(w.t, []string{"all", "fifth"}, w.devices("A", school.DeviceFilter{Topic: "fifth"})[0].Topics)
		retired := w.devices("A", school.DeviceFilter{Retired: ptr(true)})
		require.Len(w.t, retired, 1)
		require.Equal(w.t, "r5", retired[0].Ref)
		require.False(w.t, retired[0].RetiredAt.IsZero())
		require.Len(w.t, w.devices("A", school.DeviceFilter{Retired: ptr(false)}), 24)
		require.Empty(w.t, w.devices("A", school.DeviceFilter{Topic: "none"}))
		_, err := w.Store.Devices(w.ctx(), "C", school.DeviceFilter{Limit: 10})
		require.ErrorIs(w.t, err, school.ErrNotFound)
		for _, f := range []school.DeviceFilter{{Limit: 0}, {Limit: 1001}, {Limit: 1, After: "xyz"}, {Limit: 1, After: "ab"}} {
			_, err := w.Store.Devices(w.ctx(), "A", f)
			var field *school.FieldError
			require.True(w.t, errors.As(err, &field), "%+v", f)
		}
	}},
	{"Devices/many registrations of the same ones at once lose nothing", func(w *world) {
		tokens := make([]string, 50)
		for i := range tokens {
			tokens[i] = fmt.Sprint("t", i)
		}
		var wg sync.WaitGroup
		for k := range 8 {
			wg.Go(func() {
				list := make([]school.NewDevice, len(tokens))
				for i := range tokens {
					at := (i*7 + k*13) % len(tokens) // each in an order of its own
					list[i] = school.NewDevice{Token: tokens[at], Topics: []string{fmt.Sprint("of-", k)}}
				}
				if _, err := w.Store.PutDevices(w.ctx(), "A", list); err != nil {
					w.t.Error(err)
				}
			})
			wg.Go(func() {
				if err := w.Store.DeleteDevice(w.ctx(), "A", tokens[k]); err != nil && !errors.Is(err, school.ErrNotFound) {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		w.put("A", school.NewDevice{Token: tokens[0]})
		// Each device has the topic of one registration, the last one it saw.
		require.Empty(w.t, w.Query(w.t, `SELECT token_sha FROM device_topics GROUP BY token_sha HAVING count(*) <> 1`))
		n := len(w.Query(w.t, `SELECT token FROM devices`))
		require.GreaterOrEqual(w.t, n, len(tokens)-8)
	}},
}

var brakeTests = []test{
	{"Brake/devices of a batch that is not believed are flagged, and confirmed they are retired", func(w *world) {
		w.register("A", 30)
		w.Elapse(w.t, time.Minute)
		c, term := w.goneBatch("A", 30, true)
		require.Empty(w.t, w.retired())
		require.Equal(w.t, "FAIL=30", w.states(c.Work[0].Notice.ID), "the recipients are gone all the same")
		list := w.brakes()
		require.Len(w.t, list, 1)
		k := list[0]
		require.WithinDuration(w.t, time.Now(), k.EngagedAt, time.Minute)
		require.Equal(w.t, school.EngagedBrake{ID: k.ID, School: "A", Sender: "log", Batch: c.Batch, Owner: term.Owner,
			Unregistered: 30, Size: 30, EngagedAt: k.EngagedAt, Flagged: 30}, k)
		require.True(w.t, w.devices("A", school.DeviceFilter{})[0].Flagged)
		n, err := w.Store.OpenBrakes(w.ctx())
		require.NoError(w.t, err)
		require.Equal(w.t, 1, n)

		w.Elapse(w.t, time.Second)
		w.put("A", school.NewDevice{Token: "token-0000007"})
		k, err = w.Store.CloseBrake(w.ctx(), k.ID, school.BrakeConfirmed, "someone")
		require.NoError(w.t, err)
		require.Equal(w.t, []any{29, 0, school.BrakeConfirmed, "someone"}, []any{k.Retired, k.Flagged, k.ClosedAs, k.ClosedBy})
		require.Len(w.t, w.retired(), 29)
		require.NotContains(w.t, w.retired(), "token-0000007", "registered since")
		require.False(w.t, w.devices("A", school.DeviceFilter{})[0].Flagged)
		again, err := w.Store.CloseBrake(w.ctx(), k.ID, school.BrakeConfirmed, "another")
		require.NoError(w.t, err)
		require.Equal(w.t, k, again)
		_, err = w.Store.CloseBrake(w.ctx(), k.ID, school.BrakeCleared, "another")
		require.ErrorIs(w.t, err, school.ErrConflict)
		n, err = w.Store.OpenBrakes(w.ctx())
		require.NoError(w.t, err)
		require.Zero(w.t, n)
	}},
	{"Brake/cleared nothing is retired", func(w *world) {
		w.register("A", 30)
		w.Elapse(w.t, time.Minute)
		w.goneBatch("A", 30, true)
		k, err := w.Store.CloseBrake(w.ctx(), w.brakes()[0].ID, school.BrakeCleared, "someone")
		require.NoError(w.t, err)
		require.Equal(w.t, []any{0, 0, school.BrakeCleared}, []any{k.Retired, k.Flagged, k.ClosedAs})
		require.Empty(w.t, w.retired())
		require.Empty(w.t, w.Query(w.t, `SELECT token_sha FROM device_flags`))

		w.goneBatch("A", 3, false)
		require.Len(w.t, w.retired(), 3, "and judged anew")
	}},
	{"Brake/while it is on, every later answer of its school and sender is flagged, and no other's", func(w *world) {
		for _, id := range []string{"A", "B"} {
			w.register(id, 30)
		}
		w.Elapse(w.t, time.Minute)
		w.goneBatch("A", 25, true)
		w.goneBatch("B", 2, false)
		require.Equal(w.t, []string{"token-0000001", "token-0000002"}, w.retired(), "B's")
		w.goneBatch("A", 28, false)
		w.goneBatch("A", 30, true)
		require.Len(w.t, w.retired(), 2)
		list := w.brakes()
		require.Len(w.t, list, 1, "one for all of them")
		require.Equal(w.t, 30, list[0].Flagged)

		id := w.notice("A", 4)
		term := w.term("A", "x")
		c := w.claimOf(w.page(term, 10).Work, term.Ledger.Attempted+4)
		require.Equal(w.t, id, c.Work[0].Notice.ID)
		c.Sender, c.Rule.Version = "other", term.Settings.SettingsVersion
		require.NoError(w.t, w.Store.Claim(w.ctx(), term, c))
		w.record(term, c, all(school.Gone))
		require.Len(w.t, w.retired(), 6, "another sender's word counts")
	}},
	{"Brake/only a device that was registered before the claim is flagged", func(w *world) {
		w.register("A", 3)
		w.notice("A", 3)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 3).Work)
		w.Elapse(w.t, time.Second)
		w.put("A", school.NewDevice{Token: "token-0000002"})
		r := w.recordOf(term, c, all(school.Gone))
		r.Brake = true
		require.NoError(w.t, w.Store.Record(w.ctx(), r))
		require.Equal(w.t, 2, w.brakes()[0].Flagged)
	}},
	{"Brake/a record that is repeated or refused flags nothing more", func(w *world) {
		w.register("A", 30)
		w.Elapse(w.t, time.Minute)
		w.notice("A", 30)
		term := w.term("A", "x")
		c := w.claim(term, w.page(term, 30).Work)
		r := w.recordOf(term, c, all(school.Gone))
		r.Brake = true
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if err := w.Store.Record(w.ctx(), r); err != nil {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(w.t, 30, w.brakes()[0].Flagged)
		_, err := w.Store.CloseBrake(w.ctx(), w.brakes()[0].ID, school.BrakeCleared, "someone")
		require.NoError(w.t, err)
		require.NoError(w.t, w.Store.Record(w.ctx(), r))
		require.Len(w.t, w.brakes(), 1, "the same word again engages nothing")
		r.Brake = false
		require.NoError(w.t, w.Store.Record(w.ctx(), r))
		require.Empty(w.t, w.retired())

		w.notice("A", 30)
		c = w.claim(term, w.page(term, 30).Work)
		w.Elapse(w.t, time.Minute)
		_, err = w.Store.Takeover(w.ctx(), w.term("A", "y"), policy)
		require.NoError(w.t, err)
		late := w.recordOf(term, c, all(school.Gone))
		late.Brake = true
		require.ErrorIs(w.t, w.Store.Record(w.ctx(), late), school.ErrTakenOver)
		require.Len(w.t, w.brakes(), 1)
		require.Empty(w.t, w.retired())
	}},
	{"Brake/two batches at once engage one", func(w *world) {
		w.register("A", 40)
		w.Elapse(w.t, time.Minute)
		w.notice("A", 40)
		term := w.term("A", "x")
		work := w.page(term, 40).Work
		var wg sync.WaitGroup
		for _, part := range [][]school.Work{work[:20], work[20:]} {
			r := w.recordOf(term, w.claim(term, part), all(school.Gone))
			r.Brake = true
			wg.Go(func() {
				if err := w.Store.Record(w.ctx(), r); err != nil {
					w.t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Len(w.t, w.brakes(), 1)
		require.Equal(w.t, 40, w.brakes()[0].Flagged)
	}},
	{"Brake/an end while batches are recorded leaves no flag behind", func(w *world) {
		w.register("A", 200)
		w.Elapse(w.t, time.Minute)
		w.goneBatch("A", 1, true)
		w.notice("A", 200)
		term := w.term("A", "x")
		work := w.page(term, 200).Work
		var wg sync.WaitGroup
		for i := range 20 {
			r := w.recordOf(term, w.claim(term, work[i*10:i*10+10]), all(school.Gone))
			wg.Go(func() {
				if err := w.Store.Record(w.ctx(), r); err != nil {
					w.t.Error(err)
				}
			})
		}
		_, err := w.Store.CloseBrake(w.ctx(), w.brakes()[0].ID, school.BrakeConfirmed, "someone")
		wg.Wait()
		require.NoError(w.t, err)
		require.Empty(w.t, w.Query(w.t, `SELECT token_sha FROM device_flags`))
		require.Len(w.t, w.retired(), 200, "by the end or by their records")
	}},
	{"Brake/goes with its school and with its devices", func(w *world) {
		w.register("A", 30)
		w.Elapse(w.t, time.Minute)
		w.goneBatch("A", 30, true)
		require.NoError(w.t, w.Store.DeleteDevice(w.ctx(), "A", "token-0000001"))
		require.Equal(w.t, 29, w.brakes()[0].Flagged)
		require.NoError(w.t, w.Store.DeleteSchool(w.ctx(), "A"))
		require.Empty(w.t, w.brakes())
		require.Empty(w.t, w.Query(w.t, `SELECT token_sha FROM device_flags`))
		_, err := w.Store.CloseBrake(w.ctx(), 1, school.BrakeConfirmed, "someone")
		require.ErrorIs(w.t, err, school.ErrNotFound)
		_, err = w.Store.Brake(w.ctx(), 1)
		require.ErrorIs(w.t, err, school.ErrNotFound)
		_, err = w.Store.CloseBrake(w.ctx(), 1, "", "someone")
		require.Error(w.t, err)
	}},
	{"Brake/are listed newest first", func(w *world) {
		for _, id := range []string{"A", "B", "C"} {
			w.register(id, 1)
			w.goneBatch(id, 1, true)
		}
		list := w.brakes()
		require.Equal(w.t, []string{"C", "B", "A"}, []string{list[0].School, list[1].School, list[2].School})
		_, err := w.Store.CloseBrake(w.ctx(), list[1].ID, school.BrakeCleared, "someone")
		require.NoError(w.t, err)
		open, err := w.Store.Brakes(w.ctx(), school.BrakeFilter{Open: true, Limit: 10})
		require.NoError(w.t, err)
		require.Len(w.t, open, 2)
		of, err := w.Store.Brakes(w.ctx(), school.BrakeFilter{School: "B", Limit: 10})
		require.NoError(w.t, err)
		require.Len(w.t, of, 1)
		older, err := w.Store.Brakes(w.ctx(), school.BrakeFilter{Before: list[0].ID, Limit: 1})
		require.NoError(w.t, err)
		require.Equal(w.t, "B", older[0].School)
		_, err = w.Store.Brakes(w.ctx(), school.BrakeFilter{})
		require.Error(w.t, err)
	}},
}

// register registers the devices that a notice of n has.
func (w *world) register(schoolID string, n int) {
	w.t.Helper()
	var list []school.NewDevice
	for r := range devices(n) {
		list = append(list, school.NewDevice{Token: r.Token})
	}
	w.put(schoolID, list...)
}

// goneBatch sends a notice to n devices that are all gone, believed or not.
func (w *world) goneBatch(schoolID string, n int, brake bool) (school.Claim, school.Term) {
	w.t.Helper()
	w.notice(schoolID, n)
	term := w.term(schoolID, "x")
	c := w.claim(term, w.page(term, n).Work)
	r := w.recordOf(term, c, all(school.Gone))
	r.Brake = brake
	require.NoError(w.t, w.Store.Record(w.ctx(), r))
	return c, term
}

func (w *world) brakes() []school.EngagedBrake {
	w.t.Helper()
	list, err := w.Store.Brakes(w.ctx(), school.BrakeFilter{Limit: 100})
	require.NoError(w.t, err)
	return list
}

func (w *world) retired() (tokens []string) {
	w.t.Helper()
	for _, r := range w.Query(w.t, `SELECT token FROM devices WHERE retired_at IS NOT NULL ORDER BY token`) {
		tokens = append(tokens, r[0])
	}
	return tokens
}
