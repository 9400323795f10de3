package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

const devicesPath = "/v1/schools/A/devices"

func (w *world) putDevices(body string) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(http.MethodPut, devicesPath, api.JSON, strings.NewReader(body))
}

func (w *world) putLines(body io.Reader) *httptest.ResponseRecorder {
	w.t.Helper()
	return w.do(http.MethodPut, devicesPath, api.NDJSON, body)
}

func TestRegistrationFieldsAreNamedExactly(t *testing.T) {
	t.Parallel()
	device := func(d string) string { return `{"devices":[{"token":"a"},` + d + `]}` }
	w := newWorld(t, nil)
	for name, c := range map[string]struct {
		body  string
		code  api.Code
		field string
	}{
		"empty body":          {``, api.InvalidArgument, ""},
		"array":               {`[]`, api.InvalidArgument, ""},
		"nothing in it":       {`{}`, api.InvalidArgument, "devices"},
		"devices null":        {`{"devices":null}`, api.InvalidArgument, "devices"},
		"devices an object":   {`{"devices":{}}`, api.InvalidArgument, "devices"},
		"no device":           {`{"devices":[]}`, api.InvalidArgument, "devices"},
		"another field":       {`{"devices":[{"token":"a"}],"school":"A"}`, api.InvalidArgument, "school"},
		"no token":            {device(`{"ref":"r"}`), api.InvalidArgument, "devices[1].token"},
		"token null":          {device(`{"token":null}`), api.InvalidArgument, "devices[1].token"},
		"token too long":      {device(`{"token":"` + strings.Repeat("a", 4097) + `"}`), api.TooLarge, "devices[1].token"},
		"a string":            {device(`"token"`), api.InvalidArgument, "devices[1]"},
		"misspelt":            {device(`{"tokn":"a"}`), api.InvalidArgument, "devices[1].tokn"},
		"badge":               {device(`{"token":"b","badge":3}`), api.InvalidArgument, "devices[1].badge"},
		"enabled a string":    {device(`{"token":"b","enabled":"no"}`), api.InvalidArgument, "devices[1].enabled"},
		"topics a string":     {device(`{"token":"b","topics":"x"}`), api.InvalidArgument, "devices[1].topics"},
		"a topic null":        {device(`{"token":"b","topics":["x",null]}`), api.InvalidArgument, "devices[1].topics[1]"},
		"a topic a number":    {device(`{"token":"b","topics":[7]}`), api.InvalidArgument, "devices[1].topics[0]"},
		"a topic with spaces": {device(`{"token":"b","topics":["a b"]}`), api.InvalidArgument, "devices[1].topics[0]"},
		"ref too long":        {device(`{"token":"b","ref":"` + strings.Repeat("r", 256) + `"}`), api.TooLarge, "devices[1].ref"},
		"token twice in one":  {device(`{"token":"b","token":"c"}`), api.InvalidArgument, "devices[1].token"},
		"2,001 topics":        {device(`{"token":"b","topics":["x"` + strings.Repeat(`,"x"`, 2000) + `]}`), api.TooLarge, "devices[1].topics"},
		"1,001 devices":       {`{"devices":[{"token":"a"}` + strings.Repeat(`,{"token":"a"}`, 1000) + `]}`, api.TooLarge, "devices"},
		"something after it":  {`{"devices":[{"token":"a"}]}x`, api.InvalidArgument, ""},
	} {
		t.Run(name, func(t *testing.T) { requireError(t, w.putDevices(c.body), c.code, c.field) })
	}
	require.Empty(t, w.store.puts)
}

func TestRegistrationIsStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	done := requireAnswer[api.Registered](t, w.putDevices(`{"devices":[{"token":"a:/%","ref":"학생","enabled":false,"topics":["x","y"]},
		{"token":"b","ref":null,"enabled":null,"topics":null},{"token":"c","ref":"","topics":[]}]}`), http.StatusOK)
	require.Equal(t, api.Registered{School: "A", Devices: 3, Created: 2, Revived: 1}, done)
	ref, empty, off := "학생", "", false
	require.Equal(t, []school.NewDevice{
		{Token: "a:/%", Ref: &ref, Enabled: &off, Topics: []string{"x", "y"}}, {Token: "b"}, {Token: "c", Ref: &empty, Topics: []string{}},
	}, w.store.devices["A"], "null is not given, and an empty set is")
	w.requireNothingLeft()
}

