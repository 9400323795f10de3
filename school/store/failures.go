package store

import (
	"cmp"
	"slices"

	"schoolbell/school"
)

// failureCounts adds up failures that are counted in parts.
type failureCounts struct {
	counts map[[3]string]*school.FailureCount
}

// read adds the rows of one part: school, name, code, reason, count.
func (f *failureCounts) read(next func() bool, scan func(...any) error) error {
	for next() {
		var c school.FailureCount
		if err := scan(&c.School, &c.Name, &c.Code, &c.Reason, &c.Count); err != nil {
			return err
		}
		f.add(c)
	}
	return nil
}

func (f *failureCounts) add(c school.FailureCount) {
	key := [3]string{c.School, c.Code, string(c.Reason)}
	if was := f.counts[key]; was != nil {
		was.Count += c.Count
		return
	}
	if f.counts == nil {
		f.counts = map[[3]string]*school.FailureCount{}
	}
	f.counts[key] = &c
}

// sorted lists them, the most first.
func (f *failureCounts) sorted() []school.FailureCount {
	list := make([]school.FailureCount, 0, len(f.counts))
	for _, c := range f.counts {
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b school.FailureCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.School, b.School), cmp.Compare(a.Code, b.Code), cmp.Compare(a.Reason, b.Reason))
	})
	return list
}
