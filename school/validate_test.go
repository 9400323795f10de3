package school

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func goodNotice() Notice {
	return Notice{School: "A", Content: Content{Title: "title", Body: "body", Data: map[string]string{"k": "v"}}, Priority: Normal, Delivery: AtLeastOnce}
}

// requireField checks that err names field; empty: that there is none.
func requireField(t *testing.T, err error, field string, size bool) {
	t.Helper()
	if field == "" {
		require.NoError(t, err)
		return
	}
	var fe *FieldError
	require.True(t, errors.As(err, &fe), "error: %v", err)
	require.Equal(t, field, fe.Field)
	require.Equal(t, size, fe.Size)
	require.NotEmpty(t, fe.Message)
}

func TestValidateNotice(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	room := MaxPayload - payloadAdded // what title, body and data may take
	for name, c := range map[string]struct {
		change func(n *Notice)
		field  string
	}{
		"good":                    {func(*Notice) {}, ""},
		"no body":                 {func(n *Notice) { n.Content.Body = "" }, ""},
		"no school":               {func(n *Notice) { n.School = "" }, "school"},
		"school with a brace":     {func(n *Notice) { n.School = "A}" }, "school"},
		"school of 64":            {func(n *Notice) { n.School = strings.Repeat("a", 64) }, ""},
		"school of 65":            {func(n *Notice) { n.School = strings.Repeat("a", 65) }, "school"},
		"school with a line end":  {func(n *Notice) { n.School = "A\n" }, "school"},
		"topic":                   {func(n *Notice) { n.Topic = "Board.3_~%-" }, ""},
		"topic of 255":            {func(n *Notice) { n.Topic = strings.Repeat("a", 255) }, ""},
		"topic of 256":            {func(n *Notice) { n.Topic = strings.Repeat("a", 256) }, "topic"},
		"topic with a slash":      {func(n *Notice) { n.Topic = "/topics/a" }, "topic"},
		"topic with a line end":   {func(n *Notice) { n.Topic = "a\n" }, "topic"},
		"no title":                {func(n *Notice) { n.Content.Title = "" }, "title"},
		"blank title":             {func(n *Notice) { n.Content.Title = " \t" }, "title"},
		"title with NUL":          {func(n *Notice) { n.Content.Title = "a\x00b" }, "title"},
		"title that is not UTF-8": {func(n *Notice) { n.Content.Title = "a\xff" }, "title"},
		"body with NUL":           {func(n *Notice) { n.Content.Body = "\x00" }, "body"},
		"body that is not UTF-8":  {func(n *Notice) { n.Content.Body = "\xc3" }, "body"},
		"Korean, emoji, Arabic":   {func(n *Notice) { n.Content.Title, n.Content.Body = "가정통신문 📚", "مرحبا" }, ""},
		"empty data key":          {func(n *Notice) { n.Content.Data = map[string]string{"": "v"} }, "data"},
		"data key with NUL":       {func(n *Notice) { n.Content.Data = map[string]string{"a\x00": "v"} }, "data"},
		"data value with NUL":     {func(n *Notice) { n.Content.Data["k"] = "\x00" }, "data.k"},
		"data value not UTF-8":    {func(n *Notice) { n.Content.Data["k"] = "\xff" }, "data.k"},
		"from":                    {func(n *Notice) { n.Content.Data["from"] = "v" }, "data.from"},
		"message_type":            {func(n *Notice) { n.Content.Data["message_type"] = "v" }, "data.message_type"},
		"google":                  {func(n *Notice) { n.Content.Data["google.c"] = "v" }, "data.google.c"},
		"gcm":                     {func(n *Notice) { n.Content.Data["gcm"] = "v" }, "data.gcm"},
		"schoolbell_":             {func(n *Notice) { n.Content.Data["schoolbell_x"] = "v" }, "data.schoolbell_x"},
		"not reserved":            {func(n *Notice) { n.Content.Data["From"], n.Content.Data["schoolbell"] = "v", "v" }, ""},
		"many bad keys, always the first": {func(n *Notice) {
			for c := 'a'; c <= 'z'; c++ {
				n.Content.Data["gcm."+string(c)] = "v"
			}
		}, "data.gcm.a"},
		"image":                       {func(n *Notice) { n.Content.Image = "https://example.org/a.png" }, ""},
		"relative image":              {func(n *Notice) { n.Content.Image = "/a.png" }, "image"},
		"image of another scheme":     {func(n *Notice) { n.Content.Image = "ftp://example.org/a.png" }, "image"},
		"link without host":           {func(n *Notice) { n.Content.Link = "https:///x" }, "link"},
		"link":                        {func(n *Notice) { n.Content.Link = "http://example.org/?q=1" }, ""},
		"link that does not end":      {func(n *Notice) { n.Content.Link = "https://example.org/" + strings.Repeat("a", MaxLink) }, "link"},
		"javascript":                  {func(n *Notice) { n.Content.Link = "javascript:alert(1)" }, "link"},
		"exactly full":                {func(n *Notice) { n.Content = Content{Title: "t", Body: strings.Repeat("b", room-1)} }, ""},
		"a byte too much, body":       {func(n *Notice) { n.Content = Content{Title: "t", Body: strings.Repeat("b", room)} }, "body"},
		"a byte too much, title":      {func(n *Notice) { n.Content = Content{Title: strings.Repeat("t", room), Body: "b"} }, "title"},
		"a byte too much, data":       {func(n *Notice) { n.Content.Data["k"] = strings.Repeat("v", room) }, "data"},
		"bytes count, not characters": {func(n *Notice) { n.Content = Content{Title: strings.Repeat("가", room/3+1)} }, "title"},
		"a full one with a link": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", room-1-24), Link: "https://example.org/"}
		}, ""},
		"a byte too much with it": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", room-24), Link: "https://example.org/"}
		}, "body"},
		"a link of the data's own": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", room-1-5), Link: "https://example.org/", Data: map[string]string{"link": "x"}}
		}, ""},
		"a full one with an image": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", room-1-20), Image: "https://example.org/"}
		}, ""},
		"a byte too much with one": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", room-20), Image: "https://example.org/"}
		}, "body"},
		"link and image too much": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: "b", Link: "https://example.org/" + strings.Repeat("l", MaxLink-20), Image: "https://example.org/" + strings.Repeat("i", MaxLink-21)}
		}, "link"},
		"an image too much": {func(n *Notice) {
			n.Content = Content{Title: "t", Body: strings.Repeat("b", MaxLink-20), Image: "https://example.org/" + strings.Repeat("i", MaxLink-20)}
		}, "image"},
		"data of many keys": {func(n *Notice) {
			for i := range MaxPayload + 1 {
				n.Content.Data[string(rune(0x4e00+i))] = ""
			}
		}, "data"},
		"priority misspelt":       {func(n *Notice) { n.Priority = "hi" }, "priority"},
		"no priority":             {func(n *Notice) { n.Priority = "" }, "priority"},
		"urgent":                  {func(n *Notice) { n.Priority = Urgent }, ""},
		"delivery misspelt":       {func(n *Notice) { n.Delivery = "once" }, "delivery"},
		"at most once":            {func(n *Notice) { n.Delivery = AtMostOnce }, ""},
		"scheduled in the past":   {func(n *Notice) { n.ScheduledAt = now.Add(-time.Hour) }, ""},
		"expires before schedule": {func(n *Notice) { n.ScheduledAt, n.ExpiresAt = now.Add(2*time.Hour), now.Add(time.Hour) }, "expires_at"},
		"expires with schedule":   {func(n *Notice) { n.ScheduledAt, n.ExpiresAt = now.Add(time.Hour), now.Add(time.Hour) }, "expires_at"},
		"expires after schedule":  {func(n *Notice) { n.ScheduledAt, n.ExpiresAt = now.Add(time.Hour), now.Add(2*time.Hour) }, ""},
		"expired":                 {func(n *Notice) { n.ExpiresAt = now }, "expires_at"},
		"expires soon":            {func(n *Notice) { n.ExpiresAt = now.Add(1) }, ""},
		"key":                     {func(n *Notice) { n.IdempotencyKey = "2026-03-02 공지 1" }, ""},
		"key with a tab":          {func(n *Notice) { n.IdempotencyKey = "a\tb" }, "Idempotency-Key"},
		"key of 256":              {func(n *Notice) { n.IdempotencyKey = strings.Repeat("k", 256) }, "Idempotency-Key"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := goodNotice()
			c.change(&n)
			requireField(t, ValidateNotice(&n, now), c.field, false)
			if name == "expired" {
				require.NoError(t, ValidateNotice(&n, time.Time{}), "without a clock nothing has expired")
			}
		})
	}
	require.Error(t, ValidateKey(""))
	require.NoError(t, ValidateKey(strings.Repeat("가", 255)))
}

