package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/api"
)

func newDevice(w surroundings, p printer) *cobra.Command {
	r := &remote{w: w}
	g := group("device", "Register devices and their topics, and judge brakes", `  schoolbell device import --school A devices.csv
  schoolbell device put --school A TOKEN --topic board-3
  schoolbell device brakes --open`,
		newDevicePut(p, r), newDeviceImport(w, p, r), newDeviceDelete(p, r), newDeviceList(p, r),
		newBrakeList(p, r),
		newBrakeEnd(p, r, "confirm", "Retire the devices that a brake flagged", `confirm says that the devices which a brake flagged are gone: they are retired, but
for those that were registered since. The brake is off. Confirming again goes on
where the first time broke off.`, (*api.Client).ConfirmBrake),
		newBrakeEnd(p, r, "clear", "Remove a brake's flags and retire nothing", `clear says that the devices which a brake flagged are not gone, as with credentials
of another project. Nothing is retired; the brake is off.`, (*api.Client).ClearBrake))
	r.flags(g)
	return g
}

// schoolFlag adds --school, which each of these commands needs.
func schoolFlag(c *cobra.Command, to *string) {
	c.Flags().StringVar(to, "school", "", "the `school`'s id")
}

func needSchool(school string) error {
	if school == "" {
		return usagef("--school is missing")
	}
	return nil
}

func newDevicePut(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "put TOKEN",
		Short: "Register a device or change it",
		Long: `put registers a device of a school, or changes of one what the flags name. A device
that was retired is alive again. One that is off gets nothing, also of notices
accepted before.`,
		Example: `  schoolbell device put --school A TOKEN --ref member-17 --topic board-3 --topic grade-2
  schoolbell device put --school A TOKEN --enabled=false
  schoolbell device put --school A TOKEN --no-topics`,
		Args: exactly("the device's token"),
	}
	var (
		school, ref string
		enabled, no bool
		topics      []string
	)
	f := c.Flags()
	schoolFlag(c, &school)
	f.StringVar(&ref, "ref", "", "the application's own `name` for it")
	f.BoolVar(&enabled, "enabled", true, "whether notifications are on")
	f.StringArrayVar(&topics, "topic", nil, "a `topic`; may be repeated, and all of them replace those it had")
	f.BoolVar(&no, "no-topics", false, "take all topics from it")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := needSchool(school); err != nil {
			return err
		}
		if no && len(topics) > 0 {
			return usagef("--topic and --no-topics exclude one another")
		}
		d := api.NewDevice{Token: args[0]}
		if f.Changed("ref") {
			d.Ref = &ref
		}
		if f.Changed("enabled") {
			d.Enabled = &enabled
		}
		if no {
			topics = []string{}
		}
		if no || len(topics) > 0 {
			d.Topics = &topics
		}
		var done api.Registered
		err := r.ask(cmd, "put device of school "+visible(school), func(ctx context.Context, c *api.Client) (err error) {
			done, err = c.PutDevices(ctx, school, []api.NewDevice{d})
			return err
		})
		if err != nil {
			return err
		}
		return p.print(done, func() { p.registered(done) })
	}
	return c
}

func (p printer) registered(done api.Registered) {
	fmt.Fprintf(p.out, "school %s: %d devices registered, %d new, %d revived\n", visible(done.School), done.Devices, done.Created, done.Revived)
}

func newDeviceDelete(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "delete TOKEN",
		Short: "Remove a device from a school's registry",
		Long: `delete removes a device with its topics. Notices that have it as a recipient already
are sent to it all the same; put --enabled=false stops them.`,
		Example: `  schoolbell device delete --school A TOKEN`,
		Args:    exactly("the device's token"),
	}
	var school string
	schoolFlag(c, &school)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := needSchool(school); err != nil {
			return err
		}
		err := r.ask(cmd, "delete device", func(ctx context.Context, c *api.Client) error { return c.DeleteDevice(ctx, school, args[0]) })
		if err != nil {
			return err
		}
		return p.print(api.DeletedDevice{School: school, Deleted: true}, func() { fmt.Fprintf(p.out, "school %s: device deleted\n", visible(school)) })
	}
	return c
}

