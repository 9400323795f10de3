package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
)

// registry answers as a replica does that knows one brake, and notes what it is
// asked. fail answers the first calls that register.
type registry struct {
	asked []string
	puts  [][]api.NewDevice
	fail  []api.Error
}

func newRegistry(t *testing.T) (*stage, *registry) {
	g := &registry{}
	ts := httptest.NewServer(http.HandlerFunc(g.serve))
	t.Cleanup(ts.Close)
	st := newStage()
	st.environ = []string{"SCHOOLBELL_SERVER=" + ts.URL}
	return st, g
}

func (g *registry) serve(w http.ResponseWriter, r *http.Request) {
	g.asked = append(g.asked, r.Method+" "+r.URL.RequestURI())
	at := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	brake := api.Brake{ID: "7", School: "A", Sender: "fcm", Open: true, Unregistered: 61, Size: 200, Flagged: 60, EngagedAt: at}
	switch {
	case r.Method == http.MethodPut && len(g.fail) > 0:
		e := g.fail[0]
		g.fail = g.fail[1:]
		write(w, e.Code.Status(), e)
	case r.Method == http.MethodPut:
		var in api.DevicesRequest
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			write(w, 400, api.Error{Code: api.InvalidArgument, Message: err.Error()})
			return
		}
		g.puts = append(g.puts, in.Devices)
		write(w, 200, api.Registered{School: "A", Devices: len(in.Devices), Created: len(in.Devices) - 1, Revived: 1})
	case r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "/a/b:c"):
		write(w, 200, api.DeletedDevice{School: "A", Deleted: true})
	case r.URL.Path == "/v1/schools/A/devices":
		write(w, 200, api.List[api.Device]{Next: "ff", Items: []api.Device{
			{Token: "abc…", Ref: "x\x1b[2Jy", Enabled: true, Topics: []string{"a", "b"}, RegisteredAt: at},
			{Token: "bcd…", Enabled: false, RegisteredAt: at}, {Token: "cde…", Enabled: true, Flagged: true, RegisteredAt: at},
			{Token: "def…", Enabled: true, RegisteredAt: at, RetiredAt: &at},
		}})
	case r.URL.Path == "/v1/brakes":
		closed := brake
		closed.ID, closed.Open, closed.ClosedAs, closed.ClosedBy, closed.Flagged, closed.Retired = "6", false, "confirmed", "admin", 0, 60
		write(w, 200, api.List[api.Brake]{Items: []api.Brake{brake, closed}})
	case r.URL.Path == "/v1/brakes/7/confirm", r.URL.Path == "/v1/brakes/7/clear":
		brake.Open, brake.ClosedAs, brake.Retired = false, "confirmed", 60
		write(w, 200, brake)
	case r.URL.Path == "/v1/notices":
		write(w, 202, api.Accepted{ID: "1", School: "A", Status: "COMPLETED"})
	default:
		write(w, 404, api.Error{Code: api.NotFound, Message: "there is no such thing"})
	}
}

func TestDevicePut(t *testing.T) {
	t.Parallel()
	st, g := newRegistry(t)
	off, ref, topics, none := false, "member-17", []string{"x", "y"}, []string{}
	require.Equal(t, exitDone, st.run("device", "put", "--school", "A", "TOKEN"), st.err.String())
	require.Equal(t, "school A: 1 devices registered, 0 new, 1 revived\n", st.out.String())
	require.Equal(t, exitDone, st.run("device", "put", "--school", "A", "TOKEN", "--ref", "member-17", "--enabled=false", "--topic", "x", "--topic", "y"), st.err.String())
	require.Equal(t, exitDone, st.run("device", "put", "--school", "A", "TOKEN", "--no-topics"), st.err.String())
	require.Equal(t, [][]api.NewDevice{{{Token: "TOKEN"}}, {{Token: "TOKEN", Ref: &ref, Enabled: &off, Topics: &topics}}, {{Token: "TOKEN", Topics: &none}}}, g.puts)
	st.failed(t, exitUsage, "--school is missing (see schoolbell device put --help)", "device", "put", "TOKEN")
	st.failed(t, exitUsage, "give the device's token, one argument; there are 0 (see schoolbell device put --help)", "device", "put", "--school", "A")
	st.failed(t, exitUsage, "--topic and --no-topics exclude one another (see schoolbell device put --help)", "device", "put", "--school", "A", "T", "--topic", "x", "--no-topics")
}

