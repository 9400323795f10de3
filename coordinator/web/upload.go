package web

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"strconv"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// readUpload reads a notice that comes as NDJSON: the notice in the first line,
// then a recipient a line. All of it is read and checked into a temporary file
// before the store hears of it, so that the speed of a client is never the
// speed of a transaction.
func (s *Server) readUpload(sub *submission, w http.ResponseWriter, r *http.Request, key string) error {
	release, err := s.takeUpload()
	if err != nil {
		return err
	}
	sub.hold(release)

	hash := sha256.New()
	_, _ = io.WriteString(hash, api.NDJSON+"\n")
	lines := newLineReader(io.TeeReader(s.uploadBody(w, r), hash))

	first, err := lines.next()
	switch {
	case errors.Is(err, io.EOF):
		return invalid("", "line 1: the notice is missing")
	case err != nil:
		return lineError(err, "", lines.line)
	}
	n, _, err := decodeNotice(first, true)
	if err != nil {
		return lineError(err, "", lines.line)
	}
	if err := s.admit(sub, r.Context(), n, key); err != nil {
		return err
	}
	sp, err := newSpool(s.cfg.UploadDir)
	if err != nil {
		return err
	}
	sub.hold(sp.close)

	for {
		line, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return lineError(err, recipientPath(sp.count).String(), lines.line)
		}
		if sp.count >= school.MaxRecipients {
			return tooManyRecipients()
		}
		var rec school.NewRecipient
		if err := decodeRecipientLine(line, sp.count, &rec); err != nil {
			return lineError(err, recipientPath(sp.count).String(), lines.line)
		}
		if err := school.ValidateRecipient(sp.count, &rec, &n.Content); err != nil {
			return lineError(err, recipientPath(sp.count).String(), lines.line)
		}
		if err := sp.add(line); err != nil {
			return err
		}
	}
	if sp.count == 0 {
		return invalid("recipients", "must name at least one device, in the lines after the first")
	}
	if err := sp.finish(); err != nil {
		return err
	}
	n.RequestHash = hash.Sum(nil)
	sub.total, sub.accept = sp.count, s.cfg.UploadAccept
	sub.recipients = sp.recipients()
	return nil
}

// takeUpload takes one of the places for uploads.
func (s *Server) takeUpload() (release func(), err error) {
	select {
	case s.uploads <- struct{}{}:
	default:
		return nil, &api.Error{Code: api.Unavailable, RetryAfter: 5 * time.Second,
			Message: "as many uploads as are permitted at once are under way"}
	}
	s.metrics.uploads.Inc()
	return func() {
		<-s.uploads
		s.metrics.uploads.Dec()
	}, nil
}

// uploadBody is the body of an upload within its size and its time.
func (s *Server) uploadBody(w http.ResponseWriter, r *http.Request) io.Reader {
	return http.MaxBytesReader(w, &pacedReader{ReadCloser: r.Body, control: http.NewResponseController(w), start: time.Now(), cfg: &s.cfg}, s.cfg.UploadBytes)
}

// lineError adds the line, counted from 1, to a complaint about it.
func lineError(err error, field string, line int) error {
	if errors.Is(err, errLongLine) {
		return &api.Error{Code: api.TooLarge, Field: field, Message: "line " + strconv.Itoa(line) + ": is longer than 64 KiB"}
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return err // the whole is too large, no matter where
	}
	e := problem(err)
	switch e.Code {
	case api.InvalidArgument, api.TooLarge:
		if e.Field == "" {
			e.Field = field
		}
		e.Message = "line " + strconv.Itoa(line) + ": " + e.Message
		return e
	}
	return err
}

var errLongLine = errors.New("line is too long")

// lineReader cuts a stream into lines of at most 64 KiB and passes over empty
// ones. A line is valid until the next call.
type lineReader struct {
	r    *bufio.Reader
	line int // number of the last line, from 1
}

func newLineReader(r io.Reader) *lineReader {
	return &lineReader{r: bufio.NewReaderSize(r, maxLine+len("\r\n"))}
}

