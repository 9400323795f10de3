package redislease_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"schoolbell/watchdog/redislease"
)

func TestParseURL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		url   string
		check func(t *testing.T, o *redis.UniversalOptions)
	}{
		{"redis://user:secret@r1:6380/3?pool_size=7", func(t *testing.T, o *redis.UniversalOptions) {
			require.Equal(t, []string{"r1:6380"}, o.Addrs)
			require.Equal(t, "user", o.Username)
			require.Equal(t, "secret", o.Password)
			require.Equal(t, 3, o.DB)
			require.Equal(t, 7, o.PoolSize)
			require.Nil(t, o.TLSConfig)
		}},
		{"rediss://r1", func(t *testing.T, o *redis.UniversalOptions) {
			require.Equal(t, []string{"r1:6379"}, o.Addrs)
			require.Equal(t, "r1", o.TLSConfig.ServerName)
		}},
		{"redis+sentinel://su:sp@s1:26379/2?master_name=mymaster&addr=s2:26379&username=u&password=p", func(t *testing.T, o *redis.UniversalOptions) {
			require.Equal(t, []string{"s1:26379", "s2:26379"}, o.Addrs)
			require.Equal(t, "mymaster", o.MasterName)
			require.Equal(t, 2, o.DB)
			require.Equal(t, []string{"su", "sp", "u", "p"}, []string{o.SentinelUsername, o.SentinelPassword, o.Username, o.Password})
			require.False(t, o.IsClusterMode)
		}},
		{"rediss+cluster://u:p@c1:7000?addr=c2:7001&max_redirects=5", func(t *testing.T, o *redis.UniversalOptions) {
			require.Equal(t, []string{"c1:7000", "c2:7001"}, o.Addrs)
			require.True(t, o.IsClusterMode)
			require.Equal(t, 5, o.MaxRedirects)
			require.NotNil(t, o.TLSConfig)
		}},
		{"redis+cluster://c1:7000", func(t *testing.T, o *redis.UniversalOptions) {
			require.True(t, o.IsClusterMode, "one address is enough for a cluster")
		}},
	} {
		t.Run(c.url, func(t *testing.T) {
			o, err := redislease.ParseURL(c.url)
			require.NoError(t, err)
			c.check(t, o)
		})
	}
}

func TestParseURLSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"":                          "no scheme",
		"localhost:6379":            "no scheme",
		"http://r1":                 `scheme "http"`,
		"redis+ring://r":            `scheme "redis+ring"`,
		"redis+sentinel://s1:26379": "master_name",
		"redis+sentinel://s1:26379?master_name=m&replica_only=true": "replicas, which lag",
		"redis+cluster://c1:7000?read_only=true":                    "replicas, which lag",
		"redis://:hunter2@r1:6379/zero":                             "database number",
		"redis://:hunter2@r1:6379?no_such_setting=1":                "unexpected option",
		"redis://user:hunter2@r1:not-a-port":                        "port",
		"redis+cluster://user:hunter2@c1:%zz":                       "redis URL",
		"redis+sentinel://user:hunter2@s1:port?master_name=m":       "port",
	} {
		_, err := redislease.ParseURL(url)
		require.ErrorContains(t, err, want, url)
		require.NotContains(t, err.Error(), "hunter2", "an error shows a password")
	}
}

func TestNewClientLeavesItsOptionsAlone(t *testing.T) {
	t.Parallel()
	o, err := redislease.ParseURL("redis://127.0.0.1:1?max_retries=5&read_timeout=30s")
	require.NoError(t, err)
	before := *o
	client := redislease.NewClient(o)
	require.NoError(t, client.Close())
	require.Equal(t, before, *o)

	single, ok := client.(*redis.Client)
	require.True(t, ok)
	got := single.Options()
	require.Zero(t, got.MaxRetries, "go-redis shows -1 as 0")
	require.True(t, got.ContextTimeoutEnabled)
	require.EqualValues(t, 1e9, got.ReadTimeout)
	require.Equal(t, 1, got.DialerRetries)
}