func TestValidateRecipient(t *testing.T) {
	t.Parallel()
	notice := Content{Title: "title", Body: "body", Data: map[string]string{"k": strings.Repeat("v", 100)}}
	// What a recipient's own value of a new one-letter key may take.
	room := MaxPayload - payloadAdded - len("title") - len("body") - len("k") - 100 - len("x")
	badge := func(n int) *int { return &n }
	for name, c := range map[string]struct {
		r     NewRecipient
		field string
		size  bool
	}{
		"good":                         {NewRecipient{Token: "t"}, "", false},
		"no token":                     {NewRecipient{}, "recipients[7].token", false},
		"longest token":                {NewRecipient{Token: strings.Repeat("t", MaxToken)}, "", false},
		"token too long":               {NewRecipient{Token: strings.Repeat("t", MaxToken+1)}, "recipients[7].token", true},
		"token with a line end":        {NewRecipient{Token: "t\n"}, "recipients[7].token", false},
		"token with NUL":               {NewRecipient{Token: "\x00"}, "recipients[7].token", false},
		"token not UTF-8":              {NewRecipient{Token: "\xff"}, "recipients[7].token", false},
		"longest ref":                  {NewRecipient{Token: "t", Ref: strings.Repeat("가", 255)}, "", false},
		"ref too long":                 {NewRecipient{Token: "t", Ref: strings.Repeat("r", 256)}, "recipients[7].ref", true},
		"ref with NUL":                 {NewRecipient{Token: "t", Ref: "\x00"}, "recipients[7].ref", false},
		"no badge":                     {NewRecipient{Token: "t", Badge: badge(0)}, "", false},
		"negative badge":               {NewRecipient{Token: "t", Badge: badge(-1)}, "recipients[7].badge", false},
		"badge beyond 32 bits":         {NewRecipient{Token: "t", Badge: badge(MaxBadge + 1)}, "recipients[7].badge", false},
		"own data":                     {NewRecipient{Token: "t", Data: map[string]string{"x": "y"}}, "", false},
		"own data, reserved":           {NewRecipient{Token: "t", Data: map[string]string{"schoolbell_fence": "y"}}, "recipients[7].data.schoolbell_fence", false},
		"own data, bad value":          {NewRecipient{Token: "t", Data: map[string]string{"x": "\x00"}}, "recipients[7].data.x", false},
		"merged, exactly full":         {NewRecipient{Token: "t", Data: map[string]string{"x": strings.Repeat("y", room)}}, "", false},
		"merged, a byte too much":      {NewRecipient{Token: "t", Data: map[string]string{"x": strings.Repeat("y", room+1)}}, "recipients[7].data", false},
		"replaces, exactly full":       {NewRecipient{Token: "t", Data: map[string]string{"k": strings.Repeat("y", room+len("x")+100)}}, "", false},
		"replaces, a byte too much":    {NewRecipient{Token: "t", Data: map[string]string{"k": strings.Repeat("y", room+len("x")+101)}}, "recipients[7].data", false},
		"replacing makes room for one": {NewRecipient{Token: "t", Data: map[string]string{"k": "", "x": strings.Repeat("y", room+100)}}, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireField(t, ValidateRecipient(7, &c.r, &notice), c.field, c.size)
		})
	}
	// A link of the recipient's own takes the place of the notice's.
	linked := notice
	linked.Link = "https://example.org/"
	full := NewRecipient{Token: "t", Data: map[string]string{"link": strings.Repeat("y", room+len("x")-len("link"))}}
	require.NoError(t, ValidateRecipient(7, &full, &linked))
	full.Data["link"] += "y"
	requireField(t, ValidateRecipient(7, &full, &linked), "recipients[7].data", false)
}

