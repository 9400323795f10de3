//go:build mutations

package store_test

import (
	"iter"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/school"
	"schoolbell/school/store"
)

// TestMutationsOfTheClaim claims under a term that is no longer the newest, and
// fills a cycle.
func TestMutationsOfTheClaim(t *testing.T) {
	recipients := func(n int) iter.Seq2[school.NewRecipient, error] {
		return func(yield func(school.NewRecipient, error) bool) {
			for i := range n {
				if !yield(school.NewRecipient{Token: "token-" + string(rune('a'+i))}, nil) {
					return
				}
			}
		}
	}
	claims := func(t *testing.T, db *store.DB) (fenced error, resting time.Duration) {
		_, err := db.Accept(t.Context(), &school.Notice{School: "A", Content: school.Content{Title: "T", Body: "B"}, Priority: school.Normal, Delivery: school.AtLeastOnce}, 0, recipients(4))
		require.NoError(t, err)
		claim := func(term school.Term, id string, n int) error {
			p, err := db.Page(t.Context(), term, n)
			require.NoError(t, err)
			rule := school.Rule{Limit: 4, Rest: time.Minute, Version: 1}
			return db.Claim(t.Context(), term, school.Claim{
				Batch: id, Sender: "log", Work: p.Work, Longest: time.Second, Record: time.Second, Rule: rule,
				Grant: school.Grant{Kind: school.Granted, Size: n, Cycle: 1, Attempted: 4, Filled: true, Rule: rule},
			})
		}
		old, err := db.OpenTerm(t.Context(), "A", "acq-1", "one")
		require.NoError(t, err)
		term, err := db.OpenTerm(t.Context(), "A", "acq-2", "two")
		require.NoError(t, err)
		fenced = claim(old, "b1", 1)
		require.NoError(t, claim(term, "b2", 1))
		term, err = db.OpenTerm(t.Context(), "A", "acq-3", "three")
		require.NoError(t, err)
		return fenced, term.Ledger.Resting
	}
	fenced, resting := claims(t, open(t, migrated(t)))
	require.ErrorIs(t, fenced, school.ErrFenced)
	require.Positive(t, resting)
	for _, name := range []string{"claim-unfenced", "lease-end-after-call", "no-provisional-rest"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SCHOOLBELL_MUTATE", name)
			url := migrated(t)
			open(t, url)
			fenced, resting := claims(t, open(t, url)) // what is broken already stays so
			if name == "no-provisional-rest" {
				require.ErrorIs(t, fenced, school.ErrFenced)
				require.Zero(t, resting)
			} else {
				require.NoError(t, fenced)
				require.Positive(t, resting)
			}
		})
	}
}
