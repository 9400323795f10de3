package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This file keeps the layout of the module: who may import whom, where the heavy
// dependencies live, what stands at the top. The rules are an allow-list: what
// is not named is refused, with the reason that the rule has.

const module = "schoolbell"

// tree is what the rules look at.
type tree struct {
	packages []pkg
	top      []string // entries of the module's root that are not ignored
}

type pkg struct {
	path      string   // without the module: coordinator/node; "" is the root
	name      string   // of the package clause
	imports   []string // full paths, without tests
	comments  []string // files with a package comment
	mainLines int      // of main.go in a main package
}

// ours are the imports that belong to the module, without its name.
func (p pkg) ours() []string {
	var out []string
	for _, i := range p.imports {
		if rest, ok := strings.CutPrefix(i, module+"/"); ok {
			out = append(out, rest)
		}
	}
	return out
}

const maxMainLines = 100 // exclusive
const maxDepth = 5       // edges in the longest chain of imports

var topAllowed = []string{
	"cmd", "school", "watchdog", "sender", "coordinator", "scripts", "deploy",
	"go.mod", "go.sum", "README.md", "README.ko.md", "LICENSE", "CHANGELOG.md", "Makefile",
}

var leaves = []string{"school", "watchdog", "sender", "scripts", "coordinator/api"}

// rule says what packages may import of ours, and why no more.
type rule struct {
	applies func(p string) bool
	allows  func(p, imported string) bool
	reason  string
}

func is(names ...string) func(string) bool {
	return func(p string) bool { return slices.Contains(names, p) }
}

func under(folders ...string) func(string) bool {
	return func(p string) bool {
		return slices.ContainsFunc(folders, func(f string) bool { return strings.HasPrefix(p, f+"/") })
	}
}

func only(names ...string) func(string, string) bool {
	return func(_, imported string) bool { return slices.Contains(names, imported) }
}

func ancestor(p, imported string) bool { return strings.HasPrefix(p, imported+"/") }

func isTestPackage(p string) bool { return strings.HasSuffix(path.Base(p), "test") }

// rules are tried in order; the first that applies decides.
var rules = []rule{
	{is(leaves...), only(), "it is a leaf: it can be understood, tested and changed without anything else of the project"},
	{is("coordinator"), only("school", "sender"), "the scheduler reaches store, quota and lock through interfaces of its own, so that it holds no mechanism"},
	{under("school", "watchdog", "sender"), func(p, i string) bool { return ancestor(p, i) || i == "scripts" },
		"an adapter knows the leaf whose types it returns and never its consumer or its neighbour"},
	{is("coordinator/model"), only("school", "school/quota"),
		"the model of a turn is the protocol written down a second time: what it imported of the first it could not find wrong, but for the rule's arithmetic, which is the one part taken as it is"},
	{is("coordinator/web"), only("coordinator/api", "school"), "the HTTP API reaches the store through interfaces of its own and speaks in the types of coordinator/api"},
	{is("coordinator/hook"), only("school"), "what is posted to a webhook, and from which table, is for others to say"},
	{is("coordinator/alert"), only("coordinator/hook", "school"), "it says what operators are told and in which words; where that is kept is reached through interfaces of its own"},
	{is("coordinator/fallback"), only("coordinator/hook", "school"), "it says what a fallback looks like on the wire; the table is reached through an interface of its own"},
	{is("coordinator/node/settings"), only("watchdog"), "what a replica is told is read without anything of what it does, but for the arithmetic of a lease"},
	{is("coordinator/node"), func(_, i string) bool {
		return !under("cmd", "deploy", "coordinator/node")(i) && !is("school/outbox", "coordinator/model")(i) || i == "coordinator/node/settings"
	},
		"the composition root joins the parts of a replica; commands and test servers are none"},
	{is("coordinator/node/demo"), only("coordinator", "coordinator/api", "coordinator/node", "coordinator/node/settings", "sender/simulator", "sender/simulator/verdict"),
		"the demonstration runs whole replicas against the simulator and judges them from outside; of coordinator it knows the rule's arbiter, to be able to break it"},
	{is("coordinator/node/nodetest"), func(_, i string) bool { return !under("cmd")(i) }, "nodetest runs replicas in one process; commands are none"},
	{is("deploy/local"), only(), "servers for tests know nothing of what is tested"},
	{under("deploy/local"), ancestor, "servers for tests know nothing of what is tested"},
	{is("cmd/chaos"), only("cmd/chaos/arena", "cmd/chaos/plan", "cmd/chaos/storm", "deploy/local", "sender/simulator/verdict"),
		"the command reads flags and prints; the run is storm's"},
	{is("cmd/chaos/storm"), only("cmd/chaos/arena", "cmd/chaos/plan", "deploy/local", "sender/simulator", "sender/simulator/verdict"),
		"a run joins the plan with the arena that it happens in, and sees replicas from outside alone"},
	{under("cmd"), only("coordinator/node", "coordinator/node/settings", "coordinator/node/demo", "coordinator/node/nodetest", "coordinator/api", "school", "sender/simulator", "sender/simulator/verdict", "deploy/local"),
		"a command goes through the composition root or the API's client, never to an adapter"},
}

