package fcm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

// caseAnswer is a line of testdata/answers.ndjson: an answer of FCM and what it means.
type caseAnswer struct {
	Name     string            `json:"name"`
	Status   int               `json:"status"`
	Header   map[string]string `json:"headers"`
	Body     json.RawMessage   `json:"body"`
	Outcome  string            `json:"outcome"`
	Requests int64             `json:"requests"`
}

// want reads an outcome such as "unavailable, not before 7 s; its outcome is unknown".
func (c caseAnswer) want(t *testing.T) sender.Result {
	t.Helper()
	var r sender.Result
	words, unknown := strings.CutSuffix(c.Outcome, "; its outcome is unknown")
	r.OutcomeUnknown = unknown
	class, wait, waits := strings.Cut(words, ", not before ")
	if waits {
		var err error
		r.RetryAfter, err = time.ParseDuration(strings.ReplaceAll(wait, " ", ""))
		require.NoError(t, err)
	}
	for _, known := range sender.Classes() {
		if known.String() == class {
			r.Class = known
		}
	}
	require.True(t, r.Class.Valid(), "%q", c.Outcome)
	return r
}

func (c caseAnswer) body() string {
	var text string
	if json.Unmarshal(c.Body, &text) == nil {
		return text
	}
	return string(c.Body)
}

func readCases(t *testing.T) (all []caseAnswer) {
	t.Helper()
	file, err := os.Open("testdata/answers.ndjson")
	require.NoError(t, err)
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var c caseAnswer
		require.NoError(t, json.Unmarshal(lines.Bytes(), &c))
		all = append(all, c)
	}
	require.NoError(t, lines.Err())
	require.NotEmpty(t, all)
	return all
}

func TestAnswersOfFCM(t *testing.T) {
	t.Parallel()
	for _, p := range allProtocols {
		for _, c := range readCases(t) {
			t.Run(string(p)+"/"+c.Name, func(t *testing.T) {
				t.Parallel()
				r := receive(t, p, answering(c.Status, c.Header, c.body()))
				got := sendOne(t, t.Context(), r.open(t, nil))

				want := c.want(t)
				require.Equal(t, want, sender.Result{Class: got.Class, OutcomeUnknown: got.OutcomeUnknown, RetryAfter: got.RetryAfter})
				require.True(t, got.Class == sender.Accepted || sender.ValidCode(got.Code), "%q", got.Code)
				require.Equal(t, c.Requests, r.requests.Load())
			})
		}
	}
}

// fcmError is an error body of FCM's.
func fcmError(status int, word string, details ...string) string {
	return fmt.Sprintf(`{"error":{"code":%d,"message":"text with token-of-12.1","status":"%s","details":[%s]}}`, status, word, strings.Join(details, ","))
}

func detail(code string) string {
	return `{"@type":"type.googleapis.com/google.firebase.fcm.v1.FcmError","errorCode":"` + code + `"}`
}

func violation(fields ...string) string {
	var all []string
	for _, f := range fields {
		all = append(all, `{"field":"`+f+`","description":"Invalid value token-of-12.1"}`)
	}
	return `{"@type":"type.googleapis.com/google.rpc.BadRequest","fieldViolations":[` + strings.Join(all, ",") + `]}`
}

const reasonDisabled = `{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"SERVICE_DISABLED"}`

