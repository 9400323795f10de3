package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

func newNoticeSend(w surroundings, p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "send",
		Short: "Hand in a notice",
		Long: `send hands a notice in and prints its id: from then on it is stored and will be
sent. The tokens file has one device token a line, or one recipient as JSON a
line ({"token":"…","ref":"member-17","enabled":true,"badge":3,"data":{…}}); - is
standard input. It is streamed, up to 1,000,000 recipients. With --topic in place of
a file it goes to the school's registered devices that have that topic.

With --wait it stays until the notice has ended, says meanwhile what keeps it from
moving, such as the school's rest, and exits with 1 if a recipient failed
permanently.`,
		Example: `  schoolbell notice send --school A --title "No school today" --body "Snow." --tokens-file tokens.txt
  export-tokens | schoolbell notice send --school A --title Hello --data board=3 --tokens-file - --wait
  schoolbell notice send --school A --title Hello --topic board-3
  schoolbell notice send --school A --title Hello --tokens-file tokens.txt --scheduled-at 2030-03-04T08:00:00+09:00`,
		Args: cobra.NoArgs,
	}
	var s sending
	f := c.Flags()
	f.StringVar(&s.notice.School, "school", "", "the `school`'s id")
	f.StringVar(&s.notice.Title, "title", "", "title")
	f.StringVar(&s.notice.Body, "body", "", "body")
	f.StringVar(&s.notice.Image, "image", "", "`URL` of an image")
	f.StringVar(&s.notice.Link, "link", "", "`URL` that a tap opens")
	f.StringArrayVar(&s.data, "data", nil, "`key=value` for the app; may be repeated")
	f.StringVar(&s.tokens, "tokens-file", "", "`file` of the recipients; - is standard input")
	f.StringVar(&s.notice.Topic, "topic", "", "in place of a file: the school's devices that have this `topic`")
	f.StringVar(&s.scheduledAt, "scheduled-at", "", "not before this `time` (RFC 3339)")
	f.StringVar(&s.expiresAt, "expires-at", "", "not after this `time` (RFC 3339)")
	f.StringVar(&s.notice.Priority, "priority", "", "urgent, normal (default) or low")
	f.StringVar(&s.notice.Delivery, "delivery", "", "at_least_once (default) or at_most_once")
	f.StringVar(&s.key, "idempotency-key", "", "`key` under which a repeated call stores nothing new (default: a random one)")
	f.BoolVar(&s.wait, "wait", false, "stay until the notice has ended")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := s.check(); err != nil {
			return err
		}
		return s.run(cmd.Context(), w, p, r)
	}
	return c
}

// sending is one `notice send`.
type sending struct {
	notice                 api.NoticeRequest
	data                   []string
	tokens                 string
	scheduledAt, expiresAt string
	key                    string
	wait                   bool
}

// check turns the flags into the notice.
func (s *sending) check() error {
	for _, need := range []struct{ flag, value string }{
		{"--school", s.notice.School}, {"--title", s.notice.Title}, {"--tokens-file or --topic", s.tokens + s.notice.Topic},
	} {
		if need.value == "" {
			return usagef("%s is missing", need.flag)
		}
	}
	if s.tokens != "" && s.notice.Topic != "" {
		return usagef("--tokens-file and --topic exclude one another")
	}
	switch s.notice.Delivery {
	case "", "at_least_once", "at_most_once":
	default:
		return usagef("--delivery %q is not at_least_once or at_most_once", s.notice.Delivery)
	}
	switch s.notice.Priority {
	case "", "urgent", "normal", "low":
	default:
		return usagef("--priority %q is not urgent, normal or low", s.notice.Priority)
	}
	for _, kv := range s.data {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return usagef("--data needs key=value")
		}
		if _, twice := s.notice.Data[k]; twice {
			return usagef("--data names %q twice", k)
		}
		if s.notice.Data == nil {
			s.notice.Data = map[string]string{}
		}
		s.notice.Data[k] = v
	}
	for _, t := range []struct {
		flag, text string
		to         **time.Time
	}{{"--scheduled-at", s.scheduledAt, &s.notice.ScheduledAt}, {"--expires-at", s.expiresAt, &s.notice.ExpiresAt}} {
		if t.text == "" {
			continue
		}
		at, err := time.Parse(time.RFC3339, t.text)
		if err != nil {
			return usagef("%s %q is not a time such as 2030-03-04T08:00:00+09:00", t.flag, t.text)
		}
		*t.to = &at
	}
	if s.key == "" {
		s.key = rand.Text()
	}
	return nil
}

func (s *sending) run(ctx context.Context, w surroundings, p printer, r *remote) error {
	client, done, err := r.client()
	if err != nil {
		return err
	}
	defer done()
	var lines lineNumbers
	accepted, err := s.handIn(ctx, w, client, &lines)
	if wrong, ok := errors.AsType[*inputError](err); ok {
		return wrong // which breaks the upload off: the server has kept nothing
	}
	if err != nil {
		return r.explain(s.uncertain(fmt.Errorf("send notice to school %s: %w", visible(s.notice.School), s.placed(err, &lines))))
	}
	if !s.wait {
		return p.print(accepted, func() {
			fmt.Fprintf(p.out, "notice %s accepted: %d recipients\n", accepted.ID, accepted.Total)
		})
	}
	fmt.Fprintf(w.stderr, "notice %s accepted: %d recipients\n", accepted.ID, accepted.Total)
	n, err := awaitEnd(ctx, w, client, accepted)
	if err != nil {
		return r.explain(fmt.Errorf("wait for notice %s, which goes on without this command (schoolbell notice show %s): %w", accepted.ID, accepted.ID, err))
	}
	if err := p.print(n, func() { p.notice(n) }); err != nil {
		return err
	}
	switch {
	case n.Status == statusCancelled:
		return fmt.Errorf("notice %s was cancelled", n.ID)
	case n.PermanentFail > 0:
		return fmt.Errorf("%d of %d recipients of notice %s failed permanently; see its recipients in state PERMANENT_FAIL", n.PermanentFail, n.Total, n.ID)
	}
	return nil
}

