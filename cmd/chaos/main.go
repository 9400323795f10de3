// Command chaos runs schoolbell as it runs in production, breaks everything
// around it, and judges from the receiver's log what was kept.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

func main() {
	// The first signal ends the run in order; the second one kills it.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(exitCode(err))
	}
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:           "chaos",
		Short:         "Break everything around schoolbell and judge what was kept",
		Long:          long(),
		Example:       examples,
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.list {
				listFaults(cmd.OutOrStdout())
				return nil
			}
			if err := mutated(o.mutate, cmd.Flags()); err != nil {
				return err
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := cmd.Flags()
	f.IntVar(&o.replicas, "replicas", 3, "how many schoolbell processes")
	f.IntVar(&o.schools, "schools", 20, "how many schools")
	f.IntVar(&o.recipients, "recipients", 200_000, "devices of all schools together")
	f.IntVar(&o.limit, "limit", 500, "attempts per school and cycle")
	f.DurationVar(&o.rest, "rest", 5*time.Second, "a school's rest after a full cycle")
	f.DurationVar(&o.length, "for", 2*time.Minute, "how long notices come in and things break; the work then ends in peace")
	f.Float64Var(&o.unavailable, "unavailable", 0.02, "share of messages that the receiver refuses for now, which are sent again")
	f.StringVar(&o.delivery, "delivery", atLeastOnce, "at_least_once, or at_most_once: then no message may be taken twice, whatever breaks")
	f.StringVar(&o.faults, "faults", "all", "`kinds` of faults, separated by commas, each in all its ways or in one (redis-flush/all); or all, or none")
	f.StringVar(&o.redis, "redis", "", "single, sentinel or cluster; default: sentinel where redis-failover is among the faults, else single")
	f.Int64Var(&o.seed, "seed", 1, "of the faults and the notices; the same seed breaks the same things at the same moments")
	f.StringVar(&o.scenario, "scenario", "", "one exact `story` instead of planned faults: "+scenarioNames())
	f.StringVar(&o.mutate, "mutate", "", "build schoolbell with this `defect`, which has to be found: "+mutationNames())
	f.StringVar(&o.output, "output", outputText, "text or json")
	f.StringVar(&o.log, "log", "", "write the replicas' logs to this `file`")
	f.BoolVar(&o.list, "list-faults", false, "list the kinds of faults and end")
	return cmd
}
