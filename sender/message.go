package sender

import (
	"maps"
	"time"
)

// Priority is how urgent a notice is. The zero value is Normal.
type Priority int

// The priorities of a notice.
const (
	Normal Priority = iota
	Urgent
	Low
)

// Content is what a device shows: the part of a message that the recipients of
// one notice usually share. Many messages point at one Content, so a batch of
// 200 carries it once and an encoder may encode it once; it must not be changed
// after a message points at it.
type Content struct {
	Title string
	Body  string
	Image string // URL, empty for none
	Link  string // URL, empty for none

	// Data is the notice's data. A recipient's own data is merged over it by
	// WithData before the message is made (R18).
	Data map[string]string

	Priority  Priority
	ExpiresAt time.Time // zero: never; a receiver that can, drops the message then
	ExpiresBy time.Time // the same moment by this process's monotonic clock, for receivers that want to know how long
}

// WithData returns c with own merged over its data; own wins where both have a
// key (R18). Without own data it returns c itself, so that the content stays
// shared. Neither c nor own is changed.
func (c *Content) WithData(own map[string]string) *Content {
	if len(own) == 0 {
		return c
	}
	merged := *c
	merged.Data = make(map[string]string, len(c.Data)+len(own))
	maps.Copy(merged.Data, c.Data)
	maps.Copy(merged.Data, own)
	return &merged
}

// Message is one recipient's message in one batch.
type Message struct {
	// ID is "<notice id>.<seq>", the same from the first attempt to the last:
	// the key by which a receiver drops repeats (R26).
	ID      string
	Notice  string
	Token   string   // the device; never logged, never part of an error
	Content *Content // never nil, shared, read only

	Badge    *int // nil: leave the badge alone
	Attempt  int  // this hand-over's number, from 1; counts every one of them
	Requeued int  // how often an operator put it back; above 0 it is a new message to the receiver
}

// Batch is what one call hands over: messages of one school, claimed together.
type Batch struct {
	ID          string // new for each claim, so never the same in two calls
	School      string
	Fence       int64 // the fencing number it was claimed under (R13)
	Messages    []Message
	TraceParent string // W3C trace context, empty for none

	// Gate says whether a message may still leave; nil is always open. A sender
	// that hands the messages over one by one asks before each of them, at the
	// last moment that it can: an error means that this message and those
	// behind it are NotSent. It must be cheap and may be called from many
	// goroutines. The caller asks it itself right before the call, so a sender
	// whose batch is one request need not.
	Gate func() error
}
