package school

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Bounds of a school's own rule. They keep a slip of the finger (a rest in
// milliseconds, a limit with three zeros too many) from becoming a rule.
const (
	MaxLimit = 1_000_000
	MinRest  = time.Millisecond
	MaxRest  = 7 * 24 * time.Hour
)

// MaxBadge is the largest badge a recipient can carry; it is stored as 32 bits.
const MaxBadge = 1<<31 - 1

// payloadAdded is what a message carries besides the application's own fields,
// at most: the data fields by which a receiver recognises a repeat. FCM counts
// their keys and values as it counts the application's.
const payloadAdded = len("schoolbell_school") + MaxID +
	len("schoolbell_notice") + noticeDigits +
	len("schoolbell_message") + noticeDigits + len(".") + seqDigits +
	len("schoolbell_attempt") + attemptDigits +
	len("schoolbell_batch") + len("00000000-0000-0000-0000-000000000000") +
	len("schoolbell_fence") + fenceDigits

const (
	noticeDigits  = 19 // of the largest int64
	seqDigits     = 7  // of MaxRecipients
	attemptDigits = 4
	fenceDigits   = 19
)

// ValidateNotice checks all of n but its recipients: school, title, body, data,
// image, link, priority, delivery, topic, times and idempotency key, and that title,
// body, data, link and image fit the receiver's 4,096 bytes. With a zero now, the one check
// that needs a clock is left out; see [ValidateExpiry].
//
// It changes nothing and fills in no defaults. The error is a *FieldError whose
// Field is the name the field has in the API.
func ValidateNotice(n *Notice, now time.Time) error {
	if err := ValidateSchoolID("school", n.School); err != nil {
		return err
	}
	if err := validateContent(&n.Content); err != nil {
		return err
	}
	switch n.Priority {
	case Urgent, Normal, Low:
	default:
		return &FieldError{Field: "priority", Message: "must be urgent, normal or low"}
	}
	switch n.Delivery {
	case AtLeastOnce, AtMostOnce:
	default:
		return &FieldError{Field: "delivery", Message: "must be at_least_once or at_most_once"}
	}
	if n.Topic != "" {
		if err := ValidateTopic("topic", n.Topic); err != nil {
			return err
		}
	}
	if !n.ExpiresAt.IsZero() && !n.ScheduledAt.IsZero() && !n.ExpiresAt.After(n.ScheduledAt) {
		return &FieldError{Field: "expires_at", Message: "must be after scheduled_at"}
	}
	if err := validateSMS(n.Fallback); err != nil {
		return err
	}
	if n.IdempotencyKey != "" {
		if err := ValidateKey(n.IdempotencyKey); err != nil {
			return err
		}
	}
	if now.IsZero() {
		return nil
	}
	return ValidateExpiry(n, now)
}

// ValidateExpiry refuses a notice that has expired before it was accepted. It
// stands apart because the answer changes with time: a request that is repeated
// with its idempotency key must get its first answer, however late it comes
// (R27), so whoever accepts looks for that answer before asking this.
func ValidateExpiry(n *Notice, now time.Time) error {
	if !n.ExpiresAt.IsZero() && !n.ExpiresAt.After(now) {
		return &FieldError{Field: "expires_at", Message: "has passed already"}
	}
	return nil
}

// validateSMS checks the text of a fallback; empty is none.
func validateSMS(text string) error {
	if utf8.RuneCountInString(text) > MaxSMS {
		return &FieldError{Field: "fallback.sms", Message: "is longer than 2,000 characters", Size: true}
	}
	return validateText("fallback.sms", text)
}

// ValidateKey checks an idempotency key: 1 to 255 printable characters (R27).
func ValidateKey(key string) error {
	if n := utf8.RuneCountInString(key); n < 1 || n > MaxKey || !utf8.ValidString(key) || strings.ContainsFunc(key, notPrintable) {
		return &FieldError{Field: "Idempotency-Key", Message: "must be 1 to 255 printable characters"}
	}
	return nil
}

// ValidateSchoolID checks an id of a school that the caller gave as field.
func ValidateSchoolID(field, id string) error {
	if id == "" {
		return &FieldError{Field: field, Message: "is required"}
	}
	if !ValidID(id) {
		return &FieldError{Field: field, Message: "must be 1 to 64 of the characters A-Z a-z 0-9 . _ -"}
	}
	return nil
}

