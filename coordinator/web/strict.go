package web

import (
	"bytes"
	"encoding/json"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// jsonReader pulls the values of one JSON text, knowing what must come next, so
// that every complaint names the field as the caller wrote it, with indexes:
// recipients[3].token. encoding/json's reflection names neither the index nor
// an unknown field's place, takes names in any case, lets a field come twice
// and quietly mends broken UTF-8; here all of these are errors. Its token
// stream could carry the same checks, but costs 50 allocations for a line of an
// upload that is read twice; this one costs what the line holds. What is hard
// about JSON, escapes and numbers, is left to encoding/json, and a fuzz test
// compares the rest with it.
//
// It goes exactly as deep as the shapes it is asked for: nesting that nobody
// expects ends it at its first bracket.
type jsonReader struct {
	data   []byte
	pos    int
	inLine bool // data is one line of a stream: whoever reads it knows which
}

func newJSONReader(data []byte) *jsonReader { return &jsonReader{data: data} }

// path is the place of a value in a request. It becomes text only in a
// complaint.
type path struct {
	list  string // in list[index]; empty: in none
	index int
	name  string // of a member; empty: the object itself
	key   string // of an entry of data
	keyed bool
}

func recipientPath(i int) path { return path{list: "recipients", index: i} }

func devicePath(i int) path { return path{list: "devices", index: i} }

// member is a member of the object at p; of one that has a name itself, one level
// deeper.
func (p path) member(name string) path {
	if p.name != "" {
		return p.entry(name)
	}
	p.name = name
	return p
}

func (p path) entry(key string) path {
	p.key, p.keyed = key, true
	return p
}

func (p path) String() string {
	var parts []string
	if p.list != "" {
		parts = append(parts, p.list+"["+strconv.Itoa(p.index)+"]")
	}
	if p.name != "" {
		parts = append(parts, school.Printable(p.name))
	}
	if p.keyed {
		parts = append(parts, school.Printable(p.key))
	}
	return strings.Join(parts, ".")
}

func invalid(field, message string) error {
	return &api.Error{Code: api.InvalidArgument, Field: field, Message: message}
}

func (p path) invalid(message string) error { return invalid(p.String(), message) }

// invalid complains about the value at p. Of the whole, which has no name, it
// says that it is meant.
func (r *jsonReader) invalid(p path, message string) error {
	field := p.String()
	if field == "" && !r.inLine {
		message = "the body " + message
	}
	return invalid(field, message)
}

// next passes over white space and returns the byte after it; 0 at the end.
func (r *jsonReader) next() byte {
	for ; r.pos < len(r.data); r.pos++ {
		switch c := r.data[r.pos]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// syntax says where the text stops being JSON and what should have come; empty
// want: who knows.
func (r *jsonReader) syntax(p path, want string) error {
	if r.pos >= len(r.data) {
		return r.invalid(p, "is not JSON: it ends too early")
	}
	if want != "" {
		want = ": " + want
	}
	return r.invalid(p, "is not JSON at "+r.place()+want)
}

// place is where the reader stands: the byte for programs, line and column (in
// characters) for people, all from 1.
func (r *jsonReader) place() string {
	before := r.data[:r.pos]
	column := "column " + strconv.Itoa(utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])+1)
	if !r.inLine {
		column = "line " + strconv.Itoa(bytes.Count(before, []byte("\n"))+1) + ", " + column
	}
	return "byte " + strconv.Itoa(r.pos+1) + " (" + column + ")"
}

// expect takes one structural byte; want are all that may stand here.
func (r *jsonReader) expect(p path, c byte, want string) error {
	if r.next() != c {
		return r.syntax(p, "expected "+want)
	}
	r.pos++
	return nil
}

// null takes a null, if one is next.
func (r *jsonReader) null() bool { return r.next() == 'n' && r.word("null") }

func (r *jsonReader) word(w string) bool {
	if !bytes.HasPrefix(r.data[r.pos:], []byte(w)) {
		return false
	}
	r.pos += len(w)
	return true
}

// mistaken says that the value at hand is another than was asked for, or none.
func (r *jsonReader) mistaken(p path, message string) error {
	switch c := r.next(); {
	case c == '"', c == '{', c == '[', c == '-', '0' <= c && c <= '9':
		return r.invalid(p, message)
	case c == 't' && r.word("true"), c == 'f' && r.word("false"), c == 'n' && r.word("null"):
		return r.invalid(p, message)
	}
	return r.syntax(p, "it "+message)
}

// end makes sure that nothing follows the value.
func (r *jsonReader) end(p path) error {
	if r.next(); r.pos < len(r.data) {
		return r.invalid(p, "has something after its JSON value, at "+r.place())
	}
	return nil
}

// object reads an object of the shape and hands each name
// to member, which reads the value. It reports false for null.
func (r *jsonReader) object(p path, s shape, member func(name string, p path) error) (bool, error) {
	var seen uint64 // bit i: s.fields[i] was read
	return r.members(p, s.fields, func(name string) error {
		at := p.member(name)
		i := indexOf(s.fields, name)
		if i < 0 {
			return at.invalid(s.unknown())
		}
		if seen&(1<<i) != 0 {
			return at.invalid("is given twice")
		}
		seen |= 1 << i
		return member(name, at)
	})
}

func indexOf[S string | []byte](known []string, name S) int {
	for i, k := range known {
		if string(name) == k {
			return i
		}
	}
	return -1
}

// members reads any object. A name that is known is handed out without being
// copied. It reports false for null.
func (r *jsonReader) members(p path, known []string, member func(name string) error) (bool, error) {
	if r.null() {
		return false, nil
	}
	if r.next() != '{' {
		return false, r.mistaken(p, mustBeObject(p))
	}
	r.pos++
	if r.next() == '}' {
		r.pos++
		return true, nil
	}
	for {
		if r.next() != '"' {
			return false, r.syntax(p, "expected a name in double quotes")
		}
		name, err := r.literal(p, known)
		if err != nil {
			return false, err
		}
		if err := r.expect(p, ':', ":"); err != nil {
			return false, err
		}
		if err := member(name); err != nil {
			return false, err
		}
		if r.next() == ',' {
			r.pos++
			continue
		}
		return true, r.expect(p, '}', ", or }")
	}
}

// array reads an array and calls element for each index. It reports false for
// null. of says what it is an array of.
func (r *jsonReader) array(p path, of string, element func(i int) error) (bool, error) {
	if r.null() {
		return false, nil
	}
	if r.next() != '[' {
		return false, r.mistaken(p, "must be an array of "+of)
	}
	r.pos++
	if r.next() == ']' {
		r.pos++
		return true, nil
	}
	for i := 0; ; i++ {
		if err := element(i); err != nil {
			return false, err
		}
		if r.next() == ',' {
			r.pos++
			continue
		}
		return true, r.expect(p, ']', ", or ]")
	}
}

// literal reads the string whose quotation mark is next. One that is known is
// not copied.
func (r *jsonReader) literal(p path, known []string) (string, error) {
	start := r.pos
	escapes, ascii := false, true
	for r.pos++; r.pos < len(r.data); r.pos++ {
		switch c := r.data[r.pos]; {
		case c == '"':
			r.pos++
			return plain(p, r.data[start:r.pos], known, escapes, ascii)
		case c == '\\':
			escapes = true
			r.pos++
		case c < ' ':
			return "", r.syntax(p, `a line end or control character in a string has to be escaped, as \n`)
		case c >= utf8.RuneSelf:
			ascii = false
		}
	}
	r.pos = len(r.data)
	return "", r.syntax(p, "")
}

// plain is the text of a quoted string.
func plain(p path, quoted []byte, known []string, escapes, ascii bool) (string, error) {
	inner := quoted[1 : len(quoted)-1]
	if !ascii && !utf8.Valid(inner) {
		return "", p.invalid("is not valid UTF-8")
	}
	if !escapes {
		if i := indexOf(known, inner); i >= 0 {
			return known[i], nil
		}
		return string(inner), nil
	}
	if halfPair(inner) {
		return "", p.invalid("escapes half of a surrogate pair")
	}
	var s string
	if err := json.Unmarshal(quoted, &s); err != nil {
		return "", p.invalid("is not JSON: it escapes what cannot be escaped")
	}
	return s, nil
}

// halfPair reports whether a string escapes half of a surrogate pair, which
// encoding/json would mend with U+FFFD.
func halfPair(raw []byte) bool {
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 {
			return false
		}
		raw = raw[i:]
		first := escaped(raw)
		switch {
		case first < 0:
			raw = raw[min(2, len(raw)):] // \n and the like
		case utf16.IsSurrogate(first):
			if utf16.DecodeRune(first, escaped(raw[6:])) == utf8.RuneError {
				return true
			}
			raw = raw[12:]
		default:
			raw = raw[6:]
		}
	}
}

