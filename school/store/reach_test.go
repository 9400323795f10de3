package store_test

import (
	"fmt"
	"net/url"
	"os"
	"os/user"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/deploy/local/localtest"
	"schoolbell/school"
	"schoolbell/school/store"
)

// TestWhyADatabaseCannotBeOpened: a wrong password, a database that nobody made
// and a server that is away are three things to do, so they are three errors in
// words of their own, on TCP with and without TLS tried first and on a socket.
func TestWhyADatabaseCannotBeOpened(t *testing.T) {
	t.Parallel()
	server := localtest.OwnPostgres(t, local.PostgresConfig{Fast: true, Settings: map[string]string{"unix_socket_directories": "."}})
	admin := connect(t, server.URL("postgres"))
	setting := func(name string) string { return query(t, admin, "SHOW "+name)[0][0] }
	me, err := user.Current()
	require.NoError(t, err)
	exec(t, admin, `CREATE USER bell PASSWORD 'r1ght'`)
	exec(t, admin, `CREATE USER stranger PASSWORD 'r1ght'`)
	exec(t, admin, `CREATE DATABASE bell OWNER bell`)
	exec(t, admin, `CREATE DATABASE closed`)
	exec(t, admin, `REVOKE CONNECT ON DATABASE closed FROM PUBLIC`)
	// Debian's way: peer on the socket, a password on TCP.
	require.NoError(t, os.WriteFile(setting("hba_file"), []byte("local all all peer map=m\nhost all postgres 127.0.0.1/32 trust\nhost all stranger 127.0.0.1/32 reject\nhost all all 127.0.0.1/32 scram-sha-256\n"), 0o600))
	require.NoError(t, os.WriteFile(setting("ident_file"), []byte("m "+me.Username+" bell\n"), 0o600))
	query(t, admin, `SELECT pg_reload_conf()::text`)

	tcp := func(user, database string) string {
		return fmt.Sprintf("postgres://%s@%s/%s", user, server.Addr(), database)
	}
	_, port, _ := strings.Cut(server.Addr(), ":")
	socket := func(user, database, directory string) string {
		return fmt.Sprintf("postgres:///%s?user=%s&host=%s&port=%s", database, user, url.QueryEscape(directory), port)
	}
	data := setting("data_directory")
	nothing, free := t.TempDir(), localtest.Proxy(t, server.Addr())
	gone := free.Addr()
	require.NoError(t, free.Close())
	for name, c := range map[string]struct {
		url  string
		kind error
		want string
	}{
		"wrong password":         {tcp("bell:pa55", "bell"), store.ErrLogin, `the server at ` + server.Addr() + ` refused the login: password authentication failed for user "bell" (SQLSTATE 28P01); check the user and the password`},
		"no user":                {tcp("nobody:pa55", "bell"), store.ErrLogin, `the server at ` + server.Addr() + ` refused the login: password authentication failed for user "nobody" (SQLSTATE 28P01); check the user and the password`},
		"refused by pg_hba.conf": {tcp("stranger:r1ght", "bell"), store.ErrLogin, `the server at ` + server.Addr() + ` refused the login: pg_hba.conf rejects connection for host "127.0.0.1", user "stranger", database "bell", no encryption (SQLSTATE 28000); check the user and the password, and what pg_hba.conf lets in`},
		"not this database":      {tcp("bell:r1ght", "closed"), store.ErrLogin, `the server at ` + server.Addr() + ` refused the login: permission denied for database "closed" (SQLSTATE 42501); check the user and the password`},
		"no database":            {tcp("bell:r1ght", "bel"), store.ErrNoDatabase, `the server at ` + server.Addr() + ` has no database "bel"; make it (createdb bel) or name another`},
		"no server":              {"postgres://bell:pa55@" + gone + "/bell", school.ErrUnavailable, `no database server answers (dial tcp ` + gone + `: connect: connection refused); is PostgreSQL running there, and is the address right?`},
		"no TLS":                 {tcp("bell:r1ght", "bell") + "?sslmode=require", school.ErrUnavailable, `the server at ` + server.Addr() + ` cannot be used: server refused TLS connection`},
		"not this peer":          {socket("stranger", "bell", data), store.ErrLogin, `the server at ` + data + ` refused the login: Peer authentication failed for user "stranger" (SQLSTATE 28000); check the user and the password, and what pg_hba.conf lets in`},
		"no database, socket":    {socket("bell", "bel", data), store.ErrNoDatabase, `the server at ` + data + ` has no database "bel"; make it (createdb bel) or name another`},
		"no socket":              {socket("bell", "bell", nothing), school.ErrUnavailable, `no database server answers (dial unix ` + nothing + `/.s.PGSQL.` + port + `: connect: no such file or directory); is PostgreSQL running there, and is the address right?`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := store.Open(t.Context(), store.Config{URL: c.url})
			require.ErrorIs(t, err, c.kind)
			require.EqualError(t, err, c.want)
			_, err = store.Migrate(t.Context(), c.url)
			require.ErrorIs(t, err, c.kind)
			require.EqualError(t, err, "migrate up: "+c.want)
		})
	}

	steps, err := store.Migrate(t.Context(), socket("bell", "bell", data))
	require.NoError(t, err)
	require.Len(t, steps, store.SchemaVersion)
	db := open(t, socket("bell", "bell", data))
	require.NoError(t, db.Ping(t.Context()))
	require.Positive(t, accept(t, db, "A", 3))
}
