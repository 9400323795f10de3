package settings

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// world is a LoadArgs with one file, ./schoolbell.yaml, where text is given.
func world(yaml string, env ...string) LoadArgs {
	return LoadArgs{
		InstanceID: "host-1a2b",
		Environ:    env,
		ReadFile: func(name string) ([]byte, error) {
			if name == localFile && yaml != "" {
				return []byte(yaml), nil
			}
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		},
	}
}

func load(t *testing.T, args LoadArgs) Settings {
	t.Helper()
	s, err := Load(args)
	require.NoError(t, err)
	return s
}

func TestNothingSaidIsTheDefault(t *testing.T) {
	t.Parallel()
	s := load(t, world(""))
	want := Default()
	want.InstanceID = "host-1a2b"
	s.origins = nil
	require.Equal(t, want, s)
	require.NoError(t, Default().Validate())
}

func TestFlagsOverEnvironmentOverFile(t *testing.T) {
	t.Parallel()
	args := world("quota: {limit: 1, rest: 1s}\ndispatch:\n  tick: 1s\n", "SCHOOLBELL_QUOTA_LIMIT=2", "SCHOOLBELL_QUOTA_REST=2s", "OTHER=x")
	args.Flags = map[string]string{"quota.limit": "3"}
	s := load(t, args)
	require.Equal(t, 3, s.Quota.Limit)
	require.Equal(t, 2*time.Second, s.Quota.Rest)
	require.Equal(t, time.Second, s.Dispatch.Tick)
	require.Equal(t, 200, s.Dispatch.Batch)

	require.Equal(t, "--quota-limit", s.Origin("quota.limit").String())
	require.Equal(t, "SCHOOLBELL_QUOTA_REST", s.Origin("quota.rest").String())
	require.Equal(t, "schoolbell.yaml:3", s.Origin("dispatch.tick").String())
	require.Equal(t, "default", s.Origin("dispatch.batch").String())
}

func TestWhichFileIsRead(t *testing.T) {
	t.Parallel()
	files := map[string]string{localFile: "quota: {limit: 1}", systemFile: "quota: {limit: 2}", "/else.yaml": "quota: {limit: 3}"}
	args := LoadArgs{ReadFile: func(name string) ([]byte, error) {
		text, ok := files[name]
		if !ok {
			return nil, fs.ErrNotExist
		}
		return []byte(text), nil
	}}
	named := args
	named.Config = "/else.yaml"
	require.Equal(t, 3, load(t, named).Quota.Limit)
	require.Equal(t, 1, load(t, args).Quota.Limit)
	delete(files, localFile)
	require.Equal(t, 2, load(t, args).Quota.Limit)
	delete(files, systemFile)
	require.Equal(t, 5000, load(t, args).Quota.Limit)
	delete(files, "/else.yaml")
	_, err := Load(named)
	require.ErrorContains(t, err, "cannot read /else.yaml: file does not exist; name an existing file with --config")
}

func TestEveryNameIsReadFromEachLayer(t *testing.T) {
	t.Parallel()
	// One text for each kind that is neither a default nor out of any bounds.
	sample := func(f field) string {
		special := map[string]string{
			"database_url": "postgres://u:p@h/d", "redis.url": "redis://h", "alerts.webhook_url": "https://h", "fallback.url": "https://h",
			"alerts.page_url": "https://h/page", "alerts.digest_cron": "2 2 * * *",
			"http.listen": "127.0.0.1:9", "timezone": "UTC", "sweep.cron": "1 1 * * *", "default_sender": "log",
			"quota.headroom": "7", "lock.etc": "41s", "lock.etc_max": "59s", "stop_timeout": "46s",
			"dispatch.batch": "201", "dispatch.page": "1001", "retention.recipients": "3h", "retention.cron": "2 2 * * *",
		}
		if v, ok := special[f.path]; ok {
			return v
		}
		if f.oneof != "" {
			return strings.Fields(f.oneof)[0]
		}
		return map[kind]string{kindText: "x", kindSecret: "x", kindWhole: "9", kindDuration: "11s"}[f.kind]
	}
	for _, f := range fields() {
		t.Run(f.path, func(t *testing.T) {
			t.Parallel()
			text := sample(f)
			indented := f.path + ": " + quote(text)
			if group, name, ok := strings.Cut(f.path, "."); ok {
				indented = group + ":\n  " + name + ": " + quote(text)
			}
			fromFile := load(t, world(indented))
			require.Equal(t, LayerFile, fromFile.Origin(f.path).Layer)
			fromEnv := load(t, world("", f.env+"="+text))
			require.Equal(t, LayerEnvironment, fromEnv.Origin(f.path).Layer)
			args := world("")
			args.Flags = map[string]string{f.path: text}
			fromFlag := load(t, args)
			require.Equal(t, LayerFlag, fromFlag.Origin(f.path).Layer)

			fromFile.origins, fromEnv.origins, fromFlag.origins = nil, nil, nil
			require.Equal(t, fromFile, fromEnv)
			require.Equal(t, fromFile, fromFlag)
		})
	}
}

