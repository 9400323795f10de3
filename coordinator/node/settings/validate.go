package settings

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/robfig/cron/v3"
)

// Validate checks every value against its bounds and every relation between
// settings. The error is an *[Error] with all that is wrong. What only a
// replica needs is left to [Settings.CheckServe].
func (s Settings) Validate() error {
	c := check{s: s}
	root := reflect.ValueOf(s)
	for _, f := range fields() {
		c.bounds(f, f.path, root.FieldByIndex(f.index))
	}
	c.forms()
	for _, name := range s.SenderNames() {
		c.sender(name, s.Senders[name])
	}
	if len(c.ps) > 0 {
		return c.ps.err() // relations between values that are wrong anyway would mislead
	}
	c.relations()
	return c.ps.err()
}

// CheckServe says why these settings cannot run a replica although each of
// them is well formed. The error is an *[Error].
func (s Settings) CheckServe() error {
	c := check{s: s}
	// One store that others share and one that only this process has would be two
	// truths.
	switch {
	case s.DatabaseURL == "" && s.Redis.URL != "":
		c.add("database_url", "is empty, but %s; set both (SCHOOLBELL_DATABASE_URL, e.g. postgres://user:password@host:5432/schoolbell), or neither, which keeps everything in this process and an SQLite file", c.set("redis.url"))
	case s.DatabaseURL != "" && s.Redis.URL == "":
		c.add("redis.url", "is empty, but %s; set both (SCHOOLBELL_REDIS_URL, e.g. redis://host:6379/0), or neither, which keeps everything in this process and an SQLite file", c.set("database_url"))
	}
	switch {
	case s.HTTP.Auth == AuthNone && !s.Loopback():
		c.add("http.auth", "none lets everybody in who reaches %s; listen on 127.0.0.1 or set http.auth to keys", c.cite("http.listen", s.HTTP.Listen))
	case s.HTTP.Auth == AuthKeys && s.HTTP.AdminKey == "":
		c.add("http.admin_key", "http.auth is keys and there is no key; set http.admin_key (SCHOOLBELL_ADMIN_KEY) to a long random text, e.g. what `openssl rand -hex 24` prints")
	}
	if s.InstanceID == "" {
		c.add("instance_id", "is empty; set it (SCHOOLBELL_INSTANCE_ID)")
	}
	for _, name := range s.SenderNames() {
		snd := s.Senders[name]
		if snd.Kind == KindFCM {
			c.credentials(name, snd)
		}
	}
	c.chat()
	if s.Fallback.Token != "" && s.Fallback.URL == "" {
		c.add("fallback.token", "is set, and there is no fallback.url to send it to; set fallback.url or remove the token")
	}
	return c.ps.err()
}

// check collects what is wrong with s.
type check struct {
	s  Settings
	ps problems
}

func (c *check) add(path, format string, args ...any) {
	c.ps.add(path, c.s.Origin(path), fmt.Sprintf(format, args...))
}

// cite names a setting with its value and, where somebody gave it, the place.
func (c *check) cite(path string, v any) string {
	if o := c.s.Origin(path); o.Layer != LayerDefault {
		return fmt.Sprintf("%s %v (%s)", path, v, o)
	}
	return fmt.Sprintf("%s %v", path, v)
}

// set says that a setting, which may be secret, has a value, and where it is
// from.
func (c *check) set(path string) string {
	if o := c.s.Origin(path); o.Layer != LayerDefault {
		return fmt.Sprintf("%s is set (%s)", path, o)
	}
	return path + " is set"
}

// bounds checks the range and oneof tags.
func (c *check) bounds(f field, path string, v reflect.Value) {
	if f.oneof != "" && !strings.Contains(" "+f.oneof+" ", " "+v.String()+" ") {
		c.add(path, "%q is not one of %s", v.String(), strings.Join(strings.Fields(f.oneof), ", "))
	}
	low, high, ok := strings.Cut(f.bounds, "..")
	if !ok {
		return
	}
	out := false
	switch f.kind {
	case kindDuration:
		out = outside(time.Duration(v.Int()), mustDuration(low), mustDuration(high))
	case kindWhole:
		out = outside(int(v.Int()), mustWhole(low), mustWhole(high))
	}
	if out {
		c.add(path, "%v is out of bounds; give %s to %s", v.Interface(), low, high)
	}
}

