package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"schoolbell/coordinator/api"
	"schoolbell/coordinator/node"
	"schoolbell/coordinator/node/demo"
	"schoolbell/coordinator/node/settings"
	"schoolbell/school"
	"schoolbell/sender/simulator/verdict"
)

// Exit codes. Scripts decide by them.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitRefused     = 4 // authentication, authorisation
	exitUnreachable = 5 // server or store
)

// surroundings is everything the commands touch outside their arguments.
type surroundings struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool // stderr is one: progress may move the cursor
	environ        []string
	readFile       func(name string) ([]byte, error)
	open           func(name string) (io.ReadCloser, error)
	instanceID     string
	build          build
	replica        replicaCommands
	pollEvery      time.Duration // first interval of --wait
}

// replicaCommands is what runs replicas and the schema.
type replicaCommands struct {
	serve         func(ctx context.Context, s settings.Settings, log *slog.Logger, b build) error
	demo          func(ctx context.Context, cfg demo.Config) (verdict.Verdict, error)
	migrateUp     func(ctx context.Context, s settings.Settings) ([]migration, error)
	migrateStatus func(ctx context.Context, s settings.Settings) ([]migration, error)
	migrateDown   func(ctx context.Context, s settings.Settings, to int64) ([]migration, error)
}

// getenv is the last value of a variable, as a shell would have it.
func (w surroundings) getenv(name string) string {
	value := ""
	for _, kv := range w.environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			value = v
		}
	}
	return value
}

// usageError is wrong usage: the command line itself has to change.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func usagef(format string, args ...any) error {
	return &usageError{message: fmt.Sprintf(format, args...)}
}

// inputError is something given beside the command line, such as a file, that
// has to change: wrong usage as well, but nothing that the help would explain.
type inputError struct{ message string }

func (e *inputError) Error() string { return e.message }

func inputf(format string, args ...any) error {
	return &inputError{message: fmt.Sprintf(format, args...)}
}

// run executes one command line and returns the exit code. An error becomes one
// line on stderr.
func run(ctx context.Context, args []string, w surroundings) int {
	started := false
	root := newRoot(w, &started)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	code := exitCode(err)
	message := strings.Join(strings.Fields(err.Error()), " ")
	_, usage := errors.AsType[*usageError](err)
	if !started { // cobra refused the command line before any command began
		code, usage = exitUsage, true
	}
	if usage {
		message += fmt.Sprintf(" (see %s --help)", cmd.CommandPath())
	}
	fmt.Fprintf(w.stderr, "schoolbell: %s\n", message)
	return code
}

func exitCode(err error) int {
	if wrongUsage(err) {
		return exitUsage
	}
	if e, ok := errors.AsType[*api.Error](err); ok {
		switch e.Code {
		case api.InvalidArgument, api.TooLarge, api.UnsupportedMediaType:
			return exitUsage // as where this side sees it first
		case api.NotFound:
			return exitNotFound
		case api.Unauthenticated, api.PermissionDenied:
			return exitRefused
		case api.Unavailable:
			return exitUnreachable
		}
		return exitFailed
	}
	switch {
	case errors.Is(err, context.Canceled):
		return exitFailed // a signal, not the other side
	case errors.Is(err, school.ErrNotFound), errors.Is(err, node.ErrNoDatabase):
		return exitNotFound
	case errors.Is(err, node.ErrLogin):
		return exitRefused
	case unreachable(err):
		return exitUnreachable
	}
	return exitFailed
}

// wrongUsage reports whether what was given, by flags, files or settings, has to
// change before the same command can do anything: trying again is of no use.
func wrongUsage(err error) bool {
	if _, ok := errors.AsType[*usageError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*inputError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*settings.Error](err); ok {
		return true
	}
	_, ok := errors.AsType[*node.VersionError](err)
	return ok
}

// unreachable reports whether the other side did not answer at all.
func unreachable(err error) bool {
	if errors.Is(err, school.ErrUnavailable) {
		return true
	}
	if _, ok := errors.AsType[*url.Error](err); ok {
		return true
	}
	// A port of our own that is taken is an OpError, too, and no other side.
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op != "listen"
}