// The names are promises to operators: dashboards, manifests and scripts use them.
func TestNamesAreKept(t *testing.T) {
	t.Parallel()
	var got []string
	for _, f := range fields() {
		got = append(got, f.path+" "+f.env)
	}
	for _, f := range senderFields() {
		got = append(got, "senders.*."+f.path)
	}
	want, err := os.ReadFile("testdata/names.txt")
	require.NoError(t, err)
	require.Equal(t, strings.Fields(string(want)), strings.Fields(strings.Join(got, "\n")))
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, yaml string
		env        []string
		want       string // the whole text after "settings: "
	}{
		{"misspelt key", "dispatch:\n  bacth: 3\n", nil,
			"schoolbell.yaml:2: dispatch.bacth: unknown setting; did you mean dispatch.batch?"},
		{"flattened key", "quota_limit: 3\n", nil,
			"schoolbell.yaml:1: quota_limit: unknown setting; did you mean quota.limit?"},
		{"wrong group", "\nheadroom: 3\n", nil,
			"schoolbell.yaml:2: headroom: unknown setting; did you mean quota.headroom?"},
		{"nothing near", "frobnicate: 3\n", nil,
			"schoolbell.yaml:1: frobnicate: unknown setting; remove it (schoolbell serve --print-config lists the known ones)"},
		{"misspelt group", "dispach:\n  batch: 3\n", nil,
			"schoolbell.yaml:1: dispach: unknown setting; did you mean dispatch?"},
		{"too deep", "quota:\n  limit:\n    of: 3\n", nil,
			"schoolbell.yaml:2: quota.limit: must be a whole number"},
		{"list", "quota:\n  - limit\n", nil,
			"schoolbell.yaml:2: quota: must be a list of names, each with a colon and a value"},
		{"given twice", "quota:\n  limit: 1\n  limit: 2\n", nil,
			`schoolbell.yaml:3: is not valid YAML: mapping key "limit" already defined at [2:3]`},
		{"second document", "quota: {limit: 1}\n---\nquota: {limit: 2}\n", nil,
			"schoolbell.yaml:3: a second document begins here; keep one"},
		{"alias", "quota: &q\n  limit: 1\n", nil,
			"schoolbell.yaml:1: quota: must be a list of names, each with a colon and a value"},
		{"misspelt sender setting", "senders:\n  main:\n    kind: relay\n    ulr: x\n", nil,
			"schoolbell.yaml:4: senders.main.ulr: unknown setting; did you mean senders.main.url?"},
		{"empty sender", "senders:\n  main:\n", nil,
			"schoolbell.yaml:2: senders.main: says nothing; give it a kind: fcm, relay or log"},
		{"no number", "quota:\n  limit: many\n", nil,
			`schoolbell.yaml:2: quota.limit: "many" is not a whole number; give 1 to 1000000`},
		{"no duration", "quota:\n  rest: long\n", nil,
			`schoolbell.yaml:2: quota.rest: "long" is not a duration such as 500ms, 180s or 2160h; give 1ms to 168h`},
		{"misspelt kind", "senders:\n  main:\n    kind: fmc\n", nil,
			`schoolbell.yaml:3: senders.main.kind: "fmc" is not one of fcm, relay, log`},
		{"short and like none", "foo: 3\n", nil,
			"schoolbell.yaml:1: foo: unknown setting; remove it (schoolbell serve --print-config lists the known ones)"},
		{"short and near", "lgo: {level: info}\n", nil,
			"schoolbell.yaml:1: lgo: unknown setting; did you mean log?"},
		{"tab", "quota:\n\tlimit: 3\n", nil,
			"schoolbell.yaml:2: is not valid YAML: the line begins with a tab; indent with spaces"},
		{"tab after spaces", "quota:\n  rest: 1s\n  \tlimit: 3\n", nil,
			"schoolbell.yaml:3: is not valid YAML: the line begins with a tab; indent with spaces"},
		{"no unit", "quota:\n  rest: 180\n", nil,
			"schoolbell.yaml:2: quota.rest: 180 has no unit; write 180s for seconds"},
		{"no truth", "senders: {main: {kind: fcm, dry_run: perhaps}}\n", nil,
			`schoolbell.yaml:1: senders.main.dry_run: "perhaps" is not true or false`},
		{"out of bounds", "", []string{"SCHOOLBELL_DISPATCH_BATCH=1001"},
			"SCHOOLBELL_DISPATCH_BATCH: dispatch.batch: 1001 is out of bounds; give 1 to 1000"},
		{"not one of", "http: {auth: basic}\n", nil,
			`schoolbell.yaml:1: http.auth: "basic" is not one of keys, none`},
		{"misspelt variable", "", []string{"SCHOOLBELL_QUOTE_LIMIT=3"},
			"SCHOOLBELL_QUOTE_LIMIT: unknown variable; did you mean SCHOOLBELL_QUOTA_LIMIT?"},
		{"admin key under its path", "", []string{"SCHOOLBELL_HTTP_ADMIN_KEY=k"},
			"SCHOOLBELL_HTTP_ADMIN_KEY: unknown variable; did you mean SCHOOLBELL_ADMIN_KEY?"},
		{"misspelt and empty variable", "", []string{"SCHOOLBELL_QUOTE_LIMIT="},
			"SCHOOLBELL_QUOTE_LIMIT: unknown variable; did you mean SCHOOLBELL_QUOTA_LIMIT?"},
		{"variable like none", "", []string{"SCHOOLBELL_X=3"},
			"SCHOOLBELL_X: unknown variable; remove it (schoolbell serve --print-config lists the known ones)"},
		{"misspelt variable of a sender", "", []string{"SCHOOLBELL_SENDERS_A_ULR=3"},
			"SCHOOLBELL_SENDERS_A_ULR: unknown variable; write SCHOOLBELL_SENDERS_<NAME>_ and one of KIND, CALL_TIMEOUT, IN_FLIGHT, RATE_PER_MINUTE, URL, TOKEN, STATUS_URL, CONNECT_TIMEOUT, READ_TIMEOUT, PROJECT, CREDENTIALS_FILE, ENDPOINT, ONLY_TOKENS_FILE, DRY_RUN"},
		{"sender without kind", "", []string{"SCHOOLBELL_SENDERS_MAIN_URL=https://h"},
			"SCHOOLBELL_SENDERS_MAIN_URL: senders.main.kind: is missing; give fcm, relay or log"},
		{"setting of another kind", "senders:\n  main:\n    kind: log\n    url: https://h\n", nil,
			"schoolbell.yaml:4: senders.main.url: belongs to kind relay, but senders.main.kind is log; remove one of them"},
		{"rate of a log", "senders:\n  main:\n    kind: log\n    rate_per_minute: 5\n", nil,
			"schoolbell.yaml:4: senders.main.rate_per_minute: belongs to kind fcm or relay, but senders.main.kind is log; remove one of them"},
		{"sender's name", "senders:\n  'a b':\n    kind: log\n", nil,
			"schoolbell.yaml:3: senders.a b: a sender's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -"},
		{"relay without url", "senders: {main: {kind: relay}}\n", nil,
			"schoolbell.yaml:1: senders.main.url: is missing; give the address that takes the batches, e.g. https://relay.example/push"},
		{"relay with a password", "senders: {main: {kind: relay, url: 'http://u:pa55@h'}}\n", nil,
			"schoolbell.yaml:1: senders.main.url: holds a user or password; a relay is told who calls by senders.main.token"},
		{"a page with a password", "alerts: {page_url: 'https://u:pa55@h'}\n", nil,
			"schoolbell.yaml:1: alerts.page_url: holds a user or password, which every alert would show"},
		{"a page that is none", "alerts: {page_url: 'bell.example'}\n", nil,
			"schoolbell.yaml:1: alerts.page_url: must be http://host… or https://host…, without white space and brackets"},
		{"a digest every second", "alerts: {digest_cron: '* * * * * *'}\n", nil,
			"schoolbell.yaml:1: alerts.digest_cron: \"* * * * * *\" is not a schedule; write five fields such as \"0 9-21 * * *\" (the zone is timezone)"},
		{"fallback with a password", "fallback: {url: 'https://u:pa55@h', token: 'a b'}\n", nil,
			"schoolbell.yaml:1: fallback.url: holds a user or password; the webhook is told who calls by fallback.token; schoolbell.yaml:1: fallback.token: must be printable ASCII without white space"},
		{"endpoint with a path", "senders: {main: {kind: fcm, endpoint: 'http://h:1/v1'}}\n", nil,
			"schoolbell.yaml:1: senders.main.endpoint: must be scheme://host:port; /v1/… is added"},
		{"wrong database", "database_url: mysql://root:pa55@h/d\n", nil,
			"schoolbell.yaml:1: database_url: must begin with postgres:// or postgresql://"},
		{"database without a host", "database_url: postgres:///bell?user=pa55\n", nil,
			"schoolbell.yaml:1: database_url: names no host; write postgres://user:password@host:5432/name, or postgres:///name?host=/var/run/postgresql for the socket of a server on this machine"},
		{"redis without a host", "redis: {url: 'redis:///0?host=/run/redis'}\n", nil,
			"schoolbell.yaml:1: redis.url: names no host; write redis://host:port…"},
		{"unreadable url", "redis: {url: 'redis://:pa%55%@h'}\n", nil,
			"schoolbell.yaml:1: redis.url: is not a URL; write redis://…, with special characters of a password percent-encoded"},
		{"prefix", "redis: {prefix: 'a{b}'}\n", nil,
			`schoolbell.yaml:1: redis.prefix: "a{b}" must be non-empty, without braces and white space`},
		{"listen", "http: {listen: '8080'}\n", nil,
			`schoolbell.yaml:1: http.listen: "8080" is not host:port; write e.g. :8080 or 127.0.0.1:8080`},
		{"cron", "sweep: {cron: '* *'}\n", nil,
			`schoolbell.yaml:1: sweep.cron: "* *" is not a schedule; write five fields such as "*/5 9-21 * * MON-FRI" (the zone is timezone)`},
		{"zone", "timezone: Korea/Seoul\n", nil,
			`schoolbell.yaml:1: timezone: "Korea/Seoul" is not a time zone; write an IANA name such as Asia/Seoul`},
		{"key with a line break", "http: {admin_key: \"pa55\\n\"}\n", nil,
			"schoolbell.yaml:1: http.admin_key: must be printable ASCII without white space"},

		{"batch over page", "dispatch:\n  page: 100\n", nil,
			"dispatch.batch: 200 is more than is read at once, dispatch.page 100 (schoolbell.yaml:2); lower dispatch.batch or raise dispatch.page"},
		{"headroom over limit", "quota: {limit: 5, headroom: 5}\n", nil,
			"schoolbell.yaml:1: quota.headroom: 5 leaves nothing of quota.limit 5 (schoolbell.yaml:1); lower quota.headroom"},
		{"etc over its most", "lock: {etc: 61s}\n", nil,
			"schoolbell.yaml:1: lock.etc: 1m1s is more than lock.etc_max 1m0s; lower lock.etc or raise lock.etc_max"},
		{"two senders, no default", "senders: {a: {kind: log}, b: {kind: log}}\n", nil,
			"schoolbell.yaml:1: default_sender: must be set, since there are several senders: a, b; write e.g. default_sender: a"},
		{"unknown default", "default_sender: fcm\n", nil,
			`schoolbell.yaml:1: default_sender: "fcm" is not one of the senders: log`},
		{"rate below a batch", "dispatch: {batch: 150}\nsenders: {main: {kind: fcm, rate_per_minute: 149}}\n", nil,
			"schoolbell.yaml:2: senders.main.rate_per_minute: 149 does not carry one batch a minute, dispatch.batch 150 (schoolbell.yaml:1); raise rate_per_minute or lower dispatch.batch"},
		{"no rate", "senders: {main: {kind: relay, url: 'http://h', rate_per_minute: 0}}\n", nil,
			"schoolbell.yaml:1: senders.main.rate_per_minute: 0 is out of bounds; give 1 to 100000000"},
		{"a negative rate", "senders: {main: {kind: fcm, rate_per_minute: -1}}\n", nil,
			"schoolbell.yaml:1: senders.main.rate_per_minute: -1 is out of bounds; give 1 to 100000000"},
		{"in_flight below a batch", "senders: {main: {kind: fcm, in_flight: 199}}\n", nil,
			"schoolbell.yaml:1: senders.main.in_flight: 199 does not hold one batch, dispatch.batch 200; raise in_flight or lower dispatch.batch"},
		{"part longer than the call", "senders: {main: {kind: relay, url: 'http://h', read_timeout: 11s}}\n", nil,
			"schoolbell.yaml:1: senders.main.read_timeout: 11s is longer than the whole call, senders.main.call_timeout 10s; lower one or raise the other"},
		{"etc too short", "lock: {etc: 5s}\n", nil,
			"schoolbell.yaml:1: lock.etc: 5s is too short for a batch of senders.log: dispatch.claim_timeout 4s + senders.log.call_timeout 1s + margin 675ms = 5.675s (margin: 1 % of the lease of 7.5s + 500ms + 100ms); set lock.etc to at least 5.686s or shorten the timeouts"},
		{"etc_max too short", "", []string{"SCHOOLBELL_LOCK_ETC_MAX=5s"},
			"SCHOOLBELL_LOCK_ETC_MAX: lock.etc_max: 5s is too short for a batch of senders.log: dispatch.claim_timeout 4s + senders.log.call_timeout 1s + margin 675ms = 5.675s (margin: 1 % of the lease of 7.5s + 500ms + 100ms); set lock.etc_max to at least 5.686s or shorten the timeouts"},
		{"stop too short", "stop_timeout: 11s\n", nil,
			"schoolbell.yaml:1: stop_timeout: 11s is too short to end a batch of senders.log: dispatch.claim_timeout 4s + senders.log.call_timeout 1s + recording 2s + 5s = 12s; raise stop_timeout to at least 12s or shorten the timeouts"},
		{"all at once", "quota: {limit: 0}\ntimezone: ''\n", []string{"SCHOOLBELL_DISPATCH_SLOTS=0"},
			"schoolbell.yaml:1: quota.limit: 0 is out of bounds; give 1 to 1000000; SCHOOLBELL_DISPATCH_SLOTS: dispatch.slots: 0 is out of bounds; give 1 to 4096; " +
				`schoolbell.yaml:2: timezone: "" is not a time zone; write an IANA name such as Asia/Seoul`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			_, err := Load(world(tc.yaml, tc.env...))
			require.EqualError(t, err, "settings: "+tc.want)
			require.NotContains(t, err.Error(), "pa55")
			require.NotContains(t, err.Error(), "\n")
		})
	}
}

