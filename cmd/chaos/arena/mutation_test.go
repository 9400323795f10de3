package arena

import (
	"bytes"
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/deploy/local"
	"schoolbell/sender/simulator"
)

// A program is broken on purpose only where it was built to be.
const mutate = "SCHOOLBELL_MUTATE"

// TestABrokenProgramIsFound takes the ledger's floors from a replica and lets Redis
// forget in the middle of a cycle: what nobody remembers is sent on top. The other
// defects need a chaos run each; see make mutations.
func TestABrokenProgramIsFound(t *testing.T) {
	broken, err := builder.Build(t.Context(), "schoolbell/cmd/schoolbell", "mutations")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // a build may take long on a busy machine
	defer cancel()

	for name, found := range map[string]bool{"": false, "no-ledger-floors": true} {
		settings := short()
		settings["SCHOOLBELL_DISPATCH_BATCH"] = "10"
		settings[mutate] = name
		a := open(t, Config{Program: broken, Replicas: 1, Limit: 40, Rest: time.Second, Settings: settings,
			Behaviour: simulator.Behaviour{Latency: simulator.Latency{Base: 100 * time.Millisecond}}})
		_, err := a.Post(ctx, "A", 120)
		require.NoError(t, err)
		until(ctx, t, "half a cycle has arrived", func() (bool, error) { return a.Receiver.Counts().Arrivals >= 20, nil })
		require.NoError(t, a.FlushRedis(ctx))
		require.NoError(t, a.WaitEnded(ctx))
		v, err := a.Verdict(ctx)
		require.NoError(t, err)
		require.Equal(t, found, v.Rule.Violations > 0, "%q: %v", name, v.Violations)
		require.Equal(t, found, !v.OK, "%q: %v", name, v.Violations)
		require.NoError(t, a.Replicas()[0].Kill())
	}

	code, said := serve(ctx, t, broken, "no-rest")
	require.Equal(t, 2, code, said)
	require.Contains(t, said, mutate+": no such mutation; write one of no-provisional-rest, no-ledger-floors, lease-end-after-call, settle-twice, claim-unfenced")
}

// TestAReleasedProgramCannotBeBroken looks into the program for what is not to be
// there.
func TestAReleasedProgramCannotBeBroken(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	text, err := os.ReadFile(program)
	require.NoError(t, err)
	require.True(t, bytes.Contains(text, []byte("claims_fenced_total")), "texts can be found in it")
	for _, name := range []string{mutate, "no-provisional-rest", "no-ledger-floors", "lease-end-after-call", "claim-unfenced", "FAILPOINT"} {
		require.False(t, bytes.Contains(text, []byte(name)), name)
	}
	code, said := serve(ctx, t, program, "no-ledger-floors")
	require.Equal(t, 2, code, said)
	require.Contains(t, said, "unknown variable")
}

// serve starts a program with a mutation, which it is to refuse.
func serve(ctx context.Context, t *testing.T, path, mutation string) (code int, said string) {
	t.Helper()
	var out bytes.Buffer
	p, err := local.StartProgram(ctx, local.ProgramConfig{Path: path, Args: []string{"serve", "--print-config"}, Env: []string{mutate + "=" + mutation}, Stdout: &out, Stderr: &out})
	require.NoError(t, err)
	code, err = p.Wait(ctx)
	require.NoError(t, err)
	require.NoError(t, p.Close())
	return code, out.String()
}
