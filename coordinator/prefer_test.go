package coordinator

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func membersNamed(n int) []string {
	var live []string
	for i := range n {
		live = append(live, fmt.Sprintf("replica-%d", i))
	}
	return live
}

// chosen are the members that prefer the school.
func chosen(school string, live []string) []string {
	var who []string
	for _, m := range live {
		if preferred(m, school, live) {
			who = append(who, m)
		}
	}
	return who
}

func TestExactlyOneMemberPrefersASchool(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 5; n++ {
		live := membersNamed(n)
		for i := range 1000 {
			require.Len(t, chosen(fmt.Sprintf("school-%d", i), live), 1)
		}
	}
}

func TestSchoolsSpreadEvenlyOverMembers(t *testing.T) {
	t.Parallel()
	const schools = 1000
	for n := 3; n <= 5; n++ {
		live, share := membersNamed(n), map[string]int{}
		for i := range schools {
			share[chosen(fmt.Sprintf("school-%d", i), live)[0]]++
		}
		for _, m := range live {
			require.InDelta(t, schools/n, share[m], float64(schools/n)*0.25, "%s of %d members", m, n)
		}
	}
}

func TestALeavingMemberMovesOnlyItsOwnSchools(t *testing.T) {
	t.Parallel()
	live := membersNamed(4)
	for _, gone := range live {
		rest := slices.DeleteFunc(slices.Clone(live), func(m string) bool { return m == gone })
		for i := range 1000 {
			school := fmt.Sprintf("school-%d", i)
			before, after := chosen(school, live), chosen(school, rest)
			require.Len(t, after, 1)
			if before[0] != gone {
				require.Equal(t, before, after)
			}
		}
	}
}

func TestAReplicaThatKnowsNobodyPrefersItself(t *testing.T) {
	t.Parallel()
	require.True(t, preferred("replica-0", "A", nil))
	require.True(t, preferred("replica-0", "A", []string{"replica-0"}))
}
