package web

import (
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// The fields of each shape that comes in. api's types have the same ones; a
// test holds them together.
var (
	noticeFields = []string{"school", "title", "body", "data", "image", "link", "topic", "recipients",
		"priority", "scheduled_at", "expires_at", "delivery", "fallback"}
	recipientFields    = []string{"token", "ref", "enabled", "badge", "data"}
	schoolChangeFields = []string{"name", "sender", "limit", "rest_seconds"}
)

const notAvailable = "is not available in this version"

// decodeNotice reads the notice in data and, unless it is the first line of a
// stream, its recipients, and checks all of it but what depends on the clock.
func decodeNotice(data []byte, stream bool) (*school.Notice, []school.NewRecipient, error) {
	var (
		n          = &school.Notice{Priority: school.Normal, Delivery: school.AtLeastOnce}
		recipients []school.NewRecipient
		topic      bool
		listed     bool // recipients were given, if only an empty list
	)
	r := newJSONReader(data)
	ok, err := r.object(path{}, noticeFields, func(name string, p path) (err error) {
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
			_, topic, err = r.text(p)
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
			var given bool
			if given, err = r.given(p); given && err == nil {
				err = p.invalid(notAvailable)
			}
		}
		return err
	})
	switch {
	case err != nil:
		return nil, nil, err
	case !ok:
		return nil, nil, invalid("", "the body must be an object")
	}
	if err := r.end(path{}); err != nil {
		return nil, nil, err
	}
	switch {
	case topic && (listed || stream):
		return nil, nil, invalid("topic", "cannot go with recipients; give one of the two")
	case topic:
		return nil, nil, invalid("topic", notAvailable)
	case !listed && !stream:
		return nil, nil, invalid("recipients", "is required")
	case len(recipients) == 0 && !stream:
		return nil, nil, invalid("recipients", "must name at least one device")
	}
	if err := school.ValidateNotice(n, time.Time{}); err != nil {
		return nil, nil, err
	}
	if n.Priority != school.Normal {
		return nil, nil, invalid("priority", "other than normal "+notAvailable)
	}
	for i := range recipients {
		if err := school.ValidateRecipient(i, &recipients[i], &n.Content); err != nil {
			return nil, nil, err
		}
	}
	return n, recipients, nil
}

func decodeRecipients(r *jsonReader, p path) ([]school.NewRecipient, bool, error) {
	var list []school.NewRecipient
	ok, err := r.array(p, func(i int) error {
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
	ok, err := r.object(p, recipientFields, func(name string, p path) (err error) {
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
		err = p.invalid("must be an object")
	}
	return err
}

// decodeRecipientLine reads one line of a stream.
func decodeRecipientLine(line []byte, i int, to *school.NewRecipient) error {
	r := newJSONReader(line)
	at := recipientPath(i)
	if err := decodeRecipient(r, at, to); err != nil {
		return err
	}
	return r.end(at)
}

func decodeSchoolChange(data []byte) (school.SchoolChange, error) {
	var c school.SchoolChange
	r := newJSONReader(data)
	ok, err := r.object(path{}, schoolChangeFields, func(name string, p path) (err error) {
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
		return c, invalid("", "the body must be an object")
	}
	if err := r.end(path{}); err != nil {
		return c, err
	}
	return c, school.ValidateSchoolChange(c)
}

func tooManyRecipients() error {
	return &api.Error{Code: api.TooLarge, Field: "recipients", Message: "a notice has at most 1,000,000 recipients"}
}
