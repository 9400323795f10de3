package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// readFile reads the file layer. It walks the syntax tree rather than decode
// into a struct, since only the tree knows the line of a key.
func readFile(args LoadArgs, ps *problems) []value {
	if args.ReadFile == nil {
		return nil
	}
	name, content, err := findFile(args)
	if err != nil {
		// The paths of os errors repeat the name, which is all that is needed.
		cause := err
		var pe *fs.PathError
		if errors.As(err, &pe) {
			cause = pe.Err
		}
		ps.add("", Origin{}, fmt.Sprintf("cannot read %s: %v; name an existing file with --config or leave --config out", name, cause))
		return nil
	}
	if name == "" {
		return nil
	}
	r := fileReader{name: name, ps: ps, fields: map[string]field{}, senders: map[string]field{}, groups: map[string]bool{"senders": true}}
	for _, f := range fields() {
		r.fields[f.path] = f
		if group, _, ok := strings.Cut(f.path, "."); ok {
			r.groups[group] = true
		}
	}
	for _, f := range senderFields() {
		r.senders[f.path] = f
	}
	r.read(content)
	return r.out
}

type fileReader struct {
	name    string
	ps      *problems
	fields  map[string]field // by path
	senders map[string]field // by last part
	groups  map[string]bool
	out     []value
}

func (r *fileReader) at(n ast.Node) Origin {
	line := 1
	if t := n.GetToken(); t != nil && t.Position != nil {
		line = t.Position.Line
	}
	return Origin{Layer: LayerFile, Name: r.name, Line: line}
}

func (r *fileReader) read(content []byte) {
	file, err := parser.ParseBytes(content, 0)
	if err != nil {
		origin, message := Origin{Layer: LayerFile, Name: r.name, Line: 1}, "is not valid YAML"
		if se, ok := errors.AsType[*yaml.SyntaxError](err); ok {
			message = "is not valid YAML: " + se.Message
			if se.Token != nil && se.Token.Position != nil {
				origin.Line = se.Token.Position.Line
			}
			if tabbed(content, origin.Line) {
				message = "is not valid YAML: the line begins with a tab; indent with spaces"
			}
		}
		r.ps.add("", origin, message)
		return
	}
	var bodies []ast.Node
	for _, doc := range file.Docs {
		if doc.Body != nil && doc.Body.Type() != ast.CommentType {
			bodies = append(bodies, doc.Body)
		}
	}
	if len(bodies) > 1 {
		r.ps.add("", r.at(bodies[1]), "a second document begins here; keep one")
		return
	}
	for _, body := range bodies {
		r.mapping(nil, body)
	}
}

// tabbed reports whether a line, counted from 1, is indented with a tab, which
// looks right in an editor and which the parser blames on whatever follows.
func tabbed(content []byte, line int) bool {
	lines := bytes.Split(content, []byte("\n"))
	if line < 1 || line > len(lines) {
		return false
	}
	text := lines[line-1]
	return bytes.IndexByte(text[:len(text)-len(bytes.TrimLeft(text, " \t"))], '\t') >= 0
}

// mapping reads the entries of a group. An empty group says nothing.
func (r *fileReader) mapping(path []string, n ast.Node) {
	var entries []*ast.MappingValueNode
	switch m := n.(type) {
	case *ast.MappingNode:
		entries = m.Values
	case *ast.MappingValueNode:
		entries = []*ast.MappingValueNode{m}
	case *ast.NullNode:
		return
	default:
		r.ps.add(strings.Join(path, "."), r.at(n), "must be a list of names, each with a colon and a value")
		return
	}
	for _, e := range entries {
		r.entry(path, e)
	}
}

func (r *fileReader) entry(parent []string, e *ast.MappingValueNode) {
	if e.Key.IsMergeKey() || e.Key.Type() == ast.AnchorType || e.Key.Type() == ast.AliasType {
		r.ps.add("", r.at(e.Key), "anchors, aliases and merge keys are not read; write the value out")
		return
	}
	key := e.Key.GetToken().Value
	path := append(append([]string(nil), parent...), key)
	dotted := strings.Join(path, ".")
	switch {
	case len(path) == 1 && r.groups[key]:
		r.mapping(path, e.Value)
	case len(path) == 2 && parent[0] == "senders":
		if _, isNull := e.Value.(*ast.NullNode); isNull {
			r.ps.add(dotted, r.at(e.Key), "says nothing; give it a kind: fcm, relay or log")
			return
		}
		r.mapping(path, e.Value)
	case len(path) == 3:
		r.scalar(path, e, r.senders[key])
	default:
		r.scalar(path, e, r.fields[dotted])
	}
}

func (r *fileReader) scalar(path []string, e *ast.MappingValueNode, f field) {
	dotted := strings.Join(path, ".")
	if f.path == "" {
		r.ps.add(dotted, r.at(e.Key), "unknown setting; "+r.fix(path))
		return
	}
	var text string
	switch v := e.Value.(type) {
	case *ast.NullNode:
		return // "name:" without a value leaves the default
	case *ast.StringNode:
		text = v.Value
	case *ast.LiteralNode:
		text = v.Value.Value
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		text = v.GetToken().Value
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		r.ps.add(dotted, r.at(e.Key), "anchors, aliases and tags are not read; write the value out")
		return
	default:
		r.ps.add(dotted, r.at(e.Key), "must be "+f.kind.String())
		return
	}
	if v, ok := parse(f, dotted, text, r.at(e.Key), r.ps); ok {
		r.out = append(r.out, value{path: path, val: v, origin: r.at(e.Key)})
	}
}

// fix says what was probably meant by a name that is not known.
func (r *fileReader) fix(path []string) string {
	var known []string
	prefix := ""
	if len(path) == 3 {
		prefix = strings.Join(path[:2], ".") + "."
		for _, f := range senderFields() {
			known = append(known, prefix+f.path)
		}
	} else {
		for _, f := range fields() {
			known = append(known, f.path)
		}
		for g := range r.groups {
			known = append(known, g)
		}
	}
	if c := closest(strings.Join(path, "."), known, "."); c != "" {
		return "did you mean " + c + "?"
	}
	return notNear
}

// notNear is the advice for a name that resembles none.
const notNear = "remove it (schoolbell serve --print-config lists the known ones)"
