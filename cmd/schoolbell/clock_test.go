package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Between processes only Redis's clock and the database's decide: a replica whose
// own clock is wrong, or is set while it runs, must do what the others do. Its
// clock serves to measure how long something takes, for which a time keeps its
// monotonic reading. Each file of the way from a request to its result that asks
// for the time is listed here with what for; a new one has to say it.
var clocks = map[string]string{
	"coordinator/batch.go":            "durations of a batch, the lane's pauses, how long a record takes",
	"coordinator/coordinator.go":      "the agenda, which lives and dies with the process",
	"coordinator/line.go":             "how old a ticket is, and the lane's pauses",
	"coordinator/metrics.go":          "how long a lane stays closed, in this process",
	"coordinator/turn.go":             "durations of a turn; moments that the database told as durations",
	"coordinator/node/jobs.go":        "the steady clock of the schedules",
	"coordinator/node/clock_off.go":   "the clock that is handed to those that read the wall",
	"coordinator/node/clock_on.go":    "the same, to be stepped",
	"coordinator/node/redis_check.go": "how old an answer is",
	"coordinator/web/errors.go":       "a deadline of a connection",
	"coordinator/web/observe.go":      "how long a request took",
	"coordinator/web/operations.go":   "how old an answer is",
	"coordinator/web/upload.go":       "how fast an upload comes",
	"coordinator/web/web.go":          "default of what shows when a rest or a notice will end, to people",
	"sender/metrics.go":               "how long a call took",
	"sender/fcm/fcm.go":               "how long a token and a message live, from moments of the same clock",
	"sender/fcm/pool.go":              "ages of connections",
	"sender/fcm/tokens.go":            "how long a token lives, of which the answer tells a duration",
	"watchdog/keeper.go":              "default of the three clocks of a lease",
	"watchdog/redislease/locks.go":    "how old the server's time is",
	"school/store/db.go":              "default of what the ids of notices show",
	"school/store/migrate.go":         "shows when a step was applied, to people",
	"school/store/retention.go":       "how long a step took, and so how many rows the next one has",
	"school/store/sqlite_migrate.go":  "shows when a step was applied, to people",
	"school/store/sqlite_tx.go":       "the embedded engine's clock, which is its process's; and how long a writer waited",
}

// walls are the files that read what a wall clock shows: as a number, a text or a
// calendar day. What they read is told in the reason.
var walls = map[string]string{
	"coordinator/alert/alert.go":      "what the database tells, shown to people",
	"coordinator/alert/digest.go":     "what the database tells, shown to people",
	"coordinator/alert/text.go":       "what the database tells, shown to people",
	"coordinator/node/jobs.go":        "a slot, of Redis's clock",
	"coordinator/web/devices.go":      "what the database tells, shown to people",
	"coordinator/web/failures.go":     "the database's time in a cursor, as it told it",
	"coordinator/web/notices.go":      "what the database tells, shown to people",
	"coordinator/web/operations.go":   "what Redis tells, shown to people",
	"coordinator/web/schools.go":      "what the database tells, shown to people",
	"coordinator/web/strict.go":       "what a caller asked for",
	"sender/fcm/message.go":           "expires_at, which the caller gave and the receiver compares",
	"watchdog/keeper.go":              "the age in an acquisition's id, for people; its random part makes it one",
	"watchdog/window.go":              "shows that a machine slept, and can only end a lease early",
	"watchdog/redislease/locks.go":    "the server's time, as it told it",
	"watchdog/redislease/registry.go": "the server's time, as it told it",
	"watchdog/redislease/slots.go":    "the server's time, as it told it",
	"school/school.go":                "the age in a notice's id, for people; nothing goes by the order of ids",
	"school/store/alerts.go":          "the database's own times, on their way back to it",
	"school/store/models.go":          "the embedded engine's columns",
	"school/store/sqlite.go":          "the embedded engine's columns",
	"school/store/sqlite_requeue.go":  "the embedded engine's clock and columns",
	"school/store/sqlite_accept.go":   "the embedded engine's columns",
	"school/store/sqlite_alerts.go":   "the embedded engine's columns",
	"school/store/sqlite_page.go":     "the embedded engine's columns",
	"school/store/sqlite_tx.go":       "the embedded engine's clock and columns",
}

