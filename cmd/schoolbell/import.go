package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

const (
	importBatch = 1000    // devices of one call: the API's own bound
	importBytes = 4 << 20 // of one call, about; the API takes 8 MiB
)

func newDeviceImport(w surroundings, p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "import FILE",
		Short: "Register many devices from a CSV or NDJSON file",
		Long: `import registers the devices of a file, 1,000 a call; - is standard input. To repeat
it is harmless.

CSV begins with a line that names its columns: token, and any of ref, enabled (true
or false) and topics (separated by spaces). An empty cell of topics takes all topics
from the device, an empty one of enabled leaves it as it was; a column that is not
there leaves all as they were.

NDJSON has a device a line: {"token":"…","ref":"member-17","enabled":true,
"topics":["board-3"]}. What is left out stays as it was.`,
		Example: `  schoolbell device import --school A devices.csv
  export-devices | schoolbell device import --school A -`,
		Args: exactly("the file, or - for standard input"),
	}
	var school string
	schoolFlag(c, &school)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := needSchool(school); err != nil {
			return err
		}
		in, name := w.stdin, args[0]
		if name != "-" {
			file, err := w.open(name)
			if err != nil {
				return inputf("%s: %v", name, cause(err))
			}
			defer file.Close() // read only: nothing can be lost
			in = file
		}
		client, done, err := r.client()
		if err != nil {
			return err
		}
		defer done()
		im := importing{client: client, school: school, file: name, bar: newProgress(w, "registering devices", -1), pause: w.pollEvery,
			total: api.Registered{School: school}}
		err = im.run(cmd.Context(), readDevices(in, name))
		im.bar.end()
		if wrong, ok := errors.AsType[*inputError](err); ok {
			return inputf("%v%s", wrong, im.sofar())
		}
		if err != nil {
			return r.explain(fmt.Errorf("import devices of school %s%s: %w", visible(school), im.sofar(), err))
		}
		return p.print(im.total, func() { p.registered(im.total) })
	}
	return c
}

// importing is one `device import`.
type importing struct {
	client *api.Client
	school string
	file   string
	bar    *progress
	pause  time.Duration // before a call is repeated, to begin with

	batch []api.NewDevice
	lines []int // of the batch's devices
	bytes int
	total api.Registered
}

// sofar says that a file which broke off was imported in part.
func (im *importing) sofar() string {
	if im.total.Devices == 0 {
		return ""
	}
	return fmt.Sprintf(" (%d devices before are registered)", im.total.Devices)
}

func (im *importing) run(ctx context.Context, devices iter.Seq2[lined, error]) error {
	for d, err := range devices {
		if err != nil {
			return err
		}
		size := 64 + len(d.device.Token)
		if d.device.Topics != nil {
			for _, topic := range *d.device.Topics {
				size += len(topic) + 3
			}
		}
		if len(im.batch) == importBatch || len(im.batch) > 0 && im.bytes+size > importBytes {
			if err := im.flush(ctx); err != nil {
				return err
			}
		}
		im.batch, im.lines, im.bytes = append(im.batch, d.device), append(im.lines, d.line), im.bytes+size
	}
	return im.flush(ctx)
}

