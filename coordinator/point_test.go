package coordinator_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator"
)

// ports are the interfaces through which a turn reaches anything beyond this
// process, with those of their methods that stay within it.
var ports = map[string][]string{
	"schoolbell/coordinator.Queue": nil, "schoolbell/coordinator.Budget": nil,
	"schoolbell/coordinator.Holder": nil, "schoolbell/coordinator.Peers": nil, "schoolbell/coordinator.Rates": nil,
	"schoolbell/coordinator.Lease":   {"Acquisition", "Progress"},
	"schoolbell/coordinator.Members": {"Live", "OthersAble", "OthersUnanswered"}, // from memory
	"schoolbell/sender.Sender":       {"Longest"}, "schoolbell/sender.StatusAsker": nil,
}

// outside are functions that call a port and are no part of a turn.
var outside = []string{"Tick", "Sweep", "publish", "lookAtSender"}

// TestEveryStepOfATurnHasAPoint reads this package: behind every call of a port
// stands a point, before anything else happens, and every point is used and
// listed. A step that nobody can be killed behind fails here.
func TestEveryStepOfATurnHasAPoint(t *testing.T) {
	t.Parallel()
	// The points themselves stand between the lease and the sender's gate.
	r := readPoints(t, sources(t, ".", func(name string) bool { return !strings.HasPrefix(name, "point_") }))
	require.Empty(t, r.wrong)
	require.Greater(t, r.calls, 20, "the calls of ports were found")
	listed := coordinator.Points()
	for name, p := range r.points {
		require.Contains(t, listed, coordinator.Point(p), "%s is not listed", name)
		if !slices.Contains([]string{"HalfSent", "Extended"}, name) { // within the sender's call, and the watchdog's
			require.Contains(t, r.used, name, "nobody can be killed there")
		}
	}
	require.Len(t, listed, len(r.points), "every point once")
}

// TestAStepWithoutAPointIsFound gives the reader turns with one thing wrong.
func TestAStepWithoutAPointIsFound(t *testing.T) {
	t.Parallel()
	const head = `package coordinator
import "schoolbell/sender"
type Queue interface { Page(); Claim() error; Record() }
type Budget interface { Reserve() int; Settle() error }
type Lease interface { Bind() error; Check() error; Progress() }
type Coordinator struct { queue Queue; budget Budget }
type turn struct { c *Coordinator; lease Lease; lane *lane; at int }
type lane struct { sender sender.Sender }
func (t *turn) point(Point) {}
func (t *turn) look() int { return 1 }
func use(...any) {}
`
	for name, c := range map[string]struct{ body, want string }{
		"sound": {`err := t.c.queue.Claim()
	t.point(Claimed)
	if err != nil { return err }
	t.lease.Progress()
	g := t.c.budget.Reserve()
	t.at = g
	t.point(Reserved)`, ""},
		"none":             {"err := t.c.queue.Claim()\n\treturn err", "Claim has no point behind it"},
		"at the end":       {"t.c.queue.Claim()", "Claim has no point behind it"},
		"returned":         {"return t.lease.Bind()", "Bind has no point behind it"},
		"too late":         {"t.c.queue.Claim()\n\tt.c.budget.Settle()\n\tt.point(Settled)", "Claim has no point behind it"},
		"behind a call":    {"t.c.queue.Claim()\n\tt.at = t.look()\n\tt.point(Claimed)", "Claim has no point behind it"},
		"in a condition":   {"if err := t.lease.Check(); err != nil {\n\t\treturn err\n\t}\n\tt.point(Checked)", "Check is called within another statement"},
		"in a case":        {"switch {\n\tcase t.lease.Check() == nil:\n\t}", "Check is called within another statement"},
		"two at once":      {"use(t.c.queue.Claim(), t.c.budget.Settle())\n\tt.point(Settled)", "two steps in one statement"},
		"in a function":    {"use(func() { t.lane.sender.Send(nil, sender.Batch{}) })\n\tt.point(Sent)", "Send has no point behind it"},
		"in a loop":        {"for {\n\t\tt.c.queue.Record()\n\t}\n\tt.point(Recorded)", "Record has no point behind it"},
		"in a select":      {"select {\n\tdefault:\n\t\tt.c.queue.Record()\n\t}\n\tt.point(Recorded)", "Record has no point behind it"},
		"of an asker":      {"asker, _ := t.lane.sender.(sender.StatusAsker)\n\tasker.Ask(nil, nil)", "Ask has no point behind it"},
		"under a new name": {"q := t.c.queue\n\tq.Claim()", "Claim has no point behind it"},
		"of a parameter":   {"use(func(l Lease) { l.Check() })", "Check has no point behind it"},
		"as a value":       {"use(t.lease.Check)", "Check is not called here, but somewhere without a point"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := readPoints(t, map[string]string{"turn.go": head + "func (t *turn) step() error {\n\t" + c.body + "\n\treturn nil\n}\n"})
			if c.want == "" {
				require.Empty(t, r.wrong)
				return
			}
			require.Condition(t, func() bool {
				return slices.ContainsFunc(r.wrong, func(line string) bool { return strings.Contains(line, c.want) })
			}, "not refused with %q: %q", c.want, r.wrong)
		})
	}
}

// sources reads the Go files of a folder that are no tests.
func sources(t *testing.T, dir string, wanted func(name string) bool) map[string]string {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	src := map[string]string{}
	for _, e := range entries {
		if name := e.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && wanted(name) {
			text, err := os.ReadFile(filepath.Join(dir, name))
			require.NoError(t, err)
			src[name] = string(text)
		}
	}
	return src
}

