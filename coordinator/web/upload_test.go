package web

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

const head = `{"school":"A","title":"t","body":"b"}` + "\n"

// generated yields head and then n lines, without holding them.
func generated(n int, line func(i int) string) io.Reader {
	return io.MultiReader(strings.NewReader(head), &lineGenerator{n: n, line: line})
}

type lineGenerator struct {
	i, n int
	line func(i int) string
	rest []byte
}

func (g *lineGenerator) Read(p []byte) (int, error) {
	for len(g.rest) < len(p) && g.i < g.n {
		g.rest = append(g.rest, g.line(g.i)...)
		g.rest = append(g.rest, '\n')
		g.i++
	}
	if len(g.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, g.rest)
	g.rest = append(g.rest[:0], g.rest[n:]...)
	return n, nil
}

func tokenLine(i int) string { return fmt.Sprintf(`{"token":"tok-%d"}`, i) }

// requireNothingLeft checks that an upload left neither a file, nor an open one
// without a name, nor its place, nor its key.
func (w *world) requireNothingLeft() {
	w.t.Helper()
	left, err := os.ReadDir(w.dir)
	require.NoError(w.t, err)
	require.Empty(w.t, left)
	require.Zero(w.t, w.openFiles())
	require.Empty(w.t, w.server.uploads)
	w.server.keys.mu.Lock()
	defer w.server.keys.mu.Unlock()
	require.Empty(w.t, w.server.keys.under)
}

// openFiles counts this process's open files in the uploads' folder, removed
// ones too. Where there is no /proc it sees none.
func (w *world) openFiles() int {
	fds, _ := filepath.Glob("/proc/self/fd/*")
	n := 0
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil && strings.HasPrefix(target, w.dir) {
			n++
		}
	}
	return n
}

func TestUpload(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body string
		want []string
	}{
		"one":                  {head + `{"token":"a"}` + "\n", []string{"a"}},
		"no end of line":       {head + `{"token":"a"}`, []string{"a"}},
		"carriage returns":     {"{\"school\":\"A\",\"title\":\"t\"}\r\n{\"token\":\"a\"}\r\n{\"token\":\"b\"}\r\n", []string{"a", "b"}},
		"empty lines":          {"\n" + head + "\n  \n" + `{"token":"a"}` + "\n\n" + `{"token":"b"}` + "\n\n", []string{"a", "b"}},
		"the same device":      {head + `{"token":"a"}` + "\n" + `{"token":"a"}` + "\n", []string{"a", "a"}},
		"white space in lines": {" " + head + "\t{ \"token\" : \"a\" } \n", []string{"a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			got := requireAnswer[api.Accepted](t, w.upload(strings.NewReader(c.body)), http.StatusAccepted)
			require.Equal(t, api.Accepted{ID: "1", School: "A", Status: "PENDING", Total: len(c.want)}, got)
			var tokens []string
			for _, r := range w.store.notices[1].recipients {
				tokens = append(tokens, r.Token)
			}
			require.Equal(t, c.want, tokens)
			require.Equal(t, []string{"A"}, w.waker.woken)
			w.requireNothingLeft()
		})
	}
}

// TestUploadCanBeRangedOverAgain: a store that must repeat its transaction
// starts from the first recipient.
func TestUploadCanBeRangedOverAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	const n = 3000
	w.server.deps.Notices = acceptFunc(func(_ context.Context, _ *school.Notice, total int, recipients seq) (school.Receipt, error) {
		require.Equal(t, n, total)
		for range recipients { // broken off at once
			break
		}
		for range 2 {
			i := 0
			for r, err := range recipients {
				require.NoError(t, err)
				require.Equal(t, fmt.Sprintf("tok-%d", i), r.Token)
				i++
			}
			require.Equal(t, n, i)
		}
		return school.Receipt{ID: 7, School: "A", Status: school.NoticePending, Total: n}, nil
	})
	requireAnswer[api.Accepted](t, w.upload(generated(n, tokenLine)), http.StatusAccepted)
	w.requireNothingLeft()
}

