package relay

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"schoolbell/sender"
)

func TestStringsAreJSON(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.OneOf(rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) })).Draw(t, "s")
		var got string
		if err := json.Unmarshal(appendString(nil, s), &got); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		if want := strings.ToValidUTF8(string([]rune(s)), "\ufffd"); got != want {
			t.Fatalf("%q became %q", s, got)
		}
	})
}

func TestSharedContentIsTheSameAsItsOwn(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.String()
		contents := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) *sender.Content {
			return &sender.Content{
				Title: text.Draw(t, "title"), Body: text.Draw(t, "body"), Image: text.Draw(t, "image"), Link: text.Draw(t, "link"),
				Data: rapid.MapOf(rapid.StringN(0, 5, -1), rapid.StringN(0, 5, -1)).Draw(t, "data"),
			}
		}), 1, 3).Draw(t, "contents")
		shared := sender.Batch{ID: "b", School: "A"}
		apart := shared
		for i := range rapid.IntRange(1, 8).Draw(t, "messages") {
			c := rapid.SampledFrom(contents).Draw(t, "content")
			m := sender.Message{ID: fmt.Sprint("n.", i), Token: "t", Content: c, Attempt: 1}
			shared.Messages = append(shared.Messages, m)
			own := *c
			m.Content = &own
			apart.Messages = append(apart.Messages, m)
		}
		a, b := encodeBatch(new(buffer), shared).b, encodeBatch(new(buffer), apart).b
		if string(a) != string(b) {
			t.Fatalf("%s\n%s", a, b)
		}
		if !json.Valid(a) {
			t.Fatalf("not JSON: %s", a)
		}
	})
}

func TestAMessageWithoutContentIsStillJSON(t *testing.T) {
	t.Parallel()
	b := sender.Batch{ID: "b", School: "A", Messages: []sender.Message{{ID: "1"}, {ID: "2"}}}
	require.True(t, json.Valid(encodeBatch(new(buffer), b).b))
}

func BenchmarkEncode200(b *testing.B) {
	c := &sender.Content{Title: "Lunch", Body: strings.Repeat("Today's menu is rice. ", 8), Data: map[string]string{"board": "3", "article": "17"}}
	batch := sender.Batch{ID: "0190a0b4-0000-7000-8000-000000000000", School: "A"}
	for i := range 200 {
		batch.Messages = append(batch.Messages, sender.Message{ID: fmt.Sprintf("0190a0b4-0000-7000-8000-000000000000.%d", i), Token: strings.Repeat("t", 160), Content: c, Attempt: 1})
	}
	b.ReportAllocs()
	for b.Loop() {
		buf := encodeBatch(takeBuffer(), batch)
		b.SetBytes(int64(len(buf.b)))
		buf.giveBack()
	}
}
