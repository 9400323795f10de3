package web

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strconv"
	"time"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// maxDevices is how many devices one JSON body registers, and one transaction of
// a stream.
const maxDevices = 1000

// registration is devices of one school that came in, read and checked completely.
type registration struct {
	school string
	parts  iter.Seq2[[]school.NewDevice, error] // at most maxDevices each
	store  time.Duration                        // for storing all of it
	held   []func()
}

// Close gives the upload's place, its file and room back.
func (g *registration) Close() {
	for _, release := range slices.Backward(g.held) {
		release()
	}
	g.held = nil
}

// decodeRegistration reads PUT /v1/schools/{id}/devices in either form.
func (s *Server) decodeRegistration(w http.ResponseWriter, r *http.Request) (*registration, error) {
	g := &registration{school: pathParam(r, "id")}
	if err := school.ValidateSchoolID("id", g.school); err != nil {
		return nil, err
	}
	if err := allow(r.Context(), g.school); err != nil {
		return nil, err
	}
	if r.Header.Get("Content-Encoding") != "" {
		return nil, &api.Error{Code: api.UnsupportedMediaType, Message: "send the body without Content-Encoding"}
	}
	media, err := mediaType(r.Header, api.JSON, api.NDJSON)
	if err != nil {
		return nil, err
	}
	read := s.readDevices
	if media == api.NDJSON {
		read = s.readDeviceLines
	}
	done := false
	defer func() { // on an error and on a panic alike
		if !done {
			g.Close()
		}
	}()
	if err := read(g, w, r); err != nil {
		return nil, err
	}
	done = true
	return g, nil
}

// readDevices reads a registration that comes as one JSON body.
func (s *Server) readDevices(g *registration, w http.ResponseWriter, r *http.Request) error {
	body, release, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	g.held = append(g.held, release)
	list, err := decodeDevices(body)
	if err != nil {
		return err
	}
	g.store = s.cfg.AcceptTimeout
	g.parts = func(yield func([]school.NewDevice, error) bool) { yield(list, nil) }
	return nil
}

// readDeviceLines reads a registration that comes as NDJSON, a device a line, into
// a temporary file: every line is checked before the first one is stored.
func (s *Server) readDeviceLines(g *registration, w http.ResponseWriter, r *http.Request) error {
	release, err := s.takeUpload()
	if err != nil {
		return err
	}
	g.held = append(g.held, release)
	lines := newLineReader(s.uploadBody(w, r))
	sp, err := newSpool(s.cfg.UploadDir)
	if err != nil {
		return err
	}
	g.held = append(g.held, sp.close)
	for {
		line, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return lineError(err, devicePath(sp.count).String(), lines.line)
		}
		if sp.count >= school.MaxDevices {
			return &api.Error{Code: api.TooLarge, Field: "devices", Message: "at most 1,000,000 devices at once"}
		}
		var d school.NewDevice
		if err := decodeDeviceLine(line, sp.count, &d); err != nil {
			return lineError(err, devicePath(sp.count).String(), lines.line)
		}
		if err := sp.add(line); err != nil {
			return err
		}
	}
	if sp.count == 0 {
		return invalid("devices", "must name at least one device, one a line")
	}
	if err := sp.finish(); err != nil {
		return err
	}
	g.store = s.cfg.UploadAccept
	g.parts = sp.devices()
	return nil
}

// devices yields what was added, at most maxDevices at a time.
func (s *spool) devices() iter.Seq2[[]school.NewDevice, error] {
	return func(yield func([]school.NewDevice, error) bool) {
		part := make([]school.NewDevice, 0, min(s.count, maxDevices))
		i := 0
		for line, err := range s.lines() {
			var d school.NewDevice
			if err == nil && decodeDeviceLine(line, i, &d) != nil {
				err = s.spoilt(i)
			}
			if err != nil {
				yield(nil, err)
				return
			}
			part = append(part, d)
			if i++; len(part) == maxDevices || i == s.count {
				if !yield(part, nil) {
					return
				}
				part = part[:0]
			}
		}
	}
}

// putDevices registers a part at a time, in order. One that fails leaves those
// before it registered, and the whole may be repeated.
func (s *Server) putDevices(ctx context.Context, g *registration) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, g.store)
	defer cancel()
	out := api.Registered{School: g.school}
	for part, err := range g.parts {
		var done school.Devices
		if err == nil {
			done, err = s.deps.Devices.PutDevices(ctx, g.school, part)
		}
		if err != nil {
			return answer{}, fmt.Errorf("put devices of school %s: %w", g.school, err)
		}
		out.Devices += done.Registered
		out.Created += done.Created
		out.Revived += done.Revived
	}
	return answer{body: out}, nil
}

// deviceOf is one device of one school.
type deviceOf struct{ school, token string }

func decodeDeviceToken(_ http.ResponseWriter, r *http.Request) (deviceOf, error) {
	return deviceOf{pathParam(r, "id"), pathParam(r, "token")}, nil
}

func (s *Server) deleteDevice(ctx context.Context, in deviceOf) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := allow(ctx, in.school); err != nil {
		return answer{}, err
	}
	err := s.deps.Devices.DeleteDevice(ctx, in.school, in.token)
	if errors.Is(err, school.ErrNotFound) {
		// Without the token, which must not get into a log by way of an error.
		return answer{}, &api.Error{Code: api.NotFound, Message: "school " + school.Printable(in.school) + " has no such device"}
	}
	if err != nil {
		return answer{}, fmt.Errorf("delete device of school %s: %w", in.school, err)
	}
	return answer{body: api.DeletedDevice{School: in.school, Deleted: true}}, nil
}

// devicesOf is which devices of which school.
type devicesOf struct {
	school string
	filter school.DeviceFilter
}

