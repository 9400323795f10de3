package settings

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
)

// Where the file is looked for when none is named.
const (
	localFile  = "schoolbell.yaml" // in the working directory
	systemFile = "/etc/schoolbell/schoolbell.yaml"
)

// LoadArgs is the world that Load reads from.
type LoadArgs struct {
	// Config is the file named on the command line; empty: ./schoolbell.yaml,
	// else /etc/schoolbell/schoolbell.yaml, else none.
	Config string
	// ReadFile reads a file by name; an absent one is fs.ErrNotExist.
	ReadFile func(name string) ([]byte, error)
	// Environ is the environment, NAME=value each.
	Environ []string
	// Flags are the settings given on the command line, by path, as written.
	Flags map[string]string
	// InstanceID is used where nothing sets instance_id.
	InstanceID string
}

// delim separates the parts of a path inside koanf. Not the dot, since the name
// of a sender may contain one.
const delim = "/"

// value is one setting as a layer gave it, already of its type.
type value struct {
	path   []string // senders, main, call_timeout
	val    any
	origin Origin
}

func (v value) dotted() string { return strings.Join(v.path, ".") }

// Load reads the layers, puts each over the weaker ones, fills in what follows
// from other settings, and checks the whole. The error is an *[Error] that
// names everything that is wrong.
//
// An empty variable of the environment counts as not set, which is what
// ${NAME:-} in a compose file leaves behind.
func Load(args LoadArgs) (Settings, error) {
	var ps problems
	k := koanf.New(delim)
	origins := map[string]Origin{}
	for _, layer := range [][]value{readFile(args, &ps), readEnvironment(args.Environ, &ps), readFlags(args.Flags, &ps)} {
		flat := make(map[string]any, len(layer))
		for _, v := range layer {
			flat[strings.Join(v.path, delim)] = v.val
			origins[v.dotted()] = v.origin
		}
		if err := k.Load(confmap.Provider(flat, delim), nil); err != nil {
			return Settings{}, fmt.Errorf("settings: merge layers: %w", err)
		}
	}
	if err := ps.err(); err != nil {
		return Settings{}, err // what was not understood would only cause more
	}

	s := Default()
	s.Senders = nil
	if err := k.UnmarshalWithConf("", &s, koanf.UnmarshalConf{Tag: "yaml"}); err != nil {
		return Settings{}, fmt.Errorf("settings: merge layers: %w", err)
	}
	s.origins = origins
	s.derive(args)
	if err := s.Validate(); err != nil {
		return Settings{}, err
	}
	return s, nil
}

// derive fills in what was not set and follows from something else.
func (s *Settings) derive(args LoadArgs) {
	set := func(path string) bool { _, ok := s.origins[path]; return ok }
	derived := func(path, why string) { s.origins[path] = Origin{Layer: LayerDerived, Name: why} }

	if !set("instance_id") {
		s.InstanceID = args.InstanceID
		derived("instance_id", "host name and a random part")
	}
	if !set("http.listen") && !s.Embedded() {
		s.HTTP.Listen = serverListen
		derived("http.listen", "default outside the embedded mode")
	}
	if !set("http.auth") && !(s.Embedded() && s.Loopback()) {
		s.HTTP.Auth = AuthKeys
		derived("http.auth", "default unless embedded on loopback")
	}

	if len(s.Senders) == 0 {
		s.Senders = map[string]Sender{KindLog: NewSender(KindLog)}
	}
	for name, snd := range s.Senders {
		snd = snd.withDefaults(func(f string) bool { return set("senders." + name + "." + f) })
		if snd.Kind == KindFCM {
			s.google(name, &snd, args.Environ)
		}
		s.Senders[name] = snd
	}
	if !set("default_sender") {
		s.DefaultSender = ""
		if names := s.SenderNames(); len(names) == 1 {
			s.DefaultSender = names[0]
			derived("default_sender", "the only sender")
		}
	}

	if !set("lock.etc") {
		want, slowest := s.Lock.ETC, ""
		for _, name := range s.SenderNames() {
			if c := ComfortableETC(s.BatchTime(name)); c > want {
				want, slowest = c, name
			}
		}
		if slowest != "" {
			derived("lock.etc", "twice what a batch of senders."+slowest+" can take")
		}
		if want > s.Lock.ETCMax {
			want = s.Lock.ETCMax
			derived("lock.etc", "lock.etc_max")
		}
		s.Lock.ETC = want
	}
}