// next returns the next line without its end; io.EOF after the last one.
func (l *lineReader) next() ([]byte, error) {
	for {
		raw, err := l.r.ReadSlice('\n')
		if err != nil && !errors.Is(err, io.EOF) || len(raw) > 0 {
			l.line++
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, errLongLine
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, bodyError(err)
		}
		line := bytes.TrimSuffix(bytes.TrimSuffix(raw, []byte("\n")), []byte("\r"))
		if len(line) > maxLine {
			return nil, errLongLine
		}
		if len(bytes.TrimSpace(line)) > 0 {
			return line, nil // with io.EOF it comes again, and then with nothing
		}
		if err != nil {
			return nil, io.EOF
		}
	}
}

// pacedReader bounds the time that a body may take: after a grace it must have
// come at the slowest permitted rate, and it must be there at the end of the
// time for a whole upload. A client that stops altogether, or whose machine is
// gone, runs into the same deadline.
type pacedReader struct {
	io.ReadCloser
	control *http.ResponseController
	start   time.Time
	read    int64
	cfg     *Config
}

func (p *pacedReader) Read(b []byte) (int, error) {
	allowed := p.cfg.UploadGrace + time.Duration(float64(p.read)/float64(p.cfg.UploadRate)*float64(time.Second))
	if err := p.control.SetReadDeadline(p.start.Add(min(allowed, p.cfg.UploadTimeout))); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, fmt.Errorf("bound the time of an upload: %w", err)
	}
	n, err := p.ReadCloser.Read(b)
	p.read += int64(n)
	return n, err
}

// spool is the temporary file that holds an upload's recipients, one a line,
// checked. Its name is removed as soon as it is open, so that nothing is left
// of it however the process ends.
type spool struct {
	file  *os.File
	w     *bufio.Writer
	count int
	size  int64
}

func newSpool(dir string) (*spool, error) {
	f, err := os.CreateTemp(dir, "schoolbell-upload-*")
	if err != nil {
		return nil, fmt.Errorf("make the upload's temporary file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("unlink the upload's temporary file: %w", err)
	}
	return &spool{file: f, w: bufio.NewWriterSize(f, 256<<10)}, nil
}

func (s *spool) add(line []byte) error {
	_, err := s.w.Write(line)
	if err == nil {
		err = s.w.WriteByte('\n')
	}
	if err != nil {
		return fmt.Errorf("write the upload's temporary file: %w", err)
	}
	s.count++
	s.size += int64(len(line)) + 1
	return nil
}

// finish makes the file ready to be read.
func (s *spool) finish() error {
	if err := s.w.Flush(); err != nil {
		return fmt.Errorf("write the upload's temporary file: %w", err)
	}
	return nil
}

func (s *spool) close() { _ = s.file.Close() }

// lines yields what was added, from the beginning each time it is ranged over.
func (s *spool) lines() iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		lines := newLineReader(io.NewSectionReader(s.file, 0, s.size))
		for i := range s.count {
			line, err := lines.next()
			if err != nil {
				yield(nil, s.spoilt(i))
				return
			}
			if !yield(line, nil) {
				return
			}
		}
	}
}

// spoilt says that a line cannot be read again. It was checked on its way in: the
// disk is at fault, not the caller.
func (s *spool) spoilt(i int) error {
	return errors.New("read the upload's temporary file again: line " + strconv.Itoa(i+1) + " is not what was written")
}

// recipients yields what was added, from the beginning each time it is ranged
// over.
func (s *spool) recipients() iter.Seq2[school.NewRecipient, error] {
	return func(yield func(school.NewRecipient, error) bool) {
		i := 0
		for line, err := range s.lines() {
			var rec school.NewRecipient
			if err == nil && decodeRecipientLine(line, i, &rec) != nil {
				err = s.spoilt(i)
			}
			if err != nil {
				yield(school.NewRecipient{}, err)
				return
			}
			if i++; !yield(rec, nil) {
				return
			}
		}
	}
}
