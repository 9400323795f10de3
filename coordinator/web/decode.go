package web

import (
	"strconv"
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
	ok, err := r.object("", noticeFields, func(name, field string) (err error) {
		switch name {
		case "school":
			err = r.set(field, &n.School)
		case "title":
			err = r.set(field, &n.Content.Title)
		case "body":
			err = r.set(field, &n.Content.Body)
		case "data":
			n.Content.Data, err = r.strings(field)
		case "image":
			err = r.set(field, &n.Content.Image)
		case "link":
			err = r.set(field, &n.Content.Link)
		case "topic":
			_, topic, err = r.text(field)
		case "recipients":
			if stream {
				return invalid(field, "follow in the lines after the first, one each")
			}
			recipients, listed, err = decodeRecipients(r, field)
		case "priority":
			err = r.set(field, (*string)(&n.Priority))
		case "scheduled_at":
			n.ScheduledAt, err = r.time(field)
		case "expires_at":
			n.ExpiresAt, err = r.time(field)
		case "delivery":
			err = r.set(field, (*string)(&n.Delivery))
		case "fallback":
			var given bool
			if given, err = r.given(field); given && err == nil {
				err = invalid(field, notAvailable)
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
	if err := r.end(""); err != nil {
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

func decodeRecipients(r *jsonReader, field string) ([]school.NewRecipient, bool, error) {
	var list []school.NewRecipient
	ok, err := r.array(field, func(i int) error {
		if i >= school.MaxRecipients {
			return tooManyRecipients()
		}
		at := recipientAt(i)
		var rec school.NewRecipient
		if err := decodeRecipient(r, at, &rec); err != nil {
			return err
		}
		if rec.Token == "" { // checked here already: a body of empty objects must not grow a list many times its size
			return invalid(at+".token", "is required")
		}
		list = append(list, rec)
		return nil
	})
	return list, ok, err
}

// decodeRecipient reads one recipient; it does not validate it.
func decodeRecipient(r *jsonReader, field string, to *school.NewRecipient) error {
	ok, err := r.object(field, recipientFields, func(name, field string) (err error) {
		switch name {
		case "token":
			err = r.set(field, &to.Token)
		case "ref":
			err = r.set(field, &to.Ref)
		case "enabled":
			to.Enabled, err = r.flag(field)
		case "badge":
			to.Badge, err = r.integer(field)
		case "data":
			to.Data, err = r.strings(field)
		}
		return err
	})
	if err == nil && !ok {
		err = invalid(field, "must be an object")
	}
	return err
}

// decodeRecipientLine reads one line of a stream.
func decodeRecipientLine(line []byte, i int, to *school.NewRecipient) error {
	r := newJSONReader(line)
	at := recipientAt(i)
	if err := decodeRecipient(r, at, to); err != nil {
		return err
	}
	return r.end(at)
}

func decodeSchoolChange(data []byte) (school.SchoolChange, error) {
	var c school.SchoolChange
	r := newJSONReader(data)
	ok, err := r.object("", schoolChangeFields, func(name, field string) (err error) {
		var given bool
		switch name {
		case "name":
			c.Name = new(string)
			*c.Name, given, err = r.text(field)
		case "sender":
			c.Sender = new(string)
			*c.Sender, given, err = r.text(field)
		case "limit":
			c.Limit, err = r.integer(field)
			given = c.Limit != nil
		case "rest_seconds":
			c.Rest, err = r.seconds(field)
			given = c.Rest != nil
		}
		if err == nil && !given {
			// Null could mean "back to the default" as well as "as it was".
			err = invalid(field, "cannot be null; leave it out to keep what is set")
		}
		return err
	})
	if err != nil {
		return c, err
	}
	if !ok {
		return c, invalid("", "the body must be an object")
	}
	if err := r.end(""); err != nil {
		return c, err
	}
	return c, school.ValidateSchoolChange(c)
}

func recipientAt(i int) string { return "recipients[" + strconv.Itoa(i) + "]" }

func tooManyRecipients() error {
	return &api.Error{Code: api.TooLarge, Field: "recipients", Message: "a notice has at most 1,000,000 recipients"}
}
