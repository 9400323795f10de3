package sender

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestOwnDataWinsAndChangesNothingElse(t *testing.T) {
	t.Parallel()
	c := &Content{Title: "t", Data: map[string]string{"a": "1", "b": "2"}}
	own := map[string]string{"b": "own", "c": "3"}

	merged := c.WithData(own)

	require.Equal(t, map[string]string{"a": "1", "b": "own", "c": "3"}, merged.Data)
	require.Equal(t, "t", merged.Title)
	require.Equal(t, map[string]string{"a": "1", "b": "2"}, c.Data, "the notice's data is shared")
	require.Equal(t, map[string]string{"b": "own", "c": "3"}, own)
}

func TestWithoutOwnDataTheContentStaysShared(t *testing.T) {
	t.Parallel()
	c := &Content{Data: map[string]string{"a": "1"}}
	require.Same(t, c, c.WithData(nil))
	require.Same(t, c, c.WithData(map[string]string{}))
	require.Equal(t, map[string]string{"a": "1"}, (&Content{}).WithData(map[string]string{"a": "1"}).Data)
}