func newDeviceList(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "list",
		Short: "List a school's devices",
		Example: `  schoolbell device list --school A --topic board-3
  schoolbell device list --school A --retired true --limit 1000 --output json`,
		Args: cobra.NoArgs,
	}
	var (
		school string
		q      api.DeviceQuery
	)
	schoolFlag(c, &school)
	f := c.Flags()
	f.StringVar(&q.Topic, "topic", "", "only those that have this `topic`")
	f.StringVar(&q.Retired, "retired", "", "`true` or false: only retired ones, or only others")
	f.IntVar(&q.Limit, "limit", 100, "at most this `number`, up to 1000")
	f.StringVar(&q.Cursor, "cursor", "", "go on after a page: the `cursor` that it ended with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := needSchool(school); err != nil {
			return err
		}
		if q.Limit < 1 || q.Limit > 1000 {
			return usagef("--limit %d is not 1 to 1000", q.Limit)
		}
		var list api.List[api.Device]
		err := r.ask(cmd, "list devices of school "+visible(school), func(ctx context.Context, c *api.Client) (err error) {
			list, err = c.Devices(ctx, school, q)
			return err
		})
		if err != nil {
			return err
		}
		return p.print(list, func() { p.devices(list) })
	}
	return c
}

func (p printer) devices(list api.List[api.Device]) {
	if len(list.Items) == 0 {
		fmt.Fprintln(p.out, "no devices")
		return
	}
	rows := [][]string{{"TOKEN", "REF", "STATE", "TOPICS", "REGISTERED"}}
	for _, d := range list.Items {
		state := "on"
		switch {
		case d.RetiredAt != nil:
			state = "retired"
		case d.Flagged:
			state = "flagged"
		case !d.Enabled:
			state = "off"
		}
		rows = append(rows, []string{visible(d.Token), visible(d.Ref), state, strings.Join(d.Topics, " "), clock(&d.RegisteredAt)})
	}
	p.table(rows)
	if list.Next != "" {
		fmt.Fprintf(p.out, "\nmore: --cursor %s\n", list.Next)
	}
}

func newBrakeList(p printer, r *remote) *cobra.Command {
	c := &cobra.Command{
		Use:   "brakes",
		Short: "List brakes, newest first",
		Long: `brakes lists where an unusual share of a batch came back as unregistered. While such
a brake is on, devices of that school and sender are flagged and none of them is
retired. Look whether the sender's credentials belong to the app's project; then
confirm the brake, or clear it.`,
		Example: `  schoolbell device brakes --open
  schoolbell device clear 7`,
		Args: cobra.NoArgs,
	}
	var q api.BrakeQuery
	f := c.Flags()
	f.StringVar(&q.School, "school", "", "only of this `school`")
	f.BoolVar(&q.Open, "open", false, "only those that are on")
	f.IntVar(&q.Limit, "limit", 20, "at most this `number`, up to 1000")
	f.StringVar(&q.Cursor, "cursor", "", "go on after a page: the `cursor` that it ended with")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if q.Limit < 1 || q.Limit > 1000 {
			return usagef("--limit %d is not 1 to 1000", q.Limit)
		}
		var list api.List[api.Brake]
		err := r.ask(cmd, "list brakes", func(ctx context.Context, c *api.Client) (err error) {
			list, err = c.Brakes(ctx, q)
			return err
		})
		if err != nil {
			return err
		}
		return p.print(list, func() { p.brakes(list) })
	}
	return c
}

func (p printer) brakes(list api.List[api.Brake]) {
	if len(list.Items) == 0 {
		fmt.Fprintln(p.out, "no brakes")
		return
	}
	rows := [][]string{{"ID", "SCHOOL", "SENDER", "STATE", "UNREGISTERED", "FLAGGED", "RETIRED", "ENGAGED"}}
	for _, b := range list.Items {
		state := "on"
		if !b.Open {
			state = b.ClosedAs + " by " + visible(b.ClosedBy)
		}
		rows = append(rows, []string{
			b.ID, visible(b.School), visible(b.Sender), state, fmt.Sprintf("%d of %d", b.Unregistered, b.Size),
			strconv.Itoa(b.Flagged), strconv.Itoa(b.Retired), clock(&b.EngagedAt),
		})
	}
	p.table(rows)
	if list.Next != "" {
		fmt.Fprintf(p.out, "\nmore: --cursor %s\n", list.Next)
	}
}

func newBrakeEnd(p printer, r *remote, name, short, long string, call func(*api.Client, context.Context, string) (api.Brake, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " BRAKE", Short: short, Long: long,
		Example: "  schoolbell device " + name + " 7",
		Args:    exactly("the brake's id, as device brakes shows it"),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, done, err := r.client()
			if err != nil {
				return err
			}
			defer done()
			b, err := call(client, cmd.Context(), args[0]) // without askTimeout: a school may have a million devices
			if err != nil {
				return r.explain(fmt.Errorf("%s brake %s: %w", name, visible(args[0]), err))
			}
			return p.print(b, func() {
				fmt.Fprintf(p.out, "brake %s of school %s and sender %s is off: %s, %d devices retired\n", b.ID, visible(b.School), visible(b.Sender), b.ClosedAs, b.Retired)
			})
		},
	}
}
