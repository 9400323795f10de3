package verdict

import "time"

// judgeRule checks the sending rule from arrivals alone: at most Limit attempts
// of a school between two silences of at least Rest, where a silence begins
// when the last call so far has ended and ends when the next message comes in.
//
// Every arrival is an attempt, whatever was answered. The check is greedy: it
// counts from the first arrival, begins anew after each silence that is long
// enough, and where an attempt comes too early after the limit, that is one
// violation and the count begins anew with it, so that one short rest is told
// once. worst_count does not begin anew there: it is the whole count between
// two true silences.
//
// A silence below the limit (nothing to send) begins the count anew as well.
// The sender's own ledger is stricter there, but the log cannot show that it
// is: attempts that were claimed and never came in are missing from it.
func (j *Judge) judgeRule(v *Verdict, lines *violations, schools []*school) {
	v.Rule.Limit, v.Rule.RestMS = j.cfg.Rule.Limit, j.cfg.Rule.Rest.Milliseconds()
	var least time.Duration // to spare, of the shortest rest so far
	var lags []time.Duration
	for _, s := range schools {
		rule := j.rule(s.name)
		var (
			inCycle int   // attempts since the count began anew
			between int   // attempts since the last silence that was long enough
			end     int64 // when the last call so far ended
		)
		for i := range s.arrivals {
			a := &s.arrivals[i]
			if a.excused {
				continue // counted as late; see judgeLateness
			}
			silence := time.Duration(a.t - end)
			if inCycle >= rule.Limit {
				spare := silence - rule.Rest
				if v.Rule.ShortestRestMS == nil || spare < least {
					least = spare
					ms := floorMS(silence)
					v.Rule.ShortestRestMS = &ms
				}
				v.Rule.Cycles++
				if spare < 0 {
					v.Rule.Violations++
					lines.of(s.name, "", a.t, "rule: school %s sent attempt %d of %d at %s, %v after the last call's end, and had to rest %v (batch %s)",
						s.name, between+1, rule.Limit, instant(a.t), silence, rule.Rest, j.batchName(a.batch))
				} else if lag, ok := j.lag(a, end+int64(rule.Rest)); ok {
					lags = append(lags, lag)
				}
				inCycle = 0
			}
			if between > 0 && silence >= rule.Rest {
				inCycle, between = 0, 0
			}
			inCycle++
			between++
			v.Rule.WorstCount = max(v.Rule.WorstCount, between)
			// Its end is not known where it is still being answered: it came in at least.
			end = max(end, a.t, a.end)
		}
	}
	v.ResumeLagMS = percentiles(lags)
}

// lag is how long after the rest's end the school went on, if there was work:
// only a first attempt is known to have been due, from its notice's acceptance.
func (j *Judge) lag(a *arrival, restEnd int64) (time.Duration, bool) {
	if a.attempt != 1 {
		return 0, false
	}
	if n := j.notices[j.keep[a.message].notice]; !n.At.IsZero() && n.At.UnixNano() > restEnd {
		return 0, false
	}
	return time.Duration(a.t - restEnd), true
}

func floorMS(d time.Duration) int64 {
	ms := d.Milliseconds() // towards zero
	if d < 0 && d%time.Millisecond != 0 {
		ms--
	}
	return ms
}
