package web

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/coordinator/api"
	"schoolbell/school"
)

// with builds a good notice's JSON with one more member.
func with(member string) string {
	return `{"school":"A","title":"t","recipients":[{"token":"tok-1"}],` + member + `}`
}

// recipient builds a notice whose second recipient is the given JSON.
func recipient(r string) string {
	return `{"school":"A","title":"t","recipients":[{"token":"tok-1"},` + r + `]}`
}

func TestFieldsAreNamedExactly(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body  string
		code  api.Code
		field string
	}{
		"empty body":                  {``, api.InvalidArgument, ""},
		"null":                        {`null`, api.InvalidArgument, ""},
		"array":                       {`[]`, api.InvalidArgument, ""},
		"string":                      {`"x"`, api.InvalidArgument, ""},
		"cut off":                     {`{"school":"A","title":"t"`, api.InvalidArgument, ""},
		"cut off in a recipient":      {`{"school":"A","title":"t","recipients":[{"token":"a"},{"token":"b"`, api.InvalidArgument, "recipients[1]"},
		"cut off in a text":           {`{"school":"A","title":"t`, api.InvalidArgument, "title"},
		"comma at the end":            {`{"school":"A",}`, api.InvalidArgument, ""},
		"no colon":                    {`{"school" "A"}`, api.InvalidArgument, ""},
		"number as name":              {`{1:"A"}`, api.InvalidArgument, ""},
		"deep nesting in a text":      {with(`"body":` + strings.Repeat("[", 100000)), api.InvalidArgument, "body"},
		"deep nesting at the top":     {strings.Repeat(`{"data":`, 100000), api.InvalidArgument, "data.data"},
		"deep nesting in fallback":    {with(`"fallback":` + strings.Repeat("[", 100000)), api.InvalidArgument, "fallback"},
		"garbage after it":            {small + `x`, api.InvalidArgument, ""},
		"another case":                {with(`"Body":"b"`), api.InvalidArgument, "Body"},
		"name with a line end":        {with(`"a\nb":"b"`), api.InvalidArgument, `"a\nb"`},
		"name of a megabyte":          {with(`"` + strings.Repeat("n", 1<<20) + `":1`), api.InvalidArgument, strings.Repeat("n", 64) + "…"},
		"field twice":                 {with(`"title":"u"`), api.InvalidArgument, "title"},
		"data key twice":              {with(`"data":{"a":"1","a":"2"}`), api.InvalidArgument, "data.a"},
		"data of an array":            {with(`"data":["a"]`), api.InvalidArgument, "data"},
		"data value null":             {with(`"data":{"a":null}`), api.InvalidArgument, "data.a"},
		"data value an object":        {with(`"data":{"a":{"b":"c"}}`), api.InvalidArgument, "data.a"},
		"data key with a dot":         {with(`"data":{"a.b":1}`), api.InvalidArgument, "data.a.b"},
		"recipients an object":        {`{"school":"A","title":"t","recipients":{}}`, api.InvalidArgument, "recipients"},
		"recipients null":             {`{"school":"A","title":"t","recipients":null}`, api.InvalidArgument, "recipients"},
		"recipients empty":            {`{"school":"A","title":"t","recipients":[]}`, api.InvalidArgument, "recipients"},
		"recipients of empty objects": {`{"school":"A","title":"t","recipients":[{},{}]}`, api.InvalidArgument, "recipients[0].token"},
		"recipient a string":          {recipient(`"tok"`), api.InvalidArgument, "recipients[1]"},
		"recipient null":              {recipient(`null`), api.InvalidArgument, "recipients[1]"},
		"token a number":              {recipient(`{"token":1}`), api.InvalidArgument, "recipients[1].token"},
		"token null":                  {recipient(`{"token":null}`), api.InvalidArgument, "recipients[1].token"},
		"token twice":                 {recipient(`{"token":"a","token":"b"}`), api.InvalidArgument, "recipients[1].token"},
		"token too long":              {recipient(`{"token":"` + strings.Repeat("t", 4097) + `"}`), api.TooLarge, "recipients[1].token"},
		"ref too long":                {recipient(`{"token":"a","ref":"` + strings.Repeat("r", 256) + `"}`), api.TooLarge, "recipients[1].ref"},
		"enabled a string":            {recipient(`{"token":"a","enabled":"true"}`), api.InvalidArgument, "recipients[1].enabled"},
		"badge with a fraction":       {recipient(`{"token":"a","badge":1.5}`), api.InvalidArgument, "recipients[1].badge"},
		"badge with an exponent":      {recipient(`{"token":"a","badge":1e3}`), api.InvalidArgument, "recipients[1].badge"},
		"badge negative":              {recipient(`{"token":"a","badge":-1}`), api.InvalidArgument, "recipients[1].badge"},
		"badge beyond 64 bits":        {recipient(`{"token":"a","badge":99999999999999999999}`), api.InvalidArgument, "recipients[1].badge"},
		"badge a string":              {recipient(`{"token":"a","badge":"3"}`), api.InvalidArgument, "recipients[1].badge"},
		"own data, number":            {recipient(`{"token":"a","data":{"n":1}}`), api.InvalidArgument, "recipients[1].data.n"},
		"own data, reserved":          {recipient(`{"token":"a","data":{"gcm.x":"1"}}`), api.InvalidArgument, "recipients[1].data.gcm.x"},
		"own data, too large":         {recipient(`{"token":"a","data":{"k":"` + strings.Repeat("v", 4000) + `"}}`), api.InvalidArgument, "recipients[1].data"},
		"unknown field in recipient":  {recipient(`{"token":"a","tokn":"b"}`), api.InvalidArgument, "recipients[1].tokn"},
		"NUL in a text":               {with(`"body":"a\u0000b"`), api.InvalidArgument, "body"},
		"NUL in a token":              {recipient(`{"token":"a\u0000"}`), api.InvalidArgument, "recipients[1].token"},
		"broken UTF-8 in a text":      {with("\"body\":\"a\xffb\""), api.InvalidArgument, "body"},
		"broken UTF-8 in a name":      {with("\"bo\xffdy\":\"b\""), api.InvalidArgument, ""},
		"broken UTF-8 in a token":     {recipient("{\"token\":\"a\xc3\"}"), api.InvalidArgument, "recipients[1].token"},
		"half a surrogate pair":       {with(`"body":"\ud83d"`), api.InvalidArgument, "body"},
		"halves the wrong way round":  {with(`"body":"\udcda\ud83d"`), api.InvalidArgument, "body"},
		"half, beside a written one":  {with(`"body":"\ufffd\ud83d"`), api.InvalidArgument, "body"},
		"half, after a backslash":     {with(`"body":"\\ufffd\ud83d"`), api.InvalidArgument, "body"},
		"topic empty":                 {`{"school":"A","title":"t","topic":""}`, api.InvalidArgument, "topic"},
		"topic with a space":          {`{"school":"A","title":"t","topic":"board 3"}`, api.InvalidArgument, "topic"},
		"topic and recipients":        {with(`"topic":"x"`), api.InvalidArgument, "topic"},
		"topic a number":              {`{"school":"A","title":"t","topic":1}`, api.InvalidArgument, "topic"},
		"topic and no recipients":     {`{"school":"A","title":"t","topic":"x","recipients":[]}`, api.InvalidArgument, "topic"},
		"fallback, not set up":        {with(`"fallback":{"sms":"s"}`), api.InvalidArgument, "fallback"},
		"fallback a text":             {with(`"fallback":"s"`), api.InvalidArgument, "fallback"},
		"fallback without a text":     {with(`"fallback":{}`), api.InvalidArgument, "fallback.sms"},
		"fallback of white space":     {with(`"fallback":{"sms":" \n"}`), api.InvalidArgument, "fallback.sms"},
		"fallback by letter":          {with(`"fallback":{"sms":"s","letter":"l"}`), api.InvalidArgument, "fallback.letter"},
		"fallback too long":           {with(`"fallback":{"sms":"` + strings.Repeat("가", 2001) + `"}`), api.TooLarge, "fallback.sms"},
		"NUL in a fallback":           {with(`"fallback":{"sms":"a\u0000b"}`), api.InvalidArgument, "fallback.sms"},
		"delivery misspelt":           {with(`"delivery":"twice"`), api.InvalidArgument, "delivery"},
		"time a number":               {with(`"expires_at":1900000000`), api.InvalidArgument, "expires_at"},
		"time without a day":          {with(`"scheduled_at":"2030-02-30T00:00:00Z"`), api.InvalidArgument, "scheduled_at"},
		"time with a comma":           {with(`"scheduled_at":"2030-01-02T00:00:00,5Z"`), api.InvalidArgument, "scheduled_at"},
		"hour of one digit":           {with(`"scheduled_at":"2030-01-02T1:00:00Z"`), api.InvalidArgument, "scheduled_at"},
		"time of the year 1":          {with(`"expires_at":"0001-01-01T00:00:00Z"`), api.InvalidArgument, "expires_at"},
		"relative link":               {with(`"link":"/a"`), api.InvalidArgument, "link"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil)
			requireError(t, w.post(c.body), c.code, c.field)
			accepts, _, _ := w.store.counts()
			require.Zero(t, accepts)
		})
	}
}

