package fcm

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"schoolbell/sender/simulator"
)

func TestDefaults(t *testing.T) {
	t.Parallel()
	f := open(t, Config{Name: "f", Project: "p", Endpoint: "http://127.0.0.1:1"}, nil)
	require.Equal(t, 15*time.Second, f.Longest())
	require.Equal(t, 1000, f.cfg.InFlight)
	f = open(t, Config{Name: "f", Project: "p", Endpoint: "http://127.0.0.1:1", CallTimeout: 300 * time.Millisecond}, nil)
	require.Equal(t, 300*time.Millisecond, f.Longest())
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "account.json")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestWrongSettingsAreNamedAndNotShown(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t"
	const here = "http://127.0.0.1:1"
	for name, c := range map[string]struct {
		cfg  Config
		says string
	}{
		"nothing":               {Config{}, "credentials_file"},
		"no project":            {Config{Endpoint: here}, "project"},
		"a project with a path": {Config{Endpoint: here, Project: "p/../" + secret}, "project"},
		"no scheme":             {Config{Project: "p", Endpoint: "127.0.0.1:1"}, "endpoint"},
		"other scheme":          {Config{Project: "p", Endpoint: "ftp://h:1"}, "endpoint"},
		"a path":                {Config{Project: "p", Endpoint: here + "/v1"}, "endpoint"},
		"a password":            {Config{Project: "p", Endpoint: "http://u:" + secret + "@h:1"}, "endpoint"},
		"negative timeout":      {Config{Project: "p", Endpoint: here, CallTimeout: -1}, "call_timeout"},
		"negative in flight":    {Config{Project: "p", Endpoint: here, InFlight: -1}, "in_flight"},
		"no file":               {Config{CredentialsFile: filepath.Join(t.TempDir(), "none.json")}, "credentials_file"},
		"no JSON":               {Config{CredentialsFile: write(t, secret)}, "no JSON"},
		"no type":               {Config{CredentialsFile: write(t, `{"private_key":"`+secret+`"}`)}, "type"},
		"a client's secret":     {Config{CredentialsFile: write(t, `{"type":"installed","client_secret":"`+secret+`"}`)}, "type"},
		"a broken key":          {Config{Project: "p", CredentialsFile: write(t, `{"type":"service_account","private_key":7,"client_email":"`+secret+`"}`)}, "service_account"},
		"a token in the clear":  {Config{Project: "p", Endpoint: "http://fcm.example:80", CredentialsFile: write(t, `{}`)}, "in the clear"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.cfg.Name = "main"
			f, err := New(c.cfg, nil, prometheus.NewRegistry())
			if f != nil {
				f.Close()
			}
			require.ErrorContains(t, err, "fcm main: ")
			require.ErrorContains(t, err, c.says)
			require.NotContains(t, err.Error(), secret)
		})
	}
}

func TestTheProjectOfTheCredentials(t *testing.T) {
	t.Parallel()
	text, err := simulator.ServiceAccount("theirs", "http://127.0.0.1:1/token")
	require.NoError(t, err)
	f := open(t, Config{Name: "f", Endpoint: "https://127.0.0.1:1", CredentialsFile: write(t, string(text))}, nil)
	require.Equal(t, "theirs", f.cfg.Project)
	f = open(t, Config{Name: "f", Project: "ours", Endpoint: "https://127.0.0.1:1", CredentialsFile: write(t, string(text))}, nil)
	require.Equal(t, "ours", f.cfg.Project)
}

func TestSendersShareTheirMetrics(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	for _, name := range []string{"a", "b"} {
		f, err := New(Config{Name: name, Project: "p", Endpoint: "http://127.0.0.1:1"}, nil, reg)
		require.NoError(t, err)
		f.Close()
	}
	reg = prometheus.NewRegistry()
	require.NoError(t, reg.Register(prometheus.NewGauge(prometheus.GaugeOpts{Name: "schoolbell_fcm_connections", Help: "x"})))
	_, err := New(Config{Name: "a", Project: "p", Endpoint: "http://127.0.0.1:1"}, nil, reg)
	require.ErrorContains(t, err, "metrics")
}

func TestEndpoints(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"https://fcm.googleapis.com":  "https://fcm.googleapis.com",
		"https://fcm.googleapis.com/": "https://fcm.googleapis.com",
		"http://localhost:80":         "http://localhost",
		"https://[::1]:443":           "https://[::1]",
		"https://localhost:80":        "https://localhost:80",
		"http://[::1]:9099":           "http://[::1]:9099",
	} {
		e, err := parseEndpoint(in)
		require.NoError(t, err)
		require.Equal(t, want, e.base())
		require.Contains(t, e.address(), ":", "who is dialled has a port")
	}
	for host, is := range map[string]bool{"http://localhost": true, "http://127.0.0.9:1": true, "http://[::1]:1": true, "http://10.0.0.1:1": false, "http://fcm.example": false} {
		e, err := parseEndpoint(host)
		require.NoError(t, err)
		require.Equal(t, is, e.loopback(), host)
	}
}