func decodeDeviceFilter(w http.ResponseWriter, r *http.Request) (in devicesOf, err error) {
	if in.school, err = decodeSchoolID(w, r); err != nil {
		return in, err
	}
	q, err := query(r, "topic", "retired", "cursor", "limit")
	if err != nil {
		return in, err
	}
	f := &in.filter
	if q.Has("topic") {
		f.Topic = q.Get("topic")
		if err := school.ValidateTopic("topic", f.Topic); err != nil {
			return in, err
		}
	}
	switch q.Get("retired") {
	case "":
	case "true", "false":
		retired := q.Get("retired") == "true"
		f.Retired = &retired
	default:
		return in, invalid("retired", "must be true or false")
	}
	f.After = q.Get("cursor")
	if key, err := hex.DecodeString(f.After); err != nil || (len(key) != 0 && len(key) != 32) {
		return in, badCursor()
	}
	f.Limit, err = limitOf(q)
	return in, err
}

func (s *Server) listDevices(ctx context.Context, in devicesOf) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if err := allow(ctx, in.school); err != nil {
		return answer{}, err
	}
	list, err := s.deps.Devices.Devices(ctx, in.school, in.filter)
	if errors.Is(err, school.ErrNotFound) {
		return answer{}, notFound("school", in.school)
	}
	if err != nil {
		return answer{}, fmt.Errorf("list devices of school %s: %w", in.school, err)
	}
	items := make([]api.Device, len(list))
	for i, d := range list {
		items[i] = api.Device{
			Key: d.Key, Token: d.Token, Ref: d.Ref, Enabled: d.Enabled, Topics: d.Topics, Flagged: d.Flagged,
			RegisteredAt: d.RegisteredAt.UTC(), RetiredAt: moment(d.RetiredAt),
		}
	}
	return answer{body: page(items, in.filter.Limit, func(last api.Device) string { return last.Key })}, nil
}

func decodeBrakeFilter(_ http.ResponseWriter, r *http.Request) (f school.BrakeFilter, err error) {
	q, err := query(r, "school", "open", "cursor", "limit")
	if err != nil {
		return f, err
	}
	f.School = q.Get("school")
	if q.Has("school") {
		if err := school.ValidateSchoolID("school", f.School); err != nil {
			return f, err
		}
	}
	switch q.Get("open") {
	case "", "false":
	case "true":
		f.Open = true
	default:
		return f, invalid("open", "must be true or false")
	}
	if f.Before, err = cursorOf(q); err != nil {
		return f, err
	}
	f.Limit, err = limitOf(q)
	return f, err
}

func (s *Server) listBrakes(ctx context.Context, f school.BrakeFilter) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.AcceptTimeout)
	defer cancel()
	if f.School != "" {
		if err := allow(ctx, f.School); err != nil {
			return answer{}, err
		}
	}
	list, err := s.deps.Brakes.Brakes(ctx, f)
	if err != nil {
		return answer{}, fmt.Errorf("list brakes: %w", err)
	}
	items := make([]api.Brake, len(list))
	for i := range list {
		items[i] = brakeOf(&list[i])
	}
	out := page(items, f.Limit, func(last api.Brake) string { return last.ID })
	// After the cursor is made: what a key may not see is left out of the page.
	principal := infoOf(ctx).principal
	out.Items = slices.DeleteFunc(out.Items, func(b api.Brake) bool { return !principal.Touches(b.School) })
	return answer{body: out}, nil
}

func decodeBrakeID(_ http.ResponseWriter, r *http.Request) (int64, error) {
	text := pathParam(r, "id")
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id < 1 || strconv.FormatInt(id, 10) != text {
		return 0, notFound("brake", text)
	}
	return id, nil
}

// closeBrake answers the calls that confirm and clear.
func (s *Server) closeBrake(as school.BrakeEnd) func(ctx context.Context, id int64) (answer, error) {
	return func(ctx context.Context, id int64) (answer, error) {
		ctx, cancel := context.WithTimeout(ctx, s.cfg.UploadAccept) // a school may have a million devices
		defer cancel()
		b, err := s.deps.Brakes.Brake(ctx, id)
		principal := infoOf(ctx).principal
		if errors.Is(err, school.ErrNotFound) || err == nil && !principal.Touches(b.School) {
			return answer{}, notFound("brake", strconv.FormatInt(id, 10))
		}
		if err == nil {
			infoOf(ctx).school = b.School
			b, err = s.deps.Brakes.CloseBrake(ctx, id, as, principal.Name)
		}
		if errors.Is(err, school.ErrConflict) {
			return answer{}, &api.Error{Code: api.Conflict, Message: "the brake was closed in the other way already"}
		}
		if err != nil {
			return answer{}, fmt.Errorf("close brake %d: %w", id, err)
		}
		s.log.InfoContext(ctx, "a brake is off", "event", "brake_closed", "school", b.School, "sender", b.Sender,
			"brake", b.ID, "as", string(b.ClosedAs), "by", b.ClosedBy, "retired", b.Retired)
		return answer{body: brakeOf(&b)}, nil
	}
}

func brakeOf(b *school.EngagedBrake) api.Brake {
	return api.Brake{
		ID: strconv.FormatInt(b.ID, 10), School: b.School, Sender: b.Sender, Batch: b.Batch, Instance: b.Owner,
		Unregistered: b.Unregistered, Size: b.Size, EngagedAt: b.EngagedAt.UTC(), Flagged: b.Flagged, Retired: b.Retired,
		Open: b.ClosedAt.IsZero(), ClosedAt: moment(b.ClosedAt), ClosedAs: string(b.ClosedAs), ClosedBy: b.ClosedBy,
	}
}
