package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"schoolbell/school"
)

// putAttempts bounds how often a registration begins anew because one of its
// devices was deleted while it was under way.
const putAttempts = 10

// PutDevices registers devices of a school, in one transaction, as if each were
// registered by itself in this order: of a token that comes twice the later one
// counts, where it says something. A registration revives a device that was
// retired, and from then on it is not the one that an older batch was answered
// for. An unknown school is made, as its first notice would (R18).
//
// A device belongs to its school: the same token in another one is another device,
// since one app may be a member of two schools.
//
// school.ErrUnavailable, school.ErrCommitUnknown (asking again is harmless).
func (db *DB) PutDevices(ctx context.Context, schoolID string, devices []school.NewDevice) (done school.Devices, err error) {
	op := "put devices of school " + schoolID
	if err := checkSchoolID(schoolID); err != nil {
		return done, fmt.Errorf("%s: %w", op, err)
	}
	devices = eachOnce(devices)
	var (
		tokens  = make([]string, len(devices))
		refs    = make([]*string, len(devices))
		enabled = make([]*bool, len(devices))
		given   = make([]bool, len(devices))
		of      []int32
		topics  []string
	)
	for i := range devices {
		d := &devices[i]
		tokens[i], refs[i], enabled[i], given[i] = d.Token, d.Ref, d.Enabled, d.Topics != nil
		for _, topic := range d.Topics {
			of, topics = append(of, int32(i+1)), append(topics, topic)
		}
	}
	done.Registered = len(devices)
	for range putAttempts {
		err = change(ctx, db.ingest, op, func(c *pgx.Conn) error {
			return c.QueryRow(ctx, `SELECT created, revived FROM schoolbell_put_devices($1, $2, $3, $4, $5, $6, $7)`,
				schoolID, tokens, refs, enabled, given, of, topics).Scan(&done.Created, &done.Revived)
		})
		if err == nil {
			return done, nil
		}
		if !errors.Is(err, errDeviceMoved) {
			return school.Devices{}, err
		}
	}
	return school.Devices{}, fmt.Errorf("%w: %w", school.ErrUnavailable, err)
}

// eachOnce makes one of the devices that have the same token, as if they came one
// after the other.
func eachOnce(devices []school.NewDevice) []school.NewDevice {
	at := make(map[string]int, len(devices))
	out := make([]school.NewDevice, 0, len(devices))
	for _, d := range devices {
		i, known := at[d.Token]
		if !known {
			at[d.Token] = len(out)
			out = append(out, d)
			continue
		}
		if d.Ref != nil {
			out[i].Ref = d.Ref
		}
		if d.Enabled != nil {
			out[i].Enabled = d.Enabled
		}
		if d.Topics != nil {
			out[i].Topics = d.Topics
		}
	}
	return out
}

// DeleteDevice removes a device from a school's registry, with its topics.
// Notices that have it as a recipient already are sent to it all the same.
// school.ErrNotFound, school.ErrUnavailable, school.ErrCommitUnknown.
func (db *DB) DeleteDevice(ctx context.Context, schoolID, token string) error {
	sum := sha256.Sum256([]byte(token))
	return change(ctx, db.ingest, "delete device of school "+schoolID, func(c *pgx.Conn) error {
		tag, err := c.Exec(ctx, `DELETE FROM devices d WHERE d.school_id = $1 AND d.token_sha = $2`, schoolID, sum[:])
		if err == nil && tag.RowsAffected() == 0 {
			err = school.ErrNotFound
		}
		return err
	})
}

// deviceModel is a row of devices.
type deviceModel struct {
	TokenSha     []byte
	Token        string
	Ref          string
	Enabled      bool
	Flagged      bool
	RegisteredAt instant
	RetiredAt    instant
}

// Devices lists devices of one school in order of their keys, tokens shortened.
// school.ErrNotFound for an unknown school, school.ErrUnavailable;
// *school.FieldError for a limit outside 1 … 1000 and for a key that is none.
func (r readModels) Devices(ctx context.Context, schoolID string, f school.DeviceFilter) ([]school.Device, error) {
	op := "devices of school " + schoolID
	if err := checkLimit(op, f.Limit); err != nil {
		return nil, err
	}
	after, err := hex.DecodeString(f.After)
	if err != nil || (len(after) != 0 && len(after) != sha256.Size) {
		return nil, fmt.Errorf("%s: %w", op, &school.FieldError{Field: "cursor", Message: "must be the next of the page before"})
	}
	if len(after) == 0 {
		after = []byte{0} // below any key
	}
	var list []school.Device
	err = r.run(ctx, op, func(session *gorm.DB) error {
		list = nil
		var rows []deviceModel
		q := session.Table("devices AS d").Select(`d.token_sha, d.token, d.ref, d.enabled, d.registered_at, d.retired_at,
				EXISTS (SELECT 1 FROM device_flags f JOIN device_brakes k ON k.id = f.brake_id
					WHERE f.school_id = d.school_id AND f.token_sha = d.token_sha AND k.closed_at IS NULL) AS flagged`).
			Where("d.school_id = ? AND d.token_sha > ?", schoolID, after).Order("d.token_sha").Limit(f.Limit)
		if f.Topic != "" {
			q = q.Where("EXISTS (SELECT 1 FROM device_topics t WHERE t.school_id = d.school_id AND t.topic = ? AND t.token_sha = d.token_sha)", f.Topic)
		}
		if f.Retired != nil && *f.Retired {
			q = q.Where("d.retired_at IS NOT NULL")
		} else if f.Retired != nil {
			q = q.Where("d.retired_at IS NULL")
		}
		if err := q.Find(&rows).Error; err != nil {
			return err
		}
		if len(rows) == 0 {
			var known struct{ ID string }
			return session.Table("schools").Select("id").Where("id = ?", schoolID).Take(&known).Error
		}
		index := make(map[string]*school.Device, len(rows))
		shas := make([][]byte, len(rows))
		list = make([]school.Device, len(rows))
		for i, m := range rows {
			shas[i] = m.TokenSha
			list[i] = school.Device{
				Key: hex.EncodeToString(m.TokenSha), Token: shortened(m.Token), Ref: m.Ref, Enabled: m.Enabled, Topics: []string{},
				Flagged: m.Flagged, RegisteredAt: m.RegisteredAt.Time, RetiredAt: m.RetiredAt.Time,
			}
			index[string(m.TokenSha)] = &list[i]
		}
		var topics []struct {
			TokenSha []byte
			Topic    string
		}
		if err := session.Table("device_topics").Select("token_sha, topic").
			Where("school_id = ? AND token_sha IN ?", schoolID, shas).Find(&topics).Error; err != nil {
			return err
		}
		for _, t := range topics {
			d := index[string(t.TokenSha)]
			d.Topics = append(d.Topics, t.Topic)
		}
		for i := range list {
			slices.Sort(list[i].Topics)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// shortened is a token as people may see it, the same as in the view of
// recipients: at most a third of it, at most 6 characters.
func shortened(token string) string {
	n := min(6, utf8.RuneCountInString(token)/3)
	for i := range token {
		if n == 0 {
			return token[:i] + "…"
		}
		n--
	}
	return "…"
}
