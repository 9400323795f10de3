package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

const (
	defaultServer = "http://127.0.0.1:8080"
	// askTimeout bounds one question that has a short answer. Handing in a notice
	// has no bound: a million recipients take what they take, and Ctrl-C ends it.
	askTimeout  = 30 * time.Second
	dialTimeout = 5 * time.Second
)

func newNotice(w surroundings, p printer) *cobra.Command {
	r := &remote{w: w}
	g := group("notice", "Hand in notices and see what became of them", `  schoolbell notice send --school A --title "No school today" --tokens-file tokens.txt --wait
  schoolbell notice show 1193046471680
  schoolbell notice list --school A`,
		newNoticeSend(w, p, r), newNoticeShow(p, r), newNoticeList(p, r), newNoticeCancel(p, r), newNoticeRetry(p, r))
	r.flags(g)
	return g
}

// remote is the replica that client commands talk to.
type remote struct {
	w           surroundings
	server, key string
}

// flags adds to a group of commands what they all need to reach the replica.
func (r *remote) flags(g *cobra.Command) {
	g.PersistentFlags().StringVar(&r.server, "server", "", "`URL` of a replica (SCHOOLBELL_SERVER; default "+defaultServer+")")
	g.PersistentFlags().StringVar(&r.key, "key", "", "API `key`; better in SCHOOLBELL_KEY, since a command line is visible to the whole machine")
}

// ask puts one question that has a short answer; op says in an error what failed.
func (r *remote) ask(cmd *cobra.Command, op string, question func(ctx context.Context, c *api.Client) error) error {
	c, done, err := r.client()
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(cmd.Context(), askTimeout)
	defer cancel()
	if err := question(ctx, c); err != nil {
		return r.explain(fmt.Errorf("%s: %w", op, err))
	}
	return nil
}

func (r *remote) url() string {
	return cmp.Or(r.server, r.w.getenv("SCHOOLBELL_SERVER"), defaultServer)
}

// check refuses an address that nothing could be asked at, before anything is.
func (r *remote) check() error {
	from, text := "--server", r.url()
	if r.server == "" {
		from = "SCHOOLBELL_SERVER"
	}
	if !strings.Contains(text, "://") {
		return usagef("%s %q has no scheme; write http://%s", from, text, text)
	}
	if u, err := url.Parse(text); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return usagef("%s %q is not an address such as %s", from, text, defaultServer)
	}
	return nil
}

// client returns a client whose connections end with the returned function.
func (r *remote) client() (*api.Client, func(), error) {
	if err := r.check(); err != nil {
		return nil, nil, err
	}
	transport := &http.Transport{
		Proxy:       http.ProxyFromEnvironment,
		DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext,
	}
	return &api.Client{
		BaseURL: r.url(), Key: cmp.Or(r.key, r.w.getenv("SCHOOLBELL_KEY")), HTTP: &http.Client{Transport: transport},
	}, transport.CloseIdleConnections, nil
}

// explain adds to an error what to do about it.
func (r *remote) explain(err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*api.Error](err); ok {
		switch {
		case e.Code == api.Unauthenticated:
			return fmt.Errorf("%w; give a key that the server knows with SCHOOLBELL_KEY or --key", err)
		case e.Code == api.PermissionDenied:
			return fmt.Errorf("%w; use a key whose role and schools allow it", err)
		case e.RetryAfter > 0:
			return fmt.Errorf("%w; try again in %v", err, e.RetryAfter)
		}
		return err
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("interrupted: %w", err)
	}
	if unreachable(err) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("cannot reach %s: %w; is a replica running there? --server or SCHOOLBELL_SERVER names another", r.url(), err)
	}
	return err
}

func newNoticeShow(p printer, r *remote) *cobra.Command {
	return &cobra.Command{
		Use:   "show ID",
		Short: "Show a notice and what became of its recipients",
		Example: `  schoolbell notice show 1193046471680
  schoolbell notice show 1193046471680 --output json`,
		Args: exactly("the notice's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, done, err := r.client()
			if err != nil {
				return err
			}
			defer done()
			ctx, cancel := context.WithTimeout(cmd.Context(), askTimeout)
			defer cancel()
			n, err := c.Notice(ctx, args[0])
			if err != nil {
				return r.explain(fmt.Errorf("notice %s: %w", visible(args[0]), err))
			}
			return p.print(n, func() {
				p.notice(n)
				if n.EndedAt != nil || n.Status == statusCompleted || n.Status == statusCancelled {
					return
				}
				if s, err := c.School(ctx, n.School); err == nil { // who may not look is told less
					if why := (&hindrances{zone: time.Local}).look(time.Now(), n, s, lineEvery); why != "" {
						fmt.Fprintln(p.out, why)
					}
				}
			})
		},
	}
}