// handIn hands the notice in with its recipients, or to its topic.
func (s *sending) handIn(ctx context.Context, w surroundings, client *api.Client, lines *lineNumbers) (api.Accepted, error) {
	if s.notice.Topic != "" {
		return client.Send(ctx, s.notice, s.key)
	}
	in := w.stdin
	if s.tokens != "-" {
		file, err := w.open(s.tokens)
		if err != nil {
			return api.Accepted{}, inputf("--tokens-file %s: %v", s.tokens, cause(err))
		}
		defer file.Close() // read only: nothing can be lost
		in = file
	}
	reading := newProgress(w, "reading recipients", -1)
	defer reading.end()
	return client.Upload(ctx, s.notice, reading.counting(readRecipients(in, s.tokens, lines)), s.key)
}

// cause is an error of a file without its name, which stands before it already.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}

// flagOf is the flag behind each field of a notice.
var flagOf = map[string]string{
	"school": "--school", "title": "--title", "body": "--body", "image": "--image", "link": "--link", "data": "--data",
	"scheduled_at": "--scheduled-at", "expires_at": "--expires-at", "priority": "--priority", "delivery": "--delivery", "topic": "--topic", "Idempotency-Key": "--idempotency-key",
}

var (
	uploadLine     = regexp.MustCompile(`^line \d+: `)
	recipientField = regexp.MustCompile(`^recipients\[(\d+)\]\.?(.*)$`)
)

// placed puts a flag, or a line of the tokens file, in the place of the field
// and line that the server names: those are of the upload, which the person who
// called has never seen.
func (s *sending) placed(err error, lines *lineNumbers) error {
	e, ok := errors.AsType[*api.Error](err)
	if !ok {
		return err
	}
	where := ""
	name, rest, _ := strings.Cut(e.Field, ".")
	if m := recipientField.FindStringSubmatch(e.Field); m != nil {
		i, _ := strconv.Atoi(m[1]) // digits
		line, known := lines.of(i)
		if !known {
			return err
		}
		where = fmt.Sprintf("%s line %d", s.tokens, line)
		if m[2] != "" {
			where += ": " + m[2]
		}
	} else if where = flagOf[name]; where == "" {
		return err
	} else if rest != "" {
		where += " " + rest
	}
	return &placedError{text: where + ": " + uploadLine.ReplaceAllString(e.Message, ""), answer: err}
}

// placedError is an answer of the server in the words of the command line.
type placedError struct {
	text   string
	answer error
}

func (e *placedError) Error() string { return e.text }
func (e *placedError) Unwrap() error { return e.answer }

// uncertain adds to a call without an answer how it can be repeated without
// sending twice.
func (s *sending) uncertain(err error) error {
	if _, answered := errors.AsType[*api.Error](err); answered || !unreachable(err) {
		return err
	}
	return fmt.Errorf("%w; whether it was stored is not known: the same command with --idempotency-key %s stores it once", err, s.key)
}

const (
	statusCompleted = "COMPLETED"
	statusCancelled = "CANCELLED"

	pollEvery = 200 * time.Millisecond
	pollMost  = 2 * time.Second
	// patience is how long --wait bears that no replica answers, so that a
	// rolling restart does not end it.
	patience = time.Minute
)

// awaitEnd asks until the notice has ended, less and less often.
func awaitEnd(ctx context.Context, w surroundings, client *api.Client, accepted api.Accepted) (api.Notice, error) {
	bar := newProgress(w, "sending", accepted.Total)
	defer bar.end()
	lastAnswer, lastMove, done := time.Now(), time.Now(), -1
	why, asking := hindrances{zone: time.Local}, true
	for every := w.pollEvery; ; every = min(every*5/4, pollMost) {
		ask, cancel := context.WithTimeout(ctx, askTimeout)
		n, err := client.Notice(ask, accepted.ID)
		cancel()
		switch {
		case err == nil:
			lastAnswer = time.Now()
			bar.set(ended(n.Counts))
			if n.Status == statusCompleted || n.Status == statusCancelled {
				return n, nil
			}
			if now := ended(n.Counts); now != done {
				lastMove, done = lastAnswer, now
			}
			if !asking {
				break
			}
			ask, cancel := context.WithTimeout(ctx, askTimeout)
			school, err := client.School(ask, n.School)
			cancel()
			if err == nil {
				bar.say(why.look(time.Now(), n, school, time.Since(lastMove)))
			} else if !mayPass(err) {
				asking = false // this key may not look: then nothing is said
			}
		case ctx.Err() != nil:
			return api.Notice{}, context.Cause(ctx)
		case !mayPass(err) || time.Since(lastAnswer) > patience:
			return api.Notice{}, err
		}
		select {
		case <-ctx.Done():
			return api.Notice{}, context.Cause(ctx)
		case <-time.After(every):
		}
	}
}

// mayPass reports whether the same question may be answered later.
func mayPass(err error) bool {
	if e, ok := errors.AsType[*api.Error](err); ok {
		return e.Temporary()
	}
	return unreachable(err)
}