func outside[T cmp.Ordered](v, low, high T) bool { return v < low || v > high }

// mustDuration and mustWhole read the tags of this package.
func mustDuration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic("settings: range tag: " + err.Error())
	}
	return d
}

func mustWhole(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic("settings: range tag: " + err.Error())
	}
	return n
}

var (
	idPattern       = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)
	instancePattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)
)

// forms checks the texts that have a form of their own. Messages never repeat
// what may hold a password.
func (c *check) forms() {
	s := c.s
	c.url("database_url", s.DatabaseURL, "postgres", "postgresql")
	c.url("redis.url", s.Redis.URL, "redis", "rediss", "redis+sentinel", "redis+cluster")
	c.url("alerts.webhook_url", s.Alerts.WebhookURL, "https", "http")
	c.page()
	c.fallback()
	if s.Redis.Prefix == "" || strings.ContainsFunc(s.Redis.Prefix, func(r rune) bool { return r == '{' || r == '}' || unicode.IsSpace(r) || unicode.IsControl(r) }) {
		c.add("redis.prefix", "%q must be non-empty, without braces and white space", s.Redis.Prefix)
	}
	if host, port, err := net.SplitHostPort(s.HTTP.Listen); err != nil {
		c.add("http.listen", "%q is not host:port; write e.g. :8080 or 127.0.0.1:8080", s.HTTP.Listen)
	} else if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		c.add("http.listen", "port %q is not a number from 0 to 65535", port)
	} else if strings.ContainsFunc(host, unicode.IsSpace) {
		c.add("http.listen", "%q has white space in its host", s.HTTP.Listen)
	}
	c.key("http.admin_key", s.HTTP.AdminKey)
	// Empty is left to the caller who knows a host name.
	if s.InstanceID != "" && !instancePattern.MatchString(s.InstanceID) {
		c.add("instance_id", "%q must be 1 to 128 of the characters A-Z a-z 0-9 . _ -", s.InstanceID)
	}
	if _, err := time.LoadLocation(s.Timezone); err != nil || s.Timezone == "" {
		c.add("timezone", "%q is not a time zone; write an IANA name such as Asia/Seoul", s.Timezone)
	}
	c.cron("sweep.cron", s.Sweep.Cron, Default().Sweep.Cron)
	c.cron("retention.cron", s.Retention.Cron, Default().Retention.Cron)
	c.cron("alerts.digest_cron", s.Alerts.DigestCron, Default().Alerts.DigestCron)
}

// url checks a URL's scheme and host.
func (c *check) url(path string, v Secret, schemes ...string) {
	if v == "" {
		return
	}
	// The parser's own error repeats the URL with its password.
	u, err := url.Parse(string(v))
	switch {
	case err != nil:
		c.add(path, "is not a URL; write %s://…, with special characters of a password percent-encoded", schemes[0])
	case !slices.Contains(schemes, u.Scheme):
		c.add(path, "must begin with %s", strings.Join(schemes, ":// or ")+"://")
	case u.Host != "":
	case schemes[0] != "postgres":
		c.add(path, "names no host; write %s://host:port…", schemes[0])
	case u.Opaque != "" || u.Query().Get("host") == "": // libpq would look in places that differ from machine to machine
		c.add(path, "names no host; write postgres://user:password@host:5432/name, or postgres:///name?host=/var/run/postgresql for the socket of a server on this machine")
	}
}

// cron checks a schedule of five fields.
func (c *check) cron(path, v, example string) {
	if _, err := cron.ParseStandard(v); err != nil || strings.HasPrefix(v, "@") || strings.Contains(v, "TZ=") {
		c.add(path, "%q is not a schedule; write five fields such as %q (the zone is timezone)", v, example)
	}
}

// maxPage is as long as a link in an alert may be.
const maxPage = 300

// page checks the link of alerts, which is shown and so holds no secret.
func (c *check) page() {
	v := c.s.Alerts.PageURL
	if v == "" {
		return
	}
	u, err := url.Parse(v)
	switch {
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.ContainsAny(v, "<> \"\\"):
		c.add("alerts.page_url", "must be http://host… or https://host…, without white space and brackets")
	case u.User != nil:
		c.add("alerts.page_url", "holds a user or password, which every alert would show")
	case len(v) > maxPage:
		c.add("alerts.page_url", "is longer than %d characters, which leaves an alert too little", maxPage)
	}
}