func newNoticeCancel(p printer, r *remote) *cobra.Command {
	return &cobra.Command{
		Use:   "cancel ID",
		Short: "Send no more of a notice",
		Long: `cancel ends a notice: nothing of it is sent any more that is not on the way
already. What is gets its outcome, so the notice may take a moment to end.
Cancelling again changes nothing; a notice that has ended cannot be cancelled.`,
		Example: `  schoolbell notice cancel 1193046471680`,
		Args:    exactly("the notice's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var n api.Notice
			err := r.ask(cmd, "cancel notice "+visible(args[0]), func(ctx context.Context, c *api.Client) (err error) {
				n, err = c.Cancel(ctx, args[0])
				return err
			})
			if err != nil {
				return err
			}
			return p.print(n, func() { p.notice(n) })
		},
	}
}

// exactly wants one argument and says which.
func exactly(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("give %s, one argument; there are %d", what, len(args))
		}
		return nil
	}
}

func newNoticeList(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List notices, newest first",
		Example: `  schoolbell notice list --school A --status IN_PROGRESS
  schoolbell notice list --limit 1000 --output json`,
		Args: cobra.NoArgs,
	}
	var q api.NoticeQuery
	c.Flags().StringVar(&q.School, "school", "", "only of this `school`")
	c.Flags().StringVar(&q.Status, "status", "", "only in this `status`: PENDING, IN_PROGRESS, COMPLETED, CANCELLED")
	c.Flags().IntVar(&q.Limit, "limit", 20, "at most this `number`, up to 1000")
	c.Flags().StringVar(&q.Cursor, "cursor", "", "go on after a page: the `cursor` that it ended with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if q.Limit < 1 || q.Limit > 1000 {
			return usagef("--limit %d is not 1 to 1000", q.Limit)
		}
		client, done, err := r.client()
		if err != nil {
			return err
		}
		defer done()
		ctx, cancel := context.WithTimeout(cmd.Context(), askTimeout)
		defer cancel()
		list, err := client.Notices(ctx, q)
		if err != nil {
			return r.explain(fmt.Errorf("list notices: %w", err))
		}
		return p.print(list, func() { p.notices(list) })
	}
	return c
}

func (p printer) notices(list api.List[api.Notice]) {
	if len(list.Items) == 0 {
		fmt.Fprintln(p.out, "no notices")
		return
	}
	rows := [][]string{{"ID", "SCHOOL", "STATUS", "TOTAL", "ENDED", "FAILED", "CREATED", "TITLE"}}
	for _, n := range list.Items {
		rows = append(rows, []string{
			n.ID, visible(n.School), n.Status, strconv.Itoa(n.Total), strconv.Itoa(ended(n.Counts)), strconv.Itoa(n.PermanentFail),
			clock(&n.CreatedAt), visible(n.Title),
		})
	}
	p.table(rows)
	if list.Next != "" {
		fmt.Fprintf(p.out, "more: --cursor %s\n", list.Next)
	}
}

// ended is how many recipients have their final outcome.
func ended(c api.Counts) int { return c.Total - c.Waiting - c.InProgress - c.RetryPending }

func (p printer) notice(n api.Notice) {
	status := n.Status
	if n.Closing != "" && n.EndedAt == nil {
		status += ", " + strings.ToLower(n.Closing) + ": calls in flight are waited for"
	}
	rows := [][]string{
		{"id", n.ID}, {"school", visible(n.School)}, {"status", status}, {"title", visible(n.Title)},
		{"priority", n.Priority}, {"delivery", n.Delivery}, {"created", clock(&n.CreatedAt)},
	}
	for _, opt := range []struct {
		name string
		at   *time.Time
	}{
		{"scheduled", n.ScheduledAt}, {"expires", n.ExpiresAt}, {"first send", n.FirstSendAt}, {"last send", n.LastSendAt},
		{"expected end", n.ExpectedEndAt}, {"ended", n.EndedAt}, {"recipients removed", n.PurgedAt},
	} {
		if opt.at != nil {
			rows = append(rows, []string{opt.name, clock(opt.at)})
		}
	}
	count := func(name string, v int, always bool) {
		if v != 0 || always {
			rows = append(rows, []string{name, strconv.Itoa(v)})
		}
	}
	count("recipients", n.Total, true)
	count("  accepted", n.Success, true)
	count("  accepted at a retry", n.RetrySuccess, false)
	count("  device gone", n.Fail, false)
	count("  device gone at a retry", n.RetryFail, false)
	count("  failed permanently", n.PermanentFail, false)
	count("  skipped: notifications off", n.Skipped.Disabled, false)
	count("  skipped: cancelled", n.Skipped.Cancelled, false)
	count("  skipped: expired", n.Skipped.Expired, false)
	count("  skipped: duplicate", n.Skipped.Duplicate, false)
	count("  skipped: not a test device", n.Skipped.NotAllowed, false)
	count("  waiting", n.Waiting, false)
	count("  with the receiver", n.InProgress, false)
	count("  waiting for a retry", n.RetryPending, false)
	p.table(rows)
}
