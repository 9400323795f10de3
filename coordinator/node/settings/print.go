package settings

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
)

// Print writes the settings as a YAML file that Load accepts once the hidden
// values are put back, each with the place it comes from as a comment. Keys and
// tokens read "(hidden)"; of a URL the password, and every value in its query
// that is not known to be harmless, is left out.
func (s Settings) Print(w io.Writer) error {
	var b bytes.Buffer
	p := printer{s: s, b: &b}
	p.lines("", fields(), reflect.ValueOf(s), "")
	b.WriteString("senders:\n")
	for _, name := range s.SenderNames() {
		fmt.Fprintf(&b, "  %s:\n", quote(name))
		snd := s.Senders[name]
		p.lines("senders."+name+".", shown(snd), reflect.ValueOf(snd), "    ")
	}
	_, err := w.Write(b.Bytes())
	return err
}

// PrintJSON writes one JSON object for programs: settings, by group and with
// the secrets hidden as [Settings.Print] hides them, and from, which says by
// path where each of them comes from. Durations are texts such as 3m.
func (s Settings) PrintJSON(w io.Writer) error {
	from := map[string]string{}
	tree := func(prefix string, fs []field, root reflect.Value) map[string]any {
		out := map[string]any{}
		for _, f := range fs {
			from[prefix+f.path] = s.Origin(prefix + f.path).String()
			group, name, grouped := strings.Cut(f.path, ".")
			in := out
			if !grouped {
				name = f.path
			} else if held, ok := out[group].(map[string]any); ok {
				in = held
			} else {
				in = map[string]any{}
				out[group] = in
			}
			in[name] = plain(f, root.FieldByIndex(f.index))
		}
		return out
	}
	all := tree("", fields(), reflect.ValueOf(s))
	senders := map[string]any{}
	for _, name := range s.SenderNames() {
		snd := s.Senders[name]
		senders[name] = tree("senders."+name+".", shown(snd), reflect.ValueOf(snd))
	}
	all["senders"] = senders
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(map[string]any{"settings": all, "from": from})
}

// shown lists the settings that a sender of this kind has.
func shown(snd Sender) []field {
	var own []field
	for _, f := range senderFields() {
		if takes(f.kinds, snd.Kind) && !(f.path == "rate_per_minute" && snd.RatePerMinute == 0) {
			own = append(own, f)
		}
	}
	return own
}

type printer struct {
	s Settings
	b *bytes.Buffer
}

// lines writes fields, a heading before the first of each group.
func (p printer) lines(prefix string, fs []field, root reflect.Value, indent string) {
	open := ""
	for _, f := range fs {
		group, name, grouped := strings.Cut(f.path, ".")
		at := indent
		if !grouped {
			group, name = "", f.path
		} else {
			at += "  "
			if group != open {
				fmt.Fprintf(p.b, "%s%s:\n", indent, group)
			}
		}
		open = group
		fmt.Fprintf(p.b, "%s%s: %s # %s\n", at, name, show(f, root.FieldByIndex(f.index)), p.s.Origin(prefix+f.path))
	}
}

// show writes one value so that a YAML reader gets it back.
func show(f field, v reflect.Value) string {
	value := plain(f, v)
	if text, ok := value.(string); ok && f.kind != kindDuration {
		return quote(text)
	}
	return fmt.Sprint(value)
}

// plain is a value as it may be shown: a text, a number or a truth.
func plain(f field, v reflect.Value) any {
	switch f.kind {
	case kindSecret:
		secret := v.Interface().(Secret)
		if f.secret == "url" {
			return redact(string(secret))
		}
		if f.secret == "host" {
			return hostOf(string(secret))
		}
		return secret.String()
	case kindDuration:
		return shortDuration(v.Interface().(time.Duration))
	default:
		return v.Interface()
	}
}

// shortDuration writes 2160h0m0s as 2160h.
func shortDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func quote(s string) string {
	out, err := yaml.Marshal(s)
	if err != nil || bytes.Count(out, []byte("\n")) > 1 {
		return fmt.Sprintf("%q", s)
	}
	return strings.TrimSuffix(string(out), "\n")
}

// harmless are the query parameters of database, Redis and webhook URLs whose
// values are no secrets.
var harmless = map[string]bool{
	"host": true, "port": true, "user": true, "dbname": true,
	"sslmode": true, "application_name": true, "connect_timeout": true, "target_session_attrs": true, "search_path": true,
	"addr": true, "db": true, "protocol": true, "master_name": true, "dial_timeout": true, "read_timeout": true, "write_timeout": true, "pool_size": true,
}

// hostOf leaves of a URL what does not let anybody in.
func hostOf(raw string) string {
	u, err := url.Parse(raw)
	if raw == "" || err != nil || u.Host == "" {
		return Secret(raw).String()
	}
	return u.Scheme + "://" + u.Host + "/" + hidden
}

// redact leaves the secrets of a URL out. What cannot be parsed is hidden whole.
func redact(raw string) string {
	if raw == "" {
		return ""
	}
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" && (u.Scheme != "postgres" && u.Scheme != "postgresql" || u.Opaque != "") {
		return hidden
	}
	if _, has := u.User.Password(); has {
		u.User = url.UserPassword(u.User.Username(), "hidden")
	}
	q := u.Query()
	for name, values := range q {
		if !harmless[name] {
			for i := range values {
				values[i] = "hidden"
			}
		}
	}
	u.RawQuery = q.Encode()
	u.Fragment = ""
	return u.String()
}