func TestUploadErrors(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxLine)
	for name, c := range map[string]struct {
		body  string
		code  api.Code
		field string
		line  string
	}{
		"empty":                    {"", api.InvalidArgument, "", "line 1: "},
		"only empty lines":         {"\n\n", api.InvalidArgument, "", "line 1: "},
		"no recipients":            {head, api.InvalidArgument, "recipients", ""},
		"recipients in the notice": {`{"school":"A","title":"t","recipients":[]}` + "\n" + `{"token":"a"}`, api.InvalidArgument, "recipients", "line 1: "},
		"topic":                    {`{"school":"A","title":"t","topic":"x"}` + "\n" + `{"token":"a"}`, api.InvalidArgument, "topic", "line 1: "},
		"notice is not JSON":       {"x\n", api.InvalidArgument, "", "line 1: "},
		"notice without title":     {`{"school":"A"}` + "\n", api.InvalidArgument, "title", "line 1: "},
		"notice too long":          {`{"school":"A","title":"` + long + `"}` + "\n", api.TooLarge, "", "line 1: "},
		"not JSON":                 {head + `{"token":"a"}` + "\n" + `token=b` + "\n", api.InvalidArgument, "recipients[1]", "line 3: "},
		"not JSON, empty lines":    {head + "\n\n" + `{"token":"a"}` + "\n\n" + `token=b` + "\n", api.InvalidArgument, "recipients[1]", "line 6: "},
		"two in a line":            {head + `{"token":"a"}{"token":"b"}` + "\n", api.InvalidArgument, "recipients[0]", "line 2: "},
		"one in two lines":         {head + "{\"token\":\n\"a\"}\n", api.InvalidArgument, "recipients[0].token", "line 2: "},
		"null":                     {head + "null\n", api.InvalidArgument, "recipients[0]", "line 2: "},
		"unknown field":            {head + `{"token":"a","x":1}` + "\n", api.InvalidArgument, "recipients[0].x", "line 2: "},
		"empty token":              {head + `{"token":"a"}` + "\n" + `{"token":""}` + "\n", api.InvalidArgument, "recipients[1].token", "line 3: "},
		"token too long":           {head + `{"token":"` + long[:4097] + `"}` + "\n", api.TooLarge, "recipients[0].token", "line 2: "},
		"merged payload":           {head + `{"token":"a","data":{"k":"` + long[:4000] + `"}}` + "\n", api.InvalidArgument, "recipients[0].data", "line 2: "},
		"line too long":            {head + `{"token":"a"}` + "\n" + `{"token":"` + long + `"}` + "\n" + `{"token":"c"}` + "\n", api.TooLarge, "recipients[1]", "line 3: "},
		"line of one byte too many": {head + strings.Repeat(" ", maxLine+1-len(`{"token":"a"}`)) + `{"token":"a"}` + "\n",
			api.TooLarge, "recipients[0]", "line 2: "},
		"last line too long": {head + long + "xxx", api.TooLarge, "recipients[0]", "line 2: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			e := requireError(t, w.upload(strings.NewReader(c.body)), c.code, c.field)
			require.True(t, strings.HasPrefix(e.Message, c.line), e.Message)
			accepts, _, _ := w.store.counts()
			require.Zero(t, accepts)
			w.requireNothingLeft()
		})
	}
	t.Run("a line as long as may be", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, nil)
		line := strings.Repeat(" ", maxLine-len(`{"token":"a"}`)) + `{"token":"a"}`
		require.Len(t, line, maxLine)
		requireAnswer[api.Accepted](t, w.upload(strings.NewReader(head+line+"\r\n"+line)), http.StatusAccepted)
	})
}

func TestBrokenLineInTheMiddle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	e := requireError(t, w.upload(generated(10_000, func(i int) string {
		if i == 4321 {
			return `{"token":"tok-4321",}`
		}
		return tokenLine(i)
	})), api.InvalidArgument, "recipients[4321]")
	require.True(t, strings.HasPrefix(e.Message, "line 4323: "), e.Message)
	accepts, taken, _ := w.store.counts()
	require.Zero(t, accepts)
	require.Zero(t, taken)
	require.Empty(t, w.waker.woken)
	w.requireNothingLeft()
}

func TestOneRecipientTooMany(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	line := func(int) string { return `{"token":"t"}` }
	requireError(t, w.upload(generated(school.MaxRecipients+1, line)), api.TooLarge, "recipients")
	accepts, _, _ := w.store.counts()
	require.Zero(t, accepts)
	w.requireNothingLeft()

	w.server.deps.Notices = acceptFunc(func(_ context.Context, _ *school.Notice, total int, recipients seq) (school.Receipt, error) {
		n := 0
		for range recipients {
			n++
		}
		require.Equal(t, total, n)
		return school.Receipt{ID: 7, School: "A", Status: school.NoticePending, Total: n}, nil
	})
	got := requireAnswer[api.Accepted](t, w.upload(generated(school.MaxRecipients, line)), http.StatusAccepted)
	require.Equal(t, school.MaxRecipients, got.Total)
	w.requireNothingLeft()
}

func TestUploadLargerThanPermitted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.UploadBytes = maxLine })
	requireError(t, w.upload(generated(100_000, tokenLine)), api.TooLarge, "")
	w.requireNothingLeft()
}

func TestUploadDirMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *Config, _ *Deps) { c.UploadDir = filepath.Join(c.UploadDir, "missing") })
	rec := w.upload(generated(1, tokenLine))
	requireError(t, rec, api.Internal, "")
	require.NotContains(t, rec.Body.String(), "missing")
	require.Contains(t, w.log.String(), "missing", "the operator must see why")
	require.Empty(t, w.server.uploads)
}