func TestUnknownFlagIsRefused(t *testing.T) {
	t.Parallel()
	args := world("")
	args.Flags = map[string]string{"quota.limits": "3"}
	_, err := Load(args)
	require.EqualError(t, err, "settings: --quota-limits: quota.limits: unknown setting")
}

func TestHarmlessVariables(t *testing.T) {
	t.Parallel()
	s := load(t, world("",
		"SCHOOLBELL_SERVER=http://h", "SCHOOLBELL_KEY=k", "SCHOOLBELL_QUOTA_LIMIT=", // the client's own; empty is not set
		"SCHOOLBELL_SERVICE_HOST=10.0.0.1", "SCHOOLBELL_SERVICE_PORT_HTTP=80", "SCHOOLBELL_PORT=tcp://10.0.0.1:80",
		"SCHOOLBELL_PORT_80_TCP_ADDR=10.0.0.1", "SCHOOLBELL_REDIS_SERVICE_HOST=10.0.0.2", "SCHOOLBELL_REDIS_PORT_6379_TCP=tcp://10.0.0.2:6379"))
	require.Equal(t, 5000, s.Quota.Limit)
	require.Empty(t, s.Redis.URL)
}

func TestEmptyFilesAndGroupsSayNothing(t *testing.T) {
	t.Parallel()
	for _, yaml := range []string{"# only a comment\n", "quota:\n", "quota: {}\n", "---\n", "quota:\n  limit:\n", "senders:\n", "senders: {}\n"} {
		s := load(t, world(yaml))
		require.Equal(t, 5000, s.Quota.Limit, yaml)
		require.Equal(t, []string{"log"}, s.SenderNames(), yaml)
	}
}