// ValidateTopic checks the name of a topic that the caller gave as field: what
// FCM takes for one, so that a school's own topics can keep their names.
func ValidateTopic(field, topic string) error {
	if !topicPattern.MatchString(topic) {
		return &FieldError{Field: field, Message: "must be 1 to 255 of the characters A-Z a-z 0-9 . _ ~ % -"}
	}
	return nil
}

func validateContent(c *Content) error {
	if err := validateText("title", c.Title); err != nil {
		return err
	}
	if strings.TrimSpace(c.Title) == "" {
		return &FieldError{Field: "title", Message: "is required"}
	}
	if err := validateText("body", c.Body); err != nil {
		return err
	}
	if err := validateData("data", c.Data); err != nil {
		return err
	}
	if err := validateLink("image", c.Image); err != nil {
		return err
	}
	if err := validateLink("link", c.Link); err != nil {
		return err
	}
	size := contentSize(c)
	if size <= MaxPayload {
		return nil
	}
	field, largest := "title", len(c.Title)
	for _, part := range []struct {
		name string
		size int
	}{{"body", len(c.Body)}, {"data", dataSize(c.Data)}, {"link", len(c.Link)}, {"image", len(c.Image)}} {
		if part.size > largest {
			field, largest = part.name, part.size
		}
	}
	return payloadError(field, size)
}

// linkKey is the data key that a link travels under, unless the application has
// one of that name.
const linkKey = "link"

// contentSize is what a receiver counts of a message with content c: the image
// with the notification, the link with the data.
func contentSize(c *Content) int {
	size := len(c.Title) + len(c.Body) + len(c.Image) + dataSize(c.Data) + payloadAdded
	if _, own := c.Data[linkKey]; c.Link != "" && !own {
		size += len(linkKey) + len(c.Link)
	}
	return size
}

// ValidateRecipient checks the i-th recipient, i from 0, of a notice with
// content c, which has passed [ValidateNotice]. A recipient's own data is
// merged over the notice's (R18), and what comes of it must fit as well.
//
// It looks at one recipient only, so that a million can be checked as they
// arrive. The error is a *FieldError whose Field begins with recipients[i].
func ValidateRecipient(i int, r *NewRecipient, c *Content) error {
	if fault := tokenFault(r.Token); fault != nil {
		fault.Field = recipientField(i, "token")
		return fault
	}
	if fault := refFault(r.Ref); fault != nil {
		fault.Field = recipientField(i, "ref")
		return fault
	}
	if r.Badge != nil && (*r.Badge < 0 || *r.Badge > MaxBadge) {
		return recipientError(i, "badge", "must be between 0 and "+strconv.Itoa(MaxBadge))
	}
	if len(r.Data) == 0 {
		return nil // nothing of its own: the notice's size holds
	}
	if err := validateData(recipientField(i, "data"), r.Data); err != nil {
		return err
	}
	size := contentSize(c)
	for k, v := range r.Data {
		old, ok := c.Data[k]
		if !ok && k == linkKey && c.Link != "" {
			old, ok = c.Link, true
		}
		if ok {
			size += len(v) - len(old)
		} else {
			size += len(k) + len(v)
		}
	}
	if size > MaxPayload {
		return payloadError(recipientField(i, "data"), size)
	}
	return nil
}

// tokenFault says what is wrong with a token; nil: nothing. The field is the
// caller's to name, where it is needed.
func tokenFault(token string) *FieldError {
	switch {
	case token == "":
		return &FieldError{Message: "is required"}
	case len(token) > MaxToken:
		return &FieldError{Message: "is longer than 4,096 bytes", Size: true}
	case !utf8.ValidString(token) || strings.ContainsFunc(token, unicode.IsControl):
		return &FieldError{Message: "must be UTF-8 without control characters"}
	}
	return nil
}

func refFault(ref string) *FieldError {
	switch {
	case utf8.RuneCountInString(ref) > MaxRef:
		return &FieldError{Message: "is longer than 255 characters", Size: true}
	case badText(ref):
		return &FieldError{Message: textMessage}
	}
	return nil
}

