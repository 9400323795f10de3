package main

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// build says what this program was made of.
type build struct {
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
}

func (b build) orUnknown() build {
	return build{Version: cmp.Or(b.Version, "devel"), Commit: cmp.Or(b.Commit, "unknown"), Go: cmp.Or(b.Go, "unknown")}
}

func newVersion(w surroundings, p printer) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show version, commit and Go version",
		Example: `  schoolbell version
  schoolbell version --output json`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return p.version(w.build)
		},
	}
}

func (p printer) version(b build) error {
	return p.print(b, func() { fmt.Fprintf(p.out, "schoolbell %s\ncommit %s\n%s\n", b.Version, b.Commit, b.Go) })
}

// cleanHost makes a host name fit instance_id: letters, digits, dots,
// underscores and dashes, 100 at most.
func cleanHost(host string) string {
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-' {
			return r
		}
		return '-'
	}, host)
	return clean[:min(len(clean), 100)]
}
