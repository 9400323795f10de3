package fcm

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"

	"golang.org/x/net/http2"

	"schoolbell/sender"
)

// Codes of FCM, and our own where its code says less than its answer does.
const (
	codeUnregistered = "UNREGISTERED"
	codeInvalid      = "INVALID_ARGUMENT" // the token, or FCM did not say what
	codeThirdParty   = "THIRD_PARTY_AUTH_ERROR"
	codeMismatch     = "SENDER_ID_MISMATCH"
	codeQuota        = "QUOTA_EXCEEDED"

	codePayload       = "INVALID_PAYLOAD" // FCM named a field of the message that is not the token
	codeStreamRefused = "STREAM_REFUSED"  // HTTP/2: refused before it was looked at
	codeTokenRefused  = "TOKEN_REFUSED"   // no access token for these credentials
	codeTokenMissing  = "TOKEN_MISSING"   // no access token for now
)

// result is what is known about the message after the SDK has returned.
func (c *call) result(ctx context.Context, name string, err error) sender.Result {
	switch {
	case !c.reached:
		return neverReached(ctx, err)
	case c.notSent:
		return c.stayed(ctx)
	case c.err != nil:
		return c.unanswered(ctx)
	}
	return c.answered(name, err)
}

// neverReached: the SDK returned without a request.
func neverReached(ctx context.Context, err error) sender.Result {
	if ctx.Err() != nil || err == nil {
		return sender.Result{Class: sender.NotSent, Code: sender.CodeCancelled}
	}
	// It checks messages before it sends them: it would refuse this one again.
	// Its error quotes the message.
	return sender.Result{Class: sender.Rejected, Code: codePayload, Detail: "the Firebase SDK refuses the message unsent"}
}

// stayed classifies a failure before any of the message left.
func (c *call) stayed(ctx context.Context) sender.Result {
	r := sender.Result{Class: sender.NotSent, Code: sender.CodeConnectFailed}
	var (
		dns    *net.DNSError
		op     *net.OpError
		cert   *tls.CertificateVerificationError
		record tls.RecordHeaderError
	)
	cause := context.Cause(ctx)
	switch {
	case errors.Is(c.err, errGateClosed):
		return gateClosed
	case errors.Is(c.err, errPoolClosed):
		r.Code = sender.CodeClosed
	case errors.Is(cause, errCallTimeout), errors.Is(cause, context.DeadlineExceeded):
		r.Code = sender.CodeConnectTimeout
	case cause != nil:
		r.Code = sender.CodeCancelled
	case errors.As(c.err, &dns):
		r.Code = sender.CodeDNSFailed
	case errors.As(c.err, &cert), errors.As(c.err, &record),
		errors.As(c.err, &op) && (op.Op == "remote error" || op.Op == "local error"):
		r.Code, r.Detail = sender.CodeTLSFailed, "no trusted connection to FCM"
	case isTimeout(c.err):
		r.Code = sender.CodeConnectTimeout
	}
	return r
}

// unanswered classifies a failure after something may have left.
func (c *call) unanswered(ctx context.Context) sender.Result {
	cause := context.Cause(ctx)
	r := sender.Result{Class: sender.Unknown, Code: sender.CodeNoAnswer}
	r.RetryAfter, _ = sender.ParseRetryAfter(c.header) // of an answer that broke off behind its head
	switch {
	case refusedStream(c.err):
		// The receiver's word, by the protocol, that it did nothing with it.
		return sender.Result{Class: sender.NotSent, Code: codeStreamRefused}
	case errors.Is(c.err, errTooLarge):
		r.Code, r.Detail = sender.CodeBadAnswer, "the answer is larger than its bound"
	case errors.Is(cause, errCallTimeout), errors.Is(cause, context.DeadlineExceeded):
		r.Code = sender.CodeCallTimeout
	case cause != nil:
		r.Code = sender.CodeCancelled
	case isTimeout(c.err):
		r.Code = sender.CodeReadTimeout
	}
	return r
}

// goAway is how net/http words that a stream is above the last one that a
// GOAWAY said was or might be processed. It has no type. Should the words
// change, such messages are unknown, which is never wrong.
const goAway = "Transport received Server's graceful shutdown GOAWAY"

