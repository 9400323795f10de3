package main

import (
	"log/slog"

	"github.com/spf13/cobra"

	"schoolbell/coordinator/node/settings"
)

func newServe(w surroundings, p printer) *cobra.Command {
	c := &cobra.Command{
		Use:   "serve",
		Short: "Run one replica: dispatcher and HTTP API",
		Long: `serve runs one replica until SIGTERM or SIGINT, then stops gracefully. For
stop_delay it only says that it is not ready, so that a load balancer looks away,
and goes on taking requests and sending. Then no new batch starts, calls in
flight end and are recorded, locks are released. A second signal ends it at once,
as a crash would.

Settings come from a YAML file (--config, else ./schoolbell.yaml, else
/etc/schoolbell/schoolbell.yaml), over it SCHOOLBELL_ variables, over them the
flags below. The schema has to be there: schoolbell migrate up comes first.

Without a database and a Redis it runs embedded, for trying things out: one
replica that keeps everything in ./schoolbell.db, writes what it would send into
its log, and answers this machine alone, without a key.`,
		Example: `  schoolbell serve
  schoolbell serve --config /etc/schoolbell/schoolbell.yaml
  SCHOOLBELL_ADMIN_KEY=… schoolbell serve --database-url postgres://bell:…@db/bell --redis-url redis://cache:6379
  schoolbell serve --print-config`,
		Args: cobra.NoArgs,
	}
	config := c.Flags().String("config", "", "settings `file`")
	printConfig := c.Flags().Bool("print-config", false, "print the effective settings, secrets hidden, as YAML (or JSON, by --output), and exit")
	given := settingFlags(c)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := w.settings(*config, given())
		if err != nil {
			return err
		}
		if *printConfig {
			if p.json() {
				return s.PrintJSON(w.stdout)
			}
			return s.Print(w.stdout)
		}
		if err := s.CheckServe(); err != nil {
			return err
		}
		return w.replica.serve(cmd.Context(), s, w.logger(s), w.build)
	}
	return c
}

// settings reads all layers.
func (w surroundings) settings(config string, flags map[string]string) (settings.Settings, error) {
	return settings.Load(settings.LoadArgs{
		Config: config, ReadFile: w.readFile, Environ: w.environ, Flags: flags, InstanceID: w.instanceID,
	})
}

// logger writes to stderr, one line an event.
func (w surroundings) logger(s settings.Settings) *slog.Logger {
	options := &slog.HandlerOptions{Level: s.LogLevel()}
	if s.Log.Format == "text" || s.Log.Format == "auto" && w.terminal {
		return slog.New(slog.NewTextHandler(w.stderr, options))
	}
	return slog.New(slog.NewJSONHandler(w.stderr, options))
}