// homes are dependencies that may be imported in few places.
var homes = []struct {
	dependency string // import path or its beginning
	in         []string
	reason     string
}{
	{"gorm.io/", []string{"school/store", "school/outbox"}, "SQL has one home, so that a change of the schema has one"},
	{"github.com/redis/go-redis/", []string{"watchdog/redislease", "school/quota/redisquota", "sender/redisrate", "coordinator/node"}, "what is said to Redis is said by the lock, the rule and the rate, through package scripts"},
	{"firebase.google.com/", []string{"sender/fcm"}, "the provider's quirks stay with the provider's sender"},
	{"github.com/go-co-op/gocron/", []string{"coordinator/node"}, "only the composition root has schedules"},
	{"github.com/go-chi/", []string{"coordinator/web"}, "HTTP is served in one place"},
	{"github.com/spf13/cobra", []string{"cmd/"}, "the command line ends in cmd"},
	{"github.com/knadh/koanf/", []string{"coordinator/node/settings"}, "settings are read in one place; packages have a Config each"},
	{"github.com/stretchr/", []string{"test"}, "assertions belong to tests"},
}

// nameless are names that say nothing about what a package is.
var nameless = []string{"util", "utils", "common", "helper", "helpers", "manager", "misc", "base", "config", "types", "models"}

// check returns what is wrong with a tree, one line each.
func check(t tree) []string {
	var wrong []string
	refuse := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	for _, e := range t.top {
		if !slices.Contains(topAllowed, e) && !strings.HasPrefix(e, ".") {
			refuse("%s stands at the top of the tree: the top is fixed; put it into the folder that it belongs to", e)
		}
	}
	for _, p := range t.packages {
		for _, line := range checkPackage(p) {
			refuse("%s", line)
		}
	}
	if chain := longest(t); len(chain)-1 > maxDepth {
		refuse("%s: the chain of imports is %d long: at most %d, so that a change reaches few", strings.Join(chain, " → "), len(chain)-1, maxDepth)
	}
	return wrong
}

func checkPackage(p pkg) (wrong []string) {
	refuse := func(format string, args ...any) { wrong = append(wrong, p.path+fmt.Sprintf(format, args...)) }
	if slices.Contains(nameless, path.Base(p.path)) {
		refuse(" has a name that says nothing: name a package for the one idea in it")
	}
	if len(p.comments) != 1 {
		refuse(" has %d package comments (%s): exactly one says what the package does and what not", len(p.comments), strings.Join(p.comments, ", "))
	}
	if p.name == "main" && p.mainLines >= maxMainLines {
		refuse("/main.go has %d lines: fewer than %d; main joins, it does not work", p.mainLines, maxMainLines)
	}
	i := slices.IndexFunc(rules, func(r rule) bool { return r.applies(p.path) })
	if i < 0 {
		refuse(" has no rule: say in layout_test.go what it may import, and why")
		return wrong
	}
	for _, imported := range p.ours() {
		switch {
		case isTestPackage(imported) && !isTestPackage(p.path) && !slices.Contains([]string{"cmd/chaos", "cmd/bench"}, p.path):
			refuse(" imports %s: that is for tests", imported)
		case !rules[i].allows(p.path, imported):
			refuse(" imports %s: %s", imported, rules[i].reason)
		}
	}
	for _, h := range homes {
		if slices.ContainsFunc(h.in, func(home string) bool { return lives(p.path, home) }) {
			continue
		}
		for _, imported := range p.imports {
			if strings.HasPrefix(imported+"/", h.dependency) || imported == h.dependency {
				refuse(" imports %s: %s", imported, h.reason)
			}
		}
	}
	return wrong
}

