package verdict

// judgeDelivery compares what was accepted for sending with what the receiver
// accepted.
func (j *Judge) judgeDelivery(v *Verdict, lines *violations, schools []*school) {
	for i := range j.keep {
		m := &j.keep[i]
		m.last, m.arrivals, m.taken, m.learnt, m.unexcused, m.refusal = 0, 0, 0, false, false, unanswered
	}
	for _, s := range schools {
		for i := range s.arrivals {
			j.take(v, &s.arrivals[i])
		}
	}
	names := j.names()
	arrived := make([]bool, len(j.keep)) // by the first message of each requeue
	for i := range j.keep {
		m := &j.keep[i]
		if m.taken > 0 {
			if m.requeue {
				arrived[m.base] = true
			} else {
				arrived[i] = true
			}
		}
		if m.taken > 1 {
			v.Repeated++
			if !m.unexcused {
				v.RepeatedAfterLoss++
			}
		}
	}
	for i := range j.keep {
		m := &j.keep[i]
		if m.requeue {
			continue
		}
		if arrived[i] {
			v.Arrived++
		}
		if m.expected {
			v.Accepted++
			j.missed(v, lines, names[i], m, arrived[i])
		} else if !m.maybe && m.arrivals > 0 && j.accepting {
			v.Strange++
			lines.of(j.schoolOf(m), names[i], m.last, "stranger: message %s arrived and was never accepted for sending", names[i])
		}
		if m.state == Skipped && m.arrivals > 0 {
			v.SkippedButArrived++
			lines.of(j.schoolOf(m), names[i], m.last, "skipped: message %s is SKIPPED and arrived", names[i])
		}
	}
	if n := v.Repeated - v.RepeatedAfterLoss; n > v.RepeatBound {
		lines.add("repeated: %d messages were accepted more than once, and kills and pauses explain %d", n, v.RepeatBound)
		shown := 0
		for i := range j.keep {
			if m := &j.keep[i]; m.unexcused && shown < 5 {
				shown++
				lines.of(j.schoolOf(m), names[i], m.last, "repeated: message %s was accepted %d times, at last at %s (school %s)", names[i], m.taken, instant(m.last), j.schoolOf(m))
			}
		}
	}
}

// take counts one arrival, in the order of time.
func (j *Judge) take(v *Verdict, a *arrival) {
	m := &j.keep[a.message]
	m.arrivals++
	m.last = a.t
	switch a.answer {
	case unanswered:
		v.UnansweredArrivals++
	case accepted:
		m.taken++
		m.unexcused = m.unexcused || m.learnt
		m.learnt = m.learnt || !a.lost
	case dropped:
		m.learnt = m.learnt || !a.lost
	case final, retryable:
		m.refusal = a.answer
	}
}

// missed judges a recipient that was accepted for sending. It is lost unless
// the receiver accepted it or its final state says why not:
//
//   - SKIPPED and PERMANENT_FAIL say so by themselves.
//   - FAIL says so if the receiver refused it: nobody else knows of a device
//     that it is gone.
//   - SUCCESS says the opposite.
//   - A state that has not ended says that it is still to come: it is waiting,
//     and the run has not ended well.
//   - Without a state the log has to say it: the receiver refused it for good,
//     or as often as retries allow.
func (j *Judge) missed(v *Verdict, lines *violations, name string, m *message, arrived bool) {
	switch m.state {
	case Pending, InProgress, RetryPending:
		v.Waiting++
		if !j.cfg.Unfinished {
			lines.of(j.schoolOf(m), name, m.last, "waiting: message %s has not come to an end (school %s)", name, j.schoolOf(m))
		}
		return
	}
	if arrived {
		return
	}
	switch m.state {
	case Skipped, PermanentFail:
		return
	case Fail:
		if m.refusal != unanswered {
			return
		}
		lines.of(j.schoolOf(m), name, m.last, "lost: message %s is FAIL and the receiver never saw it", name)
	case Success:
		lines.of(j.schoolOf(m), name, m.last, "lost: message %s is SUCCESS and the receiver never accepted it", name)
	default:
		if m.refusal == final || int(m.arrivals) > j.cfg.Retries {
			return
		}
		if m.arrivals > 0 {
			lines.of(j.schoolOf(m), name, m.last, "lost: message %s arrived %d times, was never accepted and has no final state", name, m.arrivals)
		} else {
			lines.of(j.schoolOf(m), name, m.last, "lost: message %s never arrived", name)
		}
	}
	v.Lost++
}

// judgeCounts checks that a notice's counts are disjoint and add up, and where
// its recipients' states are known, that they are the same.
func (j *Judge) judgeCounts(v *Verdict, lines *violations) {
	if len(j.counts) == 0 {
		return
	}
	type sums struct{ known, success, fail, permanent, skipped int }
	states := make([]sums, len(j.notices))
	for i := range j.keep {
		m := &j.keep[i]
		if m.state == 0 || m.requeue {
			continue
		}
		s := &states[m.notice]
		s.known++
		switch m.state {
		case Success:
			s.success++
		case Fail:
			s.fail++
		case PermanentFail:
			s.permanent++
		case Skipped:
			s.skipped++
		}
	}
	for _, c := range j.counts {
		sum := c.Waiting + c.InProgress + c.RetryPending + c.Success + c.Fail + c.RetrySuccess + c.RetryFail + c.PermanentFail + c.SkippedAtAll
		var n Notice
		var s sums
		if i, ok := j.notice[c.Notice]; ok {
			n, s = j.notices[i], states[i]
		}
		switch {
		case sum != c.Total:
			lines.add("counts: notice %s has %d recipients and its counts add up to %d", c.Notice, c.Total, sum)
		case n.ID != "" && n.Total != c.Total:
			lines.add("counts: notice %s has %d recipients and was accepted with %d", c.Notice, c.Total, n.Total)
		case s.known == c.Total && (s.success != c.Success+c.RetrySuccess || s.fail != c.Fail+c.RetryFail ||
			s.permanent != c.PermanentFail || s.skipped != c.SkippedAtAll):
			lines.add("counts: notice %s counts %d success, %d fail, %d permanent, %d skipped; its recipients are %d, %d, %d, %d", c.Notice,
				c.Success+c.RetrySuccess, c.Fail+c.RetryFail, c.PermanentFail, c.SkippedAtAll, s.success, s.fail, s.permanent, s.skipped)
		default:
			continue
		}
		v.CountsWrong++
	}
}

// schoolOf is the school of a message's notice; "" where no notice was told of.
func (j *Judge) schoolOf(m *message) string { return j.notices[m.notice].School }

// names is ids the other way round.
func (j *Judge) names() []string {
	names := make([]string, len(j.keep))
	for id, i := range j.ids {
		names[i] = id
	}
	return names
}
