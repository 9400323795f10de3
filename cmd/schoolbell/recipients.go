package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"

	"schoolbell/coordinator/api"
)

// maxLine is the API's own bound on a line.
const maxLine = 64 << 10

// readRecipients reads one recipient a line: a device token, or a JSON object.
// Blank lines and lines that begin with # say nothing. name is for errors, which
// give the line's number and never its text.
func readRecipients(in io.Reader, name string) iter.Seq2[api.Recipient, error] {
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
				yield(api.Recipient{}, fmt.Errorf("%s line %d: %w", name, number, err))
				return
			}
			found++
			if !yield(r, nil) {
				return
			}
		}
		err := lines.Err()
		switch {
		case errors.Is(err, bufio.ErrTooLong):
			err = fmt.Errorf("%s line %d is longer than %d bytes", name, number+1, maxLine)
		case err != nil:
			err = fmt.Errorf("read %s: %w", name, err)
		case found == 0:
			err = fmt.Errorf("%s has no recipients; write one device token a line", name)
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
		return r, fmt.Errorf("is not a recipient: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return r, errors.New("has something behind its JSON object")
	}
	return r, nil
}
