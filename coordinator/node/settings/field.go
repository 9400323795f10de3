package settings

import (
	"reflect"
	"slices"
	"strings"
	"time"
)

// kind is how a setting is written.
type kind int

const (
	kindText     kind = iota
	kindSecret        // text that is never shown
	kindWhole         // a whole number
	kindDuration      // 180s, 1m30s, 2160h
	kindTruth         // true or false
)

func (k kind) String() string {
	return [...]string{"a text", "a text", "a whole number", "a duration such as 500ms, 180s or 2160h", "true or false"}[k]
}

// word is the kind for a flag's help.
func (k kind) word() string {
	return [...]string{"text", "text", "number", "duration", "true|false"}[k]
}

// field describes one setting. The tags of Settings and Sender are the only
// place in which a setting is declared; everything else (file, environment,
// flags, printing, bounds) reads this.
type field struct {
	path   string // redis.url; of a sender only the last part, call_timeout
	env    string
	usage  string
	kind   kind
	secret string // "url": the address may be shown; "host": of it the host; "all": nothing; "": no secret
	bounds string // range tag
	oneof  string
	kinds  string // of a sender: the kinds it belongs to
	index  []int  // for reflect
}

const envPrefix = "SCHOOLBELL_"

// fields lists the settings outside senders, in the order of the declaration.
func fields() []field { return collect(reflect.TypeFor[Settings](), "", nil) }

// senderFields lists the settings of one sender.
func senderFields() []field { return collect(reflect.TypeFor[Sender](), "", nil) }

func collect(t reflect.Type, prefix string, index []int) []field {
	var out []field
	for sf := range slices.Values(reflect.VisibleFields(t)) {
		name := sf.Tag.Get("yaml")
		if name == "" || sf.Type.Kind() == reflect.Map {
			continue
		}
		path, at := prefix+name, append(slices.Clone(index), sf.Index...)
		if sf.Type.Kind() == reflect.Struct {
			out = append(out, collect(sf.Type, path+".", at)...)
			continue
		}
		env := sf.Tag.Get("env")
		if env == "" {
			env = variable(path)
		}
		out = append(out, field{
			path: path, env: env, usage: sf.Tag.Get("usage"), kind: kindOf(sf.Type), secret: sf.Tag.Get("secret"),
			bounds: sf.Tag.Get("range"), oneof: sf.Tag.Get("oneof"), kinds: sf.Tag.Get("kinds"), index: at,
		})
	}
	return out
}

// variable is the name in the environment of the setting at path.
func variable(path string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

func kindOf(t reflect.Type) kind {
	switch {
	case t == reflect.TypeFor[Secret]():
		return kindSecret
	case t == reflect.TypeFor[time.Duration]():
		return kindDuration
	case t.Kind() == reflect.Int:
		return kindWhole
	case t.Kind() == reflect.Bool:
		return kindTruth
	default:
		return kindText
	}
}

// Flag is a setting that a command line can give.
type Flag struct {
	Path  string // the setting, as [LoadArgs.Flags] names it
	Name  string // the flag, without dashes: redis-url
	Type  string // what it takes, in one word
	Usage string // with the default, where that is no matter of other settings
}

// Flags lists the settings that have a flag, in the order of the declaration.
// Keys and tokens have none: a command line is visible to the whole machine.
func Flags() []Flag {
	var out []Flag
	defaults := reflect.ValueOf(Default())
	for _, f := range fields() {
		if f.usage == "" {
			continue
		}
		usage := f.usage
		if v := defaults.FieldByIndex(f.index); !strings.Contains(usage, "(default") && v.String() != "" {
			usage += " (default " + show(f, v) + ")"
		}
		out = append(out, Flag{Path: f.path, Name: flagName(f.path), Type: f.kind.word(), Usage: usage})
	}
	return out
}

func flagName(path string) string { return strings.NewReplacer(".", "-", "_", "-").Replace(path) }

// closest finds the known name that was most likely meant, or "": the nearest in
// spelling, else the only one whose last part is the one given, since a setting
// is often right and only in the wrong group.
func closest(name string, known []string, sep string) string {
	last := name[strings.LastIndex(name, sep)+1:]
	// Of a short name half the letters must be right, or it resembles everything.
	best, distance := "", min(max(2, len(name)/4), max(1, (len(name)-1)/2))+1
	var sameLast []string
	for _, k := range slices.Sorted(slices.Values(known)) {
		if d := editDistance(name, k); d < distance {
			best, distance = k, d
		}
		if k[strings.LastIndex(k, sep)+1:] == last {
			sameLast = append(sameLast, k)
		}
	}
	if best == "" && len(sameLast) == 1 {
		return sameLast[0]
	}
	return best
}

// editDistance is how many letters have to be put in, left out, changed or
// swapped with their neighbour to get from a to b.
func editDistance(a, b string) int {
	before, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, prev, row = prev, row, before
	}
	return prev[len(b)]
}