func TestValidateSchoolChange(t *testing.T) {
	t.Parallel()
	text := func(s string) *string { return &s }
	limit := func(n int) *int { return &n }
	rest := func(d time.Duration) *time.Duration { return &d }
	for name, c := range map[string]struct {
		change SchoolChange
		field  string
	}{
		"nothing":           {SchoolChange{}, ""},
		"everything":        {SchoolChange{text("한빛초"), text("fcm"), limit(50), rest(200 * time.Millisecond)}, ""},
		"default sender":    {SchoolChange{Sender: text("")}, ""},
		"sender":            {SchoolChange{Sender: text("a b")}, "sender"},
		"name with NUL":     {SchoolChange{Name: text("\x00")}, "name"},
		"name too long":     {SchoolChange{Name: text(strings.Repeat("가", 256))}, "name"},
		"limit 0":           {SchoolChange{Limit: limit(0)}, "limit"},
		"limit 1":           {SchoolChange{Limit: limit(1)}, ""},
		"limit too large":   {SchoolChange{Limit: limit(MaxLimit + 1)}, "limit"},
		"no rest":           {SchoolChange{Rest: rest(0)}, "rest_seconds"},
		"shortest rest":     {SchoolChange{Rest: rest(time.Millisecond)}, ""},
		"rest of a month":   {SchoolChange{Rest: rest(31 * 24 * time.Hour)}, "rest_seconds"},
		"rest before now":   {SchoolChange{Rest: rest(-time.Second)}, "rest_seconds"},
		"name of two lines": {SchoolChange{Name: text("a\nb")}, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			requireField(t, ValidateSchoolChange(c.change), c.field, false)
		})
	}
}