// lives reports whether a package is the home: itself, something under a folder
// (with a slash at the end), or any package for tests.
func lives(p, home string) bool {
	switch {
	case isTestPackage(p):
		return true
	case strings.HasSuffix(home, "/"):
		return strings.HasPrefix(p, home)
	}
	return p == home
}

// longest is the longest chain of imports among ours.
func longest(t tree) []string {
	edges := map[string][]string{}
	for _, p := range t.packages {
		edges[p.path] = p.ours()
	}
	known := map[string][]string{}
	var from func(p string) []string
	from = func(p string) []string {
		if c, ok := known[p]; ok {
			return c
		}
		known[p] = []string{p} // ends a cycle, which the compiler refuses anyway
		var best []string
		for _, i := range edges[p] {
			if c := from(i); len(c) > len(best) {
				best = c
			}
		}
		known[p] = append([]string{p}, best...)
		return known[p]
	}
	var best []string
	for _, p := range t.packages {
		if c := from(p.path); len(c) > len(best) {
			best = c
		}
	}
	return best
}

func TestLayout(t *testing.T) {
	t.Parallel()
	tr := readTree(t)
	require.Greater(t, len(tr.packages), 5)
	for _, line := range check(tr) {
		t.Error(line)
	}
}

func readTree(t *testing.T) tree {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	list := exec.Command("go", "list", "-e", "-json=ImportPath,Name,Dir,GoFiles,IgnoredGoFiles,Imports", "./...")
	list.Dir = root
	var stderr bytes.Buffer
	list.Stderr = &stderr
	out, err := list.Output()
	require.NoError(t, err, stderr.String())

	var tr tree
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var l struct {
			ImportPath, Name, Dir            string
			GoFiles, IgnoredGoFiles, Imports []string
		}
		err := dec.Decode(&l)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if len(l.GoFiles) == 0 {
			continue // tests only
		}
		p := pkg{path: strings.TrimPrefix(strings.TrimPrefix(l.ImportPath, module), "/"), name: l.Name, imports: l.Imports}
		for _, f := range append(l.GoFiles, l.IgnoredGoFiles...) {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			src, err := os.ReadFile(filepath.Join(l.Dir, f))
			require.NoError(t, err)
			parsed, err := parser.ParseFile(token.NewFileSet(), f, src, parser.PackageClauseOnly|parser.ParseComments)
			require.NoError(t, err)
			if parsed.Doc != nil && strings.TrimSpace(parsed.Doc.Text()) != "" {
				p.comments = append(p.comments, f)
			}
			if f == "main.go" {
				p.mainLines = bytes.Count(src, []byte("\n"))
			}
		}
		tr.packages = append(tr.packages, p)
	}
	tr.top = topEntries(t, root)
	return tr
}

// topEntries lists the root without what .gitignore leaves out.
func topEntries(t *testing.T, root string) []string {
	t.Helper()
	ignored, err := os.ReadFile(filepath.Join(root, ".gitignore"))
	require.NoError(t, err)
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	var out []string
	for _, e := range entries {
		left := slices.ContainsFunc(strings.Fields(string(ignored)), func(pattern string) bool {
			match, err := path.Match(strings.Trim(pattern, "/"), e.Name())
			return err == nil && match
		})
		if !left {
			out = append(out, e.Name())
		}
	}
	return out
}