// dispatchPath is where the two lists hold.
var dispatchPath = []string{"coordinator", "sender", "watchdog", "school", "scripts"}

// apart are folders in it whose programs send nothing for anybody.
var apart = []string{"coordinator/api", "coordinator/node/demo", "coordinator/node/settings", "sender/simulator", "sender/sendertest",
	"watchdog/watchdogtest", "school/store/storetest", "school/quota/quotatest", "sender/redisrate/ratetest", "coordinator/model"}

func TestOnlySharedClocksDecide(t *testing.T) {
	t.Parallel()
	asks, reads := map[string]bool{}, map[string]bool{}
	root := "../.."
	for _, dir := range dispatchPath {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			name = filepath.ToSlash(name)
			switch {
			case err != nil:
				return err
			case d.IsDir() && (slices.Contains(apart, name) || d.Name() == "testdata"):
				return filepath.SkipDir
			case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
				return nil
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			asks[name], reads[name] = clockUse(file)
			return nil
		})
		require.NoError(t, err)
	}
	for _, line := range unlisted("asks for the time", clocks, asks) {
		t.Error(line)
	}
	for _, line := range unlisted("reads what a wall clock shows", walls, reads) {
		t.Error(line)
	}
}

// unlisted returns what differs between a list and what was found.
func unlisted(what string, listed map[string]string, found map[string]bool) (wrong []string) {
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if found[name] && listed[name] == "" {
			wrong = append(wrong, fmt.Sprintf("%s %s: only Redis's clock and the database's decide between processes; where that stays so, add the file to the list with what it is for", name, what))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(listed)) {
		if !found[name] {
			wrong = append(wrong, fmt.Sprintf("%s is listed and no longer %s", name, what))
		}
	}
	return wrong
}

// shows are the methods of a time that leave its monotonic reading behind.
var shows = []string{"Unix", "UnixMilli", "UnixMicro", "UnixNano", "UTC", "Local", "Format", "AppendFormat"}

// clockUse reports whether a file asks for the time, and whether it reads what a
// wall clock shows. It goes by names: too much is found rather than too little.
func clockUse(file *ast.File) (asks, reads bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			pkg, ok := n.X.(*ast.Ident)
			asks = asks || ok && pkg.Name == "time" && n.Sel.Name == "Now"
		case *ast.CallExpr:
			method, ok := n.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, isIdent := method.X.(*ast.Ident)
			if isIdent && pkg.Name == "time" {
				return true // makes a time from what it shows
			}
			zero := len(n.Args) == 1
			if zero {
				lit, isLit := n.Args[0].(*ast.BasicLit)
				zero = isLit && lit.Value == "0"
			}
			reads = reads || slices.Contains(shows, method.Sel.Name) || method.Sel.Name == "Round" && zero
		}
		return true
	})
	return asks, reads
}

func TestClockUseIsSeen(t *testing.T) {
	t.Parallel()
	for source, want := range map[string][2]bool{
		"time.Now().UnixMilli()":       {true, true},
		"f(time.Now)":                  {true, false},
		"time.Since(began)":            {false, false},
		"notice.ExpiresAt.Unix()":      {false, true},
		"time.UnixMilli(3)":            {false, false},
		"now.Round(0)":                 {false, true},
		"wait.Round(time.Second)":      {false, false},
		"at.Format(time.RFC3339)":      {false, true},
		"t.looked.Add(time.Until(at))": {false, false},
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\nvar _ = "+source, parser.SkipObjectResolution)
		require.NoError(t, err)
		asks, reads := clockUse(file)
		require.Equal(t, want, [2]bool{asks, reads}, source)
	}
	require.Len(t, unlisted("does", map[string]string{"a": "r", "gone": "r"}, map[string]bool{"a": true, "new": true, "not": false}), 2)
}
