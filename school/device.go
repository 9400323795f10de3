package school

import (
	"strconv"
	"time"
)

// NewDevice registers one device of a school, or changes it. What is nil stays as
// it was; a device that is new is on, without a ref and without topics.
type NewDevice struct {
	Token   string
	Ref     *string  // the application's own name for it
	Enabled *bool    // false: notifications are off, also for notices accepted before
	Topics  []string // the whole set; empty but not nil: none
}

// Devices says what a registration did.
type Devices struct {
	Registered int // devices that were named, each once
	Created    int // of them, those that the school did not have
	Revived    int // of them, those that were retired
}

// Device is a device of a school's registry as people look at it.
type Device struct {
	Key          string // hexadecimal SHA-256 of its token
	Token        string // shortened: never whole
	Ref          string
	Enabled      bool
	Topics       []string // in order
	Flagged      bool     // came back as unregistered while a brake is on
	RegisteredAt time.Time
	RetiredAt    time.Time // zero: it is not
}

// DeviceFilter selects devices of one school, in order of their keys.
type DeviceFilter struct {
	Topic   string // empty: all
	Retired *bool  // nil: all
	After   string // key of the last one seen; empty: from the beginning
	Limit   int
}

// ValidateDevice checks the i-th device, i from 0, of a registration. The error is
// a *FieldError whose Field begins with devices[i].
func ValidateDevice(i int, d *NewDevice) error {
	if fault := tokenFault(d.Token); fault != nil {
		fault.Field = deviceField(i, "token")
		return fault
	}
	if d.Ref != nil {
		if fault := refFault(*d.Ref); fault != nil {
			fault.Field = deviceField(i, "ref")
			return fault
		}
	}
	if len(d.Topics) > MaxTopics {
		return &FieldError{Field: deviceField(i, "topics"), Message: "has more than " + strconv.Itoa(MaxTopics) + " topics", Size: true}
	}
	for k, topic := range d.Topics {
		if !topicPattern.MatchString(topic) {
			return ValidateTopic(deviceField(i, "topics["+strconv.Itoa(k)+"]"), topic)
		}
	}
	return nil
}

func deviceField(i int, name string) string { return "devices[" + strconv.Itoa(i) + "]." + name }

// Brake is the rule by which an unusual share of unregistered devices in one
// batch is taken for something wrong (another project's credentials, a receiver
// that errs) rather than for so many devices that are gone. The zero Brake never
// acts.
type Brake struct {
	Percent int // of the batch's messages; 100 never acts
	Count   int
}

// Acts reports whether unregistered messages of a batch of size are more than
// Percent of it and more than Count.
func (b Brake) Acts(unregistered, size int) bool {
	return b.Percent > 0 && unregistered > b.Count && unregistered*100 > b.Percent*size
}

// BrakeEnd is how a brake was closed.
type BrakeEnd string

const (
	BrakeConfirmed BrakeEnd = "confirmed" // the devices are gone: those flagged are retired
	BrakeCleared   BrakeEnd = "cleared"   // they are not: the flags are removed
)

// EngagedBrake keeps devices of one school and sender from being retired until a
// person has looked.
type EngagedBrake struct {
	ID           int64
	School       string
	Sender       string
	Batch        string // that engaged it
	Owner        string // instance that recorded it
	Unregistered int    // messages of that batch
	Size         int    // of that batch
	EngagedAt    time.Time
	Flagged      int // devices flagged now
	Retired      int // devices retired by its confirmation

	ClosedAt time.Time // zero: it is on
	ClosedAs BrakeEnd
	ClosedBy string // who closed it
}

// BrakeFilter selects brakes, newest first.
type BrakeFilter struct {
	School string // empty: all
	Open   bool   // only those that are on
	Before int64  // id; 0: from the newest
	Limit  int
}
