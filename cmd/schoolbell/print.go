package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// printer writes results to stdout: for people, or one JSON object.
type printer struct {
	out    io.Writer
	format *string
}

func (p printer) json() bool { return *p.format == outputJSON }

// print writes v as JSON, or calls text.
func (p printer) print(v any, text func()) error {
	if !p.json() {
		text()
		return nil
	}
	enc := json.NewEncoder(p.out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// table writes rows in columns, the first row as heading.
func (p printer) table(rows [][]string) {
	tw := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	_ = tw.Flush() // a broken stdout shows at the next write, or to nobody
}

// clock writes a time for people, in their own zone.
func clock(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05 MST")
}

// visible keeps control characters of a title or id from moving the cursor.
func visible(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}
