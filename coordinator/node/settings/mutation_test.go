//go:build mutations

package settings

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAMutationIsKnownOrRefused(t *testing.T) {
	load := func(name string) error {
		_, err := Load(LoadArgs{ReadFile: func(string) ([]byte, error) { return nil, os.ErrNotExist },
			Environ: []string{"SCHOOLBELL_MUTATE=" + name}, InstanceID: "one"})
		return err
	}
	require.NoError(t, load(""))
	for _, name := range mutations {
		require.NoError(t, load(name))
	}
	require.ErrorContains(t, load("no-rest"), "SCHOOLBELL_MUTATE: no such mutation; write one of no-provisional-rest, no-ledger-floors, lease-end-after-call, settle-twice, claim-unfenced")
}