func TestSenders(t *testing.T) {
	t.Parallel()
	s := load(t, world("senders:\n  Class.3-b:\n    kind: relay\n    url: https://a.example/push\n  b:\n    kind: fcm\n    project: p\ndefault_sender: Class.3-b\n",
		"SCHOOLBELL_SENDERS_B_CALL_TIMEOUT=12s", "SCHOOLBELL_SENDERS_MY_RELAY_KIND=relay", "SCHOOLBELL_SENDERS_MY_RELAY_URL=http://c",
		"SCHOOLBELL_SENDERS_MY_RELAY_STATUS_URL=http://d", "SCHOOLBELL_SENDERS_MY_RELAY_TOKEN=t"))
	require.Equal(t, map[string]Sender{
		"Class.3-b": {Kind: KindRelay, URL: "https://a.example/push", CallTimeout: 10 * time.Second, ConnectTimeout: 3 * time.Second, ReadTimeout: 7 * time.Second, InFlight: 20000},
		"b":         {Kind: KindFCM, Project: "p", CallTimeout: 12 * time.Second, RatePerMinute: 600000, InFlight: 1000},
		"my_relay":  {Kind: KindRelay, URL: "http://c", StatusURL: "http://d", Token: "t", CallTimeout: 10 * time.Second, ConnectTimeout: 3 * time.Second, ReadTimeout: 7 * time.Second, InFlight: 20000},
	}, s.Senders)
	require.Equal(t, "Class.3-b", s.DefaultSender)

	only := load(t, world("senders: {way: {kind: log}}\n"))
	require.Equal(t, "way", only.DefaultSender)
}

func TestTheWrittenExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../deploy/schoolbell.example.yaml")
	require.NoError(t, err)
	s := load(t, world(string(text)))
	want := load(t, world(""))
	for _, f := range fields() {
		_, said := s.origins[f.path]
		commented := regexp.MustCompile(`(?m)^ *# ` + f.path[strings.LastIndex(f.path, ".")+1:] + `: `).Match(text)
		require.True(t, said || commented, "%s is not in the example", f.path)
	}
	s.origins, want.origins = nil, nil
	require.Equal(t, want, s)

	// What is commented out is right, too.
	more := load(t, world(strings.ReplaceAll(string(text), "  #|", "  ")+"\ndefault_sender: relay\n"))
	require.Equal(t, Secret("https://relay.example/push"), more.Senders["relay"].URL)
	relay := NewSender(KindRelay)
	require.Equal(t, relay.CallTimeout, more.Senders["relay"].CallTimeout)
	require.Equal(t, relay.ConnectTimeout, more.Senders["relay"].ConnectTimeout)
	require.Equal(t, relay.ReadTimeout, more.Senders["relay"].ReadTimeout)
	require.Equal(t, relay.InFlight, more.Senders["relay"].InFlight)
	firebase := NewSender(KindFCM)
	firebase.Project, firebase.CredentialsFile = more.Senders["firebase"].Project, more.Senders["firebase"].CredentialsFile
	require.NotEmpty(t, firebase.Project)
	require.NotEmpty(t, firebase.CredentialsFile)
	require.Equal(t, firebase, more.Senders["firebase"])
}

