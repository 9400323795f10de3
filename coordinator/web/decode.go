package web

import (
	"strconv"
	"strings"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// shape is an object that comes in.
type shape struct {
	name   string
	fields []string
}

// The shapes that come in. api's types have the same fields; a test holds them
// together.
var (
	noticeShape = shape{"a notice", []string{"school", "title", "body", "data", "image", "link", "recipients",
		"priority", "scheduled_at", "expires_at", "delivery", "topic", "fallback"}}
	fallbackShape  = shape{"a fallback", []string{"sms"}}
	recipientShape = shape{"a recipient", []string{"token", "ref", "enabled", "badge", "data"}}
	schoolShape    = shape{"a school", []string{"name", "sender", "limit", "rest_seconds"}}
	devicesShape   = shape{"a registration", []string{"devices"}}
	deviceShape    = shape{"a device", []string{"token", "ref", "enabled", "topics"}}
	requeueShape   = shape{"a requeue", []string{"school", "notice", "code", "dry_run", "cursor"}}
)

// unknown says of a field that it is none, and which there are.
func (s shape) unknown() string {
	return "is not a field of " + s.name + "; it has " + strings.Join(s.fields, ", ")
}

// The forms that complaints show, so that the first try of a newcomer ends with
// what to write.
const (
	noticeForm     = `{"school":"A","title":"…","recipients":[{"token":"…"}]}`
	recipientsForm = `[{"token":"…"}]`
	recipientForm  = `{"token":"…"}`
	schoolForm     = `{"limit":5000}`
	devicesForm    = `{"devices":[{"token":"…","topics":["board-3"]}]}`
	requeueForm    = `{"school":"A","code":"INVALID_ARGUMENT"}`
)

// decodeNotice reads the notice in data and, unless it is the first line of a
// stream or goes to a topic, its recipients, and checks all of it but what depends on the clock.
func decodeNotice(data []byte, stream bool) (*school.Notice, []school.NewRecipient, error) {
	var (
		n          = &school.Notice{Priority: school.Normal, Delivery: school.AtLeastOnce}
		recipients []school.NewRecipient
		topic      bool
		listed     bool // recipients were given, if only an empty list
	)
	r := newJSONReader(data)
	r.inLine = stream
	if !stream && r.next() == 0 && r.pos == len(data) {
		return nil, nil, emptyBody(noticeForm)
	}
	ok, err := r.object(path{}, noticeShape, func(name string, p path) (err error) {
		switch name {
		case "school":
			err = r.set(p, &n.School)
		case "title":
			err = r.set(p, &n.Content.Title)
		case "body":
			err = r.set(p, &n.Content.Body)
		case "data":
			n.Content.Data, err = r.strings(p)
		case "image":
			err = r.set(p, &n.Content.Image)
		case "link":
			err = r.set(p, &n.Content.Link)
		case "topic":
			n.Topic, topic, err = r.text(p)
		case "recipients":
			if stream {
				return p.invalid("follow in the lines after the first, one each")
			}
			recipients, listed, err = decodeRecipients(r, p)
		case "priority":
			err = r.set(p, (*string)(&n.Priority))
		case "scheduled_at":
			n.ScheduledAt, err = r.time(p)
		case "expires_at":
			n.ExpiresAt, err = r.time(p)
		case "delivery":
			err = r.set(p, (*string)(&n.Delivery))
		case "fallback":
			n.Fallback, err = decodeFallback(r, p)
		}
		return err
	})
	switch {
	case err != nil:
		return nil, nil, err
	case !ok:
		return nil, nil, r.invalid(path{}, mustBeObject(path{}))
	}
	if err := r.end(path{}); err != nil {
		return nil, nil, err
	}
	switch {
	case topic && (listed || stream):
		return nil, nil, invalid("topic", "cannot go with recipients; give one of the two")
	case topic && n.Topic == "": // the domain takes it for none
		return nil, nil, school.ValidateTopic("topic", "")
	case !topic && !listed && !stream:
		return nil, nil, invalid("recipients", "is required; or name a topic")
	case !topic && len(recipients) == 0 && !stream:
		return nil, nil, invalid("recipients", "must name at least one device")
	}
	if err := school.ValidateNotice(n, time.Time{}); err != nil {
		return nil, nil, err
	}
	for i := range recipients {
		if err := school.ValidateRecipient(i, &recipients[i], &n.Content); err != nil {
			return nil, nil, err
		}
	}
	return n, recipients, nil
}

// decodeFallback reads the text of a notice's fallback; empty where there is none.
func decodeFallback(r *jsonReader, p path) (sms string, err error) {
	given, err := r.object(p, fallbackShape, func(_ string, p path) error { return r.set(p, &sms) })
	if err == nil && given && strings.TrimSpace(sms) == "" {
		err = p.member("sms").invalid("is required; leave fallback out for none")
	}
	return sms, err
}

func decodeRecipients(r *jsonReader, p path) ([]school.NewRecipient, bool, error) {
	var list []school.NewRecipient
	ok, err := r.array(p, "objects, "+recipientsForm, func(i int) error {
		if i >= school.MaxRecipients {
			return tooManyRecipients()
		}
		at := recipientPath(i)
		var rec school.NewRecipient
		if err := decodeRecipient(r, at, &rec); err != nil {
			return err
		}
		if rec.Token == "" { // checked here already: a body of empty objects must not grow a list many times its size
			return at.member("token").invalid("is required")
		}
		list = append(list, rec)
		return nil
	})
	return list, ok, err
}

// decodeRecipient reads one recipient; it does not validate it.
func decodeRecipient(r *jsonReader, p path, to *school.NewRecipient) error {
	ok, err := r.object(p, recipientShape, func(name string, p path) (err error) {
		switch name {
		case "token":
			err = r.set(p, &to.Token)
		case "ref":
			err = r.set(p, &to.Ref)
		case "enabled":
			to.Enabled, err = r.flag(p)
		case "badge":
			to.Badge, err = r.integer(p)
		case "data":
			to.Data, err = r.strings(p)
		}
		return err
	})
	if err == nil && !ok {
		err = p.invalid(mustBeObject(p))
	}
	return err
}

// decodeRecipientLine reads one line of a stream.
func decodeRecipientLine(line []byte, i int, to *school.NewRecipient) error {
	r := newJSONReader(line)
	r.inLine = true
	at := recipientPath(i)
	if err := decodeRecipient(r, at, to); err != nil {
		return err
	}
	return r.end(at)
}

// decodeDevices reads a registration that comes as one JSON body.
func decodeDevices(data []byte) ([]school.NewDevice, error) {
	r := newJSONReader(data)
	if r.next() == 0 && r.pos == len(data) {
		return nil, emptyBody(devicesForm)
	}
	var list []school.NewDevice
	listed := false
	ok, err := r.object(path{}, devicesShape, func(_ string, p path) (err error) {
		listed, err = r.array(p, "objects, "+recipientsForm, func(i int) error {
			if i >= maxDevices {
				return &api.Error{Code: api.TooLarge, Field: "devices", Message: "at most 1,000 devices in one JSON body; send more as " + api.NDJSON}
			}
			var d school.NewDevice
			if err := decodeDevice(r, devicePath(i), &d); err != nil {
				return err
			}
			list = append(list, d)
			return nil
		})
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case !ok:
		return nil, r.invalid(path{}, mustBeObject(path{}))
	}
	if err := r.end(path{}); err != nil {
		return nil, err
	}
	switch {
	case !listed:
		return nil, invalid("devices", "is required")
	case len(list) == 0:
		return nil, invalid("devices", "must name at least one device")
	}
	for i := range list {
		if err := school.ValidateDevice(i, &list[i]); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// decodeDevice reads one device; it does not validate it.
func decodeDevice(r *jsonReader, p path, to *school.NewDevice) error {
	ok, err := r.object(p, deviceShape, func(name string, p path) (err error) {
		switch name {
		case "token":
			err = r.set(p, &to.Token)
		case "ref":
			var ref string
			var given bool
			if ref, given, err = r.text(p); given {
				to.Ref = &ref
			}
		case "enabled":
			to.Enabled, err = r.flag(p)
		case "topics":
			to.Topics, err = decodeTopics(r, p)
		}
		return err
	})
	if err == nil && !ok {
		err = p.invalid(mustBeObject(p))
	}
	return err
}

// decodeTopics reads a set of topics; an empty one is not nil, as null is.
func decodeTopics(r *jsonReader, p path) ([]string, error) {
	topics := []string{}
	ok, err := r.array(p, `strings, ["board-3"]`, func(i int) error {
		at := p
		at.name += "[" + strconv.Itoa(i) + "]"
		if i >= school.MaxTopics {
			return &api.Error{Code: api.TooLarge, Field: p.String(), Message: "a device has at most 2,000 topics"}
		}
		topic, given, err := r.text(at)
		if err == nil && !given {
			err = at.invalid("must be a string")
		}
		topics = append(topics, topic)
		return err
	})
	if !ok || err != nil {
		return nil, err
	}
	return topics, nil
}

// decodeDeviceLine reads and checks one line of a registration that comes as a
// stream.
func decodeDeviceLine(line []byte, i int, to *school.NewDevice) error {
	r := newJSONReader(line)
	r.inLine = true
	at := devicePath(i)
	if err := decodeDevice(r, at, to); err != nil {
		return err
	}
	if err := r.end(at); err != nil {
		return err
	}
	return school.ValidateDevice(i, to)
}

func decodeSchoolChange(data []byte) (school.SchoolChange, error) {
	var c school.SchoolChange
	r := newJSONReader(data)
	if r.next() == 0 && r.pos == len(data) {
		return c, emptyBody(schoolForm)
	}
	ok, err := r.object(path{}, schoolShape, func(name string, p path) (err error) {
		var given bool
		switch name {
		case "name":
			c.Name = new(string)
			*c.Name, given, err = r.text(p)
		case "sender":
			c.Sender = new(string)
			*c.Sender, given, err = r.text(p)
		case "limit":
			c.Limit, err = r.integer(p)
			given = c.Limit != nil
		case "rest_seconds":
			c.Rest, err = r.seconds(p)
			given = c.Rest != nil
		}
		if err == nil && !given {
			// Null could mean "back to the default" as well as "as it was".
			err = p.invalid("cannot be null; leave it out to keep what is set")
		}
		return err
	})
	if err != nil {
		return c, err
	}
	if !ok {
		return c, r.invalid(path{}, mustBeObject(path{}))
	}
	if err := r.end(path{}); err != nil {
		return c, err
	}
	return c, school.ValidateSchoolChange(c)
}

func emptyBody(form string) error {
	return invalid("", "the body is empty; send a JSON object such as "+form)
}

// mustBeObject says that the value at p is none, and for a recipient, which
// people take for its token, how it is written.
func mustBeObject(p path) string {
	if p.list != "" && p.name == "" {
		return "must be an object, " + recipientForm
	}
	return "must be an object"
}

func tooManyRecipients() error {
	return &api.Error{Code: api.TooLarge, Field: "recipients", Message: "a notice has at most 1,000,000 recipients"}
}