// TestComplaintsSayWhatToDo holds the words of the complaints that people meet
// first, since a program needs no more than the field.
func TestComplaintsSayWhatToDo(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ body, want string }{
		"empty body":             {" \n", `the body is empty; send a JSON object such as {"school":"A","title":"…","recipients":[{"token":"…"}]}`},
		"not an object":          {`[]`, `the body must be an object`},
		"null":                   {`null`, `the body must be an object`},
		"something else":         {`school=A`, `the body is not JSON at byte 1 (line 1, column 1): it must be an object`},
		"no comma":               {"{\n  \"school\": \"가\" \"title\": \"t\"}", `the body is not JSON at byte 21 (line 2, column 17): expected , or }`},
		"comma at the end":       {`{"school":"A",}`, `the body is not JSON at byte 15 (line 1, column 15): expected a name in double quotes`},
		"no colon":               {`{"school" "A"}`, `the body is not JSON at byte 11 (line 1, column 11): expected :`},
		"single quotes":          {`{"school":'A'}`, `is not JSON at byte 11 (line 1, column 11): it must be a string`},
		"line end in a text":     {"{\"title\":\"a\nb\"}", `is not JSON at byte 12 (line 1, column 12): a line end or control character in a string has to be escaped, as \n`},
		"cut off":                {`{"school":"A"`, `the body is not JSON: it ends too early`},
		"after the last element": {`{"recipients":[{"token":"a"} {"token":"b"}]}`, `is not JSON at byte 30 (line 1, column 30): expected , or ]`},
		"unknown field":          {with(`"titel":"u"`), `is not a field of a notice; it has school, title, body, data, image, link, recipients, priority, scheduled_at, expires_at, delivery, topic, fallback`},
		"unknown in a recipient": {recipient(`{"tokens":"a"}`), `is not a field of a recipient; it has token, ref, enabled, badge, data`},
		"recipients of texts":    {`{"school":"A","title":"t","recipients":["t1","t2"]}`, `must be an object, {"token":"…"}`},
		"recipient null":         {recipient(`null`), `must be an object, {"token":"…"}`},
		"recipients a text":      {`{"school":"A","title":"t","recipients":"t1"}`, `must be an array of objects, [{"token":"…"}]`},
		"priority misspelt":      {with(`"priority":"high"`), `must be urgent, normal or low`},
		"school of another script": {`{"school":"한빛초","title":"t","recipients":[{"token":"a"}]}`,
			`must be 1 to 64 of the characters A-Z a-z 0-9 . _ -`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, err := decodeNotice([]byte(c.body), false)
			require.Error(t, err)
			require.Equal(t, c.want, problem(err).Message)
		})
	}
	_, err := decodeSchoolChange([]byte(" "))
	require.Equal(t, `the body is empty; send a JSON object such as {"limit":5000}`, problem(err).Message)
	_, err = decodeSchoolChange([]byte(`{"rest":5}`))
	require.Equal(t, `is not a field of a school; it has name, sender, limit, rest_seconds`, problem(err).Message)
	var to school.NewRecipient
	err = decodeRecipientLine([]byte(`{"token":"a" "ref":"b"}`), 0, &to)
	require.Equal(t, `is not JSON at byte 14 (column 14): expected , or }`, problem(err).Message)
}