func TestDeviceImport(t *testing.T) {
	t.Parallel()
	yes, no, ref, empty, topics, none := true, false, "r,1", "", []string{"x", "y"}, []string{}
	for name, c := range map[string]struct {
		file string
		want []api.NewDevice
	}{
		"all columns": {"\ufefftoken, ref ,enabled,topics\na,\"r,1\",true,x y\n\nb,,false,\nc,,,x y\n", []api.NewDevice{
			{Token: "a", Ref: &ref, Enabled: &yes, Topics: &topics}, {Token: "b", Ref: &empty, Enabled: &no, Topics: &none}, {Token: "c", Ref: &empty, Topics: &topics}}},
		"one column":   {"token\na\nb", []api.NewDevice{{Token: "a"}, {Token: "b"}}},
		"other order":  {"topics,token\nx y,a\n", []api.NewDevice{{Token: "a", Topics: &topics}}},
		"NDJSON":       {"\n {\"token\":\"a\",\"topics\":[\"x\",\"y\"],\"enabled\":false}\n\n{\"token\":\"b\"}\n", []api.NewDevice{{Token: "a", Enabled: &no, Topics: &topics}, {Token: "b"}}},
		"NDJSON empty": {`{"token":"a","topics":[]}`, []api.NewDevice{{Token: "a", Topics: &none}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			st, g := newRegistry(t)
			st.files["f"] = c.file
			require.Equal(t, exitDone, st.run("device", "import", "--school", "A", "f"), st.err.String())
			require.Equal(t, [][]api.NewDevice{c.want}, g.puts)
		})
	}
}

func TestDeviceImportOfMany(t *testing.T) {
	t.Parallel()
	st, g := newRegistry(t)
	file := strings.Builder{}
	file.WriteString("token\n")
	for i := range 2500 {
		fmt.Fprintf(&file, "t%d\n", i)
	}
	st.stdin = strings.NewReader(file.String())
	g.fail = []api.Error{{Code: api.Unavailable, Message: "away"}, {Code: api.Unavailable, Message: "away"}} // as in a restart
	require.Equal(t, exitDone, st.run("device", "import", "--school", "A", "-"), st.err.String())
	require.Equal(t, "school A: 2500 devices registered, 2497 new, 3 revived\n", st.out.String())
	require.Equal(t, []int{1000, 1000, 500}, []int{len(g.puts[0]), len(g.puts[1]), len(g.puts[2])})
	require.Equal(t, "t2499", g.puts[2][499].Token)

	// Long ones go in smaller calls: a body is 8 MiB at most.
	st, g = newRegistry(t)
	st.stdin = strings.NewReader("token,topics\n" + strings.Repeat("t,"+strings.Repeat(strings.Repeat("x", 200)+" ", 100)+"\n", 300))
	require.Equal(t, exitDone, st.run("device", "import", "--school", "A", "-"), st.err.String())
	require.Len(t, g.puts, 2)
	require.Len(t, append(g.puts[0], g.puts[1]...), 300)
}

func TestDeviceImportNamesTheLine(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, want string }{
		"nothing":            {"", "f has no devices"},
		"header only":        {"token\n", "f has no devices"},
		"no header":          {"secret-token\n", "f line 1 has to name the columns, each once: token, and any of ref, enabled, topics"},
		"no token column":    {"ref\nr\n", "f line 1 names no column token"},
		"a column twice":     {"token,token\na,b\n", "f line 1 has to name the columns, each once: token, and any of ref, enabled, topics"},
		"too many cells":     {"token\na\n\nsecret,b\n", "f line 4: wrong number of fields"},
		"a quote":            {"token\n\"secret\n", `f line 2: extraneous or missing " in quoted-field`},
		"no token":           {"token,ref\n,r\n", "f line 2: has no token"},
		"enabled":            {"token,enabled\na,secret\n", "f line 2: enabled is neither true nor false"},
		"NDJSON":             {"{\"token\":\"a\"}\nsecret\n", "f line 2: is not JSON at byte 1: invalid character 's' looking for beginning of value"},
		"NDJSON, misspelt":   {`{"tokn":"secret"}`, `f line 1: has an unknown field "tokn"; a device has token, ref, enabled, topics`},
		"NDJSON, two a line": {`{"token":"a"}{"token":"secret"}`, "f line 1: has something behind its JSON object"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			st, g := newRegistry(t)
			st.files["f"] = c.file
			st.failed(t, exitUsage, c.want, "device", "import", "--school", "A", "f")
			require.NotContains(t, st.err.String(), "secret")
			require.Empty(t, g.puts)
		})
	}
	st, g := newRegistry(t)
	st.files["f"] = "token\n" + strings.Repeat("a\n", 1000) + "\n\nb\nc\n"
	g.fail = nil
	st.failed(t, exitUsage, "g: file does not exist", "device", "import", "--school", "A", "g")
	st.failed(t, exitUsage, "--school is missing (see schoolbell device import --help)", "device", "import", "f")
	g.fail = []api.Error{{Code: api.InvalidArgument, Field: "devices[3].topics[0]", Message: "must be 1 to 255 of …"}}
	st.failed(t, exitUsage, "import devices of school A: f line 5: topics[0]: must be 1 to 255 of …", "device", "import", "--school", "A", "f")
}