func TestEachAnswerHasItsClassAndCode(t *testing.T) {
	t.Parallel()
	type want struct {
		class   sender.Class
		code    string
		unknown bool
		wait    time.Duration
	}
	// Of another day: the receiver's clock is the one that counts.
	said := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	date := said.Add(10 * time.Minute).Format(http.TimeFormat)
	for name, c := range map[string]struct {
		status int
		header map[string]string
		body   string
		want   want
	}{
		"400 token":                       {400, nil, fcmError(400, "INVALID_ARGUMENT", detail("INVALID_ARGUMENT")), want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
		"400 token named as a field":      {400, nil, fcmError(400, "INVALID_ARGUMENT", detail("INVALID_ARGUMENT"), violation("message.token")), want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
		"400 payload":                     {400, nil, fcmError(400, "INVALID_ARGUMENT", violation("message.data[0].value")), want{class: sender.Rejected, code: "INVALID_PAYLOAD"}},
		"400 payload with FcmError":       {400, nil, fcmError(400, "INVALID_ARGUMENT", detail("INVALID_ARGUMENT"), violation("message.token", "message.android.ttl")), want{class: sender.Rejected, code: "INVALID_PAYLOAD"}},
		"400 without details":             {400, nil, fcmError(400, "INVALID_ARGUMENT"), want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
		"400 UNREGISTERED":                {400, nil, fcmError(400, "INVALID_ARGUMENT", detail("UNREGISTERED")), want{class: sender.Rejected, code: "UNREGISTERED"}},
		"400 array":                       {400, nil, "[" + fcmError(400, "INVALID_ARGUMENT", detail("UNREGISTERED")) + "]", want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
		"400 HTML":                        {400, nil, "<html>", want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
		"401":                             {401, nil, fcmError(401, "UNAUTHENTICATED"), want{class: sender.Misconfigured, code: "UNAUTHENTICATED"}},
		"401 empty":                       {401, nil, "", want{class: sender.Misconfigured, code: "HTTP_401"}},
		"401 THIRD_PARTY_AUTH_ERROR":      {401, nil, fcmError(401, "UNAUTHENTICATED", detail("THIRD_PARTY_AUTH_ERROR")), want{class: sender.Mismatch, code: "THIRD_PARTY_AUTH_ERROR"}},
		"401 APNS_AUTH_ERROR":             {401, nil, fcmError(401, "UNAUTHENTICATED", detail("APNS_AUTH_ERROR")), want{class: sender.Mismatch, code: "THIRD_PARTY_AUTH_ERROR"}},
		"403 SENDER_ID_MISMATCH":          {403, nil, fcmError(403, "PERMISSION_DENIED", detail("SENDER_ID_MISMATCH")), want{class: sender.Mismatch, code: "SENDER_ID_MISMATCH"}},
		"403 SERVICE_DISABLED":            {403, nil, fcmError(403, "PERMISSION_DENIED", reasonDisabled), want{class: sender.Misconfigured, code: "SERVICE_DISABLED"}},
		"403":                             {403, nil, fcmError(403, "PERMISSION_DENIED"), want{class: sender.Misconfigured, code: "PERMISSION_DENIED"}},
		"403 empty":                       {403, nil, "", want{class: sender.Misconfigured, code: "HTTP_403"}},
		"401 Retry-After":                 {401, map[string]string{"Retry-After": "90"}, "", want{class: sender.Misconfigured, code: "HTTP_401", wait: 90 * time.Second}},
		"404 Retry-After":                 {404, map[string]string{"Retry-After": "90"}, "", want{class: sender.Misconfigured, code: "HTTP_404", wait: 90 * time.Second}},
		"408 Retry-After":                 {408, map[string]string{"Retry-After": "90"}, "", want{class: sender.Unknown, code: "HTTP_408", wait: 90 * time.Second}},
		"429 negative Retry-After":        {429, map[string]string{"Retry-After": "-5"}, "", want{class: sender.Throttled, code: "QUOTA_EXCEEDED"}},
		"404 UNREGISTERED":                {404, nil, fcmError(404, "NOT_FOUND", detail("UNREGISTERED")), want{class: sender.Gone, code: "UNREGISTERED"}},
		"404 another detail":              {404, nil, fcmError(404, "NOT_FOUND", detail("NOT_FOUND")), want{class: sender.Misconfigured, code: "NOT_FOUND"}},
		"404 detail of another type":      {404, nil, fcmError(404, "NOT_FOUND", strings.Replace(detail("UNREGISTERED"), "FcmError", "Other", 1)), want{class: sender.Misconfigured, code: "NOT_FOUND"}},
		"404 no details":                  {404, nil, fcmError(404, "NOT_FOUND"), want{class: sender.Misconfigured, code: "NOT_FOUND"}},
		"404 UNREGISTERED as status":      {404, nil, fcmError(404, "UNREGISTERED"), want{class: sender.Misconfigured, code: "UNREGISTERED"}},
		"404 empty":                       {404, nil, "", want{class: sender.Misconfigured, code: "HTTP_404"}},
		"408":                             {408, nil, "", want{class: sender.Unknown, code: "HTTP_408"}},
		"409":                             {409, nil, fcmError(409, "ABORTED"), want{class: sender.Unavailable, code: "ABORTED"}},
		"413 HTML":                        {413, nil, "<html>", want{class: sender.Rejected, code: "INVALID_PAYLOAD"}},
		"418":                             {418, nil, "", want{class: sender.Unknown, code: "HTTP_418"}},
		"429":                             {429, nil, fcmError(429, "RESOURCE_EXHAUSTED", detail("QUOTA_EXCEEDED")), want{class: sender.Throttled, code: "QUOTA_EXCEEDED"}},
		"429 Retry-After":                 {429, map[string]string{"Retry-After": "30"}, fcmError(429, "RESOURCE_EXHAUSTED", detail("QUOTA_EXCEEDED")), want{class: sender.Throttled, code: "QUOTA_EXCEEDED", wait: 30 * time.Second}},
		"429 without FcmError":            {429, nil, fcmError(429, "RESOURCE_EXHAUSTED"), want{class: sender.Throttled, code: "QUOTA_EXCEEDED"}},
		"429 far Retry-After":             {429, map[string]string{"Retry-After": "86400"}, "", want{class: sender.Throttled, code: "QUOTA_EXCEEDED", wait: time.Hour}},
		"429 malformed Retry-After":       {429, map[string]string{"Retry-After": "3.5"}, "", want{class: sender.Throttled, code: "QUOTA_EXCEEDED"}},
		"499":                             {499, nil, fcmError(499, "CANCELLED"), want{class: sender.Unknown, code: "HTTP_499"}},
		"500 INTERNAL":                    {500, nil, fcmError(500, "INTERNAL", detail("INTERNAL")), want{class: sender.Unavailable, code: "INTERNAL", unknown: true}},
		"500 UNSPECIFIED_ERROR":           {500, nil, fcmError(500, "UNKNOWN", detail("UNSPECIFIED_ERROR")), want{class: sender.Unavailable, code: "UNSPECIFIED_ERROR", unknown: true}},
		"500 UNREGISTERED":                {500, nil, fcmError(500, "INTERNAL", detail("UNREGISTERED")), want{class: sender.Unavailable, code: "UNREGISTERED", unknown: true}},
		"500 empty":                       {500, nil, "", want{class: sender.Unavailable, code: "HTTP_500", unknown: true}},
		"502 HTML":                        {502, nil, "<html>", want{class: sender.Unavailable, code: "HTTP_502", unknown: true}},
		"503":                             {503, nil, fcmError(503, "UNAVAILABLE", detail("UNAVAILABLE")), want{class: sender.Unavailable, code: "UNAVAILABLE", unknown: true}},
		"503 HTML":                        {503, nil, "<html>", want{class: sender.Unavailable, code: "HTTP_503", unknown: true}},
		"503 Retry-After":                 {503, map[string]string{"Retry-After": "1"}, "", want{class: sender.Unavailable, code: "HTTP_503", unknown: true, wait: time.Second}},
		"503 Retry-After beyond the SDK":  {503, map[string]string{"Retry-After": "300"}, "", want{class: sender.Unavailable, code: "HTTP_503", unknown: true, wait: 5 * time.Minute}},
		"503 Retry-After as a date":       {503, map[string]string{"Retry-After": date, "Date": said.Format(http.TimeFormat)}, "", want{class: sender.Unavailable, code: "HTTP_503", unknown: true, wait: 10 * time.Minute}},
		"504 JSON":                        {504, nil, fcmError(504, "DEADLINE_EXCEEDED"), want{class: sender.Unavailable, code: "DEADLINE_EXCEEDED", unknown: true}},
		"504 HTML":                        {504, nil, "<html>", want{class: sender.Unavailable, code: "HTTP_504", unknown: true}},
		"599":                             {599, nil, "", want{class: sender.Unavailable, code: "HTTP_599", unknown: true}},
		"200":                             {200, nil, name, want{class: sender.Accepted}},
		"200 null name":                   {200, nil, `{"name":null}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 empty name":                  {200, nil, `{"name":""}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 name of another type":        {200, nil, `{"name":7}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 empty":                       {200, nil, "", want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 too large":                   {200, nil, name + strings.Repeat(" ", maxAnswer), want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 with a name of another kind": {200, nil, `{"name":"Guest Wi-Fi"}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 with half a name":            {200, nil, `{"name":"projects/p/messages/"}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 with a name elsewhere":       {200, nil, `{"data":` + name + `}`, want{class: sender.Unknown, code: "BAD_ANSWER"}},
		"200 of a dry run":                {200, nil, `{"name":"projects/p/messages/fake_message_id"}`, want{class: sender.Accepted}},
		"201 with a name":                 {201, nil, name, want{class: sender.Unknown, code: "HTTP_201"}},
		"204":                             {204, nil, "", want{class: sender.Unknown, code: "HTTP_204"}},
		"301":                             {301, map[string]string{"Location": "/elsewhere"}, name, want{class: sender.Unknown, code: "HTTP_301"}},
		"302":                             {302, map[string]string{"Location": "/elsewhere"}, "", want{class: sender.Unknown, code: "HTTP_302"}},
		"307":                             {307, map[string]string{"Location": "/elsewhere"}, "", want{class: sender.Unknown, code: "HTTP_307"}},
		"a token as code":                 {400, nil, fcmError(400, "token-of-12.1", detail("token-of-12.1")), want{class: sender.Rejected, code: "INVALID_ARGUMENT"}},
	} {
		for _, p := range allProtocols {
			t.Run(name+"/"+string(p), func(t *testing.T) {
				t.Parallel()
				r := receive(t, p, answering(c.status, c.header, c.body))
				got := sendOne(t, t.Context(), r.open(t, nil))

				require.Equal(t, c.want.class, got.Class)
				require.Equal(t, c.want.code, got.Code)
				require.Equal(t, c.want.unknown, got.OutcomeUnknown)
				require.Equal(t, c.want.wait, got.RetryAfter)
				require.NotContains(t, got.Detail, "token-of")
				require.EqualValues(t, 1, r.requests.Load(), "exactly one request")
			})
		}
	}
}

func TestADetailNamesAPartOfTheMessageAndNoMore(t *testing.T) {
	t.Parallel()
	for field, part := range map[string]string{
		"message.data[0].value":                    "message.data",
		"message.data['secret key of the notice']": "message.data",
		"message.notification.title":               "message.notification",
		"message.apns.headers['apns-collapse-id']": "message.apns",
		"secret": "the message",
	} {
		a := parseAnswer([]byte(fcmError(400, "INVALID_ARGUMENT", violation(field))))
		got, ok := a.payloadField()
		require.True(t, ok)
		require.Equal(t, part, got)
	}
	_, ok := parseAnswer([]byte(fcmError(400, "INVALID_ARGUMENT", violation("message.token", "")))).payloadField()
	require.False(t, ok)
}

func FuzzParseAnswer(f *testing.F) {
	f.Add([]byte(fcmError(404, "NOT_FOUND", detail("UNREGISTERED"), violation("message.data"), reasonDisabled)))
	f.Add([]byte(`{"error":{"details":[null,7,{"@type":1}]}}`))
	f.Add([]byte(`{"error":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		a := parseAnswer(body)
		require.True(t, sender.ValidCode(a.code("FALLBACK")))
		part, ok := a.payloadField()
		require.Equal(t, ok, part != "")
	})
}