// ValidateSchoolChange checks the settings of a school; absent fields are fine.
func ValidateSchoolChange(c SchoolChange) error {
	if c.Name != nil {
		if badText(*c.Name) || strings.ContainsFunc(*c.Name, unicode.IsControl) {
			return &FieldError{Field: "name", Message: "must be UTF-8 without control characters"}
		}
		if utf8.RuneCountInString(*c.Name) > MaxName {
			return &FieldError{Field: "name", Message: "must be at most 255 characters"}
		}
	}
	if c.Sender != nil && *c.Sender != "" && !ValidID(*c.Sender) {
		return &FieldError{Field: "sender", Message: "must be the name of a sender, or empty for the default"}
	}
	if c.Limit != nil && (*c.Limit < 1 || *c.Limit > MaxLimit) {
		return &FieldError{Field: "limit", Message: "must be between 1 and 1,000,000 attempts"}
	}
	if c.Rest != nil && (*c.Rest < MinRest || *c.Rest > MaxRest) {
		return &FieldError{Field: "rest_seconds", Message: "must be between 0.001 and 604800"}
	}
	return nil
}

// reservedPrefixes belong to FCM or to schoolbell; a message that uses one is
// refused by the one or overwritten by the other.
var reservedPrefixes = [...]string{"google", "gcm", "schoolbell_"}

func reserved(key string) bool {
	if key == "from" || key == "message_type" {
		return true
	}
	for _, p := range reservedPrefixes {
		if strings.HasPrefix(key, p) {
			return true
		}
	}
	return false
}

func validateData(field string, data map[string]string) error {
	if len(data) > MaxPayload { // no key is shorter than a byte; refused before it costs anything
		return &FieldError{Field: field, Message: "has more keys than the payload has bytes"}
	}
	for _, k := range slices.Sorted(maps.Keys(data)) { // sorted: the same request gets the same answer
		v := data[k]
		switch {
		case k == "":
			return &FieldError{Field: field, Message: "a key is empty"}
		case badText(k):
			return &FieldError{Field: field, Message: "a key " + textMessage}
		case reserved(k):
			return &FieldError{Field: DataField(field, k), Message: "this key is reserved: from, message_type, google*, gcm* and schoolbell_* cannot be used"}
		case badText(v):
			return &FieldError{Field: DataField(field, k), Message: textMessage}
		}
	}
	return nil
}

// DataField names one key of the data field. What the caller wrote is cut and
// quoted where it could not stand in an answer or a log line.
func DataField(field, key string) string { return field + "." + Printable(key) }

// Printable cuts a name that a caller made up to 64 characters and quotes it
// unless it is plain printable text.
func Printable(name string) string {
	const most = 64
	if utf8.RuneCountInString(name) > most {
		name = string([]rune(name)[:most]) + "…"
	}
	if !utf8.ValidString(name) || strings.ContainsFunc(name, notPrintable) {
		return strconv.Quote(name)
	}
	return name
}

func validateLink(field, s string) error {
	if s == "" {
		return nil
	}
	if len(s) > MaxLink {
		return &FieldError{Field: field, Message: "must be at most 2,048 bytes"}
	}
	u, err := url.Parse(s)
	if err != nil || badText(s) || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return &FieldError{Field: field, Message: "must be an absolute http or https address"}
	}
	return nil
}

const textMessage = "must be UTF-8 without NUL"

func validateText(field, s string) error {
	if badText(s) {
		return &FieldError{Field: field, Message: textMessage}
	}
	return nil
}

// badText reports what PostgreSQL's text cannot hold.
func badText(s string) bool { return !utf8.ValidString(s) || strings.IndexByte(s, 0) >= 0 }

func notPrintable(r rune) bool { return !unicode.IsPrint(r) }

func dataSize(data map[string]string) int {
	n := 0
	for k, v := range data {
		n += len(k) + len(v)
	}
	return n
}

func payloadError(field string, size int) error {
	return &FieldError{Field: field, Message: fmt.Sprintf(
		"title, body, data, link and image together take %d bytes, %d of them added by schoolbell; at most %d fit", size, payloadAdded, MaxPayload)}
}

func recipientField(i int, name string) string {
	return "recipients[" + strconv.Itoa(i) + "]." + name
}

func recipientError(i int, name, message string) error {
	return &FieldError{Field: recipientField(i, name), Message: message}
}