// escaped reads the \uXXXX that raw begins with; -1 if it does not.
func escaped(raw []byte) rune {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
		return -1
	}
	n, err := strconv.ParseUint(string(raw[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

// text reads a string. It reports false for null.
func (r *jsonReader) text(p path) (string, bool, error) {
	if r.null() {
		return "", false, nil
	}
	if r.next() != '"' {
		return "", false, r.mistaken(p, "must be a string")
	}
	s, err := r.literal(p, nil)
	return s, err == nil, err
}

// set reads a string into to and leaves it alone on null.
func (r *jsonReader) set(p path, to *string) error {
	s, ok, err := r.text(p)
	if ok {
		*to = s
	}
	return err
}

// flag reads true or false. It reports nil for null.
func (r *jsonReader) flag(p path) (*bool, error) {
	if r.null() {
		return nil, nil
	}
	b := r.next() == 't'
	if (b && r.word("true")) || (r.next() == 'f' && r.word("false")) {
		return &b, nil
	}
	return nil, r.mistaken(p, "must be true or false")
}

// number returns the text of a number.
func (r *jsonReader) number(p path, message string) (string, error) {
	if c := r.next(); c != '-' && (c < '0' || c > '9') {
		return "", r.mistaken(p, message)
	}
	start := r.pos
	for r.pos < len(r.data) && strings.IndexByte("+-.0123456789Ee", r.data[r.pos]) >= 0 {
		r.pos++
	}
	if !json.Valid(r.data[start:r.pos]) {
		r.pos = start
		return "", r.syntax(p, "this is not how JSON writes a number")
	}
	return string(r.data[start:r.pos]), nil
}

// integer reads a whole number. It reports nil for null.
func (r *jsonReader) integer(p path) (*int, error) {
	const message = "must be a whole number"
	if r.null() {
		return nil, nil
	}
	s, err := r.number(p, message)
	if err != nil {
		return nil, err
	}
	i, err := strconv.Atoi(s)
	if err != nil {
		return nil, p.invalid(message)
	}
	return &i, nil
}

// seconds reads a duration in seconds, to the millisecond. It reports nil for null.
func (r *jsonReader) seconds(p path) (*time.Duration, error) {
	if r.null() {
		return nil, nil
	}
	s, err := r.number(p, "must be a number of seconds")
	if err != nil {
		return nil, err
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.Abs(f) > 1e9 { // far beyond every bound, and no overflow below
		return nil, p.invalid("is out of range")
	}
	d := time.Duration(math.Round(f*1000)) * time.Millisecond
	return &d, nil
}

// rfc3339 is stricter than time.Parse, which takes a comma for the point and an
// hour of one digit.
var rfc3339 = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$`)

// time reads a moment. It reports the zero time for null.
func (r *jsonReader) time(p path) (time.Time, error) {
	s, ok, err := r.text(p)
	if err != nil || !ok {
		return time.Time{}, err
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil || !rfc3339.MatchString(s) {
		return time.Time{}, p.invalid("must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00")
	}
	if t.Year() < 2000 {
		return time.Time{}, p.invalid("lies before the year 2000")
	}
	return t.UTC(), nil
}

// strings reads an object of strings. It reports nil for null.
func (r *jsonReader) strings(p path) (map[string]string, error) {
	var m map[string]string
	_, err := r.members(p, nil, func(key string) error {
		at := p.entry(key)
		if _, twice := m[key]; twice {
			return at.invalid("is given twice")
		}
		s, ok, err := r.text(at)
		if err != nil {
			return err
		}
		if !ok {
			return at.invalid("must be a string")
		}
		if m == nil {
			m = make(map[string]string)
		}
		m[key] = s
		return nil
	})
	return m, err
}
