// Package scripts holds the Lua that runs inside Redis and the names of the
// keys it runs on. It is text and key builders only: it knows no client, so
// that whoever runs a script decides how.
//
// Every script reads Redis TIME once, at its top, takes durations and never
// absolute times of another clock (one exception: the not-after time of
// acquire, which is Redis's own), and is idempotent by an id its caller made:
// a client may run a script several times behind one call when replies get
// lost. Lock scripts touch one key, so that they go on working while a Redis
// Cluster moves the slot.
package scripts

import (
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"strings"
)

//go:embed *.lua shared/*.lua
var files embed.FS

// Script is one Lua source and the SHA-1 that EVALSHA names it by.
type Script struct {
	Name   string // file name without the ending, for errors and metrics
	Source string
	SHA    string // lower-case hex SHA-1 of Source
}

// All returns every script of the package, by name.
func All() ([]Script, error) {
	entries, err := files.ReadDir(".")
	if err != nil {
		return nil, err
	}
	all := make([]Script, 0, len(entries))
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".lua"); ok {
			all = append(all, load(name))
		}
	}
	return all, nil
}

// load reads an embedded script. The name is a constant of this package, so a
// missing file is a broken build, not a condition to handle.
func load(name string) Script {
	source := mutated(name, include(read(name+".lua")))
	sum := sha1.Sum([]byte(source))
	return Script{Name: name, Source: source, SHA: hex.EncodeToString(sum[:])}
}

// include puts in the texts that several scripts have in common, where a script
// says so, since Redis scripts cannot call one another. The quota's and the rate's
// text include the clock's.
func include(src string) string {
	for _, name := range []string{"quota.lua", "rate.lua", "time.lua"} {
		src = strings.Replace(src, "-- include "+name+"\n", read("shared/"+name), 1)
	}
	return src
}

func read(name string) string {
	src, err := files.ReadFile(name)
	if err != nil {
		panic("scripts: " + name + " is not embedded: " + err.Error())
	}
	return string(src)
}
