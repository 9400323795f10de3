package settings

import (
	"errors"
	"testing"
)

// A file is what a person wrote in a hurry: whatever it holds, Load answers with
// settings or with an *Error, and never panics.
func FuzzFile(f *testing.F) {
	for _, seed := range []string{"", "quota: {limit: 3}\n", "senders:\n  a:\n    kind: log\n", "a: &b c\nd: *b\n", "? x\n: y\n", "- 1\n", "\t", "!!map {}", "quota:\n  <<: *x\n", "log: {level: |\n  debug\n}", "\"quota\": {\"limit\": 0x10}"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		_, err := Load(world(text))
		if _, ok := errors.AsType[*Error](err); err != nil && !ok {
			t.Fatalf("error of another type: %v", err)
		}
	})
}