func TestServe(t *testing.T) {
	t.Parallel()
	stores := []string{"SCHOOLBELL_DATABASE_URL=postgres://u:p@h/d", "SCHOOLBELL_REDIS_URL=redis://h"}
	for _, tc := range []struct {
		name string
		yaml string
		env  []string
		want string
	}{
		{"ready", "", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"open on loopback", "", append([]string{"SCHOOLBELL_HTTP_AUTH=none", "SCHOOLBELL_HTTP_LISTEN=[::1]:0"}, stores...), ""},
		{"relay", "senders: {r: {kind: relay, url: 'http://h'}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"embedded", "", nil, ""},
		{"embedded for everybody", "", []string{"SCHOOLBELL_HTTP_LISTEN=:8080"},
			"http.admin_key: http.auth is keys and there is no key; set http.admin_key (SCHOOLBELL_ADMIN_KEY) to a long random text, e.g. what `openssl rand -hex 24` prints"},
		{"embedded with a key", "", []string{"SCHOOLBELL_HTTP_LISTEN=:8080", "SCHOOLBELL_ADMIN_KEY=k"}, ""},
		{"no Redis", "", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores[0]),
			"redis.url: is empty, but database_url is set (SCHOOLBELL_DATABASE_URL); set both (SCHOOLBELL_REDIS_URL, e.g. redis://host:6379/0), or neither, which keeps everything in this process and an SQLite file"},
		{"no database", "redis: {url: 'redis://:pa55@h'}", []string{"SCHOOLBELL_ADMIN_KEY=k"},
			"database_url: is empty, but redis.url is set (schoolbell.yaml:1); set both (SCHOOLBELL_DATABASE_URL, e.g. postgres://user:password@host:5432/schoolbell), or neither, which keeps everything in this process and an SQLite file"},
		{"no key", "", stores,
			"http.admin_key: http.auth is keys and there is no key; set http.admin_key (SCHOOLBELL_ADMIN_KEY) to a long random text, e.g. what `openssl rand -hex 24` prints"},
		{"open to everybody", "http: {auth: none}", stores,
			"schoolbell.yaml:1: http.auth: none lets everybody in who reaches http.listen :8080 (default outside the embedded mode); listen on 127.0.0.1 or set http.auth to keys"},
		{"fcm", "senders: {f: {kind: fcm, credentials_file: /etc/account.json, dry_run: true}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"fcm with Google's variable", "senders: {f: {kind: fcm}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k", "GOOGLE_APPLICATION_CREDENTIALS=/etc/account.json"}, stores...), ""},
		{"fcm on an emulator", "senders: {f: {kind: fcm, project: p}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k", "FCM_EMULATOR_HOST=127.0.0.1:9099"}, stores...), ""},
		{"fcm without credentials", "senders: {'f.1': {kind: fcm}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...),
			"schoolbell.yaml:1: senders.f.1.credentials_file: is missing; give the file of a service account (or set GOOGLE_APPLICATION_CREDENTIALS); only with an endpoint of its own, such as a simulator's, a sender needs none; " +
				"schoolbell.yaml:1: senders.f.1.project: is missing; give the Firebase project's id"},
		{"fcm on an endpoint without a project", "senders: {f: {kind: fcm, endpoint: 'http://127.0.0.1:1'}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...),
			"schoolbell.yaml:1: senders.f.project: is missing; give the Firebase project's id"},
		{"fcm's rate", "senders: {f: {kind: fcm, credentials_file: a, rate_per_minute: 600}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"fcm for listed devices", "senders: {f: {kind: fcm, credentials_file: a, only_tokens_file: t}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"a relay for listed devices", "senders: {r: {kind: relay, url: 'http://h', only_tokens_file: t}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"a relay's rate", "senders: {r: {kind: relay, url: 'http://h'}}", append([]string{"SCHOOLBELL_ADMIN_KEY=k", "SCHOOLBELL_SENDERS_R_RATE_PER_MINUTE=200"}, stores...), ""},
		{"alerts", "alerts: {webhook_url: 'https://h/secret', page_url: 'https://h'}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"alerts to Discord", "alerts: {webhook_url: 'https://discord.com/api/webhooks/1/secret', kind: discord}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"alerts to Discord as JSON", "alerts: {webhook_url: 'https://ptb.discord.com/api/webhooks/1/secret'}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...),
			"alerts.kind: json is not what ptb.discord.com takes; set alerts.kind to discord"},
		{"alerts to Slack as Discord's", "alerts:\n  webhook_url: https://hooks.slack.com/services/secret\n  kind: discord", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...),
			"schoolbell.yaml:3: alerts.kind: discord is not what hooks.slack.com takes; set alerts.kind to slack"},
		{"fallback", "fallback: {url: 'https://h', token: t}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...), ""},
		{"fallback without an address", "fallback: {token: t}", append([]string{"SCHOOLBELL_ADMIN_KEY=k"}, stores...),
			"schoolbell.yaml:1: fallback.token: is set, and there is no fallback.url to send it to; set fallback.url or remove the token"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := load(t, world(tc.yaml, tc.env...)).CheckServe()
			if tc.want == "" {
				require.NoError(t, err)
				return
			}
			require.EqualError(t, err, "settings: "+tc.want)
		})
	}
	require.ErrorContains(t, Default().CheckServe(), "instance_id: is empty")
}

