package web

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"regexp"
	"slices"
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
// and quietly mends broken UTF-8; here all of these are errors.
//
// It goes exactly as deep as the shapes it is asked for: nesting that nobody
// expects ends it at its first bracket.
type jsonReader struct {
	data []byte
	dec  *json.Decoder
}

func newJSONReader(data []byte) *jsonReader {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	return &jsonReader{data: data, dec: dec}
}

func invalid(field, message string) error {
	return &api.Error{Code: api.InvalidArgument, Field: field, Message: message}
}

func (r *jsonReader) token(field string) (json.Token, error) {
	before := r.dec.InputOffset()
	t, err := r.dec.Token()
	if err != nil {
		return nil, r.syntax(field, err)
	}
	if s, ok := t.(string); ok && strings.Contains(s, "\uFFFD") && mended(r.data[before:r.dec.InputOffset()]) {
		return nil, invalid(field, "is not valid UTF-8, or escapes half of a surrogate pair")
	}
	return t, nil
}

// mended reports whether the decoder has put U+FFFD where raw, a JSON string,
// holds broken UTF-8 or half of a surrogate pair.
func mended(raw []byte) bool {
	for len(raw) > 0 {
		if raw[0] != '\\' {
			r, size := utf8.DecodeRune(raw)
			if r == utf8.RuneError && size == 1 {
				return true
			}
			raw = raw[size:]
			continue
		}
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
	return false
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

func (r *jsonReader) syntax(field string, err error) error {
	var se *json.SyntaxError
	switch {
	case errors.As(err, &se):
		return invalid(field, "is not JSON: "+se.Error()+", at byte "+strconv.FormatInt(se.Offset, 10))
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return invalid(field, "is not JSON: it ends too early")
	}
	return invalid(field, "is not JSON")
}

// end makes sure that nothing follows the value.
func (r *jsonReader) end(field string) error {
	if _, err := r.dec.Token(); !errors.Is(err, io.EOF) {
		return invalid(field, "has something after its JSON value")
	}
	return nil
}

// object reads an object whose members are named in known and hands each name
// to member, which reads the value. It reports false for null.
func (r *jsonReader) object(field string, known []string, member func(name, field string) error) (bool, error) {
	var seen uint64 // bit i: known[i] was read
	return r.members(field, func(name, at string) error {
		i := slices.Index(known, name)
		if i < 0 {
			return invalid(at, "is not a field of this request")
		}
		if seen&(1<<i) != 0 {
			return invalid(at, "is given twice")
		}
		seen |= 1 << i
		return member(name, at)
	})
}

// members reads any object. It reports false for null.
func (r *jsonReader) members(field string, member func(name, field string) error) (bool, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return false, err
	}
	if t != json.Delim('{') {
		return false, invalid(field, "must be an object")
	}
	for r.dec.More() {
		t, err := r.token(field)
		if err != nil {
			return false, err
		}
		name, ok := t.(string)
		if !ok {
			return false, invalid(field, "is not JSON: a name is missing")
		}
		at := school.Printable(name)
		if field != "" {
			at = field + "." + at
		}
		if err := member(name, at); err != nil {
			return false, err
		}
	}
	_, err = r.token(field)
	return err == nil, err
}

// array reads an array and calls element for each index. It reports false for null.
func (r *jsonReader) array(field string, element func(i int) error) (bool, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return false, err
	}
	if t != json.Delim('[') {
		return false, invalid(field, "must be an array")
	}
	for i := 0; r.dec.More(); i++ {
		if err := element(i); err != nil {
			return false, err
		}
	}
	_, err = r.token(field)
	return err == nil, err
}

// text reads a string. It reports false for null.
func (r *jsonReader) text(field string) (string, bool, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return "", false, err
	}
	s, ok := t.(string)
	if !ok {
		return "", false, invalid(field, "must be a string")
	}
	return s, true, nil
}

// set reads a string into to and leaves it alone on null.
func (r *jsonReader) set(field string, to *string) error {
	s, ok, err := r.text(field)
	if ok {
		*to = s
	}
	return err
}

// flag reads true or false. It reports nil for null.
func (r *jsonReader) flag(field string) (*bool, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return nil, err
	}
	b, ok := t.(bool)
	if !ok {
		return nil, invalid(field, "must be true or false")
	}
	return &b, nil
}

// integer reads a whole number. It reports nil for null.
func (r *jsonReader) integer(field string) (*int, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return nil, err
	}
	n, ok := t.(json.Number)
	if !ok {
		return nil, invalid(field, "must be a whole number")
	}
	i, err := strconv.Atoi(n.String())
	if err != nil {
		return nil, invalid(field, "must be a whole number")
	}
	return &i, nil
}

// seconds reads a duration in seconds, to the millisecond. It reports nil for null.
func (r *jsonReader) seconds(field string) (*time.Duration, error) {
	t, err := r.token(field)
	if err != nil || t == nil {
		return nil, err
	}
	n, ok := t.(json.Number)
	if !ok {
		return nil, invalid(field, "must be a number of seconds")
	}
	f, err := n.Float64()
	if err != nil || math.Abs(f) > 1e9 { // far beyond every bound, and no overflow below
		return nil, invalid(field, "is out of range")
	}
	d := time.Duration(math.Round(f*1000)) * time.Millisecond
	return &d, nil
}

// rfc3339 is stricter than time.Parse, which takes a comma for the point and an
// hour of one digit.
var rfc3339 = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$`)

// time reads a moment. It reports the zero time for null.
func (r *jsonReader) time(field string) (time.Time, error) {
	s, ok, err := r.text(field)
	if err != nil || !ok {
		return time.Time{}, err
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil || !rfc3339.MatchString(s) {
		return time.Time{}, invalid(field, "must be a time with its zone as in RFC 3339, e.g. 2030-01-02T08:00:00+09:00")
	}
	if t.Year() < 2000 {
		return time.Time{}, invalid(field, "lies before the year 2000")
	}
	return t.UTC(), nil
}

// strings reads an object of strings. It reports nil for null.
func (r *jsonReader) strings(field string) (map[string]string, error) {
	var m map[string]string
	_, err := r.members(field, func(name, _ string) error {
		at := school.DataField(field, name)
		if _, twice := m[name]; twice {
			return invalid(at, "is given twice")
		}
		s, ok, err := r.text(at)
		if err != nil {
			return err
		}
		if !ok {
			return invalid(at, "must be a string")
		}
		if m == nil {
			m = make(map[string]string)
		}
		m[name] = s
		return nil
	})
	return m, err
}

// given skips a value of any kind and reports whether it is one: not null.
func (r *jsonReader) given(field string) (bool, error) {
	var raw json.RawMessage
	if err := r.dec.Decode(&raw); err != nil {
		return false, r.syntax(field, err)
	}
	return string(raw) != "null", nil
}
