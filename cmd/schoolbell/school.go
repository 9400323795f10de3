package main

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

func newSchool(w surroundings, p printer) *cobra.Command {
	r := &remote{w: w}
	g := group("school", "Look at schools, and set, pause and resume them", `  schoolbell school list
  schoolbell school put A --limit 3000 --rest 5m
  schoolbell school pause A`,
		newSchoolList(p, r), newSchoolShow(p, r), newSchoolPut(p, r),
		newSchoolSwitch(p, r, "pause", "Stop a school", `pause stops a school: no batch of it is claimed any more when the command returns.
One that was claimed before is sent and recorded. Notices are accepted meanwhile
and wait; those whose time runs out expire.`, (*api.Client).PauseSchool),
		newSchoolSwitch(p, r, "resume", "Let a paused school go on", `resume lets a paused school go on, at once. Its rest goes on all the while.`, (*api.Client).ResumeSchool))
	r.flags(g)
	return g
}

func newSchoolList(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List schools with their quota, rest, lock and backlog",
		Example: `  schoolbell school list
  schoolbell school list --limit 1000 --output json`,
		Args: cobra.NoArgs,
	}
	var q api.Page
	c.Flags().IntVar(&q.Limit, "limit", 100, "at most this `number`, up to 1000")
	c.Flags().StringVar(&q.Cursor, "cursor", "", "go on after a page: the `cursor` that it ended with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if q.Limit < 1 || q.Limit > 1000 {
			return usagef("--limit %d is not 1 to 1000", q.Limit)
		}
		var list api.List[api.School]
		err := r.ask(cmd, "list schools", func(ctx context.Context, c *api.Client) (err error) {
			list, err = c.Schools(ctx, q)
			return err
		})
		if err != nil {
			return err
		}
		return p.print(list, func() { p.schools(list) })
	}
	return c
}

func newSchoolShow(p printer, r *remote) *cobra.Command {
	return &cobra.Command{
		Use:     "show ID",
		Short:   "Show a school",
		Example: `  schoolbell school show A`,
		Args:    exactly("the school's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.oneSchool(cmd, r, "school "+visible(args[0]), func(ctx context.Context, c *api.Client) (api.School, error) { return c.School(ctx, args[0]) })
		},
	}
}

func newSchoolPut(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "put ID",
		Short: "Make a school or change its settings",
		Long: `put makes a school, or changes of one what the flags name. A lower limit holds at
once, a higher one from the next cycle on.`,
		Example: `  schoolbell school put A --name "Hanbit Elementary" --sender fcm
  schoolbell school put A --limit 3000 --rest 5m`,
		Args: exactly("the school's id"),
	}
	var (
		name, sender string
		limit        int
		rest         time.Duration
	)
	f := c.Flags()
	f.StringVar(&name, "name", "", "its `name`, for people")
	f.StringVar(&sender, "sender", "", "`name` of the sender; empty: the deployment's default")
	f.IntVar(&limit, "limit", 0, "attempts per cycle")
	f.DurationVar(&rest, "rest", 0, "rest after a full cycle")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		var change api.SchoolChange
		if f.Changed("name") {
			change.Name = &name
		}
		if f.Changed("sender") {
			change.Sender = &sender
		}
		if f.Changed("limit") {
			change.Limit = &limit
		}
		if f.Changed("rest") {
			seconds := rest.Seconds()
			change.RestSeconds = &seconds
		}
		return p.oneSchool(cmd, r, "put school "+visible(args[0]), func(ctx context.Context, c *api.Client) (api.School, error) {
			return c.PutSchool(ctx, args[0], change)
		})
	}
	return c
}

func newSchoolSwitch(p printer, r *remote, name, short, long string, call func(*api.Client, context.Context, string) (api.School, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " ID", Short: short, Long: long,
		Example: "  schoolbell school " + name + " A",
		Args:    exactly("the school's id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.oneSchool(cmd, r, name+" school "+visible(args[0]), func(ctx context.Context, c *api.Client) (api.School, error) { return call(c, ctx, args[0]) })
		},
	}
}

// oneSchool asks for a school and prints it.
func (p printer) oneSchool(cmd *cobra.Command, r *remote, op string, question func(context.Context, *api.Client) (api.School, error)) error {
	var s api.School
	err := r.ask(cmd, op, func(ctx context.Context, c *api.Client) (err error) {
		s, err = question(ctx, c)
		return err
	})
	if err != nil {
		return err
	}
	return p.print(s, func() { p.school(s) })
}

// wholeSeconds writes seconds for people: rounded up, since what is left of a
// rest must not look over before it is.
func wholeSeconds(s float64) string {
	if s <= 0 {
		return "-"
	}
	return (time.Duration(math.Ceil(s)) * time.Second).String()
}

func owner(s api.School) string {
	switch {
	case s.Degraded:
		return "not known"
	case s.Lock == nil:
		return "-"
	}
	return visible(s.Lock.Owner)
}

func (p printer) schools(list api.List[api.School]) {
	if len(list.Items) == 0 {
		fmt.Fprintln(p.out, "no schools")
		return
	}
	rows := [][]string{{"ID", "STATE", "QUOTA", "REST", "OWNER", "WAITING", "RETRY", "OLDEST", "NAME"}}
	for _, s := range list.Items {
		rows = append(rows, []string{
			visible(s.ID), string(s.State), fmt.Sprintf("%d/%d", s.Attempted, s.Limit), wholeSeconds(s.RestingSeconds), owner(s),
			strconv.Itoa(s.Waiting), strconv.Itoa(s.RetryDue + s.RetryWaiting), wholeSeconds(s.OldestWaitingSeconds), visible(s.Name),
		})
	}
	p.table(rows)
	if list.Next != "" {
		fmt.Fprintf(p.out, "more: --cursor %s\n", list.Next)
	}
}

func (p printer) school(s api.School) {
	sender := s.Sender
	if sender == "" {
		sender = "the default"
	}
	rows := [][]string{
		{"id", visible(s.ID)}, {"name", visible(s.Name)}, {"state", string(s.State)}, {"sender", visible(sender)},
		{"limit", strconv.Itoa(s.Limit)}, {"rest", time.Duration(s.RestSeconds * float64(time.Second)).String()},
		{"attempted", fmt.Sprintf("%d in cycle %d", s.Attempted, s.Cycle)}, {"rest left", wholeSeconds(s.RestingSeconds)}, {"lock owner", owner(s)},
		{"waiting", strconv.Itoa(s.Waiting)}, {"with the receiver", strconv.Itoa(s.InProgress)},
		{"retry due", strconv.Itoa(s.RetryDue)}, {"waiting for a retry", strconv.Itoa(s.RetryWaiting)},
		{"scheduled", strconv.Itoa(s.Scheduled)}, {"oldest waiting", wholeSeconds(s.OldestWaitingSeconds)},
	}
	p.table(rows)
}