// refusedStream reports whether HTTP/2 guarantees that the receiver did not
// process the request (RFC 9113, section 8.7).
func refusedStream(err error) bool {
	var stream http2.StreamError
	if errors.As(err, &stream) {
		return stream.Code == http2.ErrCodeRefusedStream
	}
	return strings.Contains(err.Error(), goAway)
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// answered classifies an answer. The status comes first, and FCM's details only
// refine it: what is no answer of FCM's own must not retire a device.
func (c *call) answered(name string, err error) sender.Result {
	if c.status == http.StatusOK {
		if err == nil && isMessageName(name) {
			return sender.Result{Class: sender.Accepted}
		}
		return sender.Result{Class: sender.Unknown, Code: sender.CodeBadAnswer, Detail: "200 without the message's name"}
	}
	a := parseAnswer(c.body)
	wait, _ := sender.ParseRetryAfter(c.header)
	switch c.status {
	case http.StatusBadRequest:
		if field, ok := a.payloadField(); ok {
			return sender.Result{Class: sender.Rejected, Code: codePayload, Detail: "FCM refuses " + field}
		}
		return sender.Result{Class: sender.Rejected, Code: a.code(codeInvalid)}
	case http.StatusRequestEntityTooLarge:
		return sender.Result{Class: sender.Rejected, Code: codePayload, Detail: "FCM finds the message too large"}
	case http.StatusUnauthorized, http.StatusForbidden:
		switch a.fcm {
		case codeThirdParty, "APNS_AUTH_ERROR":
			return sender.Result{Class: sender.Mismatch, Code: codeThirdParty, Detail: "the project's APNs or web push key is wrong"}
		case codeMismatch:
			return sender.Result{Class: sender.Mismatch, Code: codeMismatch, Detail: "the device belongs to another project"}
		}
		return sender.Result{Class: sender.Misconfigured, Code: a.code(httpCode(c.status)), RetryAfter: wait, Detail: "FCM does not let these credentials send"}
	case http.StatusNotFound:
		if a.fcm == codeUnregistered {
			return sender.Result{Class: sender.Gone, Code: codeUnregistered}
		}
		return sender.Result{Class: sender.Misconfigured, Code: a.code(httpCode(c.status)), RetryAfter: wait, Detail: "no such project or URL"}
	case http.StatusConflict:
		return sender.Result{Class: sender.Unavailable, Code: a.code(httpCode(c.status)), RetryAfter: wait}
	case http.StatusTooManyRequests:
		return sender.Result{Class: sender.Throttled, Code: codeQuota, RetryAfter: wait}
	}
	if c.status >= 500 {
		// FCM has answered 503 for messages that it delivered.
		return sender.Result{Class: sender.Unavailable, OutcomeUnknown: true, Code: a.code(httpCode(c.status)), RetryAfter: wait}
	}
	return sender.Result{Class: sender.Unknown, Code: httpCode(c.status), RetryAfter: wait, Detail: "the status says nothing about the message"}
}

// isMessageName reports whether s is how FCM names a message that it took,
// projects/<project>/messages/<id>. A 200 of something in between may well hold
// JSON with a name of its own.
func isMessageName(s string) bool {
	project, id, ok := strings.Cut(strings.TrimPrefix(s, "projects/"), "/messages/")
	return ok && strings.HasPrefix(s, "projects/") && project != "" && id != ""
}

func httpCode(status int) string { return "HTTP_" + strconv.Itoa(status) }

// answer is what an error of FCM says beside its status.
type answer struct {
	fcm    string   // FcmError's errorCode
	reason string   // ErrorInfo's reason
	status string   // the error's status
	fields []string // that BadRequest complains of
}

const detailTypes = "type.googleapis.com/"

// parseAnswer reads what it can. What is no such JSON says nothing.
func parseAnswer(body []byte) answer {
	var envelope struct {
		Error struct {
			Status  string            `json:"status"`
			Details []json.RawMessage `json:"details"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &envelope) != nil {
		return answer{}
	}
	a := answer{status: envelope.Error.Status}
	for _, raw := range envelope.Error.Details {
		var d struct {
			Type       string `json:"@type"`
			ErrorCode  string `json:"errorCode"`
			Reason     string `json:"reason"`
			Violations []struct {
				Field string `json:"field"`
			} `json:"fieldViolations"`
		}
		if json.Unmarshal(raw, &d) != nil {
			continue
		}
		switch d.Type {
		case detailTypes + "google.firebase.fcm.v1.FcmError":
			if a.fcm == "" {
				a.fcm = d.ErrorCode
			}
		case detailTypes + "google.rpc.ErrorInfo":
			a.reason = d.Reason
		case detailTypes + "google.rpc.BadRequest":
			for _, v := range d.Violations {
				a.fields = append(a.fields, v.Field)
			}
		}
	}
	return a
}

// code is the most telling of the answer's codes, or the fallback.
func (a answer) code(fallback string) string {
	for _, code := range []string{a.fcm, a.reason, a.status} {
		if sender.ValidCode(code) {
			return code
		}
	}
	return fallback
}

const tokenField = "message.token"

// payloadField is the part of the message that FCM complains of, where it says
// so and it is not the token. Only the part's name is kept: a path may hold a
// key of the notice's data.
func (a answer) payloadField() (part string, ok bool) {
	for _, f := range a.fields {
		if f == tokenField || f == "" {
			continue
		}
		for _, known := range []string{"message.data", "message.notification", "message.android", "message.apns", "message.webpush", "message.fcm_options"} {
			if strings.HasPrefix(f, known) {
				return known, true
			}
		}
		return "the message", true
	}
	return "", false
}
