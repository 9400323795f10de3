package coordinator

import (
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/sender"
)

func TestEveryClassOfASenderHasItsOutcome(t *testing.T) {
	t.Parallel()
	want := map[sender.Class]school.Outcome{
		sender.Accepted:      school.Accepted,
		sender.Gone:          school.Gone,
		sender.Rejected:      school.Rejected,
		sender.Mismatch:      school.Mismatch,
		sender.Throttled:     school.Throttled,
		sender.Unavailable:   school.Unavailable,
		sender.Misconfigured: school.Misconfigured,
		sender.NotSent:       school.NotSent,
		sender.Unknown:       school.Unknown,
	}
	for _, class := range sender.Classes() {
		t.Run(class.String(), func(t *testing.T) {
			t.Parallel()
			got, err := outcomeOf(sender.Result{Class: class})
			require.NoError(t, err)
			require.Contains(t, want, class, "a class that nobody thought of")
			require.Equal(t, want[class], got)

			uncertain := sender.Result{Class: class, OutcomeUnknown: class == sender.Unavailable}
			got, err = outcomeOf(uncertain)
			require.NoError(t, err)
			require.Equal(t, uncertain.Uncertain(), got == school.Unknown, "what the sender cannot say, the domain must not claim")
		})
	}
}

func TestAClassThatIsNoneHasNoOutcome(t *testing.T) {
	t.Parallel()
	for _, class := range []sender.Class{0, sender.Unknown + 1, -1} {
		_, err := outcomeOf(sender.Result{Class: class})
		require.Error(t, err)
	}
}
