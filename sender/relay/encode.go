package relay

import (
	"maps"
	"slices"
	"strconv"
	"sync"
	"unicode/utf8"

	"schoolbell/sender"
)

// buffer is a request body that serves one request after another: a batch of
// 200 is some 100 KB, and there is one every few milliseconds.
type buffer struct{ b []byte }

var buffers = sync.Pool{New: func() any { return new(buffer) }}

// maxKept keeps a rare huge batch from pinning its memory.
const maxKept = 4 << 20

func takeBuffer() *buffer {
	buf := buffers.Get().(*buffer)
	buf.b = buf.b[:0]
	return buf
}

func (buf *buffer) giveBack() {
	if cap(buf.b) <= maxKept {
		buffers.Put(buf)
	}
}

// encodeBatch writes the request of a batch. Content that the message before
// has pointed at too is copied, not encoded again.
func encodeBatch(buf *buffer, batch sender.Batch) *buffer {
	b := append(buf.b, `{"batch_id":`...)
	b = appendString(b, batch.ID)
	b = append(b, `,"school":`...)
	b = appendString(b, batch.School)
	b = append(b, `,"messages":[`...)
	var last *sender.Content
	var from, to int // where last's fields stand in b
	for i := range batch.Messages {
		m := &batch.Messages[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"id":`...)
		b = appendString(b, m.ID)
		b = append(b, `,"token":`...)
		b = appendString(b, m.Token)
		if m.Content == last && last != nil {
			b = append(b, b[from:to]...)
		} else {
			from = len(b)
			b = appendContent(b, m.Content)
			to, last = len(b), m.Content
		}
		b = append(b, `,"attempt":`...)
		b = strconv.AppendInt(b, int64(m.Attempt), 10)
		if m.Badge != nil {
			b = append(b, `,"badge":`...)
			b = strconv.AppendInt(b, int64(*m.Badge), 10)
		}
		if m.Requeued > 0 {
			b = append(b, `,"requeued":`...)
			b = strconv.AppendInt(b, int64(m.Requeued), 10)
		}
		b = append(b, '}')
	}
	buf.b = append(b, `]}`...)
	return buf
}

func appendContent(b []byte, c *sender.Content) []byte {
	if c == nil {
		c = &sender.Content{}
	}
	b = append(b, `,"title":`...)
	b = appendString(b, c.Title)
	b = append(b, `,"body":`...)
	b = appendString(b, c.Body)
	b = append(b, `,"data":{`...)
	for i, k := range slices.Sorted(maps.Keys(c.Data)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, k)
		b = append(b, ':')
		b = appendString(b, c.Data[k])
	}
	b = append(b, '}')
	if c.Image != "" {
		b = append(b, `,"image":`...)
		b = appendString(b, c.Image)
	}
	if c.Link != "" {
		b = append(b, `,"link":`...)
		b = appendString(b, c.Link)
	}
	return b
}

func encodeIDs(buf *buffer, ids []string) *buffer {
	b := append(buf.b, `{"ids":[`...)
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, id)
	}
	buf.b = append(b, `]}`...)
	return buf
}

const hexDigits = "0123456789abcdef"

// appendString writes s as a JSON string. What is not UTF-8 becomes the
// replacement character, as encoding/json does it.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= ' ' && c != '"' && c != '\\' {
				i++
				continue
			}
			b = append(b, s[start:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, '\\', 'n')
			case '\r':
				b = append(b, '\\', 'r')
			case '\t':
				b = append(b, '\\', 't')
			default:
				b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&0xf])
			}
			i++
			start = i
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && size == 1 {
			b = append(b, s[start:i]...)
			b = append(b, "\ufffd"...)
			i++
			start = i
			continue
		}
		i += size
	}
	b = append(b, s[start:]...)
	return append(b, '"')
}
