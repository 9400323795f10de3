package settings

import (
	"strconv"
	"strings"
)

// Error is every reason why settings were refused, in one line.
type Error struct{ Problems []Problem }

// Problem is one reason: the setting, where it was given, what is wrong and
// what to do about it. It never holds the value of a secret.
type Problem struct {
	Path    string // e.g. dispatch.batch; empty where a whole file is meant
	Origin  Origin
	Message string
}

func (e *Error) Error() string {
	texts := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		texts[i] = p.String()
	}
	return "settings: " + strings.Join(texts, "; ")
}

func (p Problem) String() string {
	var b strings.Builder
	if p.Origin.Layer != LayerDefault {
		b.WriteString(p.Origin.String())
		b.WriteString(": ")
	}
	if p.Path != "" && p.Path != p.Origin.Name {
		b.WriteString(p.Path)
		b.WriteString(": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Layer is where a value came from, weakest first.
type Layer int

const (
	LayerDefault Layer = iota
	LayerFile
	LayerEnvironment
	LayerFlag
	LayerDerived // worked out from other settings
)

// Origin is the place at which a value was given.
type Origin struct {
	Layer Layer
	Name  string // the file, the variable, the flag, or the reason of a derived value
	Line  int    // in the file, from 1
}

func (o Origin) String() string {
	switch o.Layer {
	case LayerFile:
		return o.Name + ":" + strconv.Itoa(o.Line)
	case LayerEnvironment, LayerFlag, LayerDerived:
		return o.Name
	default:
		return "default"
	}
}

// problems collects, so that an operator learns of all mistakes at once.
type problems []Problem

func (ps *problems) add(path string, o Origin, message string) {
	*ps = append(*ps, Problem{Path: path, Origin: o, Message: message})
}

func (ps problems) err() error {
	if len(ps) == 0 {
		return nil
	}
	return &Error{Problems: ps}
}
