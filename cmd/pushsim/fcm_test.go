package main

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
	"schoolbell/sender/fcm"
)

// A sender with nothing but the files that the command wrote.
func TestItIsFCMOverTLSWithAServiceAccount(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	log, ca, account, tlsAddr := filepath.Join(dir, "log"), filepath.Join(dir, "ca.pem"), filepath.Join(dir, "account.json"), filepath.Join(dir, "tls-addr")
	stderr, _, stop := start(t, "--log", log, "--tls-listen", "127.0.0.1:0", "--tls-addr-file", tlsAddr, "--tls-ca", ca,
		"--service-account", account, "--project", "school-1", "--outcomes", "UNREGISTERED=1")
	for _, file := range []string{tlsAddr, account} {
		require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, 10*time.Second, 5*time.Millisecond)
	}
	addr, err := os.ReadFile(tlsAddr)
	require.NoError(t, err)
	authority, err := os.ReadFile(ca)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(authority))
	info, err := os.Stat(account)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	f, err := fcm.New(fcm.Config{Name: "f", Endpoint: "https://" + strings.TrimSpace(string(addr)), CredentialsFile: account, RootCAs: roots}, nil, nil)
	require.NoError(t, err)
	defer f.Close()
	c := &sender.Content{Title: "t", Body: "b"}
	got := f.Send(t.Context(), sender.Batch{ID: "b1", School: "A", Fence: 1, Messages: []sender.Message{
		{ID: "7.1", Notice: "7", Token: "mismatch-1", Content: c, Attempt: 1},
		{ID: "7.2", Notice: "7", Token: "device", Content: c, Attempt: 1},
	}})
	require.Equal(t, sender.Mismatch, got[0].Class, got)
	require.Equal(t, sender.Gone, got[1].Class, got)
	require.NoError(t, stop())
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	require.Contains(t, string(text), `"kind":"fcm","school":"A","notice":"7","message":"7.2"`)
	require.Contains(t, stderr.String(), "listening on https://")
}

func TestTLSMistakesAreTold(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--tls-listen", "nonsense"},
		{"--tls-listen", "127.0.0.1:0", "--tls-ca", filepath.Join(t.TempDir(), "no", "dir")},
		{"--service-account", filepath.Join(t.TempDir(), "no", "dir")},
	} {
		cmd := command()
		cmd.SetArgs(append([]string{"--listen", "127.0.0.1:0"}, args...))
		require.Error(t, cmd.ExecuteContext(t.Context()), args)
	}
}