const (
	outputText = "text"
	outputJSON = "json"
)

func newRoot(w surroundings, started *bool) *cobra.Command {
	root := &cobra.Command{
		Use:   "schoolbell",
		Short: "Push notifications for many schools, each within its sending rule",
		Long: `schoolbell sends push notifications for many schools. Several replicas share
PostgreSQL and Redis; no school ever exceeds its sending rule, and killing any
machine at any moment loses nothing.

Exit codes: 0 done, 1 failed, 2 wrong usage (flags, settings, input that has to
change), 3 not found, 4 refused (authentication, authorisation), 5 server or
store not reachable. An error is one line of text on stderr, also with --output
json.`,
		Example: `  schoolbell migrate up --database-url postgres://bell:PASSWORD@db/bell
  schoolbell serve --config schoolbell.yaml
  schoolbell notice send --school A --title "No school today" --tokens-file tokens.txt --wait`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetIn(w.stdin)
	root.SetOut(w.stdout)
	root.SetErr(w.stderr)
	root.SetFlagErrorFunc(flagError)
	showVersion := root.Flags().Bool("version", false, "show version, commit and Go version, as schoolbell version does")
	output := root.PersistentFlags().String("output", outputText, "`format` of what is printed: text or json")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		*started = true
		if *output != outputText && *output != outputJSON {
			return usagef("--output %q is not text or json", *output)
		}
		return nil
	}
	p := printer{out: w.stdout, format: output}
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		if *showVersion {
			return p.version(w.build)
		}
		return cmd.Help()
	}
	root.AddCommand(newServe(w, p), newDemo(w, p), newMigrate(w, p), newNotice(w, p), newSchool(w, p), newFailure(w, p), newDevice(w, p), newVersion(w, p))
	return root
}

// flagError says in words what a flag takes: the parsers of the standard library
// speak of themselves.
func flagError(_ *cobra.Command, err error) error {
	wrong, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag, text := wrong.GetFlag(), wrong.GetValue()
	want := ""
	switch flag.Value.Type() {
	case "duration":
		if _, err := strconv.ParseFloat(text, 64); err == nil {
			return usagef("--%s %q has no unit; write %ss", flag.Name, text, text)
		}
		want = "a duration such as 3s or 1m30s"
	case "int", "int64":
		want = "a whole number"
	case "bool":
		want = "true or false"
	default:
		return err
	}
	return usagef("--%s %q is not %s", flag.Name, text, want)
}

// group is a command that only holds others.
func group(use, short, example string, children ...*cobra.Command) *cobra.Command {
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Name()
	}
	g := &cobra.Command{
		Use: use, Short: short, Example: example,
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("%s has no command %q; it has %s", use, args[0], strings.Join(names, ", "))
			}
			return usagef("%s needs a command: %s", use, strings.Join(names, ", "))
		},
	}
	g.AddCommand(children...)
	return g
}

// settingFlags adds a flag for each of the named settings, or for all that have
// one, and returns a way to read those that were given.
func settingFlags(c *cobra.Command, only ...string) (given func() map[string]string) {
	values := map[string]*settingValue{}
	for _, f := range settings.Flags() {
		if len(only) > 0 && !slices.Contains(only, f.Path) {
			continue
		}
		v := &settingValue{kind: f.Type}
		values[f.Path] = v
		c.Flags().Var(v, f.Name, f.Usage)
	}
	return func() map[string]string {
		out := map[string]string{}
		for path, v := range values {
			if v.set {
				out[path] = v.text
			}
		}
		return out
	}
}

// settingValue keeps a flag as written: package settings judges it together
// with the other layers.
type settingValue struct {
	text, kind string
	set        bool
}

func (v *settingValue) String() string     { return v.text }
func (v *settingValue) Type() string       { return v.kind }
func (v *settingValue) Set(s string) error { v.text, v.set = s, true; return nil }