// flush registers what was gathered. What may pass, a replica that restarts for
// instance, is tried again for a while, since to repeat it is harmless.
func (im *importing) flush(ctx context.Context) error {
	if len(im.batch) == 0 {
		return nil
	}
	began := time.Now()
	for wait := im.pause; ; wait = min(2*wait, pollMost) {
		call, cancel := context.WithTimeout(ctx, askTimeout)
		done, err := im.client.PutDevices(call, im.school, im.batch)
		cancel()
		if err == nil {
			im.total.Devices += done.Devices
			im.total.Created += done.Created
			im.total.Revived += done.Revived
			im.batch, im.lines, im.bytes = im.batch[:0], im.lines[:0], 0
			im.bar.set(im.total.Devices)
			return nil
		}
		if ctx.Err() != nil || !mayPass(err) || time.Since(began) > patience {
			return im.placed(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

var deviceField = regexp.MustCompile(`^devices\[(\d+)\]\.?(.*)$`)

// placed puts a line of the file in the place of the field that the server names.
func (im *importing) placed(err error) error {
	e, ok := errors.AsType[*api.Error](err)
	if !ok {
		return err
	}
	m := deviceField.FindStringSubmatch(e.Field)
	if m == nil {
		return err
	}
	i, _ := strconv.Atoi(m[1]) // digits
	if i >= len(im.lines) {
		return err
	}
	where := fmt.Sprintf("%s line %d", im.file, im.lines[i])
	if m[2] != "" {
		where += ": " + m[2]
	}
	return &placedError{text: where + ": " + e.Message, answer: err}
}

// lined is a device with the line of its file.
type lined struct {
	device api.NewDevice
	line   int
}

// readDevices reads a CSV file, or NDJSON where the first line begins with a brace.
// Errors give the line's number and never its text.
func readDevices(in io.Reader, name string) iter.Seq2[lined, error] {
	return func(yield func(lined, error) bool) {
		b := bufio.NewReaderSize(in, maxLine)
		if head, _ := b.Peek(3); bytes.Equal(head, []byte("\ufeff")) { // what some editors put first
			_, _ = b.Discard(3)
		}
		read := readDeviceCSV
		if head, _ := b.Peek(maxLine); bytes.HasPrefix(bytes.TrimSpace(head), []byte("{")) {
			read = readDeviceJSON
		}
		found := false
		for d, err := range read(b, name) {
			found = true
			if !yield(d, err) {
				return
			}
		}
		if !found {
			yield(lined{}, inputf("%s has no devices", name))
		}
	}
}

func readDeviceJSON(in io.Reader, name string) iter.Seq2[lined, error] {
	return func(yield func(lined, error) bool) {
		lines := bufio.NewScanner(in)
		lines.Buffer(make([]byte, 0, maxLine), maxLine)
		number := 0
		for lines.Scan() {
			number++
			text := bytes.TrimSpace(lines.Bytes())
			if len(text) == 0 {
				continue
			}
			d := lined{line: number}
			dec := json.NewDecoder(bytes.NewReader(text))
			dec.DisallowUnknownFields()
			err := dec.Decode(&d.device)
			if err != nil {
				err = inputf("%s line %d: %s", name, number, notADevice(err))
			} else if _, more := dec.Token(); !errors.Is(more, io.EOF) {
				err = inputf("%s line %d: has something behind its JSON object", name, number)
			}
			if !yield(d, err) || err != nil {
				return
			}
		}
		if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
			yield(lined{}, inputf("%s line %d is longer than %d bytes", name, number+1, maxLine))
		} else if err != nil {
			yield(lined{}, fmt.Errorf("read %s: %w", name, err))
		}
	}
}

func notADevice(err error) string {
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return "has an unknown field " + field + "; a device has token, ref, enabled, topics"
	}
	return notARecipient(err)
}

var deviceColumns = []string{"token", "ref", "enabled", "topics"}

func readDeviceCSV(in io.Reader, name string) iter.Seq2[lined, error] {
	return func(yield func(lined, error) bool) {
		records := csv.NewReader(in)
		records.ReuseRecord = true
		head, err := records.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		columns := slices.Clone(head)
		if err == nil {
			err = checkColumns(columns, name)
		}
		if err != nil {
			yield(lined{}, notCSV(err, name))
			return
		}
		for {
			record, err := records.Read()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(lined{}, notCSV(err, name))
				return
			}
			line, _ := records.FieldPos(0)
			d, err := deviceOf(columns, record)
			if err != nil {
				yield(lined{}, inputf("%s line %d: %v", name, line, err))
				return
			}
			if !yield(lined{d, line}, nil) {
				return
			}
		}
	}
}

func checkColumns(columns []string, name string) error {
	for i, c := range columns {
		columns[i] = strings.TrimSpace(c)
		// What is none may be a device's token: it is not shown.
		if !slices.Contains(deviceColumns, columns[i]) || slices.Contains(columns[:i], columns[i]) {
			return inputf("%s line 1 has to name the columns, each once: token, and any of ref, enabled, topics", name)
		}
	}
	if !slices.Contains(columns, "token") {
		return inputf("%s line 1 names no column token", name)
	}
	return nil
}

func deviceOf(columns, record []string) (d api.NewDevice, err error) {
	for i, c := range columns {
		cell := strings.TrimSpace(record[i])
		switch c {
		case "token":
			d.Token = strings.Clone(cell)
		case "ref":
			ref := strings.Clone(cell)
			d.Ref = &ref
		case "enabled":
			if cell == "" {
				continue
			}
			on := cell == "true"
			if !on && cell != "false" {
				return d, errors.New("enabled is neither true nor false")
			}
			d.Enabled = &on
		case "topics":
			topics := strings.Fields(strings.Clone(cell))
			d.Topics = &topics
		}
	}
	if d.Token == "" {
		return d, errors.New("has no token")
	}
	return d, nil
}

// notCSV says where a file stops being CSV.
func notCSV(err error, name string) error {
	if e, ok := errors.AsType[*csv.ParseError](err); ok {
		return inputf("%s line %d: %v", name, e.Line, e.Err)
	}
	if _, ok := errors.AsType[*inputError](err); ok {
		return err
	}
	return fmt.Errorf("read %s: %w", name, err)
}