// chat finds a webhook whose host takes another kind than the one set: it would
// refuse every alert.
func (c *check) chat() {
	u, err := url.Parse(string(c.s.Alerts.WebhookURL))
	if err != nil {
		return
	}
	for host, kind := range map[string]string{"discord.com": "discord", "discordapp.com": "discord", "hooks.slack.com": "slack"} {
		if name := u.Hostname(); (name == host || strings.HasSuffix(name, "."+host)) && c.s.Alerts.Kind != kind {
			c.add("alerts.kind", "%s is not what %s takes; set alerts.kind to %s", c.s.Alerts.Kind, name, kind)
		}
	}
}

// fallback checks the webhook of fallbacks.
func (c *check) fallback() {
	f := c.s.Fallback
	c.url("fallback.url", f.URL, "https", "http")
	if u, err := url.Parse(string(f.URL)); err == nil && u.User != nil {
		c.add("fallback.url", "holds a user or password; the webhook is told who calls by fallback.token")
	}
	c.key("fallback.token", f.Token)
}

// key checks what goes into an Authorization header.
func (c *check) key(path string, v Secret) {
	if strings.ContainsFunc(string(v), func(r rune) bool { return r <= ' ' || r > '~' }) {
		c.add(path, "must be printable ASCII without white space")
	}
}

