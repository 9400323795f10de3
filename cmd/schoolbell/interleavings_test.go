package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

const (
	interleavingsPage = "coordinator/INTERLEAVINGS.md"
	interleavings     = 22
)

// TestInterleavingsHaveTests reads the page of the decided interleavings: each has
// a test that is named after it, each test that is named exists, and no test is
// named after one without standing there.
func TestInterleavingsHaveTests(t *testing.T) {
	t.Parallel()
	root := os.DirFS("../..")
	page, err := fs.ReadFile(root, interleavingsPage)
	require.NoError(t, err)
	tests, err := testsOf(root)
	require.NoError(t, err)
	for _, line := range checkInterleavings(string(page), tests) {
		t.Errorf("%s: %s", interleavingsPage, line)
	}
}

// testNames are the tests of each folder: functions, and the quoted texts of
// which cases are named.
type testNames map[string]map[string]bool

var (
	headingLine = regexp.MustCompile(`^## ([0-9]+)\. \S`)
	testLine    = regexp.MustCompile("^- `([^`]+)` (?:(Test[A-Za-z0-9_]+)|\"(.+)\")$")
	ownTest     = regexp.MustCompile(`^TestInterleaving([0-9]{2})[A-Z]`)
	ownCase     = regexp.MustCompile(`^interleaving ([0-9]+): `)
)

// numberIn is the interleaving that a test is named after, 0 where it is none.
func numberIn(name string) int {
	for _, form := range []*regexp.Regexp{ownTest, ownCase} {
		if m := form.FindStringSubmatch(name); m != nil {
			n, _ := strconv.Atoi(m[1])
			return n
		}
	}
	return 0
}

// testsOf collects the names of what can be a test from the sources under root.
func testsOf(root fs.FS) (testNames, error) {
	all := testNames{}
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go"):
			return nil
		}
		source, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		if !bytes.Contains(source, []byte(`"testing"`)) && !bytes.Contains(source, []byte(`"interleaving `)) {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		folder := path.Dir(name)
		if all[folder] == nil {
			all[folder] = map[string]bool{}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if n.Recv == nil && strings.HasSuffix(name, "_test.go") && strings.HasPrefix(n.Name.Name, "Test") {
					all[folder][n.Name.Name] = true
				}
			case *ast.BasicLit:
				if text, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil && ownCase.MatchString(text) {
					all[folder][text] = true
				}
			}
			return true
		})
		return nil
	})
	return all, err
}

// checkInterleavings says what is wrong with the page.
func checkInterleavings(page string, tests testNames) (wrong []string) {
	refuse := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	own := map[int]bool{}
	listed := map[string]bool{}
	number := 0
	for _, line := range strings.Split(page, "\n") {
		if m := headingLine.FindStringSubmatch(line); m != nil {
			n, _ := strconv.Atoi(m[1])
			if n != number+1 {
				refuse("%d comes after %d: they are numbered from 1", n, number)
			}
			number = n
			continue
		}
		if !strings.HasPrefix(line, "- ") {
			continue
		}
		m := testLine.FindStringSubmatch(line)
		if m == nil {
			refuse("%q is not: - `package` TestName, or: - `package` \"name of a case\"", line)
			continue
		}
		folder, name := m[1], m[2]+m[3]
		listed[folder+" "+name] = true
		if !tests[folder][name] {
			refuse("%d names %s in %s, which does not exist", number, name, folder)
			continue
		}
		switch n := numberIn(name); n {
		case number:
			own[number] = true
		case 0:
		default:
			refuse("%s is named after %d and stands under %d", name, n, number)
		}
	}
	if number != interleavings {
		refuse("ends with %d: there are %d", number, interleavings)
	}
	for n := 1; n <= interleavings; n++ {
		if !own[n] {
			refuse("%d has no test that is named after it", n)
		}
	}
	for folder, names := range tests {
		for name := range names {
			if numberIn(name) > 0 && !listed[folder+" "+name] {
				refuse("%s in %s is named after an interleaving and does not stand here", name, folder)
			}
		}
	}
	return wrong
}

// TestInterleavingsPageIsChecked feeds the check a page with one thing wrong.
func TestInterleavingsPageIsChecked(t *testing.T) {
	t.Parallel()
	source := "package p\nimport \"testing\"\nfunc TestOther(t *testing.T) {}\nfunc (r) TestInterleaving05Method() {}\n"
	var page strings.Builder
	for n := 1; n <= interleavings; n++ {
		fmt.Fprintf(&page, "## %d. Title\n\nText.\n\n- `p` TestInterleaving%02dHolds\n- `p` TestOther\n", n, n)
		source += fmt.Sprintf("func TestInterleaving%02dHolds(t *testing.T) {}\n", n)
	}
	suite := "package suite\nvar cases = []string{\"interleaving 7: it holds\", \"something else\"}\n"
	line := "- `p/suite` \"interleaving 7: it holds\"\n"
	sound := strings.Replace(page.String(), "## 8.", line+"\n## 8.", 1)

	tests, err := testsOf(fstest.MapFS{
		"p/p_test.go":           {Data: []byte(source)},
		"p/suite/suite.go":      {Data: []byte(suite)},
		"p/code.go":             {Data: []byte("package p\nimport \"testing\"\nfunc TestInterleaving09NotRun(t *testing.T) {}\n")},
		"p/testdata/p_test.go":  {Data: []byte("package p\nimport \"testing\"\nfunc TestInterleaving09NotThere(t *testing.T) {}\n")},
		".hidden/hides_test.go": {Data: []byte("this is no Go at all, with \"testing\"")},
	})
	require.NoError(t, err)
	require.Empty(t, checkInterleavings(sound, tests))
	for _, c := range []struct{ name, from, to, want string }{
		{"a number without a test", "- `p` TestInterleaving09Holds\n", "", "9 has no test"},
		{"only others' tests", "- `p` TestInterleaving09Holds\n", "- `p` TestOther\n", "9 has no test"},
		{"a test that is not there", "TestInterleaving09Holds", "TestInterleaving09Gone", "does not exist"},
		{"a method", "TestInterleaving05Holds", "TestInterleaving05Method", "does not exist"},
		{"no test file", "TestInterleaving09Holds", "TestInterleaving09NotRun", "does not exist"},
		{"another package", "- `p` TestInterleaving09Holds", "- `q` TestInterleaving09Holds", "in q, which does not exist"},
		{"a case that is not there", "7: it holds", "7: it held", "does not exist"},
		{"under another number", "- `p` TestInterleaving09Holds\n", "- `p` TestInterleaving08Holds\n", "is named after 8 and stands under 9"},
		{"a case that is not listed", line, "", "7: it holds in p/suite is named after an interleaving"},
		{"a line of another form", "- `p` TestInterleaving09Holds", "- TestInterleaving09Holds of p", "is not: - `package` TestName"},
		{"a number left out", "## 9. Title", "## Title", "10 comes after 8"},
		{"one too few", "## 22. Title", "Title", "ends with 21: there are 22"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			require.Contains(t, sound, c.from)
			require.Contains(t, strings.Join(checkInterleavings(strings.Replace(sound, c.from, c.to, 1), tests), "\n"), c.want)
		})
	}
}