// Variables that Google's tools know, for every FCM sender without a setting of
// its own.
const (
	googleCredentials = "GOOGLE_APPLICATION_CREDENTIALS"
	fcmEmulator       = "FCM_EMULATOR_HOST" // host:port
)

// google takes what Google's variables say. An emulator that was named by its
// variable gets no credentials that were: they are for the real thing.
func (s *Settings) google(name string, snd *Sender, environ []string) {
	variables := map[string]string{}
	for _, kv := range environ {
		if k, v, _ := strings.Cut(kv, "="); k == googleCredentials || k == fcmEmulator {
			variables[k] = v
		}
	}
	prefix := "senders." + name + "."
	if v := variables[fcmEmulator]; v != "" && snd.Endpoint == "" {
		snd.Endpoint = "http://" + v
		s.origins[prefix+"endpoint"] = Origin{Layer: LayerEnvironment, Name: fcmEmulator}
		return
	}
	if v := variables[googleCredentials]; v != "" && snd.CredentialsFile == "" {
		snd.CredentialsFile = v
		s.origins[prefix+"credentials_file"] = Origin{Layer: LayerEnvironment, Name: googleCredentials}
	}
}

// SenderNames lists the senders in alphabetical order.
func (s Settings) SenderNames() []string { return slices.Sorted(maps.Keys(s.Senders)) }

// readFlags turns what the command line gave into values.
func readFlags(flags map[string]string, ps *problems) []value {
	known := map[string]field{}
	for _, f := range fields() {
		known[f.path] = f
	}
	var out []value
	for _, path := range slices.Sorted(maps.Keys(flags)) {
		origin := Origin{Layer: LayerFlag, Name: "--" + flagName(path)}
		f, ok := known[path]
		if !ok {
			ps.add(path, origin, "unknown setting")
			continue
		}
		if v, ok := parse(f, path, flags[path], origin, ps); ok {
			out = append(out, value{path: strings.Split(path, "."), val: v, origin: origin})
		}
	}
	return out
}

// parse turns a setting as written into its type.
func parse(f field, path, text string, origin Origin, ps *problems) (any, bool) {
	switch f.kind {
	case kindText:
		return text, true
	case kindSecret:
		return Secret(text), true
	case kindWhole:
		if n, err := strconv.Atoi(text); err == nil {
			return n, true
		}
	case kindDuration:
		if d, err := time.ParseDuration(text); err == nil {
			return d, true
		}
		if _, err := strconv.ParseFloat(text, 64); err == nil {
			ps.add(path, origin, fmt.Sprintf("%s has no unit; write %ss for seconds", text, text))
			return nil, false
		}
	case kindTruth:
		if b, err := strconv.ParseBool(text); err == nil {
			return b, true
		}
	}
	message := fmt.Sprintf("%q is not %s", text, f.kind)
	if low, high, ok := strings.Cut(f.bounds, ".."); ok {
		message += fmt.Sprintf("; give %s to %s", low, high)
	}
	ps.add(path, origin, message)
	return nil, false
}

// findFile reads the file that applies, if there is one.
func findFile(args LoadArgs) (name string, content []byte, err error) {
	if args.Config != "" {
		content, err = args.ReadFile(args.Config)
		return args.Config, content, err
	}
	for _, name := range []string{localFile, systemFile} {
		content, err := args.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return name, content, err
	}
	return "", nil, nil
}