func TestGooglesVariables(t *testing.T) {
	t.Parallel()
	const two = "senders:\n  a: {kind: fcm}\n  b: {kind: fcm, credentials_file: own.json, endpoint: 'https://own:1'}\n  log: {kind: log}\ndefault_sender: log\n"
	s := load(t, world(two, "GOOGLE_APPLICATION_CREDENTIALS=g.json"))
	require.Equal(t, "g.json", s.Senders["a"].CredentialsFile)
	require.Equal(t, "GOOGLE_APPLICATION_CREDENTIALS", s.Origin("senders.a.credentials_file").String())
	require.Equal(t, "own.json", s.Senders["b"].CredentialsFile)
	require.Empty(t, s.Senders["log"].CredentialsFile)

	s = load(t, world(two, "GOOGLE_APPLICATION_CREDENTIALS=g.json", "FCM_EMULATOR_HOST=emulator:9099"))
	require.Equal(t, "http://emulator:9099", s.Senders["a"].Endpoint)
	require.Empty(t, s.Senders["a"].CredentialsFile, "real credentials are not for an emulator")
	require.Equal(t, "https://own:1", s.Senders["b"].Endpoint)

	_, err := Load(world(two, "FCM_EMULATOR_HOST=http://emulator:9099/v1"))
	require.EqualError(t, err, "settings: FCM_EMULATOR_HOST: senders.a.endpoint: must be scheme://host:port; /v1/… is added")
}

