package sendertest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"schoolbell/sender"
)

// Secret is in every token, title, body and data value of the suite's messages:
// no result may carry it, nor may anything that a sender logs.
const Secret = "s3cr3t"

// endAfter is when the suite ends the context of a call that hangs.
const endAfter = 300 * time.Millisecond

// Subject is a sender under test.
type Subject struct {
	// Sender is made anew for each test and must be able to take at least 200
	// messages. It is the bare sender, without Guard.
	Sender sender.Sender

	// Replies are what the receiver behind it can be made to answer, by the
	// token prefix that makes it, and what has to come of it. A prefix that
	// befalls a whole batch says so.
	Replies map[string]Reply

	// Hang is a token prefix with which the receiver takes the message and
	// never answers; empty where there is no receiver.
	Hang string

	// Logged is everything that was logged so far; nil where nothing is.
	Logged func() string
}

// Reply is what has to come of a scripted answer.
type Reply struct {
	Class          sender.Class
	Code           string // "": any
	OutcomeUnknown bool
	Whole          bool // befalls all messages of the batch
}

// Run checks that a sender keeps the contract of sender.Sender. subject is called
// for each test and registers its own clean-up.
func Run(t *testing.T, subject func(t *testing.T) Subject) {
	t.Helper()
	t.Run("one accepted result a message, in order", func(t *testing.T) {
		s := subject(t)
		for _, n := range []int{1, 2, 199, 200} {
			b := Batch(fmt.Sprint("size", n), n, nil)
			got := send(t, s, b)
			require.Equal(t, sender.Fill(b.Messages, sender.Result{Class: sender.Accepted}), got)
		}
		require.Empty(t, s.Sender.Send(t.Context(), sender.Batch{ID: "empty", School: "A"}))
		clean(t, s, nil)
	})
	t.Run("each reply has its class", func(t *testing.T) {
		s := subject(t)
		for prefix, want := range s.Replies {
			b := Batch("reply-"+prefix, 5, map[int]string{2: prefix})
			got := send(t, s, b)
			for i, r := range got {
				if i != 2 && !want.Whole {
					require.Equal(t, sender.Accepted, r.Class, "%s: a neighbour's result", prefix)
					continue
				}
				require.Equal(t, want.Class, r.Class, prefix)
				require.Equal(t, want.OutcomeUnknown, r.OutcomeUnknown, prefix)
				if want.Code != "" {
					require.Equal(t, want.Code, r.Code, prefix)
				}
			}
		}
		clean(t, s, nil)
	})
	t.Run("all replies in one batch", func(t *testing.T) {
		s := subject(t)
		at := map[int]string{}
		for prefix, want := range s.Replies {
			if !want.Whole {
				at[3*len(at)+1] = prefix
			}
		}
		b := Batch("all", 3*len(at)+2, at)
		for i, r := range send(t, s, b) {
			want := sender.Accepted
			if prefix, ok := at[i]; ok {
				want = s.Replies[prefix].Class
			}
			require.Equal(t, want, r.Class, "message %d %s", i, at[i])
		}
	})
	t.Run("nothing is sent once the context has ended", func(t *testing.T) {
		s := subject(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		b := Batch("ended", 3, nil)
		for _, r := range s.Sender.Send(ctx, b) {
			require.Equal(t, sender.NotSent, r.Class)
		}
		// Had it been sent all the same, this would be a repeat.
		for _, r := range send(t, s, b) {
			require.Equal(t, sender.Accepted, r.Class)
		}
	})
	t.Run("a call ends with its context", func(t *testing.T) {
		s := subject(t)
		if s.Hang == "" {
			return
		}
		for name, end := range map[string]func(context.Context) (context.Context, context.CancelFunc){
			"deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, endAfter)
			},
			"cancel": func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				timer := time.AfterFunc(endAfter, cancel)
				return ctx, func() { timer.Stop(); cancel() }
			},
		} {
			ctx, cancel := end(t.Context())
			begin := time.Now()
			b := Batch(name, 2, map[int]string{0: s.Hang})
			got := s.Sender.Send(ctx, b)
			cancel()
			require.Less(t, time.Since(begin), endAfter+sender.DefaultGrace, name)
			require.Len(t, got, 2)
			// On a busy machine it may not have left at all.
			require.Contains(t, []sender.Class{sender.Unknown, sender.NotSent}, got[0].Class, name)
			clean(t, s, got)
		}
	})
	t.Run("calls side by side do not mix", func(t *testing.T) {
		s := subject(t)
		type answer struct {
			b   sender.Batch
			got []sender.Result
		}
		answers := make(chan answer, 8)
		for i := range 8 {
			go func() {
				b := Batch(fmt.Sprint("side", i), 50, nil)
				answers <- answer{b, s.Sender.Send(context.WithoutCancel(t.Context()), b)}
			}()
		}
		for range 8 {
			a := <-answers
			require.Equal(t, sender.Fill(a.b.Messages, sender.Result{Class: sender.Accepted}), a.got)
		}
	})
	t.Run("it says how long a call may take", func(t *testing.T) {
		require.Positive(t, subject(t).Sender.Longest())
	})
}

// Batch is a batch of n messages that all carry Secret. at gives single ones,
// by index, a token prefix. The message ids are those of a notice named like
// the batch.
func Batch(id string, n int, at map[int]string) sender.Batch {
	b := sender.Batch{ID: id, School: "A", Fence: 1, Messages: make([]sender.Message, n)}
	content := &sender.Content{Title: "title " + Secret, Body: "body " + Secret, Data: map[string]string{"key": Secret}}
	for i := range b.Messages {
		b.Messages[i] = sender.Message{
			ID: fmt.Sprintf("%s.%d", id, i+1), Notice: id, Token: fmt.Sprintf("%sdevice-%s-%d", at[i], Secret, i),
			Content: content, Attempt: 1,
		}
	}
	return b
}

func send(t *testing.T, s Subject, b sender.Batch) []sender.Result {
	t.Helper()
	got := s.Sender.Send(t.Context(), b)
	require.Len(t, got, len(b.Messages))
	clean(t, s, got)
	return got
}

// clean checks what may be stored and logged.
func clean(t *testing.T, s Subject, results []sender.Result) {
	t.Helper()
	for _, r := range results {
		require.NotContains(t, fmt.Sprintf("%+v", r), Secret)
		require.True(t, r.Class.Valid())
		require.True(t, r.Class == sender.Accepted && r.Code == "" || sender.ValidCode(r.Code), "%q", r.Code)
		require.True(t, r.RetryAfter >= 0 && r.RetryAfter <= sender.MaxRetryAfter)
	}
	if s.Logged != nil {
		require.False(t, strings.Contains(s.Logged(), Secret), "a secret was logged")
	}
}