// TestMergedPayload compares the sum that is kept for each recipient with one
// that merges first.
func TestMergedPayload(t *testing.T) {
	t.Parallel()
	keys := rapid.StringMatching(`[a-f]{1,2}`)
	values := rapid.Custom(func(t *rapid.T) string { return strings.Repeat("v", rapid.IntRange(0, 2000).Draw(t, "length")) })
	data := rapid.MapOfN(keys, values, 0, 5)
	rapid.Check(t, func(t *rapid.T) {
		c := Content{Title: "t", Body: strings.Repeat("b", rapid.IntRange(0, 2000).Draw(t, "body")), Data: data.Draw(t, "data")}
		n := goodNotice()
		n.Content = c
		if ValidateNotice(&n, time.Time{}) != nil {
			return // the notice itself is too large
		}
		r := NewRecipient{Token: "t", Data: data.Draw(t, "own data")}
		merged := make(map[string]string)
		for k, v := range c.Data {
			merged[k] = v
		}
		for k, v := range r.Data {
			merged[k] = v
		}
		size := len(c.Title) + len(c.Body) + payloadAdded
		for k, v := range merged {
			size += len(k) + len(v)
		}
		require.Equal(t, size > MaxPayload, ValidateRecipient(0, &r, &c) != nil)
	})
}

// TestMessagesHoldNoValues makes sure that what a caller sent never stands in
// the complaint about it.
func TestMessagesHoldNoValues(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	n := goodNotice()
	for _, change := range []func(n *Notice){
		func(n *Notice) { n.Content.Title = secret + "\x00" },
		func(n *Notice) { n.Content.Body = strings.Repeat(secret, 1000) },
		func(n *Notice) { n.Content.Data = map[string]string{"k": secret + "\x00"} },
		func(n *Notice) { n.Content.Link = secret },
		func(n *Notice) { n.IdempotencyKey = secret + "\x00" },
	} {
		n := n
		change(&n)
		err := ValidateNotice(&n, time.Time{})
		require.Error(t, err)
		require.NotContains(t, err.Error(), secret)
	}
	for _, r := range []NewRecipient{{Token: secret + "\x00"}, {Token: strings.Repeat(secret, 1000)}, {Token: "t", Ref: secret + "\x00"},
		{Token: "t", Data: map[string]string{"k": secret + "\x00"}}} {
		err := ValidateRecipient(0, &r, &n.Content)
		require.Error(t, err)
		require.NotContains(t, err.Error(), secret)
	}
}

func TestPrintable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain":                  "plain",
		"키":                      "키",
		"a\nb":                   `"a\nb"`,
		"\xff":                   `"\xff"`,
		strings.Repeat("가", 65):  strings.Repeat("가", 64) + "…",
		strings.Repeat("k", 64):  strings.Repeat("k", 64),
		strings.Repeat("k", 1e4): strings.Repeat("k", 64) + "…",
	} {
		require.Equal(t, want, Printable(in))
	}
}

func TestNoticeID(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	id := NewNoticeID(now, 0xffffffff)
	require.Positive(t, id)
	require.Greater(t, NewNoticeID(now.Add(time.Millisecond), 0), id, "ordered by time")
	require.NotEqual(t, id, NewNoticeID(now, 0))
	for s, want := range map[string]int64{"1": 1, "815551463424001023": 815551463424001023} {
		got, err := ParseNoticeID(s)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, s := range []string{"", "0", "-1", "01", "+1", "1 ", "1.2", "9223372036854775808", "x"} {
		_, err := ParseNoticeID(s)
		require.ErrorIs(t, err, ErrNotFound, s)
	}
	require.Equal(t, "815551463424001023.1000000", MessageID(815551463424001023, MaxRecipients))
	require.Len(t, MessageID(1<<62, MaxRecipients), noticeDigits+1+seqDigits, "what the payload sets aside")
}
