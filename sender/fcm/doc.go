// Package fcm sends messages to Firebase Cloud Messaging through the Firebase
// Admin SDK, one request a message.
//
// # What it keeps
//
//   - A message leaves this process at most once. The SDK repeats transport
//     failures and 503s up to four times inside one call and cannot be told not
//     to; it runs on a transport that makes it single-shot (see once.go).
//   - Accepted needs FCM's name for the message. Not sent is proved by the
//     request's body, which is sealed unread. What lies between is unknown.
//   - Only FCM's own UNREGISTERED retires a device. A 404 without that detail
//     is a wrong project or URL.
//   - A batch never waits for the token endpoint: access tokens are fetched by
//     a goroutine of their own.
//   - No device token, text, data or key is in a result, a log line or an error.
//
// It does not retry, limit its rate, count attempts or retire devices.
//
// # How a message looks
//
// Title, body and image are the notification. The notice's data travels with
// schoolbell_school, schoolbell_notice, schoolbell_message, schoolbell_attempt,
// schoolbell_batch and schoolbell_fence added. The message id, the same in every
// attempt, is the Android notification tag, the apns-collapse-id and the web
// push tag, so that a repeated push replaces the first on the screen (R26);
// android.collapse_key is never set, since FCM keeps four of those per device
// and drops the others silently. A link is the data key "link", unless the
// notice has one of its own, and with https what a web push opens.
//
// DESIGN.md says why the transport, the pool of connections and the tokens are
// as they are.
package fcm
