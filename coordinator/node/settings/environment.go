package settings

import (
	"regexp"
	"slices"
	"strings"
)

// clientVariables are the command line's own, which a replica may find in its
// environment and does not mind.
var clientVariables = []string{"SCHOOLBELL_SERVER", "SCHOOLBELL_KEY"}

// serviceLink matches what Kubernetes puts into every pod for a Service called
// schoolbell or schoolbell-something. Nobody wrote these, so they do not count
// as misspelt settings.
var serviceLink = regexp.MustCompile(`^SCHOOLBELL_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

const envSenders = envPrefix + "SENDERS_"

// readEnvironment reads the environment layer: every variable that begins with
// SCHOOLBELL_ has to be known.
func readEnvironment(environ []string, ps *problems) []value {
	known := map[string]field{}
	names := slices.Clone(clientVariables)
	for _, f := range fields() {
		known[f.env] = f
		names = append(names, f.env)
	}
	var out []value
	for _, kv := range slices.Sorted(slices.Values(environ)) {
		name, text, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, envPrefix) || slices.Contains(clientVariables, name) {
			continue
		}
		origin := Origin{Layer: LayerEnvironment, Name: name}
		if mutation(name, text, origin, ps) {
			continue
		}
		f, ok := known[name]
		path := strings.Split(f.path, ".")
		if !ok {
			f, path, ok = senderVariable(name)
		}
		switch {
		case !ok && serviceLink.MatchString(name):
		case !ok:
			ps.add(name, origin, "unknown variable; "+fixVariable(name, names))
		case text == "":
		default:
			if v, ok := parse(f, strings.Join(path, "."), text, origin, ps); ok {
				out = append(out, value{path: path, val: v, origin: origin})
			}
		}
	}
	return out
}

// senderVariable reads SCHOOLBELL_SENDERS_<NAME>_<SETTING>. A name may contain
// underscores, so the longest setting that fits at the end is taken:
// …_A_STATUS_URL is status_url of a, not url of a_status.
func senderVariable(name string) (f field, path []string, ok bool) {
	rest, isSender := strings.CutPrefix(name, envSenders)
	if !isSender {
		return field{}, nil, false
	}
	for _, sf := range senderFields() {
		sender, fits := strings.CutSuffix(rest, "_"+strings.ToUpper(sf.path))
		if !fits || sender == "" || len(sf.path) < len(f.path) {
			continue
		}
		f, path, ok = sf, []string{"senders", strings.ToLower(sender), sf.path}, true
	}
	return f, path, ok
}

func fixVariable(name string, names []string) string {
	for _, f := range fields() {
		if f.env != name && variable(f.path) == name {
			return "did you mean " + f.env + "?" // one of the few with a name of its own
		}
	}
	if strings.HasPrefix(name, envSenders) {
		var last []string
		for _, f := range senderFields() {
			last = append(last, strings.ToUpper(f.path))
		}
		return "write " + envSenders + "<NAME>_ and one of " + strings.Join(last, ", ")
	}
	// Without the part that all of them share: it would make any two look alike.
	short := make([]string, len(names))
	for i, n := range names {
		short[i] = strings.TrimPrefix(n, envPrefix)
	}
	if c := closest(strings.TrimPrefix(name, envPrefix), short, "_"); c != "" {
		return "did you mean " + envPrefix + c + "?"
	}
	return notNear
}