// TestLayoutRefuses feeds the rules a tree with one thing wrong, so that a rule
// that refuses nothing is found.
func TestLayoutRefuses(t *testing.T) {
	t.Parallel()
	sound := func() tree {
		names := append(slices.Clone(leaves), "coordinator", "coordinator/model", "coordinator/web", "coordinator/hook", "coordinator/fallback", "coordinator/alert", "coordinator/node", "coordinator/node/settings", "coordinator/node/demo", "coordinator/node/nodetest",
			"school/quota", "school/quota/redisquota", "school/quota/quotatest", "school/store", "watchdog/redislease", "watchdog/watchdogtest",
			"sender/relay", "sender/fcm", "sender/simulator", "deploy/local", "deploy/local/localtest", "sender/simulator/verdict", "cmd/schoolbell", "cmd/chaos", "cmd/chaos/storm", "cmd/chaos/plan")
		imports := map[string]string{
			"coordinator":               "school sender",
			"coordinator/model":         "school school/quota",
			"coordinator/web":           "coordinator/api school",
			"coordinator/hook":          "school",
			"coordinator/fallback":      "coordinator/hook school",
			"coordinator/alert":         "coordinator/hook school",
			"coordinator/node":          "coordinator coordinator/alert coordinator/fallback coordinator/hook coordinator/web coordinator/api school/store school/quota/redisquota watchdog watchdog/redislease sender/relay coordinator/node/settings",
			"coordinator/node/demo":     "coordinator/node coordinator/node/settings coordinator/api sender/simulator",
			"coordinator/node/nodetest": "coordinator/node deploy/local sender/simulator",
			"school/quota":              "school",
			"school/quota/redisquota":   "school school/quota scripts",
			"school/quota/quotatest":    "school/quota",
			"school/store":              "school",
			"watchdog/redislease":       "watchdog scripts",
			"sender/relay":              "sender",
			"deploy/local/localtest":    "deploy/local",
			"cmd/schoolbell":            "coordinator/node coordinator/node/demo coordinator/node/settings coordinator/api",
			"cmd/chaos":                 "cmd/chaos/storm sender/simulator/verdict",
			"cmd/chaos/storm":           "cmd/chaos/plan sender/simulator",
			"cmd/chaos/plan":            "",
		}
		var tr tree
		for _, n := range names {
			p := pkg{path: n, name: path.Base(n), comments: []string{"doc.go"}}
			if strings.HasPrefix(n, "cmd/") {
				p.name, p.mainLines = "main", maxMainLines-1
			}
			for _, i := range strings.Fields(imports[n]) {
				p.imports = append(p.imports, module+"/"+i)
			}
			tr.packages = append(tr.packages, p)
		}
		tr.top = append(slices.Clone(topAllowed), ".git", ".ci")
		return tr
	}
	require.Empty(t, check(sound()))

	at := func(tr *tree, p string) *pkg {
		i := slices.IndexFunc(tr.packages, func(q pkg) bool { return q.path == p })
		if i < 0 {
			tr.packages = append(tr.packages, pkg{path: p, name: path.Base(p), comments: []string{"doc.go"}})
			i = len(tr.packages) - 1
		}
		return &tr.packages[i]
	}
	type mutation struct {
		name, want string
		mutate     func(*tree)
	}
	edge := func(from, to, want string) mutation {
		return mutation{from + " → " + to, want, func(tr *tree) {
			if !strings.Contains(to, ".") {
				to = module + "/" + to
			}
			at(tr, from).imports = append(at(tr, from).imports, to)
		}}
	}
	const redis, gorm, firebase = "github.com/redis/go-redis/v9", "gorm.io/gorm", "firebase.google.com/go/v4"
	mutations := []mutation{
		{"something new at the top", "the top is fixed", func(tr *tree) { tr.top = append(tr.top, "internal") }},
		{"no package comment", "0 package comments", func(tr *tree) { at(tr, "school").comments = nil }},
		{"two package comments", "2 package comments (a.go, b.go)", func(tr *tree) { at(tr, "school").comments = []string{"a.go", "b.go"} }},
		{"a long main", "100 lines: fewer than 100", func(tr *tree) { at(tr, "cmd/chaos").mainLines = maxMainLines }},
		{"a name that says nothing", "says nothing", func(tr *tree) { at(tr, "school/util") }},
		{"a package without a rule", "has no rule", func(tr *tree) { at(tr, "coordinator/extra") }},
		{"a package at the root", "has no rule", func(tr *tree) { at(tr, "") }},
		{"a long chain", "chain of imports is 6 long", func(tr *tree) {
			at(tr, "school/a/b/c").imports = []string{module + "/school/a/b"}
			at(tr, "school/a/b").imports = []string{module + "/school/a"}
			at(tr, "school/a").imports = []string{module + "/school"}
			at(tr, "coordinator/node").imports = append(at(tr, "coordinator/node").imports, module+"/school/a/b/c")
		}},
		edge("coordinator", "school/store", "interfaces of its own"),
		edge("coordinator", "watchdog", "interfaces of its own"),
		edge("coordinator", "coordinator/api", "interfaces of its own"),
		edge("coordinator/model", "coordinator", "a second time"),
		edge("coordinator/node", "coordinator/model", "composition root"),
		edge("coordinator/web", "school/store", "interfaces of its own"),
		edge("coordinator/web", "coordinator", "interfaces of its own"),
		edge("coordinator/hook", "school/store", "for others to say"),
		edge("coordinator/alert", "coordinator", "interfaces of its own"),
		edge("coordinator/fallback", "school/store", "an interface of its own"),
		edge("coordinator/node/settings", "sender/relay", "what a replica is told"),
		edge("coordinator/node", "deploy/local", "composition root"),
		edge("coordinator/node", "coordinator/node/demo", "composition root"),
		edge("coordinator/node/demo", "school/store", "whole replicas"),
		edge("coordinator/node", "watchdog/watchdogtest", "for tests"),
		edge("school/store", "coordinator", "never its consumer"),
		edge("school/store", "school/quota", "neighbour"),
		edge("school/store", "sender", "never its consumer or its neighbour"),
		edge("watchdog/redislease", "school", "never its consumer or its neighbour"),
		edge("sender/relay", "sender/fcm", "neighbour"),
		edge("sender/relay", "school", "never its consumer or its neighbour"),
		edge("school/quota", "school/quota/redisquota", "never its consumer or its neighbour"),
		edge("school/quota", "school/quota/quotatest", "for tests"),
		edge("deploy/local", "coordinator/node", "servers for tests"),
		edge("deploy/local/localtest", "school/store", "servers for tests"),
		edge("cmd/schoolbell", "school/store", "never to an adapter"),
		edge("cmd/schoolbell", "coordinator", "never to an adapter"),
		edge("cmd/schoolbell", "coordinator/web", "never to an adapter"),
		edge("cmd/schoolbell", "coordinator/node/nodetest", "for tests"),
		edge("cmd/chaos", "coordinator/api", "storm's"),
		edge("cmd/chaos/storm", "coordinator/node", "from outside"),
		edge("cmd/chaos/plan", "cmd/chaos/storm", "never to an adapter"),
		edge("coordinator", gorm, "SQL has one home"),
		edge("coordinator/node", gorm+"/clause", "SQL has one home"),
		edge("coordinator/web", redis, "said to Redis"),
		edge("watchdog", redis, "said to Redis"),
		edge("scripts", redis, "said to Redis"),
		edge("sender/relay", firebase+"/messaging", "provider's quirks"),
		edge("coordinator", "github.com/go-co-op/gocron/v2", "schedules"),
		edge("school", "github.com/go-chi/chi/v5", "HTTP is served"),
		edge("coordinator/node", "github.com/spf13/cobra", "command line"),
		edge("cmd/schoolbell", "github.com/knadh/koanf/v2", "settings are read"),
		edge("school/store", "github.com/stretchr/testify/require", "belong to tests"),
	}
	for _, leaf := range leaves {
		for _, other := range []string{"school/store", "coordinator", "coordinator/node/settings"} {
			mutations = append(mutations, edge(leaf, other, "it is a leaf"))
		}
	}
	mutations = append(mutations, edge("watchdog", "school", "it is a leaf"), edge("sender", "school", "it is a leaf"), edge("school", "scripts", "it is a leaf"))
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			tr := sound()
			m.mutate(&tr)
			require.Condition(t, func() bool {
				return slices.ContainsFunc(check(tr), func(line string) bool { return strings.Contains(line, m.want) })
			}, "not refused with %q: %q", m.want, check(tr))
		})
	}
}
