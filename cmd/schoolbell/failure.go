package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

func newFailure(w surroundings, p printer) *cobra.Command {
	r := &remote{w: w}
	g := group("failure", "Look at permanent failures and try them again", `  schoolbell failure list --school A
  schoolbell failure requeue --code SENDER_ID_MISMATCH
  schoolbell failure requeue --code SENDER_ID_MISMATCH --yes`,
		newFailureList(p, r), newFailureRequeue(w, p, r))
	r.flags(g)
	return g
}

func newFailureList(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List permanent failures by school, notice and error code",
		Example: `  schoolbell failure list
  schoolbell failure list --school A --code INVALID_ARGUMENT --output json`,
		Args: cobra.NoArgs,
	}
	var q api.FailureQuery
	c.Flags().StringVar(&q.School, "school", "", "only of this `school`")
	c.Flags().StringVar(&q.Notice, "notice", "", "only of this `notice`")
	c.Flags().StringVar(&q.Code, "code", "", "only with this error `code` or reason")
	c.Flags().IntVar(&q.Limit, "limit", 100, "at most this `number`, up to 1000")
	c.Flags().StringVar(&q.Cursor, "cursor", "", "go on after a page: the `cursor` that it ended with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if q.Limit < 1 || q.Limit > 1000 {
			return usagef("--limit %d is not 1 to 1000", q.Limit)
		}
		var list api.List[api.Failure]
		err := r.ask(cmd, "list failures", func(ctx context.Context, c *api.Client) (err error) {
			list, err = c.Failures(ctx, q)
			return err
		})
		if err != nil {
			return err
		}
		return p.print(list, func() { p.failures(list) })
	}
	return c
}

func (p printer) failures(list api.List[api.Failure]) {
	if len(list.Items) == 0 && list.Next == "" {
		fmt.Fprintln(p.out, "no permanent failures")
		return
	}
	rows := [][]string{{"SCHOOL", "NOTICE", "CODE", "REASON", "RECIPIENTS", "LAST", "TITLE"}}
	for _, f := range list.Items {
		code := f.ErrorCode
		if code == "" {
			code = "-"
		}
		rows = append(rows, []string{
			visible(f.School), f.Notice, visible(code), f.Reason, strconv.Itoa(f.Recipients), clock(f.LastFailedAt), visible(f.Title),
		})
	}
	p.table(rows)
	if list.Next != "" {
		fmt.Fprintf(p.out, "more: --cursor %s\n", list.Next)
	}
}

func newFailureRequeue(w surroundings, p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "requeue",
		Short: "Try permanent failures again",
		Long: `requeue puts recipients that failed permanently back: they are due at once, with
their retries begun anew. Without --yes it only says how many there are. What was
cancelled, has expired or was removed is left, and so is what may have arrived of
notices that are to be sent at most once, unless --code OUTCOME_UNKNOWN names it:
that may then arrive twice.

It may be broken off and called again. What fails again meanwhile is not taken up
again.`,
		Example: `  schoolbell failure requeue --school A --code INVALID_ARGUMENT
  schoolbell failure requeue --notice 1193046471680 --yes`,
		Args: cobra.NoArgs,
	}
	var (
		o   api.RequeueRequest
		yes bool
	)
	c.Flags().StringVar(&o.School, "school", "", "of this `school`")
	c.Flags().StringVar(&o.Notice, "notice", "", "of this `notice`")
	c.Flags().StringVar(&o.Code, "code", "", "with this error `code` or reason")
	c.Flags().BoolVar(&yes, "yes", false, "do it; without it they are only counted")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.School == "" && o.Notice == "" && o.Code == "" {
			return usagef("name what to requeue: --school, --notice, --code, or several of them")
		}
		o.DryRun = !yes
		sum, err := r.requeue(cmd, w, o)
		if err != nil {
			return err
		}
		return p.print(sum, func() { p.requeued(sum) })
	}
	return c
}

// requeue goes on until the order is done; each call takes up only a part of it.
func (r *remote) requeue(cmd *cobra.Command, w surroundings, o api.RequeueRequest) (api.Requeued, error) {
	sum := api.Requeued{DryRun: o.DryRun}
	for {
		var part api.Requeued
		err := r.ask(cmd, "requeue failures", func(ctx context.Context, c *api.Client) (err error) {
			part, err = c.Requeue(ctx, o)
			return err
		})
		if err != nil {
			if sum.Requeued > 0 && !o.DryRun {
				return sum, fmt.Errorf("%w; %d were put back before: the same command goes on with the rest", err, sum.Requeued)
			}
			return sum, err
		}
		add(&sum, part)
		if part.Next == "" {
			return sum, nil
		}
		o.Cursor = part.Next
		if !o.DryRun {
			fmt.Fprintf(w.stderr, "%d so far\n", sum.Requeued)
		}
	}
}

func add(sum *api.Requeued, part api.Requeued) {
	sum.Requeued += part.Requeued
	sum.Left.Cancelled += part.Left.Cancelled
	sum.Left.Expired += part.Left.Expired
	sum.Left.Purged += part.Left.Purged
	sum.Left.SchoolDeleted += part.Left.SchoolDeleted
	sum.Left.OutcomeUnknown += part.Left.OutcomeUnknown
}

func (p printer) requeued(r api.Requeued) {
	if r.DryRun {
		fmt.Fprintf(p.out, "%d recipients would be tried again; --yes does it\n", r.Requeued)
	} else {
		fmt.Fprintf(p.out, "%d recipients are tried again\n", r.Requeued)
	}
	var left []string
	for _, l := range []struct {
		n   int
		why string
	}{
		{r.Left.Cancelled, "of cancelled notices"}, {r.Left.Expired, "of expired notices"}, {r.Left.Purged, "removed since"},
		{r.Left.SchoolDeleted, "of deleted schools"}, {r.Left.OutcomeUnknown, "may have arrived (at most once; --code OUTCOME_UNKNOWN takes them)"},
	} {
		if l.n > 0 {
			left = append(left, fmt.Sprintf("%d %s", l.n, l.why))
		}
	}
	if len(left) > 0 {
		fmt.Fprintf(p.out, "left: %s\n", strings.Join(left, ", "))
	}
}

func newNoticeRetry(p printer, r *remote) *cobra.Command {
	return &cobra.Command{
		Use:   "retry ID",
		Short: "Try a notice's permanent failures again",
		Long: `retry puts all recipients of a notice that failed permanently back: they are due
at once, with their retries begun anew. What may have arrived of a notice that is
to be sent at most once is left; schoolbell failure requeue can name it.`,
		Example: `  schoolbell notice retry 1193046471680`,
		Args:    exactly("the notice's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var sum api.Requeued
			for {
				var part api.Requeued
				err := r.ask(cmd, "retry notice "+visible(args[0]), func(ctx context.Context, c *api.Client) (err error) {
					part, err = c.Retry(ctx, args[0])
					return err
				})
				if err != nil {
					return err
				}
				sum.Requeued += part.Requeued
				sum.Left = part.Left // the whole notice's, each time
				if part.Next == "" {
					break
				}
			}
			return p.print(sum, func() { p.requeued(sum) })
		},
	}
}