func TestSecretsAreNotShown(t *testing.T) {
	t.Parallel()
	const secret = "pa55-w0rd"
	s := load(t, world("senders: {r: {kind: relay, url: 'https://h/push?key="+secret+"', token: "+secret+", status_url: 'https://h?t="+secret+"'}}\n",
		"SCHOOLBELL_DATABASE_URL=postgres://bell:"+secret+"@db:5432/bell?sslmode=disable&sslpassword="+secret,
		"SCHOOLBELL_REDIS_URL=redis+sentinel://:"+secret+"@s1:26379?addr=s2:26379&master_name=m&sentinel_password="+secret,
		"SCHOOLBELL_ADMIN_KEY="+secret, "SCHOOLBELL_ALERTS_WEBHOOK_URL=https://discord.example/api/webhooks/1/"+secret))
	var out strings.Builder
	require.NoError(t, s.Print(&out))
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "settings", s, "url", s.DatabaseURL)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "settings", s, "url", s.DatabaseURL)
	fmt.Fprintf(&out, "%v %+v %#v %s %q", s, s, s, s.DatabaseURL, s.HTTP.AdminKey)
	require.NotContains(t, out.String(), secret)
	require.Contains(t, out.String(), "database_url: postgres://bell:hidden@db:5432/bell?sslmode=disable&sslpassword=hidden # SCHOOLBELL_DATABASE_URL\n")
	require.Contains(t, out.String(), "addr=s2%3A26379&master_name=m")
	require.Equal(t, secret, string(s.HTTP.AdminKey))
}

func TestWhatIsPrintedLoadsAgain(t *testing.T) {
	t.Parallel()
	s := load(t, world("senders: {'1': {kind: relay, url: 'https://h/push'}, log: {kind: log}}\ndefault_sender: '1'\ninstance_id: 'true'\n", "SCHOOLBELL_DATABASE_URL=postgres://h/d", "SCHOOLBELL_REDIS_URL=redis://h"))
	var out strings.Builder
	require.NoError(t, s.Print(&out))
	again := load(t, world(out.String()))
	s.origins, again.origins = nil, nil
	require.Equal(t, s, again)
}

func TestDatabaseOnASocket(t *testing.T) {
	t.Parallel()
	const url = "postgres:///bell?host=%2Fvar%2Frun%2Fpostgresql&port=5433&user=pa"
	s := load(t, world("", "SCHOOLBELL_DATABASE_URL="+url+"&password=pa55"))
	require.Equal(t, Secret(url+"&password=pa55"), s.DatabaseURL)
	var out strings.Builder
	require.NoError(t, s.Print(&out))
	require.Contains(t, out.String(), "database_url: postgres:///bell?host=%2Fvar%2Frun%2Fpostgresql&password=hidden&port=5433&user=pa # SCHOOLBELL_DATABASE_URL\n")
	require.NotContains(t, out.String(), "pa55")
}

// TestAWebhookShowsItsHostAlone: whoever has the whole address may post.
func TestAWebhookShowsItsHostAlone(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"https://discord.com/api/webhooks/1/pa55?wait=pa55#pa55": "webhook_url: https://discord.com/(hidden)",
		"https://u:pa55@h:8443/pa55":                             "webhook_url: https://h:8443/(hidden)",
		"":                                                       "webhook_url: \"\"",
	} {
		s := Default()
		s.Alerts.WebhookURL = Secret(url)
		var out strings.Builder
		require.NoError(t, s.Print(&out))
		require.Contains(t, out.String(), want)
		require.NotContains(t, out.String(), "pa55")
	}
}

func TestPrintedAsJSON(t *testing.T) {
	t.Parallel()
	s := load(t, world("senders: {'a.b': {kind: relay, url: 'https://h/push?key=pa55', token: pa55}}\nquota: {limit: 50}\n", "SCHOOLBELL_DISPATCH_PACE=90s"))
	var out strings.Builder
	require.NoError(t, s.PrintJSON(&out))
	require.NotContains(t, out.String(), "pa55")
	var got struct {
		Settings map[string]any    `json:"settings"`
		From     map[string]string `json:"from"`
	}
	require.NoError(t, json.Unmarshal([]byte(out.String()), &got))
	require.Equal(t, map[string]any{"limit": 50.0, "rest": "3m", "headroom": 0.0}, got.Settings["quota"])
	require.Equal(t, "1m30s", got.Settings["dispatch"].(map[string]any)["pace"])
	require.Equal(t, "Asia/Seoul", got.Settings["timezone"])
	relay := got.Settings["senders"].(map[string]any)["a.b"].(map[string]any)
	require.Equal(t, "relay", relay["kind"])
	require.Equal(t, "(hidden)", relay["token"])
	require.Equal(t, "schoolbell.yaml:2", got.From["quota.limit"])
	require.Equal(t, "schoolbell.yaml:1", got.From["senders.a.b.kind"])
	require.Equal(t, "SCHOOLBELL_DISPATCH_PACE", got.From["dispatch.pace"])
	require.Equal(t, "default", got.From["timezone"])
}

func TestEveryFlagNamesASetting(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, f := range Flags() {
		require.False(t, seen[f.Name], f.Name)
		seen[f.Name] = true
		require.NotContains(t, f.Path, "key")
	}
	require.True(t, seen["database-url"] && seen["redis-url"] && seen["http-listen"] && seen["quota-limit"])
}