func TestRegistrationByLines(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	var lines strings.Builder
	for i := range 2500 {
		fmt.Fprintf(&lines, "{\"token\":\"t%d\"}\n\n", i)
	}
	done := requireAnswer[api.Registered](t, w.putLines(strings.NewReader(lines.String())), http.StatusOK)
	require.Equal(t, 2500, done.Devices)
	require.Equal(t, []int{1000, 1000, 500}, w.store.puts)
	require.Equal(t, []string{"t0", "t1000", "t2499"}, []string{w.store.devices["A"][0].Token, w.store.devices["A"][1000].Token, w.store.devices["A"][2499].Token})

	// A complaint about the last line leaves nothing behind.
	e := requireError(t, w.putLines(strings.NewReader(lines.String()+`{"token":"x","topics":["a b"]}`)), api.InvalidArgument, "devices[2500].topics[0]")
	require.True(t, strings.HasPrefix(e.Message, "line 5001: "), e.Message)
	requireError(t, w.putLines(strings.NewReader(`{"token":"a"}x`)), api.InvalidArgument, "devices[0]")
	requireError(t, w.putLines(strings.NewReader("\n")), api.InvalidArgument, "devices")
	requireError(t, w.putLines(strings.NewReader(`{"token":"a","ref":"`+strings.Repeat("r", 70_000)+`"}`)), api.TooLarge, "devices[0]")
	require.Len(t, w.store.puts, 3)
	w.requireNothingLeft()

	w.store.set(func(f *fakeStore) { f.err = school.ErrUnavailable })
	requireError(t, w.putLines(strings.NewReader(`{"token":"a"}`)), api.Unavailable, "")
	w.requireNothingLeft()
}

func TestRegistrationsAreUploads(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.Uploads = 1 })
	pr, pw := io.Pipe()
	done := make(chan *httptest.ResponseRecorder, 1)
	go func() { done <- w.putLines(pr) }()
	_, err := io.WriteString(pw, `{"token":"a"}`+"\n")
	require.NoError(t, err)
	requireError(t, w.upload(strings.NewReader(head+`{"token":"a"}`)), api.Unavailable, "")
	requireError(t, w.putLines(strings.NewReader(`{"token":"a"}`)), api.Unavailable, "")
	require.NoError(t, pw.Close())
	requireAnswer[api.Registered](t, <-done, http.StatusOK)
	w.requireNothingLeft()
}

func TestDeviceIsDeletedByItsToken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	for _, token := range []string{"plain", "a:b_c-d", "a/b", "a%2Fb", "100%", "a b", "한빛", "..", "a?b#c"} {
		requireAnswer[api.Registered](t, w.putDevices(fmt.Sprintf(`{"devices":[{"token":%q}]}`, token)), http.StatusOK)
		target := devicesPath + "/" + url.PathEscape(token)
		require.Equal(t, api.DeletedDevice{School: "A", Deleted: true},
			requireAnswer[api.DeletedDevice](t, w.do(http.MethodDelete, target, "", nil), http.StatusOK), token)
		e := requireError(t, w.do(http.MethodDelete, target, "", nil), api.NotFound, "")
		require.NotContains(t, e.Message, token)
	}
	require.NotContains(t, w.log.String(), "a:b_c-d")
}

func TestDevicesAreListed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	requireError(t, w.get(devicesPath), api.NotFound, "")
	requireAnswer[api.Registered](t, w.putDevices(`{"devices":[{"token":"a"},{"token":"b"},{"token":"c"}]}`), http.StatusOK)
	first := requireAnswer[api.List[api.Device]](t, w.get(devicesPath+"?limit=2&topic=x&retired=false"), http.StatusOK)
	require.Len(t, first.Items, 2)
	no := false
	require.Equal(t, school.DeviceFilter{Topic: "x", Retired: &no, Limit: 2}, w.store.filtered)
	rest := requireAnswer[api.List[api.Device]](t, w.get(devicesPath+"?limit=2&cursor="+first.Next), http.StatusOK)
	require.Len(t, rest.Items, 1)
	require.Empty(t, rest.Next)
	for target, field := range map[string]string{
		"?topic=a%20b": "topic", "?topic=": "topic", "?retired=yes": "retired", "?cursor=xyz": "cursor", "?cursor=ab": "cursor", "?limit=0": "limit", "?enabled=true": "enabled",
	} {
		requireError(t, w.get(devicesPath+target), api.InvalidArgument, field)
	}
}

func TestBrakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	w.store.brakes = []school.EngagedBrake{
		{ID: 1, School: "A", Sender: "fcm", Batch: "b1", Owner: "r1", Unregistered: 60, Size: 100, EngagedAt: testNow, Flagged: 55},
		{ID: 2, School: "B", Sender: "fcm", EngagedAt: testNow, Flagged: 21},
	}
	list := requireAnswer[api.List[api.Brake]](t, w.get("/v1/brakes"), http.StatusOK)
	require.Equal(t, []string{"2", "1"}, []string{list.Items[0].ID, list.Items[1].ID})
	require.Equal(t, api.Brake{ID: "1", School: "A", Sender: "fcm", Open: true, Batch: "b1", Instance: "r1", Unregistered: 60, Size: 100, EngagedAt: testNow, Flagged: 55}, list.Items[1])
	require.Equal(t, 2, requireAnswer[api.Cluster](t, w.get("/v1/cluster"), http.StatusOK).OpenBrakes)

	post := func(path string) *httptest.ResponseRecorder { return w.do(http.MethodPost, path, "", nil) }
	closed := requireAnswer[api.Brake](t, post("/v1/brakes/1/confirm"), http.StatusOK)
	require.Equal(t, []any{false, "confirmed", "admin", 55, 0}, []any{closed.Open, closed.ClosedAs, closed.ClosedBy, closed.Retired, closed.Flagged})
	requireError(t, post("/v1/brakes/1/clear"), api.Conflict, "")
	require.Equal(t, "cleared", requireAnswer[api.Brake](t, post("/v1/brakes/2/clear"), http.StatusOK).ClosedAs)
	require.Contains(t, w.log.String(), `"event":"brake_closed"`)
	for _, id := range []string{"3", "0", "-1", "01", "x"} {
		requireError(t, post("/v1/brakes/"+id+"/confirm"), api.NotFound, "")
	}
	require.Empty(t, requireAnswer[api.List[api.Brake]](t, w.get("/v1/brakes?open=true"), http.StatusOK).Items)
	require.Len(t, requireAnswer[api.List[api.Brake]](t, w.get("/v1/brakes?school=A&open=false&limit=1"), http.StatusOK).Items, 1)
	for target, field := range map[string]string{"?open=1": "open", "?school=a%20b": "school", "?cursor=x": "cursor", "?limit=1001": "limit"} {
		requireError(t, w.get("/v1/brakes"+target), api.InvalidArgument, field)
	}
}

// fixed lets everybody in as one.
type fixed Principal

func (f fixed) Authenticate(context.Context, string) (Principal, error) { return Principal(f), nil }

func TestDevicesAndBrakesOfOtherSchools(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *Config, d *Deps) { d.Auth = fixed{Name: "b", Roles: Admin, Schools: []string{"B"}} })
	requireError(t, w.putDevices(`{"devices":[{"token":"a"}]}`), api.PermissionDenied, "")
	requireError(t, w.putLines(strings.NewReader("never read")), api.PermissionDenied, "")
	requireError(t, w.get(devicesPath), api.PermissionDenied, "")
	requireError(t, w.do(http.MethodDelete, devicesPath+"/a", "", nil), api.PermissionDenied, "")
	requireError(t, w.get("/v1/brakes?school=A"), api.PermissionDenied, "")
	w.store.brakes = []school.EngagedBrake{{ID: 1, School: "A"}, {ID: 2, School: "B"}}
	list := requireAnswer[api.List[api.Brake]](t, w.get("/v1/brakes"), http.StatusOK)
	require.Len(t, list.Items, 1)
	require.Equal(t, "B", list.Items[0].School)
	requireError(t, w.do(http.MethodPost, "/v1/brakes/1/confirm", "", nil), api.NotFound, "")
	require.Empty(t, w.store.brakes[0].ClosedAs)

	w = newWorld(t, func(_ *Config, d *Deps) { d.Auth = fixed{Name: "i", Roles: Ingest} })
	requireAnswer[api.Registered](t, w.putDevices(`{"devices":[{"token":"a"}]}`), http.StatusOK)
	requireError(t, w.get(devicesPath), api.PermissionDenied, "")
	requireError(t, w.do(http.MethodPost, "/v1/brakes/1/clear", "", nil), api.PermissionDenied, "")
}

// TestClientOfDevices: what the client sends is what the server takes, and an
// error of the way there does not show the token.
func TestClientOfDevices(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	server := httptest.NewServer(w.server.Handler())
	c := &api.Client{BaseURL: server.URL, Key: testKey, HTTP: server.Client()}
	topics := []string{"board-3"}
	_, err := c.PutDevices(t.Context(), "A", []api.NewDevice{{Token: "secret/token:%", Topics: &topics}})
	require.NoError(t, err)
	require.Equal(t, []school.NewDevice{{Token: "secret/token:%", Topics: topics}}, w.store.devices["A"])
	list, err := c.Devices(t.Context(), "A", api.DeviceQuery{Topic: "board-3", Retired: "false"})
	require.NoError(t, err)
	require.Len(t, list.Items, 1)
	require.NoError(t, c.DeleteDevice(t.Context(), "A", "secret/token:%"))
	var refused *api.Error
	require.True(t, errors.As(c.DeleteDevice(t.Context(), "A", "secret/token:%"), &refused))
	require.Equal(t, api.NotFound, refused.Code)

	w.store.brakes = []school.EngagedBrake{{ID: 1, School: "A", EngagedAt: time.Now()}}
	brakes, err := c.Brakes(t.Context(), api.BrakeQuery{School: "A", Open: true})
	require.NoError(t, err)
	require.Len(t, brakes.Items, 1)
	closed, err := c.ClearBrake(t.Context(), "1")
	require.NoError(t, err)
	require.Equal(t, "cleared", closed.ClosedAs)
	_, err = c.ConfirmBrake(t.Context(), "1")
	require.True(t, errors.As(err, &refused))
	require.Equal(t, api.Conflict, refused.Code)

	server.Close()
	err = c.DeleteDevice(t.Context(), "A", "secret/token:%")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
	require.NotContains(t, err.Error(), "token")
}
