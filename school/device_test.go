package school

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBrakeActsAboveBothNumbers(t *testing.T) {
	t.Parallel()
	rule := Brake{Percent: 30, Count: 20}
	for _, c := range []struct {
		gone, size int
		acts       bool
	}{
		{0, 0, false}, {0, 200, false}, {60, 200, false}, {61, 200, true}, {200, 200, true},
		{20, 20, false}, {21, 21, true}, {21, 25, true}, // few, but nearly all
		{21, 70, false}, {22, 70, true}, {1, 1, false},
	} {
		require.Equal(t, c.acts, rule.Acts(c.gone, c.size), "%d of %d", c.gone, c.size)
	}
	require.False(t, Brake{}.Acts(200, 200), "the zero brake never acts")
	require.False(t, Brake{Percent: 100}.Acts(200, 200))
	require.True(t, Brake{Percent: 99}.Acts(1, 1))
}

func TestValidateDevice(t *testing.T) {
	t.Parallel()
	text := func(s string) *string { return &s }
	for name, c := range map[string]struct {
		device NewDevice
		field  string
		size   bool
	}{
		"token alone":           {NewDevice{Token: "a"}, "", false},
		"all":                   {NewDevice{Token: "a", Ref: text("학생"), Topics: []string{"Board.3_~%-"}}, "", false},
		"no topics":             {NewDevice{Token: "a", Topics: []string{}}, "", false},
		"no token":              {NewDevice{}, "devices[3].token", false},
		"token of 4,097":        {NewDevice{Token: strings.Repeat("a", 4097)}, "devices[3].token", true},
		"token with a line end": {NewDevice{Token: "a\n"}, "devices[3].token", false},
		"ref of 256":            {NewDevice{Token: "a", Ref: text(strings.Repeat("r", 256))}, "devices[3].ref", true},
		"ref with NUL":          {NewDevice{Token: "a", Ref: text("\x00")}, "devices[3].ref", false},
		"topic empty":           {NewDevice{Token: "a", Topics: []string{"x", ""}}, "devices[3].topics[1]", false},
		"topic with a space":    {NewDevice{Token: "a", Topics: []string{"a b"}}, "devices[3].topics[0]", false},
		"2,001 topics":          {NewDevice{Token: "a", Topics: make([]string, 2001)}, "devices[3].topics", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireField(t, ValidateDevice(3, &c.device), c.field, c.size)
		})
	}
}
