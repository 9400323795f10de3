package node

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"schoolbell/coordinator/node/settings"
	"schoolbell/school"
)

// allowed are the devices that a sender is limited to, by the sender's name. One
// that is not limited has no entry; one whose list is empty has an empty one.
type allowed map[string]map[string]bool

// readAllowed reads the lists that the settings name, once, at the start.
func readAllowed(s settings.Settings) (allowed, error) {
	all := allowed{}
	for _, name := range s.SenderNames() {
		file := s.Senders[name].OnlyTokensFile
		if file == "" {
			continue
		}
		tokens, err := onlyTokens(file)
		if err != nil {
			return nil, onlyError(s, name, err)
		}
		all[name] = tokens
	}
	return all, nil
}

// of asks for a sender's devices; nil: it is not limited.
func (a allowed) of(name string) func(token string) bool {
	tokens, limited := a[name]
	if !limited {
		return nil
	}
	return func(token string) bool { return tokens[token] }
}

// maxOnlyFile bounds a list of test devices: some 6,000 of FCM's tokens. Who has
// more is not trying any more.
const maxOnlyFile = 1 << 20

// onlyTokens reads a list of the devices that a sender is limited to (R44): a
// token a line; empty lines and what follows a "#" that begins a line or follows
// a space count as comments. A file without a token allows nobody. Errors name
// the file and the line and never quote what stands there, which may be a token.
func onlyTokens(file string) (map[string]bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// Of what is no file of this size no more is read than it takes to know.
	text, err := io.ReadAll(io.LimitReader(f, maxOnlyFile+1))
	switch {
	case err != nil:
		return nil, err
	case len(text) > maxOnlyFile:
		return nil, fmt.Errorf("%s is larger than 1 MiB, which is no list of test devices; leave only_tokens_file out to send to everybody", file)
	}
	tokens := map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff")))) // as Windows writes it
	lines.Buffer(nil, maxOnlyFile+1)
	for n := 1; lines.Scan(); n++ {
		token, err := onlyToken(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, n, err)
		}
		if token != "" {
			tokens[token] = true
		}
	}
	return tokens, lines.Err()
}

// onlyToken is the token in a line; empty where there is none.
func onlyToken(line string) (string, error) {
	for i, r := range line {
		if r == '#' && strings.TrimRightFunc(line[:i], unicode.IsSpace) != line[:i] || i == 0 && r == '#' {
			line = line[:i]
			break
		}
	}
	line = strings.TrimSpace(line)
	switch {
	case len(line) > school.MaxToken:
		return "", errors.New("a token is longer than 4,096 bytes")
	case !utf8.ValidString(line):
		return "", errors.New("is not UTF-8; save the file as UTF-8")
	case strings.ContainsFunc(line, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }):
		return "", errors.New("a token holds no white space and no control characters; give one token a line, and put # before a comment")
	}
	return line, nil
}
