package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/node/settings"
)

// migration is one step of the schema.
type migration struct {
	Version   int64      `json:"version"`
	Name      string     `json:"name"`
	AppliedAt *time.Time `json:"applied_at"` // null: not yet
}

// schema is what the migrate commands print: the steps done by this call, or
// for status all of them.
type schema struct {
	Steps []migration `json:"steps"`
}

func newMigrate(w surroundings, p printer) *cobra.Command {
	config := new(string)
	command := func(use, short, example string, add func(*cobra.Command) func(context.Context, settings.Settings) error) *cobra.Command {
		c := &cobra.Command{Use: use, Short: short, Example: example, Args: cobra.NoArgs}
		given := settingFlags(c, "database_url")
		act := add(c)
		c.RunE = func(cmd *cobra.Command, _ []string) error {
			s, err := w.settings(*config, given())
			if err != nil {
				return err
			}
			if s.DatabaseURL == "" {
				return usagef("database_url is empty; give --database-url or SCHOOLBELL_DATABASE_URL, e.g. postgres://user:password@host:5432/schoolbell")
			}
			return act(cmd.Context(), s)
		}
		return c
	}
	up := command("up", "Bring the schema to this version", `  schoolbell migrate up --database-url postgres://bell:PASSWORD@db/bell`,
		func(*cobra.Command) func(context.Context, settings.Settings) error {
			return func(ctx context.Context, s settings.Settings) error {
				steps, err := w.replica.migrateUp(ctx, s)
				if err != nil {
					return err
				}
				return p.print(schema{steps}, func() { p.steps("applied", steps, "the schema is up to date") })
			}
		})
	status := command("status", "Show the steps of the schema and which are applied", `  schoolbell migrate status --output json`,
		func(*cobra.Command) func(context.Context, settings.Settings) error {
			return func(ctx context.Context, s settings.Settings) error {
				steps, err := w.replica.migrateStatus(ctx, s)
				if err != nil {
					return err
				}
				return p.print(schema{steps}, func() { p.status(steps) })
			}
		})
	down := command("down", "Take the schema back to a version", `  schoolbell migrate down --to 3`,
		func(c *cobra.Command) func(context.Context, settings.Settings) error {
			to := c.Flags().Int64("to", 0, "last `version` to keep; 0 drops everything")
			return func(ctx context.Context, s settings.Settings) error {
				if !c.Flags().Changed("to") || *to < 0 {
					return usagef("migrate down needs --to with the last version to keep; 0 drops everything")
				}
				steps, err := w.replica.migrateDown(ctx, s, *to)
				if err != nil {
					return err
				}
				return p.print(schema{steps}, func() { p.steps("taken back", steps, fmt.Sprintf("the schema is at version %d already", *to)) })
			}
		})
	g := group("migrate", "Change the schema of the database", `  schoolbell migrate up
  schoolbell migrate status
  schoolbell migrate down --to 3`, up, status, down)
	g.PersistentFlags().StringVar(config, "config", "", "settings `file`; only database_url is used")
	return g
}

func (p printer) steps(done string, steps []migration, none string) {
	if len(steps) == 0 {
		fmt.Fprintln(p.out, none)
	}
	for _, m := range steps {
		fmt.Fprintf(p.out, "%s %d %s\n", done, m.Version, m.Name)
	}
}

func (p printer) status(steps []migration) {
	rows := [][]string{{"VERSION", "NAME", "APPLIED"}}
	for _, m := range steps {
		applied := "no"
		if m.AppliedAt != nil {
			applied = clock(m.AppliedAt)
		}
		rows = append(rows, []string{fmt.Sprint(m.Version), m.Name, applied})
	}
	p.table(rows)
}
