package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"reflect"
	"sort"
	"strings"

	"schoolbell/coordinator/api"
)

// maxLine is the API's own bound on a line.
const maxLine = 64 << 10

// readRecipients reads one recipient a line: a device token, or a JSON object.
// Blank lines and lines that begin with # say nothing. name is for errors, which
// give the line's number and never its text; at keeps the numbers for errors that
// come later.
func readRecipients(in io.Reader, name string, at *lineNumbers) iter.Seq2[api.Recipient, error] {
	return func(yield func(api.Recipient, error) bool) {
		lines := bufio.NewScanner(in)
		lines.Buffer(make([]byte, 0, maxLine), maxLine)
		number, found := 0, 0
		for lines.Scan() {
			number++
			text := lines.Bytes()
			if number == 1 {
				text = bytes.TrimPrefix(text, []byte("\ufeff")) // what some editors put first
			}
			text = bytes.TrimSpace(text)
			if len(text) == 0 || text[0] == '#' {
				continue
			}
			r, err := parseRecipient(text)
			if err != nil {
				yield(api.Recipient{}, inputf("%s line %d: %v", name, number, err))
				return
			}
			at.add(found, number)
			found++
			if !yield(r, nil) {
				return
			}
		}
		err := lines.Err()
		switch {
		case errors.Is(err, bufio.ErrTooLong):
			err = inputf("%s line %d is longer than %d bytes", name, number+1, maxLine)
		case err != nil:
			err = fmt.Errorf("read %s: %w", name, err)
		case found == 0:
			err = inputf("%s has no recipients; write one device token a line", name)
		default:
			return
		}
		yield(api.Recipient{}, err)
	}
}

func parseRecipient(text []byte) (api.Recipient, error) {
	if text[0] != '{' {
		if bytes.ContainsAny(text, " \t,;\"") {
			return api.Recipient{}, errors.New("is neither one device token nor a JSON object")
		}
		return api.Recipient{Token: string(text)}, nil
	}
	var r api.Recipient
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil {
		return r, errors.New(notARecipient(err))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return r, errors.New("has something behind its JSON object")
	}
	return r, nil
}

// notARecipient says of a line that does not decode what is wrong with it.
func notARecipient(err error) string {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return `its JSON object is not closed; write {"token":"…"} on one line`
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Sprintf("is not JSON at byte %d: %v", e.Offset, e)
	}
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		want := "a " + e.Type.String()
		switch e.Type.Kind() {
		case reflect.Bool:
			want = "true or false"
		case reflect.Int:
			want = "a whole number"
		case reflect.Map, reflect.Struct:
			want = "an object"
		}
		return fmt.Sprintf("%s must be %s, not a %s", e.Field, want, e.Value)
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return "has an unknown field " + name + "; a recipient has token, ref, enabled, badge, data"
	}
	return "is not a recipient: " + err.Error()
}

// lineNumbers knows in which line of its file each recipient stands. Files are
// long and blank lines and comments few, so it keeps only where the distance
// between the two numbers changes.
type lineNumbers struct {
	runs []lineRun
	seen int // recipients
}

type lineRun struct{ recipient, line int }

// add says that the i-th recipient, from 0 and in order, stands in a line, from 1.
func (n *lineNumbers) add(i, line int) {
	if last := len(n.runs) - 1; last < 0 || n.runs[last].line-n.runs[last].recipient != line-i {
		n.runs = append(n.runs, lineRun{i, line})
	}
	n.seen = i + 1
}

// of is the line of the i-th recipient, if there was one.
func (n *lineNumbers) of(i int) (line int, known bool) {
	if i >= n.seen {
		return 0, false
	}
	after := sort.Search(len(n.runs), func(k int) bool { return n.runs[k].recipient > i })
	run := n.runs[after-1]
	return run.line + i - run.recipient, true
}