// reading is what was found in the source.
type reading struct {
	set    *token.FileSet
	info   types.Info
	points map[string]string // constant → value
	used   []string
	calls  int
	wrong  []string
}

func readPoints(t *testing.T, src map[string]string) *reading {
	r := &reading{set: token.NewFileSet(), points: map[string]string{}, info: types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}}
	files, _ := r.check(t, "schoolbell/coordinator", src)
	for _, f := range files {
		ast.Inspect(f, r.constant)
	}
	for _, f := range files {
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil && !slices.Contains(outside, fn.Name.Name) {
				r.function(fn.Body)
				ast.Inspect(fn.Body, func(n ast.Node) bool {
					if id, ok := n.(*ast.Ident); ok && fn.Name.Name != "Points" && r.points[id.Name] != "" {
						r.used = append(r.used, id.Name)
					}
					return true
				})
			}
		}
	}
	return r
}

// importing makes an importer of a function.
type importing func(path string) (*types.Package, error)

func (f importing) Import(path string) (*types.Package, error) { return f(path) }

// check finds the types of a package as far as they are the project's own: what
// is imported besides package sender is empty, and the errors that follow from
// that say nothing.
func (r *reading) check(t *testing.T, path string, src map[string]string) ([]*ast.File, *types.Package) {
	var files []*ast.File
	for _, name := range slices.Sorted(maps.Keys(src)) {
		f, err := parser.ParseFile(r.set, name, src[name], 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	conf := types.Config{Error: func(error) {}, Importer: importing(func(imported string) (*types.Package, error) {
		if imported == "schoolbell/sender" {
			_, p := r.check(t, imported, sources(t, "../sender", func(string) bool { return true }))
			return p, nil
		}
		p := types.NewPackage(imported, filepath.Base(imported))
		p.MarkComplete()
		return p, nil
	})}
	p, _ := conf.Check(path, r.set, files, &r.info)
	return files, p
}

// constant notes the points.
func (r *reading) constant(n ast.Node) bool {
	if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
		if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Point" {
			r.points[v.Names[0].Name] = strings.Trim(v.Values[0].(*ast.BasicLit).Value, `"`)
		}
	}
	return true
}

func (r *reading) refuse(n ast.Node, format string, args ...any) {
	r.wrong = append(r.wrong, fmt.Sprintf("%s: "+format, append([]any{r.set.Position(n.Pos())}, args...)...))
}

// step is the method that a selector names of a port, if it is one that leaves
// the process.
func (r *reading) step(s *ast.SelectorExpr) (method string, ok bool) {
	of := r.info.TypeOf(s.X)
	if of == nil {
		return "", false
	}
	within, port := ports[of.String()]
	return s.Sel.Name, port && !slices.Contains(within, s.Sel.Name)
}

// function reads a body: each list of statements by itself.
func (r *reading) function(body *ast.BlockStmt) {
	behind := map[ast.Node]bool{} // calls that a list was read for
	called := map[ast.Node]bool{} // selectors that are called
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			r.list(n.List, behind)
		case *ast.CaseClause:
			r.list(n.Body, behind)
		case *ast.CommClause:
			r.list(n.Body, behind)
		}
		return true
	})
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			called[n.Fun] = true
			if s, ok := n.Fun.(*ast.SelectorExpr); ok && !behind[n] {
				if method, ok := r.step(s); ok {
					r.refuse(n, "%s is called within another statement: give it one of its own, and a point behind it", method)
				}
			}
		case *ast.SelectorExpr:
			if method, ok := r.step(n); ok && !called[n] {
				r.refuse(n, "%s is not called here, but somewhere without a point", method)
			}
		}
		return true
	})
}

// list looks behind each statement of a list that holds a step.
func (r *reading) list(stmts []ast.Stmt, behind map[ast.Node]bool) {
	for i, s := range stmts {
		var steps []string
		switch s.(type) {
		case *ast.ExprStmt, *ast.AssignStmt, *ast.ReturnStmt, *ast.DeferStmt, *ast.GoStmt, *ast.DeclStmt:
			ast.Inspect(s, func(n ast.Node) bool {
				if _, ok := n.(*ast.FuncLit); ok {
					return false // a function of its own
				}
				if c, ok := n.(*ast.CallExpr); ok {
					if sel, ok := c.Fun.(*ast.SelectorExpr); ok {
						if method, ok := r.step(sel); ok {
							steps, behind[c] = append(steps, method), true
						}
					}
				}
				return true
			})
		}
		r.calls += len(steps)
		switch {
		case len(steps) > 1:
			r.refuse(s, "two steps in one statement: %s", strings.Join(steps, ", "))
		case len(steps) == 1 && !pointFollows(stmts[i+1:]):
			r.refuse(s, "%s has no point behind it", steps[0])
		}
	}
}

// pointFollows reports whether the next thing that happens is a point: what calls
// nothing may come before it.
func pointFollows(stmts []ast.Stmt) bool {
	for _, s := range stmts {
		if isPoint(s) {
			return true
		}
		a, ok := s.(*ast.AssignStmt)
		if !ok {
			return false
		}
		calls := false
		ast.Inspect(a, func(n ast.Node) bool {
			_, call := n.(*ast.CallExpr)
			calls = calls || call
			return true
		})
		if calls {
			return false
		}
	}
	return false
}

func isPoint(s ast.Stmt) bool {
	e, ok := s.(*ast.ExprStmt)
	if !ok {
		return false
	}
	c, ok := e.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	switch f := c.Fun.(type) {
	case *ast.Ident:
		return f.Name == "point"
	case *ast.SelectorExpr:
		return f.Sel.Name == "point"
	}
	return false
}
