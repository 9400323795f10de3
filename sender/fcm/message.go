package fcm

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/url"
	"strconv"
	"time"

	"firebase.google.com/go/v4/messaging"

	"schoolbell/sender"
)

// Data keys of ours. The names are a promise to apps, which may drop repeats by
// the message id. What an application puts under them is overwritten.
const (
	dataSchool  = "schoolbell_school"
	dataNotice  = "schoolbell_notice"
	dataMessage = "schoolbell_message"
	dataAttempt = "schoolbell_attempt"
	dataBatch   = "schoolbell_batch"
	dataFence   = "schoolbell_fence"
	dataLink    = "link"
)

const (
	maxCollapseID = 64                  // bytes, by APNs
	maxTTL        = 28 * 24 * time.Hour // by FCM
)

// message is m as FCM takes it.
func message(batch sender.Batch, m *sender.Message, now time.Time) *messaging.Message {
	c := m.Content
	data := make(map[string]string, len(c.Data)+7)
	if c.Link != "" {
		data[dataLink] = c.Link
	}
	maps.Copy(data, c.Data)
	data[dataSchool] = batch.School
	data[dataNotice] = m.Notice
	data[dataMessage] = m.ID
	data[dataAttempt] = strconv.Itoa(m.Attempt)
	data[dataBatch] = batch.ID
	data[dataFence] = strconv.FormatInt(batch.Fence, 10)

	msg := &messaging.Message{
		//lint:ignore SA1019 the registration token is what applications have; FCM takes both
		Token:        m.Token,
		Data:         data,
		Notification: &messaging.Notification{Title: c.Title, Body: c.Body, ImageURL: c.Image},
		Android:      &messaging.AndroidConfig{Notification: &messaging.AndroidNotification{Tag: m.ID}},
		APNS:         &messaging.APNSConfig{Headers: map[string]string{"apns-collapse-id": collapseID(m.ID)}},
		Webpush:      &messaging.WebpushConfig{Notification: &messaging.WebpushNotification{Tag: m.ID}, Headers: map[string]string{}},
	}
	switch c.Priority {
	case sender.Urgent:
		msg.Android.Priority = "high"
		msg.APNS.Headers["apns-priority"] = "10"
		msg.Webpush.Headers["Urgency"] = "high"
	case sender.Low:
		msg.Android.Priority = "normal"
		msg.APNS.Headers["apns-priority"] = "5"
		msg.Webpush.Headers["Urgency"] = "low"
	}
	if !c.ExpiresAt.IsZero() {
		// Whole seconds, rounded up: a rest of a second is not "now or never".
		ttl := min(max(c.ExpiresBy.Sub(now), 0), maxTTL)
		ttl = (ttl + time.Second - 1).Truncate(time.Second)
		msg.Android.TTL = &ttl
		msg.Webpush.Headers["TTL"] = strconv.FormatInt(int64(ttl/time.Second), 10)
		msg.APNS.Headers["apns-expiration"] = strconv.FormatInt(c.ExpiresAt.Unix(), 10)
	}
	// iOS shows an image only where the app's extension may change the message.
	if m.Badge != nil || c.Image != "" {
		msg.APNS.Payload = &messaging.APNSPayload{Aps: &messaging.Aps{Badge: m.Badge, MutableContent: c.Image != ""}}
	}
	if opensInBrowser(c.Link) {
		msg.Webpush.FCMOptions = &messaging.WebpushFCMOptions{Link: c.Link}
	}
	return msg
}

// opensInBrowser reports whether a web push may open the link: https only, or
// the SDK refuses the whole message.
func opensInBrowser(link string) bool {
	if link == "" {
		return false
	}
	u, err := url.ParseRequestURI(link)
	return err == nil && u.Scheme == "https"
}

// collapseID is the message id, or its hash where APNs would refuse its length.
func collapseID(id string) string {
	if len(id) <= maxCollapseID {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}