func (c *check) sender(name string, snd Sender) {
	prefix := "senders." + name + "."
	if !idPattern.MatchString(name) {
		c.ps.add("senders."+name, c.senderOrigin(name), "a sender's name must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
	}
	if snd.Kind == "" {
		c.ps.add(prefix+"kind", c.senderOrigin(name), "is missing; give fcm, relay or log")
		return
	}
	v := reflect.ValueOf(snd)
	for _, f := range senderFields() { // the kind first
		fv := v.FieldByIndex(f.index)
		switch {
		case takes(f.kinds, snd.Kind):
			// The rate of a relay has no default: unlimited.
			if f.path == "rate_per_minute" && fv.IsZero() && c.s.Origin(prefix+f.path).Layer == LayerDefault {
				continue
			}
			sound := len(c.ps)
			c.bounds(f, prefix+f.path, fv)
			if f.path == "kind" && len(c.ps) > sound {
				return // which settings and defaults it has is not known
			}
		case !fv.IsZero():
			c.add(prefix+f.path, "belongs to kind %s, but %skind is %s; remove one of them", strings.Join(strings.Fields(f.kinds), " or "), prefix, snd.Kind)
		}
	}
	switch snd.Kind {
	case KindRelay:
		c.relay(name, snd)
	case KindFCM:
		c.fcm(prefix, snd)
	}
}

// senderOrigin is the place of anything that was said about the sender.
func (c *check) senderOrigin(name string) Origin {
	for _, f := range senderFields() {
		if o := c.s.Origin("senders." + name + "." + f.path); o.Layer != LayerDefault {
			return o
		}
	}
	return Origin{}
}

func (c *check) relay(name string, snd Sender) {
	prefix := "senders." + name + "."
	if snd.URL == "" {
		c.ps.add(prefix+"url", c.senderOrigin(name), "is missing; give the address that takes the batches, e.g. https://relay.example/push")
	}
	for _, address := range []struct {
		name string
		v    Secret
	}{{"url", snd.URL}, {"status_url", snd.StatusURL}} {
		c.url(prefix+address.name, address.v, "https", "http")
		if u, err := url.Parse(string(address.v)); err == nil && u.User != nil {
			c.add(prefix+address.name, "holds a user or password; a relay is told who calls by %stoken", prefix)
		}
	}
	c.key(prefix+"token", snd.Token)
	for _, part := range []struct {
		name string
		d    time.Duration
	}{{"connect_timeout", snd.ConnectTimeout}, {"read_timeout", snd.ReadTimeout}} {
		if part.d > snd.CallTimeout {
			c.add(prefix+part.name, "%v is longer than the whole call, %s; lower one or raise the other", part.d, c.cite(prefix+"call_timeout", snd.CallTimeout))
		}
	}
}

func (c *check) fcm(prefix string, snd Sender) {
	if snd.Endpoint == "" {
		return
	}
	u, err := url.Parse(snd.Endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
		c.add(prefix+"endpoint", "must be scheme://host:port; /v1/… is added")
	}
}

// credentials checks that an FCM sender has what it needs to send. What only the
// credentials themselves can tell is left to the sender.
func (c *check) credentials(name string, snd Sender) {
	prefix := "senders." + name + "."
	if snd.CredentialsFile != "" {
		return
	}
	if snd.Endpoint == "" {
		c.ps.add(prefix+"credentials_file", c.senderOrigin(name),
			"is missing; give the file of a service account (or set "+googleCredentials+"); only with an endpoint of its own, such as a simulator's, a sender needs none")
	}
	if snd.Project == "" {
		c.ps.add(prefix+"project", c.senderOrigin(name), "is missing; give the Firebase project's id")
	}
}

// relations checks what two settings say about each other.
func (c *check) relations() {
	s := c.s
	if s.Dispatch.Batch > s.Dispatch.Page {
		c.add("dispatch.batch", "%d is more than is read at once, %s; lower dispatch.batch or raise dispatch.page", s.Dispatch.Batch, c.cite("dispatch.page", s.Dispatch.Page))
	}
	if s.Quota.Headroom >= s.Quota.Limit {
		c.add("quota.headroom", "%d leaves nothing of %s; lower quota.headroom", s.Quota.Headroom, c.cite("quota.limit", s.Quota.Limit))
	}
	if s.Lock.ETC > s.Lock.ETCMax {
		c.add("lock.etc", "%v is more than %s; lower lock.etc or raise lock.etc_max", s.Lock.ETC, c.cite("lock.etc_max", s.Lock.ETCMax))
	}
	switch _, ok := s.Senders[s.DefaultSender]; {
	case len(s.Senders) == 0:
		c.add("senders", "there is none; configure one, e.g. senders.log.kind: log")
	case s.DefaultSender == "":
		names := s.SenderNames()
		c.ps.add("default_sender", c.senderOrigin(names[0]), fmt.Sprintf("must be set, since there are several senders: %s; write e.g. default_sender: %s", strings.Join(names, ", "), names[0]))
	case !ok:
		c.add("default_sender", "%q is not one of the senders: %s", s.DefaultSender, strings.Join(s.SenderNames(), ", "))
	}
	for _, name := range s.SenderNames() {
		c.times(name)
	}
}

// times checks that a batch of the sender fits the lease and the stop.
func (c *check) times(name string) {
	s, snd := c.s, c.s.Senders[name]
	if snd.InFlight < s.Dispatch.Batch {
		c.add("senders."+name+".in_flight", "%d does not hold one batch, %s; raise in_flight or lower dispatch.batch", snd.InFlight, c.cite("dispatch.batch", s.Dispatch.Batch))
	}
	// 0 is a relay's default: no limit.
	if snd.RatePerMinute > 0 && snd.RatePerMinute < s.Dispatch.Batch {
		c.add("senders."+name+".rate_per_minute", "%d does not carry one batch a minute, %s; raise rate_per_minute or lower dispatch.batch", snd.RatePerMinute, c.cite("dispatch.batch", s.Dispatch.Batch))
	}
	b := s.BatchTime(name)
	parts := c.cite("dispatch.claim_timeout", s.Dispatch.ClaimTimeout) + " + " + c.cite("senders."+name+".call_timeout", snd.CallTimeout)
	etc, path := s.Lock.ETC, "lock.etc"
	if s.Lock.ETCMax <= etc {
		etc, path = s.Lock.ETCMax, "lock.etc_max"
	}
	if m := Margin(etc); etc < b+m {
		c.add(path, "%v is too short for a batch of senders.%s: %s + margin %v = %v (margin: 1 %% of the lease of %v + %v + 100ms); set %s to at least %v or shorten the timeouts",
			etc, name, parts, m, b+m, Lease(etc), min(500*time.Millisecond, Lease(etc)/10), path, LeastETC(b))
	}
	if need := b + RecordGrace + StopReserve; s.StopTimeout < need {
		c.add("stop_timeout", "%v is too short to end a batch of senders.%s: %s + recording %v + %v = %v; raise stop_timeout to at least %v or shorten the timeouts",
			s.StopTimeout, name, parts, RecordGrace, StopReserve, need, need)
	}
}
