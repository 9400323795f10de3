package verdict

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// judgeLateness finds arrivals that had lost their right to come, and claims
// that had. An arrival is late after its batch's send_deadline, or once a
// higher fence of its school has arrived.
//
// One case cannot be prevented by any lease: a process that is stopped after
// its last look at the clock and before the write sends when it goes on. So an
// arrival whose owner was paused between claim and arrival is counted and
// excused, up to the batches that the paused owners had unsettled; the rule
// leaves it out. The same goes for a machine that gave nobody time, but measured
// more strictly, since nobody planned it and it happens all the time in a small
// way: it must have stood still for at least as long as the arrival came late.
func (j *Judge) judgeLateness(v *Verdict, lines *violations, schools []*school) {
	for _, s := range schools {
		var highest, since int64 // since when it has been the highest
		for i := range s.arrivals {
			a := &s.arrivals[i]
			b := &j.batches[a.batch]
			a.excused = false
			var why string
			switch {
			case a.fence > 0 && a.fence < highest:
				why = "a higher fence had arrived"
			case !b.SendDeadline.IsZero() && a.t > b.SendDeadline.UnixNano():
				why = "its send_deadline had passed"
			}
			takenOver := since
			if a.fence > highest {
				highest, since = a.fence, a.t
			}
			if why == "" {
				continue
			}
			v.LateAfterLease++
			if a.excused = j.stoppedOnTheWay(a) || j.stalledOnTheWay(a, takenOver); a.excused {
				v.LateByPause++
				continue
			}
			lines.of(s.name, "", a.t, "late: school %s, batch %s with fence %d arrived at %s, %s", s.name, j.batchName(a.batch), a.fence, instant(a.t), why)
		}
	}
	if v.LateByPause > v.LateBound {
		lines.add("late: %d arrivals of owners that were stopped on the way, and only %d messages were in their hands", v.LateByPause, v.LateBound)
	}
	j.judgeClaims(v, lines)
}