func TestEverythingThatCanBeSaid(t *testing.T) {
	t.Parallel()
	yes, badge := true, 3
	at := time.Date(2030, 1, 2, 8, 0, 0, 0, time.FixedZone("", 9*60*60))
	until := at.Add(time.Hour)
	request := api.NoticeRequest{
		School: "A", Title: "가정통신문 📚", Body: "مرحبا \uFFFD", Data: map[string]string{"k": "v", "": ""},
		Image: "https://example.org/a.png", Link: "https://example.org/", Priority: "normal", Delivery: "at_most_once",
		ScheduledAt: &at, ExpiresAt: &until,
		Recipients: []api.Recipient{{Token: "tok-1", Ref: "member-17", Enabled: &yes, Badge: &badge, Data: map[string]string{"x": "y"}}, {Token: "tok-2"}},
	}
	delete(request.Data, "")
	body, err := json.Marshal(request)
	require.NoError(t, err)
	n, recipients, err := decodeNotice(body, false)
	require.NoError(t, err)
	require.Equal(t, &school.Notice{
		School: "A", Content: school.Content{Title: request.Title, Body: request.Body, Data: request.Data, Image: request.Image, Link: request.Link},
		Priority: school.Normal, Delivery: school.AtMostOnce, ScheduledAt: at.UTC(), ExpiresAt: until.UTC(),
	}, n)
	require.Equal(t, []school.NewRecipient{
		{Token: "tok-1", Ref: "member-17", Enabled: &yes, Badge: &badge, Data: map[string]string{"x": "y"}}, {Token: "tok-2"},
	}, recipients)
}

