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
)

//go:embed *.lua
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
		all = append(all, load(e.Name()[:len(e.Name())-len(".lua")]))
	}
	return all, nil
}

// load reads an embedded script. The name is a constant of this package, so a
// missing file is a broken build, not a condition to handle.
func load(name string) Script {
	src, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic("scripts: " + name + ".lua is not embedded: " + err.Error())
	}
	source := include(string(src))
	sum := sha1.Sum([]byte(source))
	return Script{Name: name, Source: source, SHA: hex.EncodeToString(sum[:])}
}