// judgeClaims finds batches claimed after a higher fence had claimed, or where it
// is known, after a higher fence had been given.
func (j *Judge) judgeClaims(v *Verdict, lines *violations) {
	bySchool := map[string][]Batch{}
	for _, b := range j.batches {
		if b.ID != "" {
			bySchool[b.School] = append(bySchool[b.School], b)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(bySchool)) {
		batches, terms := bySchool[name], j.terms[name]
		slices.SortFunc(batches, func(a, b Batch) int {
			return cmp.Or(a.ClaimedAt.Compare(b.ClaimedAt), cmp.Compare(a.Fence, b.Fence))
		})
		slices.SortFunc(terms, func(a, b Term) int { return a.OpenedAt.Compare(b.OpenedAt) })
		var highest int64
		what := "had claimed"
		for _, b := range batches {
			for len(terms) > 0 && terms[0].OpenedAt.Before(b.ClaimedAt) {
				if terms[0].Fence > highest {
					highest, what = terms[0].Fence, "had been given at "+instant(terms[0].OpenedAt.UnixNano())
				}
				terms = terms[1:]
			}
			if b.Fence < highest {
				v.FencedWritesTaken++
				lines.of(name, "", b.ClaimedAt.UnixNano(), "fence: school %s, batch %s was claimed with fence %d at %s, after fence %d %s", name, b.ID, b.Fence, instant(b.ClaimedAt.UnixNano()), highest, what)
			} else if b.Fence > highest {
				highest, what = b.Fence, "had claimed"
			}
		}
	}
}

// stoppedOnTheWay reports whether the arrival's owner was paused at some time
// between the claim and the arrival, by the run's own faults.
func (j *Judge) stoppedOnTheWay(a *arrival) bool {
	b := &j.batches[a.batch]
	if b.ID == "" {
		return false
	}
	for i := range j.faults {
		f := &j.faults[i]
		if f.Kind == Pause && f.Target == b.Owner && f.At.UnixNano() <= a.t && (f.Until.IsZero() || !f.Until.Before(b.ClaimedAt)) {
			return true
		}
	}
	return false
}

// stalledOnTheWay reports whether the arrival would have come in time, had the
// machine not stood still between its claim and it. A school that was taken over
// before the batch's time was up is excused by nothing.
func (j *Judge) stalledOnTheWay(a *arrival, takenOver int64) bool {
	b := &j.batches[a.batch]
	if b.ID == "" || b.SendDeadline.IsZero() {
		return false
	}
	deadline := b.SendDeadline.UnixNano()
	if a.t <= deadline || a.fence > 0 && takenOver > 0 && takenOver < deadline {
		return false
	}
	return j.stalled(b.ClaimedAt.UnixNano(), a.t) >= time.Duration(a.t-deadline)
}

// stalled is how long the machine stood still between two moments.
func (j *Judge) stalled(from, to int64) (all time.Duration) {
	for i := range j.faults {
		if f := &j.faults[i]; f.Kind == Stall {
			all += time.Duration(max(0, min(to, f.Until.UnixNano())-max(from, f.At.UnixNano())))
		}
	}
	return all
}

// judgeStalls counts what stalls explain, each batch once. A call ends by its
// deadline although its answer is there but nobody had time to read it: that
// repeats a batch where the machine stood still for a good part of its time.
func (j *Judge) judgeStalls(v *Verdict) {
	for i := range j.faults {
		if f := &j.faults[i]; f.Kind == Stall {
			lasted := f.Until.Sub(f.At).Milliseconds()
			v.Stalls.Count++
			v.Stalls.TotalMS += lasted
			v.Stalls.LongestMS = max(v.Stalls.LongestMS, lasted)
		}
	}
	if v.Stalls.Count == 0 {
		return
	}
	for i := range j.batches {
		b := &j.batches[i]
		if b.ID == "" {
			continue
		}
		given := b.SendDeadline.Sub(b.ClaimedAt)
		stood := j.stalled(b.ClaimedAt.UnixNano(), max(b.SendDeadline.UnixNano(), b.SettledAt.UnixNano()))
		if stood > 0 {
			v.LateBound += b.Size
		}
		if stood >= given/stallShare {
			v.RepeatBound += b.Size
		}
	}
}

// stallShare is the part of a batch's time, from its claim to its deadline, that
// makes a stall the likely reason of a call that ended without its answer.
const stallShare = 4

// judgeFaults lists the faults, sums up what was in the hands of those that
// something was done to, and measures from each fault to the next send.
func (j *Judge) judgeFaults(v *Verdict) {
	start := j.cfg.Start
	if start.IsZero() && j.last >= j.first {
		start = time.Unix(0, j.first)
	}
	var all []time.Duration
	for i := range j.faults {
		f := &j.faults[i]
		line := FaultLine{AtMS: f.At.Sub(start).Milliseconds(), Kind: f.Kind, Target: f.Target, Detail: f.Detail}
		if !f.Until.IsZero() {
			line.UntilMS = f.Until.Sub(start).Milliseconds()
		}
		if f.Kind == Stall {
			v.Faults = append(v.Faults, line)
			continue
		}
		sizes, schools := j.unsettled(f)
		for _, n := range sizes {
			if f.Kind == Kill || f.Kind == Pause || f.Kind == PartitionDB {
				v.RepeatBound += n
			}
			if f.Kind == Pause {
				v.LateBound += n
			}
		}
		if f.Kind == PartitionDB {
			schools = j.held(f)
		}
		took := j.recovery(f, schools)
		if p := percentiles(took); p != nil {
			line.NextSendMS = &p.Max
		}
		all = append(all, took...)
		v.Faults = append(v.Faults, line)
	}
	slices.SortStableFunc(v.Faults, func(a, b FaultLine) int { return cmp.Compare(a.AtMS, b.AtMS) })
	v.RecoveryMS = percentiles(all)
	j.judgeStalls(v)
}

// unsettled are the sizes of the batches in the target's hands at the fault,
// and their schools. Of a process that is cut off from the database those count
// that were in its hands at any time until it was mended, and that another then
// took over (or nobody has settled): it could not record them.
func (j *Judge) unsettled(f *Fault) (sizes []int, schools []string) {
	if f.Unsettled != nil {
		return f.Unsettled, f.Schools
	}
	until := f.At
	if f.Kind == PartitionDB && f.Until.After(until) {
		until = f.Until
	}
	for _, b := range j.batches {
		if f.Kind == PartitionDB && !b.TakenOver && !b.SettledAt.IsZero() {
			continue
		}
		if b.ID != "" && b.Owner == f.Target && !b.ClaimedAt.After(until) && (b.SettledAt.IsZero() || b.SettledAt.After(f.At)) {
			sizes = append(sizes, b.Size)
			schools = append(schools, b.School)
		}
	}
	return sizes, append(schools, f.Schools...)
}

// held are the schools of which the target had a batch in its hands at the fault.
func (j *Judge) held(f *Fault) (schools []string) {
	for _, b := range j.batches {
		if b.ID != "" && b.Owner == f.Target && !b.ClaimedAt.After(f.At) && (b.SettledAt.IsZero() || b.SettledAt.After(f.At)) {
			schools = append(schools, b.School)
		}
	}
	return schools
}

// recovery measures from a fault to the next send: see the package's comment.
func (j *Judge) recovery(f *Fault, names []string) (took []time.Duration) {
	at := f.At.UnixNano()
	switch f.Kind {
	case Kill, Pause, PartitionDB, PartitionRedis:
		slices.Sort(names)
		for _, name := range slices.Compact(names) {
			s := j.schools[name]
			if s == nil {
				continue
			}
			var before int64
			for k := range s.arrivals {
				a := &s.arrivals[k]
				if a.t <= at {
					before = max(before, a.fence)
				} else if a.fence > before || f.Kind != Kill && f.Kind != Pause && j.batches[a.batch].ClaimedAt.After(f.At) {
					took = append(took, time.Duration(a.t-at))
					break
				}
			}
		}
	default:
		var first int64
		for _, s := range j.schools {
			i, _ := slices.BinarySearchFunc(s.arrivals, at+1, func(a arrival, t int64) int { return cmp.Compare(a.t, t) })
			for ; i < len(s.arrivals) && (first == 0 || s.arrivals[i].t < first); i++ {
				if a := &s.arrivals[i]; j.batches[a.batch].ClaimedAt.After(f.At) {
					first = a.t
				}
			}
		}
		if first > 0 {
			took = append(took, time.Duration(first-at))
		}
	}
	return took
}

func (j *Judge) batchName(i int32) string {
	if id := j.batches[i].ID; id != "" {
		return id
	}
	for id, k := range j.batchID { // only for a violation's line
		if k == i {
			return id
		}
	}
	return "?"
}
