package alert

import (
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"

	"schoolbell/school"
)

// textOf says an alert in words: a headline and lines, of which as many are given
// as fit in most UTF-16 units. esc is applied to everything that people have named.
func textOf(a school.Alert, e Event, zone *time.Location, esc func(string) string, most int) string {
	clock := func(t time.Time) string { return esc(t.In(zone).Format("2006-01-02 15:04 MST")) }
	sender := func() string { return "Sender " + esc(named(e.Sender)) }
	lasting := a.At.Sub(a.Since) >= time.Minute
	since := ""
	if lasting {
		since = " since " + clock(a.Since)
	}
	var head string
	var lines []string
	more := 0
	seen := func() {
		lines = append(lines, number(a.Seen)+plural(int(a.Seen), " message", " messages")+", the last at school "+esc(named(e.School))+".")
	}
	switch Kind(a.Kind) {
	case SenderStopped:
		head = sender() + " is stopped" + since + ": its receiver does not let it in (" + esc(named(e.Code)) + ")."
		lines = append(lines, "Nothing is sent by it until it is let in; it is probed by itself. Look at its credentials, project and address.")
		if e.School != "" {
			lines = append(lines, "Found out with school "+esc(named(e.School))+".")
		}
	case SenderResumed:
		head = sender() + " goes on: its receiver lets it in again."
		if lasting {
			lines = append(lines, "It was stopped"+since+".")
		}
	case SenderUnanswered:
		head = sender() + " gets no answer from its receiver" + since + " (" + esc(named(e.Code)) + "), on any replica."
		lines = append(lines, "It is tried with one message at a time; what waits is sent when it answers.")
	case SenderAnswered:
		head = sender() + " is answered again."
		if lasting {
			lines = append(lines, "It was not"+since+".")
		}
	case SenderMismatch:
		head = sender() + ": devices belong to another sender (SENDER" + esc("_") + "ID" + esc("_") + "MISMATCH)."
		lines = append(lines, "Their recipients are PERMANENT"+esc("_")+"FAIL. Is this school's app of another Firebase project?")
		seen()
	case ThirdPartyAuth:
		head = sender() + ": the key for a platform is wrong (THIRD" + esc("_") + "PARTY" + esc("_") + "AUTH" + esc("_") + "ERROR)."
		lines = append(lines, "Renew the APNs key or the web push credentials of its Firebase project; until then devices of that platform are PERMANENT"+esc("_")+"FAIL.")
		seen()
	case UnregisteredBrake:
		head = sender() + ": an unusual share of devices came back as unregistered (" + strconv.Itoa(e.Unregistered) + " of " + strconv.Itoa(e.Size) + ")."
		lines = append(lines, "None of them was retired. Is the project or the receiver the right one?", "At school "+esc(named(e.School))+".")
	case FailuresDigest:
		if f := e.Failures; f != nil {
			head, lines, more = digestText(f, clock, esc)
		}
	}
	if head == "" {
		head = "Alert of kind " + esc(named(a.Kind)) + "."
	}
	return fit(head, lines, more, most)
}

func digestText(f *Failures, clock func(time.Time) string, esc func(string) string) (head string, lines []string, more int) {
	head = number(int64(f.Recipients)) + plural(f.Recipients, " recipient", " recipients") + " of " + number(int64(f.Schools)) + plural(f.Schools, " school", " schools") +
		" failed for good since " + clock(f.From) + "."
	for _, s := range f.Items {
		name := esc(named(s.School))
		if s.Name != "" {
			name = esc(named(s.Name)) + " (" + name + ")"
		}
		var codes []string
		for _, c := range s.Codes {
			word := esc(named(c.Code))
			if c.Reason != "" && c.Reason != c.Code {
				word += " " + esc(named(c.Reason))
			}
			codes = append(codes, word+": "+number(int64(c.Recipients)))
		}
		lines = append(lines, name+": "+strings.Join(codes, ", "))
	}
	return head, lines, f.MoreSchools
}

// fit joins the lines that fit. more is how many schools there are besides those
// of the lines, each of which is one where there can be more than fit.
func fit(head string, lines []string, more, most int) string {
	const room = len("\nand 1,000,000 more schools")
	text := head
	size := units(head)
	for i, line := range lines {
		n := 1 + units(line)
		if size+n > most-room {
			more += len(lines) - i
			break
		}
		text += "\n" + line
		size += n
	}
	if more > 0 {
		text += "\nand " + number(int64(more)) + " more" + plural(more, " school", " schools")
	}
	return text
}

func units(s string) int { return len(utf16.Encode([]rune(s))) }

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// number writes 1234567 as 1,234,567.
func number(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// maxName is how much of a name is shown.
const maxName = 60

// named makes a name one short line: without control characters, directions of
// writing and what takes no room, by which one text looks like another.
func named(s string) string {
	var b strings.Builder
	n := 0
	for _, r := range s {
		if n == maxName {
			b.WriteRune('…')
			break
		}
		if !unicode.IsPrint(r) {
			r = ' '
		}
		b.WriteRune(r)
		n++
	}
	if strings.TrimSpace(b.String()) == "" {
		return "?"
	}
	return b.String()
}

func plain(s string) string { return s }

// escapeDiscord takes the meaning from what is markup, a mention, a link or a
// time stamp in Discord, of whose text each ASCII punctuation may be escaped.
func escapeDiscord(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r < unicode.MaxASCII && (unicode.IsPunct(r) || unicode.IsSymbol(r)) {
			b.WriteByte('\\')
		}
		b.WriteRune(r)
	}
	return b.String()
}

var escapeSlack = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;").Replace
