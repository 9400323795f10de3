package relay

import (
	"fmt"
	"strings"
	"testing"

	"schoolbell/sender"
)

func BenchmarkResults200(b *testing.B) {
	var messages []sender.Message
	var results []string
	for i := range 200 {
		id := fmt.Sprintf("123456.%d", i)
		messages = append(messages, sender.Message{ID: id})
		results = append(results, `{"id":"`+id+`","status":"ok"}`)
	}
	body := []byte(`{"results":[` + strings.Join(results, ",") + `]}`)
	r, err := New(Config{Name: "r", URL: "http://127.0.0.1:1"}, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(r.Close)
	b.ReportAllocs()
	for b.Loop() {
		r.results(messages, body)
	}
}