// TestUploadsAtOnce holds two uploads in the middle and sees a third refused,
// then accepted when one of them has hung up.
func TestUploadsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	type running struct {
		body *io.PipeWriter
		done chan *httptest.ResponseRecorder
	}
	begin := func() running {
		pr, pw := io.Pipe()
		up := running{pw, make(chan *httptest.ResponseRecorder, 1)}
		go func() { up.done <- w.upload(pr) }()
		_, err := io.WriteString(pw, head) // returns when it was read
		require.NoError(t, err)
		return up
	}
	first, second := begin(), begin()
	require.EqualValues(t, 2, testutil.ToFloat64(w.server.metrics.uploads))

	rec := w.upload(generated(1, tokenLine))
	requireError(t, rec, api.Unavailable, "")
	require.Equal(t, "5", rec.Header().Get("Retry-After"))
	require.Equal(t, http.StatusAccepted, w.post(small).Code, "a JSON notice needs no such place")

	_ = first.body.CloseWithError(io.ErrUnexpectedEOF) // the client hangs up
	requireError(t, <-first.done, api.InvalidArgument, "recipients[0]")
	require.Equal(t, http.StatusAccepted, w.upload(generated(1, tokenLine)).Code)

	_, err := io.WriteString(second.body, tokenLine(0)+"\n")
	require.NoError(t, err)
	left, err := os.ReadDir(w.dir)
	require.NoError(t, err)
	require.Empty(t, left, "the file of an upload under way has no name")
	require.NoError(t, second.body.Close())
	require.Equal(t, http.StatusAccepted, (<-second.done).Code)
	w.requireNothingLeft()
}

// TestUploadLeavesNothingBehind: however the store ends, place, file and key
// are given back.
func TestUploadLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		on   func(context.Context) error
		code api.Code
	}{
		"error":       {func(context.Context) error { return errors.New("pq: relation secret_table does not exist") }, api.Internal},
		"unavailable": {func(context.Context) error { return fmt.Errorf("accept: %w", school.ErrUnavailable) }, api.Unavailable},
		"unknown":     {func(context.Context) error { return fmt.Errorf("accept: %w", school.ErrCommitUnknown) }, api.Unavailable},
		"conflict":    {func(context.Context) error { return school.ErrConflict }, api.Conflict},
		"timeout":     {func(context.Context) error { return context.DeadlineExceeded }, api.Unavailable},
		"panic":       {func(context.Context) error { panic("tok-0") }, api.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			w.store.onAccept = c.on
			rec := w.upload(generated(10, tokenLine), "Idempotency-Key", "k")
			field := ""
			requireError(t, rec, c.code, field)
			require.NotContains(t, rec.Body.String(), "secret_table")
			require.NotContains(t, rec.Body.String(), "tok-0")
			require.NotContains(t, w.log.String(), "tok-0")
			require.Empty(t, w.waker.woken)
			w.requireNothingLeft()
		})
	}
}

func TestDecodingMakesLittleGarbage(t *testing.T) { // not parallel: it counts
	const n = 20_000
	var buf bytes.Buffer
	for i := range n {
		buf.WriteString(tokenLine(i) + "\n")
	}
	allocs := testing.AllocsPerRun(1, func() {
		lines := newLineReader(bytes.NewReader(buf.Bytes()))
		for i := range n {
			line, err := lines.next()
			var r school.NewRecipient
			if err != nil || decodeRecipientLine(line, i, &r) != nil {
				t.Fatal("line", i)
			}
		}
	})
	require.Less(t, allocs/n, 8.0, "a million recipients must not drown in garbage")
}

func BenchmarkDecodeRecipientLine(b *testing.B) {
	line := []byte(`{"token":"dXwabcdefghijklmnopqrstuvwxyz:APA91bHabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz","ref":"member-17","badge":3}`)
	b.SetBytes(int64(len(line)))
	b.ReportAllocs()
	c := school.Content{Title: "t"}
	for b.Loop() {
		var r school.NewRecipient
		if err := decodeRecipientLine(line, 1234, &r); err != nil {
			b.Fatal(err)
		}
		if err := school.ValidateRecipient(1234, &r, &c); err != nil {
			b.Fatal(err)
		}
	}
}

func TestPacedReaderAsksForItsRate(t *testing.T) {
	t.Parallel()
	cfg := Config{UploadGrace: 10 * time.Second, UploadRate: 1000, UploadTimeout: time.Minute}
	start := time.Now()
	w := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	p := &pacedReader{ReadCloser: io.NopCloser(strings.NewReader(strings.Repeat("x", 200_000))), control: http.NewResponseController(w), start: start, cfg: &cfg}
	for range 3 {
		_, err := io.ReadFull(p, make([]byte, 20_000))
		require.NoError(t, err)
	}
	require.Equal(t, []time.Duration{10 * time.Second, 30 * time.Second, 50 * time.Second}, w.since(start))
	_, err := io.ReadFull(p, make([]byte, 20_000))
	require.NoError(t, err)
	require.Equal(t, time.Minute, w.since(start)[3], "however much has come")
}

type deadlines struct {
	*httptest.ResponseRecorder
	read []time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.read = append(d.read, t)
	return nil
}

func (d *deadlines) since(start time.Time) []time.Duration {
	var out []time.Duration
	for _, t := range d.read {
		out = append(out, t.Sub(start))
	}
	return out
}