func TestNullIsNotGiven(t *testing.T) {
	t.Parallel()
	n, recipients, err := decodeNotice([]byte(`{"school":"A","title":"t","body":null,"data":null,"image":null,"link":null,"topic":null,
		"priority":null,"delivery":null,"scheduled_at":null,"expires_at":null,"fallback":null,
		"recipients":[{"token":"a","ref":null,"enabled":null,"badge":null,"data":null}]}`), false)
	require.NoError(t, err)
	require.Equal(t, &school.Notice{School: "A", Content: school.Content{Title: "t"}, Priority: school.Normal, Delivery: school.AtLeastOnce}, n)
	require.Equal(t, []school.NewRecipient{{Token: "a"}}, recipients)
}

func TestSchoolChange(t *testing.T) {
	t.Parallel()
	for body, field := range map[string]string{
		`{}`: "", `{"limit":50,"rest_seconds":0.2,"name":"한빛초","sender":""}`: "",
		`{"limit":null}`: "limit", `{"sender":null}`: "sender", `{"rest_seconds":null}`: "rest_seconds",
		`{"limit":"5"}`: "limit", `{"limit":0}`: "limit", `{"rest_seconds":"1"}`: "rest_seconds", `{"rest_seconds":0.0001}`: "rest_seconds",
		`{"rest_seconds":1e300}`: "rest_seconds", `{"rest_seconds":-5}`: "rest_seconds", `{"rest":5}`: "rest", `{"name":7}`: "name",
		`{"limit":5}{}`: "-", `null`: "-", `[]`: "-", ``: "-",
	} {
		_, err := decodeSchoolChange([]byte(body))
		if field == "" {
			require.NoError(t, err, body)
			continue
		}
		require.Error(t, err, body)
		if field == "-" {
			field = ""
		}
		require.Equal(t, field, problem(err).Field, body)
		require.Equal(t, api.InvalidArgument, problem(err).Code, body)
	}
	c, err := decodeSchoolChange([]byte(`{"rest_seconds":0.2}`))
	require.NoError(t, err)
	require.Equal(t, 200*time.Millisecond, *c.Rest)
}

