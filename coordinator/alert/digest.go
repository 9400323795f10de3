package alert

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"schoolbell/school"
)

// Failing is what the store knows of recipients that failed for good.
type Failing interface {
	// NewFailures counts those since the last digest.
	NewFailures(ctx context.Context) (school.Failures, error)
	// TellFailures moves the digest past f, with the alert that tells of it where
	// body is not nil; false where another was first.
	TellFailures(ctx context.Context, f school.Failures, kind string, body []byte) (told bool, err error)
}

// Digest makes one alert of the recipients that have failed for good since the
// last one, if there are any. Run twice it tells nothing twice.
func Digest(ctx context.Context, store Failing) error {
	f, err := store.NewFailures(ctx)
	if err != nil {
		return fmt.Errorf("digest of failures: %w", err)
	}
	var body []byte
	if len(f.Counts) > 0 {
		if body, err = json.Marshal(Event{Failures: digestOf(f)}); err != nil {
			return fmt.Errorf("digest of failures: %w", err)
		}
	}
	if _, err := store.TellFailures(ctx, f, string(FailuresDigest), body); err != nil {
		return fmt.Errorf("digest of failures: %w", err)
	}
	return nil
}

// Bounds of a digest.
const (
	maxSchools = 20
	maxCodes   = 5
)

// digestOf sums up by school, the most first.
func digestOf(f school.Failures) *Failures {
	d := &Failures{From: f.From.UTC(), Until: f.Until.UTC(), Recipients: f.Recipients()}
	at := map[string]int{}
	var all []SchoolFailed
	for _, c := range f.Counts {
		i, known := at[c.School]
		if !known {
			i = len(all)
			at[c.School] = i
			all = append(all, SchoolFailed{School: c.School, Name: c.Name})
		}
		s := &all[i]
		s.Recipients += c.Count
		if len(s.Codes) < maxCodes { // they come with the most first
			s.Codes = append(s.Codes, CodeFailed{Code: c.Code, Reason: string(c.Reason), Recipients: c.Count})
		}
	}
	slices.SortStableFunc(all, func(a, b SchoolFailed) int {
		return cmp.Or(cmp.Compare(b.Recipients, a.Recipients), cmp.Compare(a.School, b.School))
	})
	d.Schools = len(all)
	d.Items = all[:min(len(all), maxSchools)]
	d.MoreSchools = len(all) - len(d.Items)
	return d
}
