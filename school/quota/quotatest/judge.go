package quotatest

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Sent is one batch as the receiver saw it.
type Sent struct {
	Start, End int64 // ms
	Size       int
}

// Judge counts the attempts between two silences of at least rest and returns a
// line for each stretch with more than limit. It knows nothing but the batches:
// an attempt may have happened at any moment of its batch, so a silence counts
// from the latest end before to the next start.
func Judge(sent []Sent, limit int, rest int64) []string {
	sent = slices.Clone(sent)
	slices.SortStableFunc(sent, func(a, b Sent) int { return cmp.Compare(a.Start, b.Start) })
	var wrong []string
	count, end := 0, int64(math.MinInt64)
	for i, b := range sent {
		if i > 0 && b.Start-end >= rest {
			count = 0
		}
		count += b.Size
		end = max(end, b.End)
		if count > limit {
			wrong = append(wrong, fmt.Sprintf("%d attempts of %d without a rest by %d", count, limit, b.Start))
		}
	}
	return wrong
}