func TestDeviceListAndDelete(t *testing.T) {
	t.Parallel()
	st, g := newRegistry(t)
	require.Equal(t, exitDone, st.run("device", "list", "--school", "A", "--topic", "x", "--retired", "false", "--limit", "4"), st.err.String())
	require.Regexp(t, `^TOKEN +REF +STATE +TOPICS +REGISTERED\nabc… +x \[2Jy +on +a b +.*\nbcd… +off +.*\ncde… +flagged +.*\ndef… +retired +.*\n\nmore: --cursor ff\n$`, st.out.String())
	require.Equal(t, exitDone, st.run("device", "delete", "--school", "A", "a/b:c"), st.err.String())
	require.Equal(t, "school A: device deleted\n", st.out.String())
	st.failed(t, exitNotFound, "delete device: not_found: there is no such thing", "device", "delete", "--school", "A", "another")
	st.failed(t, exitUsage, "--limit 0 is not 1 to 1000 (see schoolbell device list --help)", "device", "list", "--school", "A", "--limit", "0")
	require.Equal(t, []string{"GET /v1/schools/A/devices?limit=4&retired=false&topic=x", "DELETE /v1/schools/A/devices/a%2Fb:c", "DELETE /v1/schools/A/devices/another"}, g.asked)
}

func TestBrakes(t *testing.T) {
	t.Parallel()
	st, g := newRegistry(t)
	require.Equal(t, exitDone, st.run("device", "brakes", "--open", "--school", "A"), st.err.String())
	require.Regexp(t, `^ID +SCHOOL +SENDER +STATE +UNREGISTERED +FLAGGED +RETIRED +ENGAGED\n7 +A +fcm +on +61 of 200 +60 +0 .*\n6 +A +fcm +confirmed by admin +61 of 200 +0 +60 .*\n$`, st.out.String())
	require.Equal(t, exitDone, st.run("device", "confirm", "7"), st.err.String())
	require.Equal(t, "brake 7 of school A and sender fcm is off: confirmed, 60 devices retired\n", st.out.String())
	require.Equal(t, exitDone, st.run("device", "clear", "7", "--output", "json"), st.err.String())
	st.failed(t, exitNotFound, "clear brake 8: not_found: there is no such thing", "device", "clear", "8")
	require.Equal(t, []string{"GET /v1/brakes?limit=20&open=true&school=A", "POST /v1/brakes/7/confirm", "POST /v1/brakes/7/clear", "POST /v1/brakes/8/clear"}, g.asked)
}

func TestSendToATopic(t *testing.T) {
	t.Parallel()
	st, g := newRegistry(t)
	require.Equal(t, exitDone, st.run("notice", "send", "--school", "A", "--title", "T", "--topic", "board-3"), st.err.String())
	require.Equal(t, "notice 1 accepted: 0 recipients\n", st.out.String())
	require.Equal(t, []string{"POST /v1/notices"}, g.asked)
	st.failed(t, exitUsage, "--tokens-file or --topic is missing (see schoolbell notice send --help)", "notice", "send", "--school", "A", "--title", "T")
	st.failed(t, exitUsage, "--tokens-file and --topic exclude one another (see schoolbell notice send --help)", "notice", "send", "--school", "A", "--title", "T", "--topic", "x", "--tokens-file", "-")
}