// FuzzDecodeNotice compares with encoding/json: what is taken must be JSON, mean
// what it means there, and be valid; nothing may panic.
func FuzzDecodeNotice(f *testing.F) {
	for _, s := range []string{small, with(`"data":{"k":"v"}`), with(`"scheduled_at":"2030-01-02T00:00:00+09:00"`), recipient(`{"token":"a","badge":3,"enabled":false}`),
		`{"school":"A","title":"\ud83d\udcda","recipients":[{"token":"\ufffd"}]}`, with(`"fallback":null`), with(`"fallback":{"sms":"s"}`), `[[[`, `{"a":`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		n, recipients, err := decodeNotice(data, false)
		if err != nil {
			e := problem(err)
			if e.Code != api.InvalidArgument && e.Code != api.TooLarge {
				t.Fatalf("refused as %s: %v", e.Code, err)
			}
			return
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		var want struct {
			api.NoticeRequest
			Topic *string // null, if it is there
		}
		if err := dec.Decode(&want); err != nil || !json.Valid(data) {
			t.Fatalf("taken, but encoding/json says %v", err)
		}
		if err := school.ValidateNotice(n, time.Time{}); err != nil {
			t.Fatal(err)
		}
		require.Equal(t, want.School, n.School)
		require.Equal(t, want.Title, n.Content.Title)
		require.Equal(t, want.Body, n.Content.Body)
		require.Equal(t, want.Fallback != nil, n.Fallback != "")
		if want.Fallback != nil {
			require.Equal(t, want.Fallback.SMS, n.Fallback)
		}
		require.Len(t, n.Content.Data, len(want.Data))
		for k, v := range want.Data {
			require.Equal(t, v, n.Content.Data[k])
		}
		require.Len(t, recipients, len(want.Recipients))
		for i, r := range want.Recipients {
			require.Equal(t, r.Token, recipients[i].Token)
			require.Equal(t, r.Ref, recipients[i].Ref)
			require.Equal(t, r.Badge, recipients[i].Badge)
			require.Equal(t, r.Enabled, recipients[i].Enabled)
		}
	})
}

func FuzzDecodeRecipientLine(f *testing.F) {
	for _, s := range []string{`{"token":"a"}`, `{"token":"a","ref":"r","enabled":true,"badge":0,"data":{"k":"v"}}`, `{}`, `{"token":"a"}{}`, `null`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var got school.NewRecipient
		if err := decodeRecipientLine(data, 5, &got); err != nil {
			var e *api.Error
			if !errors.As(err, &e) || e.Code != api.InvalidArgument || !strings.HasPrefix(e.Field, "recipients[5]") {
				t.Fatalf("refused without its place: %v", err)
			}
			return
		}
		var want api.Recipient
		if err := json.Unmarshal(data, &want); err != nil {
			t.Fatalf("taken, but encoding/json says %v", err)
		}
		require.Equal(t, want.Token, got.Token)
		require.Equal(t, want.Ref, got.Ref)
	})
}

// FuzzDecodeSchoolChange compares with encoding/json, as FuzzDecodeNotice does.
func FuzzDecodeSchoolChange(f *testing.F) {
	for _, s := range []string{`{}`, `{"limit":50,"rest_seconds":0.2,"name":"한빛초","sender":""}`, `{"limit":null}`, `{"rest_seconds":1e300}`, `{"limit":5}{}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := decodeSchoolChange(data)
		if err != nil {
			if e := problem(err); e.Code != api.InvalidArgument {
				t.Fatalf("refused as %s: %v", e.Code, err)
			}
			return
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		var want api.SchoolChange
		if err := dec.Decode(&want); err != nil || !json.Valid(data) {
			t.Fatalf("taken, but encoding/json says %v", err)
		}
		require.Equal(t, want.Name, c.Name)
		require.Equal(t, want.Sender, c.Sender)
		require.Equal(t, want.Limit, c.Limit)
		require.Equal(t, want.RestSeconds == nil, c.Rest == nil)
		if c.Rest != nil {
			require.InDelta(t, *want.RestSeconds, c.Rest.Seconds(), 1e-3)
		}
	})
}
